"""The Weights & Biases tracker."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.config.run import RunConfig
from headrace.records.trackers import Tracker
from headrace.records.trackers.installed import missing

_FORBIDDEN = "/\\#?%:"


class Wandb(Tracker):
    """One Weights & Biases run for all starts. WANDB_MODE=offline keeps it under `wandb/`."""

    @staticmethod
    def problems(config: RunConfig) -> Iterator[str]:
        yield from missing("wandb")
        project = config.trainer.project_name
        if not project or set(project) & set(_FORBIDDEN):
            yield (
                f"trainer.project_name: {project!r}: Weights & Biases takes no empty name and none of "
                f"{' '.join(_FORBIDDEN)}; choose another"
            )

    @staticmethod
    def warnings(config: RunConfig) -> Iterator[str]:
        """Warn of a missing login: it would only show during the run, which then continues without it."""
        if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
            return
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _logged_in():
            return
        yield (
            "trainer.logger: wandb: there is no login on this machine: set WANDB_API_KEY or run "
            "`wandb login`, or set WANDB_MODE=offline to keep the rows in the run's directory; as it is, "
            "none will go there"
        )

    def __init__(self, config: RunConfig, directory: Path, state: dict[str, Any], after: int) -> None:
        import wandb

        state.setdefault("id", secrets.token_hex(6))
        self._run = wandb.init(
            project=config.trainer.project_name,
            name=config.name,
            id=state["id"],
            resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
            dir=str(directory.parent),
            config=config.to_plain(),
            settings=wandb.Settings(
                console="off", disable_git=True, disable_code=True, init_timeout=60.0, silent=True
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _logged_in() -> bool:
    base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    host = base.split("://")[-1].split("/")[0].split(":")[0]
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
