"""Write docker/locks/: the subset of requirements/cpu.lock that each service's extras in pyproject.toml need.

    python scripts/service_locks.py [--check]

The closure comes from the metadata of the installed packages. Packages that the CPU environment leaves out on
purpose (see requirements/cpu.lock) are left out here too. The Dockerfile itself installs torch. Every package
has the hash of its wheel for x86-64. Hashes already in a lock are kept; pip fetches the others, which needs a
network. A few locks are maintained by hand; only their hashes are written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
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
BY_HAND = ("build", "torch-cuda", "nccl")
APART = {"torch"}
"""Installed by the Dockerfile without dependencies: CPU and CUDA builds come from different places."""
IN_THE_BASE = {"rollouter-cuda": {"torch", "transformers"}}
"""Packages that vLLM's CUDA image has in its own versions."""
PYTHON = {"rollouter-cuda": ["3.12"], "nccl": ["3.11", "3.12"], "build": ["3.11", "3.12"]}
"""The Pythons that install a lock: vLLM's CUDA image has 3.12, all others 3.11."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]  # Debian 12 has glibc 2.36
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def pythons(lock: str) -> list[str]:
    return PYTHON.get(lock, ["3.11"])


def pinned() -> dict[str, str]:
    """Version by canonical name, as the lock has them."""
    lines = [line.partition("#")[0].strip() for line in LOCK.read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): version for name, version in pairs}


def closure(
    wanted: list[Requirement],
    pins: dict[str, str],
    own: dict[str, list[str]],
    in_the_base: set[str],
    python: str,
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
            places = [
                {"extra": extra, "python_version": python, "python_full_version": f"{python}.0"}
                for extra in new
            ]
            if inner.marker is None or any(inner.marker.evaluate(place) for place in places):
                open_.append(inner)
    return found


def derived(service: str) -> list[str]:
    """The lines `name==version` of a service's lock, under their head line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [Requirement(text) for extra in SERVICES[service] for text in own[extra]]
    (python,) = pythons(service)
    names = closure(wanted, pinned(), own, IN_THE_BASE.get(service, set()), python)
    versions = {re.split("==", line)[0]: line for line in LOCK.read_text().splitlines() if "==" in line}
    lines = [line for name, line in versions.items() if canonicalize_name(name) in names and name[0] != "#"]
    head = f"# What the {service} image installs, from requirements/cpu.lock by scripts/service_locks.py."
    return [head, *sorted(lines, key=str.lower)]


def read(lock: str) -> tuple[list[str], dict[str, list[str]]]:
    """The lines of a lock as it is, comments and `name==version`, and the hashes of each of the latter."""
    path = TARGET / f"{lock}.txt"
    text = re.sub(r" \\\n *", " ", path.read_text()) if path.exists() else ""
    lines, hashes = [], {}
    for line in text.splitlines():
        pin, *options = line.split(" --hash=")
        lines.append(pin)
        if options:
            hashes[pin] = options
    return lines, hashes


def ask_pip(pins: list[str], python: str) -> dict[str, str]:
    """The hash of the wheel that pip would install for each of these pins. Nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        report, wanted = Path(folder, "report.json"), Path(folder, "wanted.txt")
        wanted.write_text("\n".join(pins))
        command = [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--dry-run"),
            *("--ignore-installed", "--no-deps", "--only-binary", ":all:", "--use-feature", "fast-deps"),
            *("--python-version", python, "--target", folder, "--report", str(report), "-r", str(wanted)),
            *(word for name in PLATFORMS for word in ("--platform", name)),
        ]
        # Only the index counts: a local folder of wheels may hold other builds of the same version.
        local = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
        env = {k: v for k, v in os.environ.items() if k not in local} | {"PIP_CONFIG_FILE": os.devnull}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            raise SystemExit(f"pip finds no wheel for all of the pins, Python {python}:\n{done.stderr}")
        found = {
            canonicalize_name(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]
            for item in json.loads(report.read_text())["install"]
        }
    return {pin: "sha256:" + found[canonicalize_name(re.split("=", pin)[0])]["sha256"] for pin in pins}


def is_pin(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#")


def render(lock: str, lines: list[str], hashes: dict[str, list[str]]) -> str:
    out = [
        " \\\n    ".join([line, *(f"--hash={value}" for value in hashes[line])]) if is_pin(line) else line
        for line in lines
    ]
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when one is not current")
    args = parser.parse_args()
    stale = []
    TARGET.mkdir(parents=True, exist_ok=True)
    for lock in (*SERVICES, *BY_HAND):
        kept, hashes = read(lock)
        lines = derived(lock) if lock in SERVICES else kept
        unknown = [line for line in lines if is_pin(line) and not hashes.get(line)]
        if unknown and not args.check:
            print(f"docker/locks: asking pip for {len(unknown)} hashes of {lock}", flush=True)
            answers = [ask_pip(unknown, python) for python in pythons(lock)]
            hashes |= {pin: sorted({answer[pin] for answer in answers}) for pin in unknown}
        path = TARGET / f"{lock}.txt"
        if unknown or not path.exists() or path.read_text() != render(lock, lines, hashes):
            stale.append(path.name)
            if not args.check:
                path.write_text(render(lock, lines, hashes))
    if stale and args.check:
        sys.exit(f"docker/locks: {', '.join(stale)} not current: python scripts/service_locks.py")


if __name__ == "__main__":
    main()
