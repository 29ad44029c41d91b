"""verl's row format: check a plain value and make it a `DataRow`, or refuse it and name the field.

    {"prompt": "text" | [{"role": "user", "content": "text"}, ...],
     "data_source": "gsm8k", "reward_model": {"ground_truth": "42"},
     "ability": "math", "extra_info": {...}}                            # these two are optional

What this module guarantees:

- Every `DataRow` is well-formed: no reward function, tokenizer or codec fails on its types later.
- Columns that are not in the format are ignored, as in verl. Unknown keys of a chat message are refused,
  because dropping them would change the prompt.
- A null counts as absent where a key is optional, because a struct column in Parquet has every key in every
  row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from headrace.data.problems import InvalidRow

COLUMNS = ("prompt", "data_source", "reward_model", "ability", "extra_info")
"""Columns that are read."""

REQUIRED = ("prompt", "data_source", "reward_model")
"""Columns that every row must have."""

PICTURES = ("images", "videos")
"""verl's columns whose content belongs in the prompt; ignoring them would change it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class DataRow:
    """One prompt of the data set. `index` counts from 0 over all files, in their order."""

    index: int
    file: str
    line: int
    prompt: str | tuple[Message, ...]
    data_source: str
    ground_truth: str
    ability: str | None
    extra_info: dict[str, Any]
    is_row: bool = False
    """The file has rows instead of lines: `line` - 1 is the row number."""


def make_row(
    index: int, file: str, line: int, value: Any, *, is_row: bool = False, ground_truth_as_json: bool = False
) -> DataRow:
    """Convert `value` to a row. Raises InvalidRow."""
    if not isinstance(value, dict):
        raise InvalidRow("", f"must be a JSON object, is {kind(value)}")
    pictures = next((name for name in PICTURES if value.get(name)), None)
    if pictures:
        raise InvalidRow(pictures, "prompts with pictures are not supported; take out the row")
    reward_model = _get(value, "", "reward_model", dict)
    extra_info = value.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise InvalidRow("extra_info", f"must be an object, is {kind(extra_info)}")
    if is_row and extra_info:
        _check_json(extra_info, "extra_info")
    ability = value.get("ability")
    if ability is not None and not isinstance(ability, str):
        raise InvalidRow("ability", f"must be a string, is {kind(ability)}")
    return DataRow(
        index=index,
        file=file,
        line=line,
        prompt=_prompt(value),
        data_source=_text(value, "", "data_source"),
        ground_truth=_ground_truth(reward_model, ground_truth_as_json),
        ability=ability,
        extra_info=extra_info or {},
        is_row=is_row,
    )


def _ground_truth(reward_model: Mapping[str, Any], as_json: bool) -> str:
    """The text itself; any other value as JSON text if `as_json`."""
    where = "reward_model.ground_truth"
    found = reward_model.get("ground_truth")
    if "ground_truth" not in reward_model or isinstance(found, str):
        text: str = _get(reward_model, "reward_model.", "ground_truth", str)
        return text
    if found is None or not as_json:
        raise InvalidRow(
            where,
            f"must be a string, is {kind(found)}; write it as a string, or set data.ground_truth_as_json "
            "and let the reward function read it with json.loads",
        )
    _check_json(found, where)
    return json.dumps(found, ensure_ascii=False)


def _prompt(value: Mapping[str, Any]) -> str | tuple[Message, ...]:
    prompt = _get(value, "", "prompt", str, list)
    if not prompt:
        raise InvalidRow("prompt", "is empty")
    if isinstance(prompt, str):
        return prompt
    return tuple(_message(f"prompt[{number}]", message) for number, message in enumerate(prompt))


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise InvalidRow(where, f"must be an object with role and content, is {kind(value)}")
    message = Message(_text(value, f"{where}.", "role"), _get(value, f"{where}.", "content", str))
    if len(value) > 2:
        unknown = sorted(key for key in value.keys() - {"role", "content"} if value[key] is not None)
        if unknown:
            raise InvalidRow(f"{where}.{unknown[0]}", "is not known; a message has role and content")
    return message


def _get(value: Mapping[str, Any], prefix: str, key: str, *kinds: type) -> Any:
    """Return `value[key]`, checked to exist with one of `kinds`. `prefix` is its path, for messages."""
    if key not in value:
        near = get_close_matches(key, value.keys(), n=1)
        raise InvalidRow(prefix + key, "is missing" + (f"; there is {near[0]!r}" if near else ""))
    found = value[key]
    if not isinstance(found, kinds):
        wanted = " or ".join(_KINDS[wanted] for wanted in kinds)
        advice = "; write it as a string" if kinds == (str,) and isinstance(found, int | float) else ""
        raise InvalidRow(prefix + key, f"must be {wanted}, is {kind(found)}{advice}")
    return found


def _text(value: Mapping[str, Any], prefix: str, key: str) -> str:
    """Return `value[key]`, checked to be a non-empty string."""
    found: str = _get(value, prefix, key, str)
    if not found:
        raise InvalidRow(prefix + key, "is empty")
    return found


def _check_json(value: Any, where: str) -> None:
    """Raise InvalidRow if a value that was not read from JSON cannot be written as JSON."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_json(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_json(inner, f"{where}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidRow(where, f"is {value}, which JSON does not have; write null")
    elif type(value) not in _KINDS:
        raise InvalidRow(where, f"is {kind(value)}, which JSON does not have; write it as a string")


_KINDS: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def kind(value: Any) -> str:
    """The type of `value` in words, with an article."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")
