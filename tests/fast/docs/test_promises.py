"""docs/security.md and docs/architecture.md promise only what a test shows.

A sentence that says never, only, every, cannot, ... is a promise. A footnote in it, or behind it in the same
paragraph, names the tests that would fail if the promise did not hold. This file checks that no promise goes
without, and that the tests named exist and run on a machine without a GPU.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("docs/security.md", "docs/architecture.md")
PROMISE = re.compile(
    r"\b(never|always|only|every|each|all|any|no|none|nobody|nothing|neither|cannot|must|refused?|denied|"
    r"exactly|at once|survives?|ends with|stops?)\b",
    re.IGNORECASE,
)
REFERENCE = re.compile(r"\[\^([\w-]+)\]")
DEFINITION = re.compile(r"^\[\^([\w-]+)\]:\s*(.*)$")
LIMIT = "limit"
"""The footnote of what only sounds like a promise: it says what is not promised."""
TEST = re.compile(r"`([\w/.-]+\.(?:py|txt))(?:::(\w+))?`")
"""A file of tests, one test in it, or a scenario: those are played by `test_coordinator_scenarios`."""


def units(page: str) -> Iterator[str]:
    """Paragraphs, list items and table rows, each on one line; no code, headings, tables' heads, footnotes'
    texts, nor what is generated: that is held by what generates it."""
    found: list[str] = []
    fenced = in_definition = False
    text = re.sub(r"(<!-- (\w+) -->).*?<!-- \2 -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    text = re.sub(r"^\|.*\n(?=\|---)", "", text, flags=re.MULTILINE)
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        if bare.startswith("```"):
            fenced = not fenced
        new = bare.startswith(("- ", "| ", "#")) or re.match(r"\d+\. ", bare) is not None
        if DEFINITION.match(line):
            in_definition = True
        elif not bare or new:
            in_definition = False
        if found and (not bare or new or fenced or in_definition):
            yield " ".join(found)
            found = []
        if bare and not (fenced or in_definition or bare.startswith(("#", "```", "<!--", "|---"))):
            found.append(bare)


def sentences(unit: str) -> list[str]:
    """A table's row is one sentence."""
    if unit.startswith("|"):
        return [unit]
    return re.split(r"(?<=[.!?\]])\s+(?=[A-Z`*])", unit)


def bare_promises(page: str) -> list[str]:
    """Those behind the last footnote of their paragraph."""
    found = []
    for unit in units(page):
        for sentence in reversed(sentences(unit)):
            if REFERENCE.search(sentence):
                break
            if PROMISE.search(sentence):
                found.append(sentence)
    return found


def definitions(page: str) -> dict[str, str]:
    text = (ROOT / page).read_text()
    found = re.findall(r"^\[\^([\w-]+)\]:\s*(.*(?:\n    .*)*)", text, re.MULTILINE)
    return dict(found)


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(
        n.name
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and n.name.lower().startswith(("test", "should"))
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_names_a_test(page: str) -> None:
    bare = bare_promises(page)
    assert not bare, f"{len(bare)} promises without a footnote, the first:\n" + "\n".join(bare[:20])


@pytest.mark.parametrize("page", PAGES)
def test_every_footnote_names_tests_that_exist(page: str) -> None:
    known = definitions(page)
    used = {name for unit in units(page) for name in REFERENCE.findall(unit)}
    assert used == set(known), "used and defined differ"
    for name, text in known.items():
        if name == LIMIT:
            continue
        named = TEST.findall(text)
        assert named, f"[^{name}] names no test: {text}"
        for path, test in named:
            assert (ROOT / path).is_file(), f"[^{name}]: there is no {path}"
            assert path.endswith(".py") or Path(path).parent.name == "scenarios", f"[^{name}]: {path}"
            assert not path.startswith("tests/engine/gpu/"), f"[^{name}]: {path} is skipped without a GPU"
            assert not test or test in functions_in(path), f"[^{name}]: {path} has no {test}"


def test_a_promise_is_found_when_it_stands_bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    text = (
        "# T\n\nIt never lies. It is blue.[^a] Only you\nsee it.\n\n| every row | x |\n\n[^a]: `tests/x.py`\n"
    )
    for page in PAGES:
        (tmp_path / page).write_text(text)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert bare_promises(PAGES[0]) == ["Only you see it.", "| every row | x |"]
