"""Rows of the data set: verl's row format as JSON lines, read and checked before a run starts.

One row a line:

    {"prompt": "text" | [{"role": "user", "content": "text"}, ...],
     "data_source": "gsm8k", "reward_model": {"ground_truth": "42"},
     "ability": "math", "extra_info": {...}}                            # these two are optional

What this module guarantees:

- A `Row` that exists is well-formed: no reward function, tokenizer or codec fails on its type later.
- Every problem names file, line and field. All rows are looked at; the first `MAX_PROBLEMS` are told.
- Columns that are not in the format are ignored, as verl does; unknown keys of a chat message are refused,
  because dropping them would change the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, Protocol

MAX_PROBLEMS = 20
"""Problems that a `DataError` spells out; the rest is only counted."""

_PARQUET_MAGIC = b"PAR1"
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the data. `line` counts from 1; 0 stands for the file as a whole."""

    file: str
    line: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.field}: {self.message}" if self.field else f"{where}: {self.message}"


@dataclass
class Problems:
    """Collects problems: keeps the first `MAX_PROBLEMS`, counts all."""

    kept: list[Problem] = field(default_factory=list)
    total: int = 0

    def add(self, problem: Problem) -> None:
        self.total += 1
        if len(self.kept) < MAX_PROBLEMS:
            self.kept.append(problem)

    def raise_if_any(self, summary: str) -> None:
        """Raise what was collected; `summary` becomes the message's first line."""
        if self.total:
            raise DataError(summary, self.kept, self.total)


class DataError(ValueError):
    """The data cannot be used. `problems` holds the first ones, `total` counts all of them."""

    def __init__(self, summary: str, problems: Sequence[Problem], total: int | None = None) -> None:
        self.problems = tuple(problems)
        self.total = len(problems) if total is None else total
        lines = [summary, *(f"  {problem}" for problem in self.problems)]
        if self.total > len(self.problems):
            lines.append(f"  and {self.total - len(self.problems)} more")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True)
class Row:
    """One prompt of the data set. `index` counts from 0 over all files, in their order."""

    index: int
    file: str
    line: int
    prompt: str | tuple[Message, ...]
    data_source: str
    ground_truth: str
    ability: str | None
    extra_info: dict[str, Any]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    @property
    def bos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> Any: ...


