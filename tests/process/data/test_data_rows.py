"""Rows of JSON and Parquet are read alike, and refused with file, line or row, and field."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.data.rows import MAX_PROBLEMS, DataError, Message, load_rows, read_entries

GOOD: dict[str, Any] = {"prompt": "1+1=", "data_source": "sums", "reward_model": {"ground_truth": "2"}}
SOURCELESS = {key: value for key, value in GOOD.items() if key != "data_source"}


def write(path: Path, *rows: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


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
        (
            {**GOOD, "reward_model": {"ground_truth": 2}},
            "reward_model.ground_truth",
            "write it as a string, or set data.ground",
        ),
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
    assert caught.value.problems[0].message == "no such file; correct the path"
    assert str(caught.value).startswith("27 problems in the data; data.skip_invalid leaves such rows out:\n")
    assert str(caught.value).endswith("and 7 more")


def test_json_comes_in_arrays_and_compressed(tmp_path: Path) -> None:
    array = tmp_path / "a.json"
    array.write_text(json.dumps([GOOD, {**GOOD, "prompt": "2+2="}], indent=1))
    lines = write(tmp_path / "b.jsonl", GOOD)
    zipped = tmp_path / "b.jsonl.gz"
    zipped.write_bytes(gzip.compress(lines.read_bytes()))
    assert [(r.prompt, r.line) for r in load_rows([array, zipped])] == [("1+1=", 1), ("2+2=", 2), ("1+1=", 1)]
    zipped.write_bytes(zipped.read_bytes()[:-9])
    array.write_text(json.dumps([GOOD, {**GOOD, "prompt": ""}]))
    with pytest.raises(DataError) as caught:
        load_rows([array, zipped])
    assert f"{array}, row 1: prompt: is empty" in str(caught.value)
    assert f"{zipped}: cannot be read: " in str(caught.value)


def test_directories_and_globs_name_files_in_order(tmp_path: Path) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "notes.txt", "deep/c.jsonl"):
        write(tmp_path / name, {**GOOD, "prompt": name})
    assert [r.prompt for r in load_rows([tmp_path])] == ["a.jsonl", "b.jsonl"]
    assert [r.prompt for r in load_rows([tmp_path / "*.jsonl", deep])] == [
        "a.jsonl",
        "b.jsonl",
        "deep/c.jsonl",
    ]
    assert len(load_rows([tmp_path / "**" / "*.jsonl"])) == 3
    empty = tmp_path / "none"
    (empty / "below").mkdir(parents=True)
    write(empty / "below" / "x.jsonl", GOOD)
    with pytest.raises(DataError) as caught:
        load_rows([tmp_path / "*.parquet", empty, "hdfs://host/train.parquet"])
    assert "hdfs://host/train.parquet: is an address; download it" in str(caught.value)
    assert "no file matches the pattern" in str(caught.value)
    assert f"name one of {empty / 'below'}" in str(caught.value)


def verl_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As verl's preparation scripts write it: lists of dictionaries, through pandas."""
    import pandas

    pandas.DataFrame(rows).to_parquet(path)
    return path


def verl_row(**changes: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "1+1="}],
        "data_source": "sums",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
        **changes,
    }


