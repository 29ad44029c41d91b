"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SERVICES = {path.name: path for path in (ROOT / "services").glob("*/headrace_*")}


def imported(folder: Path) -> Iterator[tuple[str, str]]:
    """(file and line, module) of every import below `folder`, also of those within functions."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ImportFrom) and node.module:
                yield from ((where, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((where, alias.name) for alias in node.names)


def test_the_product_imports_nothing_that_is_for_tests() -> None:
    found = [
        f"{where} imports {module}"
        for folder in (ROOT / "headrace", ROOT / "services", ROOT / "scripts")
        for where, module in imported(folder)
        if module.split(".")[0] == "tests"
        or (
            module.startswith("headrace.ledger.in_memory")
            and not where.startswith("headrace/ledger/in_memory")
        )
    ]
    assert found == []


def test_services_import_neither_the_runner_nor_each_other() -> None:
    """What they share with the runner lies below both."""
    found = [
        f"{where} imports {module}"
        for name, folder in SERVICES.items()
        for where, module in imported(folder)
        if module.startswith("headrace.local.") or module.split(".")[0] in SERVICES.keys() - {name}
    ]
    assert found == []