class _Invalid(Exception):
    """One row's problem: the field and what is wrong with it."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


# -- reading ------------------------------------------------------------------------------------------


def load_rows(files: Sequence[str | Path]) -> list[Row]:
    """The rows of `files`, in order. Blank lines are skipped. Raises DataError, with all files looked at."""
    rows: list[Row] = []
    problems = Problems()
    for file in map(str, files):
        before = len(rows), problems.total
        for line, raw in _lines(file, problems):
            try:
                rows.append(_row(len(rows), file, line, _parse(raw)))
            except _Invalid as invalid:
                problems.add(Problem(file, line, invalid.where, str(invalid)))
        if before == (len(rows), problems.total):
            problems.add(Problem(file, 0, "", "the file has no rows"))
    if not files:
        problems.add(Problem("data", 0, "", "no file is named"))
    problems.raise_if_any(f"{_count(problems.total, 'problem')} in the data:")
    return rows


def _lines(file: str, problems: Problems) -> Iterator[tuple[int, bytes]]:
    """(line number, content) of the lines that are not blank. Lines end at \\n only: text may hold U+2028."""
    try:
        with open(file, "rb") as stream:
            for line, raw in enumerate(stream, start=1):
                if line == 1:
                    hint = _other_format(raw, file)
                    if hint:
                        problems.add(Problem(file, 0, "", hint))
                        return
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if raw.strip():
                    yield line, raw
    except OSError as error:
        problems.add(Problem(file, 0, "", f"cannot be read: {error.strerror or error}"))


def _other_format(first: bytes, file: str) -> str | None:
    """What to do about a file that is no JSON lines, or None."""
    if first.startswith(_PARQUET_MAGIC):
        return (
            "is a Parquet file; convert it to JSON lines: "
            f"pandas.read_parquet({file!r}).to_json('rows.jsonl', orient='records', lines=True)"
        )
    if first.startswith(_GZIP_MAGIC):
        return "is compressed; unpack it with gunzip"
    return None


def _parse(raw: bytes) -> Any:
    """The line's JSON value. Refuses NaN and infinity, and lone surrogates, which UTF-8 cannot carry."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Invalid("", f"is not UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _Invalid("", "holds half of a surrogate pair (\\ud800 to \\udfff)") from None
    except json.JSONDecodeError as error:
        raise _Invalid("", f"is not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _Invalid("", f"is not JSON that can be read: {error}") from None
    return value


def _no_constant(name: str) -> NoReturn:
    raise _Invalid("", f"holds {name}, which JSON does not have")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise _Invalid("", f"holds {digits}, which is too large for a double")
    return number


# -- checking -----------------------------------------------------------------------------------------


def _row(index: int, file: str, line: int, value: Any) -> Row:
    """`value` as a row. Raises _Invalid."""
    if not isinstance(value, dict):
        raise _Invalid("", f"must be a JSON object, is {_kind(value)}")
    reward_model = _get(value, "", "reward_model", dict)
    extra_info = value.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise _Invalid("extra_info", f"must be an object, is {_kind(extra_info)}")
    ability = value.get("ability")
    if ability is not None and not isinstance(ability, str):
        raise _Invalid("ability", f"must be a string, is {_kind(ability)}")
    return Row(
        index=index,
        file=file,
        line=line,
        prompt=_prompt(value),
        data_source=_text(value, "", "data_source"),
        ground_truth=_get(reward_model, "reward_model.", "ground_truth", str),
        ability=ability,
        extra_info=extra_info or {},
    )


def _prompt(value: Mapping[str, Any]) -> str | tuple[Message, ...]:
    prompt = _get(value, "", "prompt", str, list)
    if not prompt:
        raise _Invalid("prompt", "is empty")
    if isinstance(prompt, str):
        return prompt
    return tuple(_message(f"prompt[{place}]", message) for place, message in enumerate(prompt))


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise _Invalid(where, f"must be an object with role and content, is {_kind(value)}")
    message = Message(_text(value, f"{where}.", "role"), _get(value, f"{where}.", "content", str))
    unknown = sorted(value.keys() - {"role", "content"})
    if unknown:
        raise _Invalid(f"{where}.{unknown[0]}", "is not known; a message has role and content")
    return message


def _get(value: Mapping[str, Any], prefix: str, key: str, *kinds: type) -> Any:
    """`value[key]`, there and of one of `kinds`. `prefix` is the path of `value`, for messages."""
    if key not in value:
        near = get_close_matches(key, value.keys(), n=1)
        raise _Invalid(prefix + key, "is missing" + (f"; there is {near[0]!r}" if near else ""))
    found = value[key]
    if not isinstance(found, kinds):
        wanted = " or ".join(_KINDS[kind] for kind in kinds)
        advice = "; write it as a string" if kinds == (str,) and isinstance(found, int | float) else ""
        raise _Invalid(prefix + key, f"must be {wanted}, is {_kind(found)}{advice}")
    return found


def _text(value: Mapping[str, Any], prefix: str, key: str) -> str:
    """A string that is not empty."""
    found: str = _get(value, prefix, key, str)
    if not found:
        raise _Invalid(prefix + key, "is empty")
    return found


_KINDS: dict[type, str] = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return _KINDS[type(value)]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# -- tokens -------------------------------------------------------------------------------------------


def tokenize_prompt(tokenizer: Tokenizer, row: Row, max_prompt_length: int) -> list[int]:
    """The prompt's token ids: at least one, at most `max_prompt_length`. Raises DataError.

    Plain text gets the special tokens that the tokenizer adds by default. A chat goes through the model's
    chat template, which brings its own; neither gets a second BOS.
    """
    problems = Problems()
    ids = _checked_ids(tokenizer, row, max_prompt_length, problems)
    problems.raise_if_any("the prompt cannot be used:")
    return ids


def tokenize_rows(
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    max_prompt_length: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """`tokenize_prompt` of every row, in order. Raises one DataError that counts the prompts at fault.

    `progress` is called after each row with (rows done, rows in all).
    """
    problems = Problems()
    out: list[list[int]] = []
    for row in rows:
        out.append(_checked_ids(tokenizer, row, max_prompt_length, problems))
        if progress is not None:
            progress(len(out), len(rows))
    longest = max(map(len, out), default=0)
    too_long = sum(len(ids) > max_prompt_length for ids in out)
    summary = f"{problems.total} of {_count(len(rows), 'prompt')} cannot be used"
    if too_long:
        summary += (
            f"; {too_long} longer than data.max_prompt_length = {max_prompt_length} tokens, the longest "
            f"{longest}: raise it, or take them out of the file"
        )
    problems.raise_if_any(summary + ":")
    return out


def _checked_ids(tokenizer: Tokenizer, row: Row, max_prompt_length: int, problems: Problems) -> list[int]:
    """The token ids whatever they are; what is wrong with them goes to `problems`."""
    try:
        ids = _token_ids(tokenizer, row.prompt)
    except Exception as error:  # a chat template is the model's own program: it may raise anything
        problems.add(Problem(row.file, row.line, "prompt", f"cannot be tokenised: {error}"))
        return []
    if not ids:
        problems.add(Problem(row.file, row.line, "prompt", "has no tokens"))
    elif len(ids) > max_prompt_length:
        message = f"has {len(ids)} tokens, data.max_prompt_length is {max_prompt_length}"
        problems.add(Problem(row.file, row.line, "prompt", message))
    return ids


def _token_ids(tokenizer: Tokenizer, prompt: str | tuple[Message, ...]) -> list[int]:
    if not isinstance(prompt, str):
        messages = [{"role": message.role, "content": message.content} for message in prompt]
        templated = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(templated)
    ids = list(tokenizer.encode(prompt))
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:  # text that was templated beforehand brings its own BOS
        ids = list(tokenizer.encode(prompt, add_special_tokens=False))
    return ids
