"""Paths that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs_commands import PAGES, ROOT

TOP = "headrace|services|proto|configs|helm|k8s|docker|tests|benchmarks|docs|scripts"
PATH = re.compile(rf"`((?:{TOP})/[\w./*-]*)`")


def missing(text: str) -> list[str]:
    return [path for path in PATH.findall(text) if "*" not in path and not (ROOT / path).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_paths_exist(page: Path) -> None:
    assert not missing(page.read_text())


def test_a_path_that_does_not_exist_is_found() -> None:
    assert missing("in `headrace/ledger/` and `headrace/ledger/gate.py`") == ["headrace/ledger/gate.py"]


def test_the_ten_questions_have_two_hops() -> None:
    """Each row of the first table names a place and then files or functions in it."""
    page = (ROOT / "docs" / "find-your-way.md").read_text()
    rows = [line.strip("|").split("|") for line in page.split("\n\n")[2].splitlines()[2:]]
    assert len(rows) == 10
    for question, first, second in rows:
        assert question.strip().endswith("?")
        assert PATH.search(first) or "services" in first
        assert PATH.search(second), question
