"""From which checkpoint a trainer goes on.

`auto` means the newest; a path means that one, once: checkpoints that are newer are set aside, and a trainer
that starts again later goes on from what it has saved itself meanwhile. `checkpoints/resumed_from` remembers
that a path has been obeyed; the runner removes it when somebody asks again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.runner.layout import RESUMED_FROM, checkpoint_at, complete_checkpoints

log = logging.getLogger("headrace.trainer.resume")


def candidates(directory: Path, resume: str) -> list[str]:
    """Names of the checkpoints to try, the first that can be read is it; [] to start anew.

    Raises ValueError for a path that is no checkpoint of this run.
    """
    if resume not in ("auto", "never"):
        _obey(directory, Path(resume))
    return [d.name for d in reversed(complete_checkpoints(directory))]


def _obey(directory: Path, wanted: Path) -> None:
    marker = directory / RESUMED_FROM
    if marker.exists() and marker.read_text() == str(wanted):
        return
    found = checkpoint_at(directory, wanted)
    set_aside(directory, [d.name for d in complete_checkpoints(directory) if d.name > found.name])
    marker.write_text(str(wanted))


def set_aside(directory: Path, names: list[str]) -> None:
    """Rename checkpoints so that nobody takes them for one any more; nothing is deleted."""
    for name in names:
        number = 1
        while (aside := directory / f"aside_{number}_{name}").exists():
            number += 1
        (directory / name).rename(aside)
        log.info("checkpoint set aside", extra={"was": name, "is": aside.name})
