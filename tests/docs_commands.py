"""The pages of the documentation and the commands that they show, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TUTORIAL = "tutorial.md"

READING = frozenset({"status", "audit", "samples", "report", "dead", "export"})
"""Commands that any finished run answers."""
ABOUT_A_RUN = READING | {"scale", "tune", "trace"}
"""Also those for which a run has to be in progress (`tests/engine/local/test_elastic.py`,
`test_modes_in_the_loop.py`) or to have recorded its timeline (`tests/fast/records/test_trace.py`)."""


def of_page(page: Path) -> list[str]:
    """Every line of its `sh` blocks, comments removed."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
        found += [command for line in block.splitlines() if (command := line.split("#")[0].strip())]
    return found


def all_commands() -> list[tuple[str, str]]:
    """(page, command)"""
    return [(page.name, command) for page in PAGES for command in of_page(page)]


def about_a_finished_run() -> list[list[str]]:
    """The command and its options, once each, without the run's name that stands between them."""
    words = [command.split() for _, command in all_commands()]
    reading = [(w[1], *w[3:]) for w in words if w[0] == ".venv/bin/headrace" and w[1] in READING]
    return [list(arguments) for arguments in dict.fromkeys(reading)]
