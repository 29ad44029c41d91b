"""The packages of the product form layers: nothing imports what lies above it, and there are no circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
SERVICES = {
    "headrace_queue": ROOT / "services/queue",
    "headrace_coordinator": ROOT / "services/sync-coordinator",
    "headrace_rollouter": ROOT / "services/rollouter",
    "headrace_trainer": ROOT / "services/trainer",
}
MOST_ROOMS = 28
"""Packages of `headrace`, the four services as one room each on top of them."""


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the product, generated ones left out."""
    found = {}
    for root, package in [(ROOT, "headrace"), *((root, name) for name, root in SERVICES.items())]:
        for file in sorted((root / package).rglob("*.py")):
            words = file.relative_to(root).with_suffix("").parts
            found[".".join(words).removesuffix(".__init__")] = file
    return found


def imported(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the product that a module imports when it runs, at any depth of its code."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            wanted = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in wanted:
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != name:
                yield target


def room(module: str) -> str:
    """`headrace.ledger.ops` is in the room `headrace.ledger`; a service is one room."""
    words = module.split(".")
    return ".".join(words[:2]) if words[0] == "headrace" else words[0]


def room_of_a_service(module: str) -> str:
    """Inside a service a package is a room, and so is each module beside the packages."""
    words = module.split(".")
    return room(module) if words[0] == "headrace" else ".".join(words[:2])


@pytest.mark.parametrize("of", [room, room_of_a_service], ids=["product", "services"])
def test_rooms_have_no_circle(of) -> None:  # type: ignore[no-untyped-def]
    known = modules()
    graph: dict[str, set[str]] = {}
    why: dict[tuple[str, str], str] = {}
    for name, file in known.items():
        below = graph.setdefault(of(name), set())
        for target in imported(name, file, known):
            if of(target) != of(name):
                below.add(of(target))
                why.setdefault((of(name), of(target)), f"{name} imports {target}")
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle = error.args[1]
        steps = [why.get((b, a)) or why.get((a, b)) for a, b in pairwise(circle)]
        pytest.fail("these packages import each other: " + "; ".join(map(str, steps)))


def test_there_are_few_rooms_and_each_says_what_it_is_for() -> None:
    rooms = [p for p in (ROOT / "headrace").iterdir() if p.is_dir() and p.name != "__pycache__"]
    assert len(rooms) + len(SERVICES) <= MOST_ROOMS
    packages = {
        file.parent
        for name in ("headrace", *SERVICES)
        for file in (SERVICES.get(name, ROOT) / name).rglob("*.py")
        if "v1" not in file.parts
    }
    for package in sorted(packages):
        doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
        assert doc, f"{package.relative_to(ROOT)}/__init__.py: say in one sentence what the package is for"


def test_the_top_level_of_the_package_holds_packages_only() -> None:
    assert [p.name for p in (ROOT / "headrace").glob("*.py")] == ["__init__.py"]
