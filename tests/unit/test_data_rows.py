"""Rows are refused with file, line and field; the order of issue is a fixed pure function."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.feed_order import prompt_at
from headrace.data.rows import (
    MAX_PROBLEMS,
    DataError,
    Message,
    Row,
    load_rows,
    tokenize_prompt,
    tokenize_rows,
)

GOOD: dict[str, Any] = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
SOURCELESS = {key: value for key, value in GOOD.items() if key != "data_source"}
BOS = 1


def write(path: Path, *rows: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


class Characters:
    """A tokenizer: BOS by default, then a token per character; chats are framed by a template of its own."""

    bos_token_id = BOS

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        if text.startswith("<s>"):
            ids, text = [*ids, BOS], text.removeprefix("<s>")
        return ids + [ord(c) for c in text]

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
    ) -> list[int]:
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, False)
        if conversation[0]["role"] == "broken":
            raise RuntimeError("roles must alternate")
        text = "<s>" + "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"
        return self.encode(text, add_special_tokens=False)


def row(prompt: Any, line: int = 1) -> Row:
    return Row(0, "train.jsonl", line, prompt, "sums", "2", None, {})


def test_reads_rows_of_several_files_in_order(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "sum\u2028it"}]
    first = write(tmp_path / "a.jsonl", {**GOOD, "ability": "math", "extra_info": {"k": [1]}, "other": 1}, "")
    second = write(tmp_path / "b.jsonl", json.dumps({**GOOD, "prompt": chat}, ensure_ascii=False))
    second.write_bytes(b"\xef\xbb\xbf" + second.read_bytes())
    rows = load_rows([first, str(second)])
    assert [(r.index, r.line) for r in rows] == [(0, 1), (1, 1)]
    assert (rows[0].prompt, rows[0].data_source, rows[0].ground_truth) == ("1+1=", "sums", "2")
    assert (rows[0].ability, rows[0].extra_info) == ("math", {"k": [1]})
    assert rows[1].prompt == (Message("system", ""), Message("user", "sum\u2028it"))
    assert rows[1].file == str(second)


@pytest.mark.parametrize(
    ("bad", "field", "message"),
    [
        ({**GOOD, "prompt": ""}, "prompt", "is empty"),
        ({**GOOD, "prompt": []}, "prompt", "is empty"),
        ({**GOOD, "prompt": 3}, "prompt", "must be a string or a list, is a number"),
        ({**GOOD, "prompt": ["hi"]}, "prompt[0]", "must be an object with role and content, is a string"),
        ({**GOOD, "prompt": [{"role": "user"}]}, "prompt[0].content", "is missing"),
        ({**GOOD, "prompt": [{"role": "user", "content": [1]}]}, "prompt[0].content", "is a list"),
        ({**GOOD, "prompt": [{"role": "", "content": "x"}]}, "prompt[0].role", "is empty"),
        ({**GOOD, "prompt": [{"role": "u", "content": "x", "name": "n"}]}, "prompt[0].name", "is not known"),
        ({**GOOD, "reward_model": {}}, "reward_model.ground_truth", "is missing"),
        ({**GOOD, "reward_model": {"ground_truth": 2}}, "reward_model.ground_truth", "write it as a string"),
        ({**GOOD, "reward_model": "2"}, "reward_model", "must be an object, is a string"),
        ({**SOURCELESS, "datasource": "sums"}, "data_source", "is missing; there is 'datasource'"),
        ({**GOOD, "extra_info": [1]}, "extra_info", "must be an object, is a list"),
        ({**GOOD, "ability": 1}, "ability", "must be a string, is a number"),
        ("[1]", "", "must be a JSON object, is a list"),
        ('{"prompt": "x"', "", "is not JSON"),
        ('{"extra_info": {"x": NaN}}', "", "NaN"),
        ('{"extra_info": {"x": 1e999}}', "", "1e999"),
        ('{"prompt": "\\ud800"}', "", "surrogate"),
        ("[" * 100_000, "", "is not JSON that can be read"),
        ('{"x": ' + "1" * 5000 + "}", "", "is not JSON that can be read"),
    ],
)
def test_a_problem_names_file_line_and_field(tmp_path: Path, bad: Any, field: str, message: str) -> None:
    file = write(tmp_path / "train.jsonl", GOOD, bad)
    with pytest.raises(DataError) as caught:
        load_rows([file])
    (problem,) = caught.value.problems
    assert (problem.file, problem.line, problem.field) == (str(file), 2, field)
    assert message in problem.message
    assert str(problem) in str(caught.value)


def test_collects_twenty_problems_and_counts_the_rest(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", *[{**GOOD, "data_source": ""}] * 25)
    empty = write(tmp_path / "empty.jsonl", "", "  ")
    with pytest.raises(DataError) as caught:
        load_rows([tmp_path / "absent.jsonl", bad, empty])
    assert caught.value.total == 27
    assert len(caught.value.problems) == MAX_PROBLEMS
    assert caught.value.problems[0].message == "cannot be read: No such file or directory"
    assert str(caught.value).startswith("27 problems in the data:\n")
    assert str(caught.value).endswith("and 7 more")


def test_other_files_are_refused_with_advice(tmp_path: Path) -> None:
    parquet, zipped, binary = (tmp_path / name for name in ("x.parquet", "x.gz", "x.bin"))
    parquet.write_bytes(b"PAR1\x15\x04\n\xff\xff\n")
    zipped.write_bytes(b"\x1f\x8b\x08")
    binary.write_bytes(b'{"a": "\xff"}\n')
    empty = write(tmp_path / "empty.jsonl")
    with pytest.raises(DataError) as caught:
        load_rows([parquet, zipped, binary, empty, tmp_path])
    messages = [p.message for p in caught.value.problems]
    assert "to_json('rows.jsonl', orient='records', lines=True)" in messages[0]
    assert "gunzip" in messages[1]
    assert messages[2] == "is not UTF-8 (byte 8 of the line)"
    assert messages[3] == "the file has no rows"
    assert messages[4] == "cannot be read: Is a directory"
    with pytest.raises(DataError, match="no file is named"):
        load_rows([])


def test_plain_text_and_chats_get_one_bos() -> None:
    tokenizer = Characters()
    assert tokenize_prompt(tokenizer, row("ab"), 8) == [BOS, ord("a"), ord("b")]
    assert tokenize_prompt(tokenizer, row("<s>ab"), 8) == [BOS, ord("a"), ord("b")]
    chat = tokenize_prompt(tokenizer, row((Message("user", "hi"),)), 64)
    assert chat == [BOS, *map(ord, "[user]hi[assistant]")]


def test_prompts_at_fault_are_counted_together() -> None:
    rows = [row("ok", 1), row("x" * 20, 2), row((Message("broken", ""),), 3), row("y" * 9, 4)]
    done: list[tuple[int, int]] = []
    with pytest.raises(DataError) as caught:
        tokenize_rows(Characters(), rows, 9, lambda n, total: done.append((n, total)))
    text = str(caught.value)
    assert text.startswith("3 of 4 prompts cannot be used; 2 longer than data.max_prompt_length = 9 tokens")
    assert "the longest 21" in text
    assert "train.jsonl:3: prompt: cannot be tokenised: roles must alternate" in text
    assert done[-1] == (4, 4)
    assert tokenize_rows(Characters(), rows[:1], 3) == [[BOS, ord("o"), ord("k")]]


def test_a_prompt_without_tokens_is_refused() -> None:
    class Deaf(Characters):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(DataError, match=r"train.jsonl:7: prompt: has no tokens"):
        tokenize_prompt(Deaf(), row("\u200b", 7), 9)


@given(st.integers(1, 60), st.integers(0, 2**63), st.booleans(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_epoch_issues_every_row_once(n_rows: int, seed: int, shuffle: bool, epoch: int) -> None:
    issued = [prompt_at(epoch * n_rows + place, n_rows, seed, shuffle) for place in range(n_rows)]
    assert {e for e, _ in issued} == {epoch}
    assert Counter(r for _, r in issued) == Counter(range(n_rows))
    if not shuffle:
        assert [r for _, r in issued] == list(range(n_rows))


def test_the_order_is_the_published_one() -> None:
    """Recorded values: a change here would make every retained checkpoint resume on other prompts."""
    assert [prompt_at(i, 8, 7, True)[1] for i in range(16)] == RECORDED
    assert prompt_at(3, 8, 7, True) == prompt_at(3, 8, 7, True)
    assert [prompt_at(i, 8, 8, True)[1] for i in range(8)] != RECORDED[:8]


RECORDED = [7, 4, 3, 5, 1, 2, 0, 6, 4, 1, 2, 5, 3, 7, 6, 0]


@pytest.mark.parametrize(("issue", "n_rows"), [(-1, 3), (0, 0)])
def test_numbers_out_of_range_are_refused(issue: int, n_rows: int) -> None:
    with pytest.raises(ValueError, match=r"start at 0|no rows"):
        prompt_at(issue, n_rows, 0, True)


def test_reading_needs_no_torch() -> None:
    modules = "headrace.data.rows, headrace.data.feed_order"
    code = f"import sys, {modules}; print(*{{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
