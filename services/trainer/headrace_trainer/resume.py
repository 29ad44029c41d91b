"""From which checkpoint a trainer goes on.

`auto` means the newest; a path means that one, once: checkpoints that are newer are set aside, and a trainer
that starts again later goes on from what it has saved itself meanwhile. `checkpoints/resumed_from` remembers
that a path has been obeyed; the runner removes it when somebody asks again.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.runner.layout import RESUMED_FROM, complete_checkpoints

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
    there, asked, wanted = complete_checkpoints(directory), wanted, wanted.resolve()
    if wanted not in [d.resolve() for d in there]:
        shown = ", ".join(d.name for d in there) or "none"
        raise ValueError(
            f"trainer.resume: {asked} is no complete checkpoint of this run (there are: {shown}); to begin "
            "with the weights of another run, export them with `headrace export` and set model.path"
        )
    set_aside(directory, [d.name for d in there if d.name > wanted.name])
    marker.write_text(str(asked))


def set_aside(directory: Path, names: list[str]) -> None:
    """Rename checkpoints so that nobody takes them for one any more; nothing is deleted."""
    for name in names:
        number = 1
        while (aside := directory / f"aside_{number}_{name}").exists():
            number += 1
        (directory / name).rename(aside)
        log.info("checkpoint set aside", extra={"was": name, "is": aside.name})
