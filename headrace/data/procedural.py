"""Generated rows: `reasoning_gym:<data set>?size=1000&seed=3&max_terms=4`.

`size` (500) and `seed` (0) are the package's arguments, as are all others except two; values are YAML. Our
own two: `chat=false` makes the question plain text instead of a user's chat message, and `system=...` puts a
system message before it. Values are percent-encoded: `%26` stands for `&`.

A row is a pure function of the name. It carries the input of `score_answer` as
`extra_info["reasoning_gym"] = {"dataset": name, "entry": {"question", "answer", "metadata"}}`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote

import yaml

from headrace.data.gym_package import ADVICE, MissingPackage, absent_packages, import_reasoning_gym
from headrace.data.problems import InvalidRow, UnreadableFile

SCHEME = "reasoning_gym:"
DEFAULT_SIZE = 500
OTHER_DATASET = "take another data set, or install it"
_SCORED = 3
"""Entries whose own answer is scored, to check that they survive conversion to JSON."""

_OURS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "size": (lambda value: type(value) is int and value > 0, "a number above 0"),
    "seed": (lambda value: type(value) is int and value >= 0, "a number from 0"),
    "chat": (lambda value: isinstance(value, bool), "true or false"),
    "system": (lambda value: isinstance(value, str), "a text"),
}
"""Arguments that every data set has: a check of the value, and its description."""


@dataclass(frozen=True)
class GymEntry:
    """A parsed name."""

    dataset: str
    size: int = DEFAULT_SIZE
    seed: int = 0
    chat: bool = True
    system: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def is_procedural(entry: str) -> bool:
    """Whether an entry of the configuration names generated rows."""
    return entry.startswith(SCHEME)


def parse(entry: str) -> GymEntry:
    """Parse a name. Raises UnreadableFile."""
    name, _, query = entry.removeprefix(SCHEME).partition("?")
    given: dict[str, Any] = {}
    for part in query.split("&") if query else ():
        key, equals, text = part.partition("=")
        if not key or not equals:
            raise UnreadableFile(f"{part!r} is no argument; write key=value, with & between them")
        if key in given:
            raise UnreadableFile(f"{key} is given twice")
        try:
            given[key] = yaml.safe_load(unquote(text))
        except yaml.YAMLError:
            raise UnreadableFile(f"{key}: {unquote(text)!r} cannot be read as YAML") from None
    ours = {key: given.pop(key) for key in _OURS if key in given}
    for key, value in ours.items():
        is_possible, wanted = _OURS[key]
        if not is_possible(value):
            raise UnreadableFile(f"{key} = {value!r} is not possible; give {wanted}")
    return GymEntry(name, arguments=given, **ours)


def values(entry: str) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, row as a plain value or InvalidRow) for a name. Raises UnreadableFile."""
    source = parse(entry)
    dataset = _make(source)
    for number in range(source.size):
        try:
            made = dataset[number]
            found = {key: made[key] for key in ("question", "answer", "metadata")}
            carried = json.loads(json.dumps(found))
            if number < _SCORED and isinstance(found["answer"], str):
                _check_score(dataset, found, carried)
        except MissingPackage as error:
            raise UnreadableFile(f"{error}; {OTHER_DATASET}") from None
        except UnreadableFile:
            raise
        except Exception as error:  # a data set's own code may raise anything
            absent = absent_packages(type(dataset).__module__)
            if absent:
                raise UnreadableFile(f"{MissingPackage(absent[0])}; {OTHER_DATASET}") from None
            why = f"cannot be made, or carried as JSON: {type(error).__name__}: {error}"
            yield number + 1, InvalidRow("", why)
            continue
        yield number + 1, _value(source, carried)


def _value(source: GymEntry, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry in the row format."""
    prompt: Any = entry["question"]
    if source.chat:
        system = [{"role": "system", "content": source.system}] if source.system is not None else []
        prompt = [*system, {"role": "user", "content": entry["question"]}]
    elif source.system is not None:
        prompt = f"{source.system}\n\n{prompt}"
    answer = entry["answer"]
    return {
        "prompt": prompt,
        "data_source": f"reasoning_gym/{source.dataset}",
        "reward_model": {"ground_truth": answer if isinstance(answer, str) else ""},
        "extra_info": {"reasoning_gym": {"dataset": source.dataset, "entry": entry}},
    }


def _make(source: GymEntry) -> Any:
    """The package's data set. Raises UnreadableFile."""
    try:
        package = import_reasoning_gym()
    except ModuleNotFoundError as error:
        what = "the Python package reasoning_gym" if error.name == "reasoning_gym" else f"{error.name}"
        raise UnreadableFile(f"it needs {what}, which is not installed; {ADVICE}") from None
    known = package.factory.DATASETS
    if source.dataset not in known:
        near = get_close_matches(source.dataset, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known))}"
        raise UnreadableFile(f"there is no data set {source.dataset!r} in reasoning_gym; {hint}")
    fields = {item.name: item for item in dataclasses.fields(known[source.dataset][1])}
    for key in source.arguments:
        if key not in fields:
            near = get_close_matches(key, fields, n=1)
            names = ", ".join(sorted({*fields, "chat", "system"}))
            hint = f"did you mean {near[0]}?" if near else f"it has {names}"
            raise UnreadableFile(f"{source.dataset} has no argument {key!r}; {hint}")
    arguments = {
        key: tuple(value) if isinstance(value, list) and isinstance(fields[key].default, tuple) else value
        for key, value in source.arguments.items()
    }
    try:
        return package.create_dataset(source.dataset, seed=source.seed, size=source.size, **arguments)
    except MissingPackage as error:
        raise UnreadableFile(f"{error}; {OTHER_DATASET}") from None
    except Exception as error:  # it validates with assertions, and a wrong type may raise anything
        raise UnreadableFile(f"these arguments are not possible: {error}") from None


def _check_score(dataset: Any, made: dict[str, Any], carried: dict[str, Any]) -> None:
    """Raise UnreadableFile if scoring needs types that JSON does not keep, such as numbers as keys."""
    answer = made["answer"]
    try:
        before = float(dataset.score_answer(answer, made))
        after = float(dataset.score_answer(answer, carried))
    except MissingPackage:
        raise
    except Exception as error:  # the score's own code may raise anything
        raise UnreadableFile(f"its answers cannot be scored: {type(error).__name__}: {error}") from None
    if before != after:
        raise UnreadableFile(
            "its score needs types that JSON does not keep, so that it cannot travel with the prompt; take "
            "another data set"
        )
