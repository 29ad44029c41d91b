"""The Dockerfiles, taken apart: which commands an image really consists of, for one DEVICE.

Only what leads to the last stage counts: its bases, and the stages from which it copies the environment.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
LOCKS = DOCKER / "locks"
SERVICES = ("queue", "coordinator", "trainer", "rollouter")
BY_DEVICE = ("trainer", "rollouter")
"""Those whose image depends on DEVICE."""
IMAGES = [(service, "cpu") for service in SERVICES] + [(service, "cuda") for service in BY_DEVICE]
ENVIRONMENT = "/opt/headrace"


@dataclass
class Stage:
    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Instruction and what follows it."""

    def of(self, instruction: str) -> list[str]:
        return [rest for word, rest in self.lines if word == instruction]


@dataclass
class Command:
    """One command of a RUN, with the files that COPY has put there before it."""

    words: list[str]
    files: dict[str, str]
    """Path in the build context by path in the image."""


def text_of(service: str) -> str:
    return (DOCKER / f"Dockerfile.{service}").read_text()


def arguments(text: str) -> dict[str, str]:
    """The ARGs before the first FROM, with their defaults."""
    head = re.split(r"^FROM ", text, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", head, re.MULTILINE))


def stages(text: str, device: str) -> list[Stage]:
    given = {**arguments(text), "DEVICE": device}
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    out: list[Stage] = []
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, *name = re.sub(r"\$\{(\w+)\}", lambda m: given[m[1]], rest).split(" AS ")
            out.append(Stage(name[0] if name else "", base))
        elif out:
            out[-1].lines.append((word, rest))
    return out


def chain(every: list[Stage], last: Stage) -> list[Stage]:
    """`last` after the stages it is built upon, the outermost base first."""
    found = [last]
    while (base := next((s for s in every if s.name == found[0].base), None)) is not None:
        found.insert(0, base)
    return found


def image(text: str, device: str) -> list[Stage]:
    """The stages that the image itself is made of."""
    every = stages(text, device)
    return chain(every, every[-1])


def base_image(text: str, device: str) -> str:
    return image(text, device)[0].base


def environment(text: str, device: str) -> dict[str, str]:
    """The variables that ENV sets in the image."""
    found: dict[str, str] = {}
    for stage in image(text, device):
        for rest in stage.of("ENV"):
            found |= dict(word.split("=", 1) for word in shlex.split(rest))
    return found


def commands(text: str, device: str) -> list[Command]:
    """What makes the image's Python environment and what else it runs, in order."""
    every = stages(text, device)
    parts = image(text, device)
    for stage in list(parts):
        for rest in stage.of("COPY"):
            if taken := re.fullmatch(rf"--from=(\S+) {ENVIRONMENT} {ENVIRONMENT}", rest):
                parts = chain(every, next(s for s in every if s.name == taken[1])) + parts
    out: list[Command] = []
    files: dict[str, str] = {}
    for stage in parts:
        for word, rest in stage.lines:
            if word == "COPY" and not rest.startswith("--from"):
                *sources, target = rest.split()
                files = files | {
                    target + Path(s).name if target.endswith("/") else target: s for s in sources
                }
            elif word == "RUN":
                out += [Command(shlex.split(part), files) for part in rest.split(" && ")]
    return out


def pip_arguments(words: list[str], what: str) -> list[str] | None:
    """What follows `pip install` or `pip uninstall` (`what`); None when this is another command."""
    for head in ([f"{ENVIRONMENT}/bin/pip"], ["python3", "-m", "pip"]):
        if words[: len(head) + 1] == [*head, what]:
            return words[len(head) + 1 :]
    return None


def installed(text: str, device: str) -> tuple[list[str], list[str]]:
    """The locks and the other requirements that an image's pip installs."""
    locks: list[str] = []
    others: list[str] = []
    for command in commands(text, device):
        words = iter(pip_arguments(command.words, "install") or [])
        for word in words:
            if word == "-r":
                locks.append(Path(next(words)).stem)
            elif word == "--extra-index-url":
                next(words)
            elif not word.startswith("-"):
                others.append(word)
    return locks, others


def pins(lock: str) -> dict[str, str]:
    """Version by name, as a lock has it."""
    lines = (LOCKS / f"{lock}.txt").read_text().splitlines()
    return dict(re.findall(r"^([\w.-]+)={2,3}([\w.+!]+)", "\n".join(lines), re.MULTILINE))