def test_parquet_as_verl_writes_it(tmp_path: Path) -> None:
    named = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "u"}]
    rows = [verl_row(), verl_row(prompt=named, extra_info={"answer": "4", "index": 1}, other=b"1")]
    found = load_rows([verl_parquet(tmp_path / "train.parquet", rows)])
    assert [(r.index, r.line, r.is_row) for r in found] == [(0, 1, True), (1, 2, True)]
    assert found[1].prompt == (Message("system", "s"), Message("user", "u"))
    assert (found[0].ground_truth, found[0].ability) == ("2", "math")
    assert found[1].extra_info == {
        "answer": "4",
        "index": 1,
        "split": None,
    }  # a column of structs has all keys


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": [{"role": "user", "content": None}]}, "prompt[0].content: must be a string, is null"),
        ({"prompt": None}, "prompt: must be a string or a list, is null"),
        ({"prompt": []}, "prompt: is empty"),
        ({"prompt": [{"role": "user", "content": "x", "name": "n"}]}, "prompt[0].name: is not known"),
        ({"reward_model": {"ground_truth": None}}, "reward_model.ground_truth: must be a string, is null"),
        ({"extra_info": {"x": float("inf")}}, "extra_info.x: is inf, which JSON does not have; write null"),
        ({"extra_info": {"x": [b"1"]}}, "extra_info.x[0]: is a bytes, which JSON does not have"),
    ],
)
def test_a_problem_in_parquet_names_the_row(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = verl_parquet(tmp_path / "x.parquet", [verl_row(), verl_row(**changes)])
    with pytest.raises(DataError) as caught:
        load_rows([file])
    assert f"{file}, row 1: {said}" in str(caught.value)


def test_files_that_are_no_text_prompts_are_refused(tmp_path: Path) -> None:
    pictures = verl_parquet(tmp_path / "p.parquet", [verl_row(images=[b"1"])])
    broken = tmp_path / "b.parquet"
    broken.write_bytes(pictures.read_bytes()[:-20])
    row = write(tmp_path / "r.jsonl", GOOD, {**GOOD, "images": ["a.png"]})
    with pytest.raises(DataError) as caught:
        load_rows([pictures, broken, row])
    assert f"{pictures}: has a column 'images': prompts with pictures are not supported" in str(caught.value)
    assert f"{broken}: cannot be read as Parquet" in str(caught.value)
    assert f"{row}:2: images: prompts with pictures are not supported" in str(caught.value)


def test_a_file_in_another_format_is_told_once(tmp_path: Path) -> None:
    import pandas

    pandas.DataFrame([{"question": "q", "answer": "a"}] * 30).to_parquet(tmp_path / "x.parquet")
    (tmp_path / "x.json").write_text(json.dumps({"data": [1, 2]}, indent=2))
    with pytest.raises(DataError) as caught:
        load_rows([tmp_path / "x.parquet", tmp_path / "x.json"])
    assert caught.value.total == 2
    assert "has no column prompt, data_source, reward_model (it has answer, question)" in str(caught.value)
    assert "x.json: begins like one JSON value over several lines; write JSON lines" in str(caught.value)


def test_what_the_datasets_library_saved(tmp_path: Path) -> None:
    """In a process of its own, which has nothing in its home directory afterwards."""
    code = (
        "import sys, datasets, json; from headrace.data.rows import load_rows\n"
        "rows = json.loads(sys.argv[1])\n"
        "both = datasets.DatasetDict(train=datasets.Dataset.from_list(rows)); both.save_to_disk('d'); "
        "print([r.line for r in load_rows(['d/train'])]); load_rows(['d'])"
    )
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([verl_row(), verl_row()])],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "[1, 2]", done.stderr
    assert "d: holds several splits; name one: d/train" in done.stderr
    assert not list((tmp_path / "home").rglob("*.arrow"))


@pytest.mark.parametrize(
    ("truth", "text"), [(2, "2"), (["a", 1], '["a", 1]'), ({"target": "é"}, '{"target": "é"}')]
)
def test_ground_truths_that_are_no_text_travel_as_json_where_asked(
    tmp_path: Path, truth: Any, text: str
) -> None:
    file = str(write(tmp_path / "a.jsonl", {**GOOD, "reward_model": {"ground_truth": truth}}))
    assert read_entries([file], ground_truth_as_json=True).rows[0].ground_truth == text
    with pytest.raises(
        DataError, match=r"a.jsonl:1: reward_model.ground_truth: .* data.ground_truth_as_json"
    ):
        load_rows([file])


def test_rows_that_cannot_be_used_are_left_out_where_asked(tmp_path: Path) -> None:
    good, bad = (
        write(tmp_path / "a.jsonl", GOOD, "no JSON", {**GOOD, "prompt": ""}, GOOD),
        tmp_path / "b.jsonl",
    )
    found = read_entries([str(good)], skip_invalid=True)
    assert [(r.index, r.line) for r in found.rows] == [(0, 1), (1, 4)]
    assert (found.sizes, found.skipped.total) == ([2], 2)
    assert [str(p).split(":")[1] for p in found.skipped.kept] == ["2", "3"]
    write(bad, {})
    with pytest.raises(DataError, match=r"b.jsonl: no row of it can be used"):
        read_entries([str(good), str(bad)], skip_invalid=True)
    with pytest.raises(DataError, match=r"c.jsonl: no such file"):
        read_entries([str(good), str(tmp_path / "c.jsonl")], skip_invalid=True)


def test_nothing_is_no_data() -> None:
    with pytest.raises(DataError, match="no file is named"):
        load_rows([])


def test_reading_needs_no_torch() -> None:
    modules = "headrace.data.dataset, headrace.data.feed_order"
    code = f"import sys, {modules}; print(*{{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
