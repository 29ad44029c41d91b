"""Writes docker/locks/: what of requirements/cpu.lock each service needs, from its extras in pyproject.toml.

    python scripts/service_locks.py [--check]

The closure is taken from the metadata of the installed packages. What the CPU environment leaves out on
purpose (see requirements/cpu.lock) is left out here too, and torch is installed by the Dockerfile itself.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
TARGET = ROOT / "docker" / "locks"
SERVICES = {
    "queue": ["queue", "rewards"],
    "coordinator": ["coordinator", "kubernetes"],
    "trainer": ["trainer", "logging"],
    "rollouter": ["rollouter-cpu", "rewards"],
    "rollouter-cuda": ["rollouter", "rewards"],
}
APART = {"torch"}
"""Installed by the Dockerfile, less what it requires: its CPU and CUDA builds come from different places."""
IN_THE_BASE = {"rollouter-cuda": {"torch", "transformers"}}
"""What vLLM's CUDA image brings in versions of its own."""


def pinned() -> dict[str, str]:
    """Version by canonical name, as the lock has them."""
    lines = [line.partition("#")[0].strip() for line in LOCK.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): version for name, version in pairs}


def closure(
    wanted: list[Requirement], pins: dict[str, str], own: dict[str, list[str]], in_the_base: set[str]
) -> set[str]:
    """Canonical names that `wanted` leads to, as far as the lock has them; not by way of `in_the_base`."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    open_ = list(wanted)
    while open_:
        requirement = open_.pop()
        name = canonicalize_name(requirement.name)
        extras = sorted(requirement.extras)
        if name == "headrace":
            open_ += [Requirement(text) for extra in extras for text in own[extra]]
            continue
        new = [extra for extra in ["", *extras] if (name, extra) not in seen]
        seen |= {(name, extra) for extra in new}
        if not new or name in in_the_base or name not in {*pins, *APART}:
            continue
        if name not in APART:
            found.add(name)
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            raise SystemExit(
                f"{name} is not installed: run this in the environment of `make setup`"
            ) from None
        for text in requires:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in new):
                open_.append(inner)
    return found


def render(service: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own: dict[str, list[str]] = project["optional-dependencies"]
    pins = pinned()
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [Requirement(text) for extra in SERVICES[service] for text in own[extra]]
    names = closure(wanted, pins, own, IN_THE_BASE.get(service, set()))
    versions = {re.split("==", line)[0]: line for line in LOCK.read_text().splitlines() if "==" in line}
    lines = [line for name, line in versions.items() if canonicalize_name(name) in names and name[0] != "#"]
    head = f"# What the {service} image installs, from requirements/cpu.lock by scripts/service_locks.py.\n"
    return head + "\n".join(sorted(lines, key=str.lower)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when one is not current")
    args = parser.parse_args()
    stale = []
    TARGET.mkdir(parents=True, exist_ok=True)
    for service in SERVICES:
        path, text = TARGET / f"{service}.txt", render(service)
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if not args.check:
                path.write_text(text)
    if stale and args.check:
        sys.exit(f"docker/locks: {', '.join(stale)} not current: python scripts/service_locks.py")


if __name__ == "__main__":
    main()
