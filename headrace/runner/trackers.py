"""Checks of `trainer.logger` before anything is started."""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.config import RunConfig

_FORBIDDEN = "/\\#?%:"


def problems(config: RunConfig) -> Iterator[str]:
    for name in dict.fromkeys(config.trainer.logger):
        if name != "console" and not _is_installed(name):
            yield (
                f"trainer.logger: {name} is not installed; run pip install -e '.[logging]' in the checkout, "
                "or leave it out"
            )
    bad = sorted(set(config.trainer.project_name) & set(_FORBIDDEN))
    if "wandb" in config.trainer.logger and (bad or not config.trainer.project_name):
        yield (
            f"trainer.project_name: {config.trainer.project_name!r}: Weights & Biases takes no empty name "
            f"and none of {' '.join(_FORBIDDEN)}; choose another"
        )


def _is_installed(name: str) -> bool:
    """A mere directory of that name in the working directory is none: Weights & Biases leaves one."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def warnings(config: RunConfig) -> Iterator[str]:
    """A login that is missing only shows when the run is on, and then the run goes on without it."""
    if "wandb" not in config.trainer.logger or os.environ.get("WANDB_MODE") in (
        "offline",
        "disabled",
        "dryrun",
    ):
        return
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _logged_in():
        return
    yield (
        "trainer.logger: wandb: there is no login on this machine: set WANDB_API_KEY or run `wandb login`, "
        "or set WANDB_MODE=offline to keep the rows in the run's directory; as it is, none will go there"
    )


def _logged_in() -> bool:
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = base.split("://")[-1].split("/")[0].split(":")[0]
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
