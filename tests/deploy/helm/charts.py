"""The chart as the tests render it: with its presets, once each."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

from scripts.kube_tools import run_helm
from scripts.manifests import CHART
from tests.deploy.helm.objects import Object, read

PRESETS = sorted(
    p.relative_to(CHART).as_posix() for folder in ("ci", "examples") for p in (CHART / folder).iterdir()
)
DEFAULTS = "defaults"
ALL = [DEFAULTS, *PRESETS]


@cache
def text(preset: str = DEFAULTS, release: str = "demo", sets: tuple[str, ...] = ()) -> str:
    """`helm template` of one preset; `sets` are further `--set-json` words."""
    values = [] if preset == DEFAULTS else ["--values", str(CHART / preset)]
    words = [word for pair in sets for word in ("--set-json", pair)]
    return run_helm("template", release, str(CHART), "--namespace", "tests", *values, *words)


def rendered(preset: str = DEFAULTS, release: str = "demo", sets: tuple[str, ...] = ()) -> list[Object]:
    """The objects; a copy that may be changed."""
    return copy.deepcopy(_parsed(preset, release, sets))


@cache
def _parsed(preset: str, release: str, sets: tuple[str, ...]) -> list[Object]:
    return read(text(preset, release, sets))


def preset_path(preset: str) -> Path:
    return CHART / preset


def notes(preset: str = DEFAULTS, sets: tuple[str, ...] = ()) -> str:
    """What an installation prints at its end."""
    values = [] if preset == DEFAULTS else ["--values", str(CHART / preset)]
    words = [word for pair in sets for word in ("--set-json", pair)]
    shown = run_helm(
        "install", "demo", str(CHART), "--namespace", "tests", "--dry-run=client", *values, *words
    )
    return shown.partition("\nNOTES:\n")[2]
