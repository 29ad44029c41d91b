"""The packages of the product form layers: nothing imports what is above it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.reference.packages import LAYERS, ROOT, SERVICES, TARGET, folder, render


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the product."""
    found = {}
    for root, package in [(ROOT, "headrace"), *((ROOT / place, name) for name, place in SERVICES.items())]:
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
    for node in ast.walk(tree):
        if node in for_types:
            continue
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


def package_of(module: str) -> str:
    """`headrace.ledger.ops` is in `ledger`; a service is one package."""
    words = module.split(".")
    return words[1] if words[0] == "headrace" and len(words) > 1 else words[0]


def test_a_package_imports_only_those_below_it() -> None:
    known = modules()
    height = {package: n for n, package in enumerate(("headrace", *LAYERS))}
    upwards = [
        f"{name} imports {target}"
        for name, file in known.items()
        for target in imported(name, file, known)
        if height[package_of(target)] > height[package_of(name)]
    ]
    assert not upwards, f"move what is shared below both, or correct LAYERS: {'; '.join(upwards)}"


def part_of_service(module: str) -> str:
    """A service's packages, and the modules beside them; the other packages as they are."""
    return module if module.startswith("headrace.") else ".".join(module.split(".")[:2])


def itself(module: str) -> str:
    return module


@pytest.mark.parametrize("of", [part_of_service, itself])
def test_nothing_imports_in_circles(of: Callable[[str], str]) -> None:
    known = modules()
    graph: dict[str, set[str]] = {}
    why: dict[tuple[str, str], str] = {}
    for name, file in known.items():
        graph.setdefault(of(name), set())
        for target in imported(name, file, known):
            if of(target) != of(name):
                graph[of(name)].add(of(target))
                why[of(name), of(target)] = f"{name} imports {target}"
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        steps = [why.get((b, a)) or why.get((a, b)) for a, b in pairwise(error.args[1])]
        pytest.fail("; ".join(map(str, steps)))


def test_every_package_has_a_place_and_says_what_it_is_for() -> None:
    here = {p.name for p in (ROOT / "headrace").iterdir() if (p / "__init__.py").exists()}
    assert here | set(SERVICES) == set(LAYERS)
    assert [p.name for p in (ROOT / "headrace").glob("*.py")] == ["__init__.py"]
    for package in LAYERS:
        for file in (ROOT / folder(package)).rglob("__init__.py"):
            doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            assert doc, f"{file.relative_to(ROOT)}: say in one sentence what the package is for"


def test_the_table_of_packages_is_current() -> None:
    assert TARGET.read_text() == render(TARGET.read_text()), "run `make docs`"
