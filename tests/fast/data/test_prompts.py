"""Rows become the token ids that the engine gets; what is too long is refused, left out or cut, counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.config.data import DataConfig
from headrace.data.problems import Problem, Problems
from headrace.data.prompts import Prompts, tokenize_rows
from headrace.data.rows import DataError, DataRow, Message

BOS = 1


class Characters:
    """A tokenizer: BOS by default, then a token per character; chats are framed by a template of its own."""

    bos_token_id = BOS

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        if any("\u200b" in one for one in text):
            raise RuntimeError("no such character")
        return {"input_ids": [self.encode(one, add_special_tokens) for one in text]}

    def encode(self, text: str, special: bool) -> list[int]:
        ids = [BOS] if special else []
        if text.startswith("<s>"):
            ids, text = [*ids, BOS], text.removeprefix("<s>")
        return ids + [ord(c) for c in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in token_ids if i != BOS or not skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        role: str = "assistant",
        **kwargs: Any,
    ) -> str:
        assert not kwargs
        assert (add_generation_prompt, tokenize) == (True, False)
        if conversation[0]["role"] == "broken":
            raise RuntimeError("roles must alternate")
        return "<s>" + "".join(f"[{m['role']}]{m['content']}" for m in conversation) + f"[{role}]"


def row(prompt: Any, line: int = 1) -> DataRow:
    return DataRow(line - 1, "train.jsonl", line, prompt, "sums", "2", None, {})


def tokens(*prompts: Any, sizes: list[int] | None = None, **settings: Any) -> Prompts:
    data = DataConfig(train_files=["train.jsonl"], **settings)
    rows = [row(prompt, line) for line, prompt in enumerate(prompts, start=1)]
    return tokenize_rows(Characters(), rows, data, sizes=sizes)


def test_plain_text_and_chats_get_one_bos() -> None:
    found = tokens("ab", "<s>ab", (Message("user", "hi"),))
    assert [list(ids) for ids in found.tokens] == [
        [BOS, ord("a"), ord("b")],
        [BOS, ord("a"), ord("b")],
        [BOS, *map(ord, "[user]hi[assistant]")],
    ]
    other = tokens((Message("user", ""),), apply_chat_template_kwargs={"role": "x"})
    assert list(other.tokens[0]) == [BOS, *map(ord, "[user][x]")]


PROMPTS = ("ok", "x" * 20, (Message("broken", ""),), "y" * 9, "\u200b")


def test_prompts_at_fault_are_counted_together() -> None:
    with pytest.raises(DataError) as caught:
        tokens(*PROMPTS, max_prompt_length=9)
    text = str(caught.value)
    assert text.startswith("4 of 5 prompts cannot be used; 2 longer than data.max_prompt_length = 9 tokens")
    assert "the longest 21" in text
    assert "train.jsonl:3: prompt: the chat template fails: roles must alternate" in text
    assert "train.jsonl:5: prompt: cannot be tokenised: no such character" in text
    assert "train.jsonl:2: prompt: has 21 tokens, data.max_prompt_length is 9" in text


def test_too_long_prompts_are_left_out_or_cut_and_counted() -> None:
    skipped = tokens("ok", "x" * 20, "abc", max_prompt_length=9, truncation="skip")
    assert [(r.index, r.line) for r in skipped.rows] == [(0, 1), (1, 3)]
    assert (skipped.too_long.total, skipped.sizes) == (1, [2])
    data = DataConfig(train_files=["a"], truncation="skip")
    assert skipped.remarks(data) == [
        "1 of 3 rows left out (data.truncation: skip): "
        "train.jsonl:2: prompt: has 21 tokens, data.max_prompt_length is 9"
    ]
    cut = tokens("ok", "abcdefgh" * 3, max_prompt_length=9, truncation="truncate_left")
    assert list(cut.tokens[1]) == list(map(ord, "habcdefgh"))
    assert (cut.too_long.total, len(cut.rows)) == (1, 2)
    (line,) = cut.remarks(DataConfig(train_files=["a"], truncation="truncate_left"))
    assert line.startswith("1 of 2 rows cut at the beginning (data.truncation: truncate_left): train.jsonl:2")


def test_what_cannot_be_tokenised_counts_as_invalid() -> None:
    found = tokens(*PROMPTS, max_prompt_length=21, skip_invalid=True)
    assert [r.line for r in found.rows] == [1, 2, 4]
    assert found.invalid.total == 2
    earlier = Problems([Problem("a", 1, "", "bad")], 7)
    data = DataConfig(train_files=["a"], skip_invalid=True)
    both = tokenize_rows(Characters(), [row("ok")], data, invalid=earlier)
    assert both.invalid.total == 7
    assert both.remarks(data) == ["7 of 8 rows left out (data.skip_invalid): a:1: bad; and 6 more"]


def test_each_entry_keeps_a_prompt() -> None:
    found = tokens("a", "b", "x" * 20, "c", sizes=[2, 2], max_prompt_length=9, truncation="skip")
    assert found.sizes == [2, 1]
    with pytest.raises(DataError, match=r"no prompt of train.jsonl is left"):
        tokens("a", "b", "x" * 20, sizes=[2, 1], max_prompt_length=9, truncation="skip")


def test_a_thousand_at_once_are_as_each_alone() -> None:
    prompts = [f"<s>{n}" if n % 3 else str(n) if n % 2 else (Message("user", str(n)),) for n in range(2101)]
    done: list[tuple[int, int | None]] = []
    data = DataConfig(train_files=["a"])
    rows = [row(prompt, line) for line, prompt in enumerate(prompts, start=1)]
    found = tokenize_rows(Characters(), rows, data, progress=lambda _, n, total: done.append((n, total)))
    alone = [tokenize_rows(Characters(), [row(prompt)], data).tokens[0] for prompt in prompts]
    assert [list(ids) for ids in found.tokens] == [list(ids) for ids in alone]
    assert done == [(1000, 2101), (2000, 2101), (2101, 2101)]
