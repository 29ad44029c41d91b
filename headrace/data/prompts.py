"""Tokenise rows into exactly the token ids that the engine gets.

What this module guarantees:

- Every prompt that is kept has at least one token and at most `data.max_prompt_length`.
- Plain text gets the special tokens that the tokenizer adds by default. A chat goes through the chat
  template, which brings its own; neither gets a second BOS.
- Nothing is left out or cut unless the configuration allows it, and then it is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from headrace.config.data import DataConfig
from headrace.data.problems import MAX_PROBLEMS, DataError, Problem, Problems, count
from headrace.data.row_format import DataRow
from headrace.data.rows import Progress
from headrace.wire.payloads import Int32Array

_CHUNK = 1000
"""Prompts per call of the tokenizer, which processes them in parallel."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that we use."""

    @property
    def bos_token_id(self) -> int | None: ...

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **kwargs: Any,
    ) -> Any: ...


@dataclass(frozen=True)
class Prompts:
    """Rows with their tokens, numbered from 0, and the rows that were left out or cut."""

    rows: list[DataRow]
    tokens: list[Int32Array]
    sizes: list[int]
    """Number of prompts of each entry; entries are consecutive."""
    invalid: Problems = field(default_factory=Problems)
    """Rows left out by `data.skip_invalid`."""
    too_long: Problems = field(default_factory=Problems)
    """Prompts left out by `data.truncation: skip`, or cut by `truncate_left`."""

    def remarks(self, data: DataConfig) -> list[str]:
        """Lines for the user: how many rows were left out or cut, and the first of them."""
        out = []
        read = len(self.rows) + self.invalid.total
        if data.overlong == "skip":
            read += self.too_long.total
        for found, what in (
            (self.invalid, "left out (data.skip_invalid)"),
            (
                self.too_long,
                "left out (data.truncation: skip)"
                if data.overlong == "skip"
                else "cut at the beginning (data.truncation: truncate_left)",
            ),
        ):
            if found.total:
                first = "; ".join(map(str, found.kept[:3]))
                others = found.total - len(found.kept[:3])
                more = f"; and {others} more" if others else ""
                out.append(f"{found.total} of {count(read, 'row')} {what}: {first}{more}")
        return out


def tokenize_rows(
    tokenizer: Tokenizer,
    rows: Sequence[DataRow],
    data: DataConfig,
    *,
    sizes: Sequence[int] | None = None,
    invalid: Problems | None = None,
    progress: Progress | None = None,
) -> Prompts:
    """Tokenise `rows`. Raises one DataError for all unusable prompts.

    `sizes`: rows of each entry, if there are several. `invalid`: rows left out earlier. `progress` is called
    after each thousand.
    """
    longest_allowed = data.max_prompt_length
    wrong, too_long = Problems(), Problems()
    kept: list[DataRow] = []
    tokens: list[Int32Array] = []
    longest = 0
    entry_of = [entry for entry, size in enumerate(sizes or [len(rows)]) for _ in range(size)]
    left = [0] * len(sizes or [0])
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        for row, entry, ids in zip(
            chunk, entry_of[start:], _ids_of_chunk(tokenizer, chunk, data), strict=False
        ):
            if isinstance(ids, str):
                wrong.add(Problem(row.file, row.line, "prompt", ids, row.is_row))
                continue
            if len(ids) > longest_allowed:
                message = f"has {len(ids)} tokens, data.max_prompt_length is {longest_allowed}"
                too_long.add(Problem(row.file, row.line, "prompt", message, row.is_row))
                longest = max(longest, len(ids))
                if data.overlong != "truncate_left":
                    continue
                ids = ids[-longest_allowed:]
            kept.append(row if row.index == len(kept) else dataclasses.replace(row, index=len(kept)))
            tokens.append(np.asarray(ids, dtype=np.int32))
            left[entry] += 1
        if progress is not None:
            progress("tokenising prompts", start + len(chunk), len(rows))
    _refuse(wrong, too_long, longest, len(rows), data)
    if rows and min(left) == 0:
        file = rows[entry_of.index(left.index(0))].file
        why = [problem for found in (wrong, too_long) for problem in found.kept]
        raise DataError(f"no prompt of {file} is left:", why[:MAX_PROBLEMS])
    everything = invalid or Problems()
    everything = Problems([*everything.kept, *wrong.kept], everything.total + wrong.total)
    return Prompts(kept, tokens, left, everything, too_long)


def _refuse(wrong: Problems, too_long: Problems, longest: int, n_rows: int, data: DataConfig) -> None:
    """Raise DataError for problems that the configuration does not let us skip or cut."""
    fatal = [] if data.skip_invalid else [wrong]
    fatal += [too_long] if data.overlong == "error" else []
    total = sum(found.total for found in fatal)
    if not total:
        return
    summary = f"{total} of {count(n_rows, 'prompt')} cannot be used"
    if too_long.total and data.overlong == "error":
        summary += (
            f"; {too_long.total} longer than data.max_prompt_length = {data.max_prompt_length} tokens, the "
            f"longest {longest}: raise it, or set data.truncation to skip or truncate_left"
        )
    problems = [problem for found in fatal for problem in found.kept]
    raise DataError(summary + ":", problems[:MAX_PROBLEMS], total)


def _ids_of_chunk(tokenizer: Tokenizer, rows: Sequence[DataRow], data: DataConfig) -> list[list[int] | str]:
    """For each row its token ids (lengths not checked), or its problem as text."""
    out: list[list[int] | str] = ["has no tokens"] * len(rows)
    texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by whether special tokens are added
    for number, row in enumerate(rows):
        if isinstance(row.prompt, str):
            texts[True][number] = row.prompt
            continue
        try:
            texts[False][number] = _templated(tokenizer, row, data)
        except Exception as error:  # a chat template is the model's own code and may raise anything
            out[number] = f"the chat template fails: {error}"
    for special, named in texts.items():
        for number, ids in zip(named, _encode(tokenizer, list(named.values()), special), strict=True):
            out[number] = ids or "has no tokens"
    bos = tokenizer.bos_token_id
    if bos is not None:  # already templated text starts with its own BOS: encode it without another
        twice = [number for number in texts[True] if out[number][:2] == [bos, bos]]
        again = _encode(tokenizer, [texts[True][number] for number in twice], False)
        for number, ids in zip(twice, again, strict=True):
            out[number] = ids
    return out


def _templated(tokenizer: Tokenizer, row: DataRow, data: DataConfig) -> str:
    assert not isinstance(row.prompt, str)
    messages = [{"role": message.role, "content": message.content} for message in row.prompt]
    text: str = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **data.apply_chat_template_kwargs
    )
    return text


def _encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int] | str]:
    """Token ids of each text. If a batch fails, encode each text alone to find those at fault."""
    if not texts:
        return []
    try:
        return list(tokenizer(texts, add_special_tokens=special)["input_ids"])
    except Exception as error:  # a tokenizer may be the model's own code
        if len(texts) == 1:
            return [f"cannot be tokenised: {error}"]
    return [ids for text in texts for ids in _encode(tokenizer, [text], special)]
