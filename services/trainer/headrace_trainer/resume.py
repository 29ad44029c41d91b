"""From which checkpoint a trainer goes on.

`auto` means the newest, and only that. Where it is damaged, another run's or of a history that the run has
left, the trainer stops and names one that could be taken instead. To pass over it would train steps again and
lose what it had, without anybody having decided so; and damage to a file that was complete tells of a disk,
or of a hand, that somebody should look at.

A path means that one, once: checkpoints that are newer are set aside, and a trainer that starts again later
goes on from what it has saved itself meanwhile. `checkpoints/resumed_from` remembers that a path has been
obeyed; the runner removes it when somebody asks again.

Finished and parked samples of the lineage before are kept where they fit; none when somebody goes back by a
path: what came after it is to be done anew. `checkpoints/going_back` says so until the ledger agrees.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from pathlib import Path

from headrace import run_identity
from headrace.checkpoints import RESUMED_FROM, checkpoint_at, complete_checkpoints
from headrace.config import RunConfig
from headrace.ledger.keep import Keep, keep_under
from headrace_trainer.checkpoint import set_aside, trained_rows
from headrace_trainer.progress import Progress

log = logging.getLogger("headrace.trainer.resume")

GOING_BACK = "going_back"


def work_to_keep(config: RunConfig, progress: Progress, version: int, directory: Path) -> Keep:
    """Of the finished and parked samples in the ledger, whose committed version is `version`."""
    keep = keep_under(config.rule, *progress.origin(version), run_identity.scoring(config))
    keep = replace(keep, snapshot=progress.snapshot)
    return replace(keep, limit=0) if (directory / GOING_BACK).exists() else keep


def adopted(directory: Path) -> None:
    """The ledger agrees with the checkpoint."""
    (directory / GOING_BACK).unlink(missing_ok=True)


def chosen(directory: Path, resume: str) -> str | None:
    """Name of the checkpoint to go on from; None to start anew.

    Raises ValueError for a path that is no checkpoint of this run.
    """
    if resume not in ("auto", "never"):
        _obey(directory, Path(resume))
    return next((d.name for d in reversed(complete_checkpoints(directory))), None)


def run_id(directory: Path, progress: Progress) -> str:
    """Of the run, which has one from its first start on."""
    told = (row["run_id"] for row in trained_rows(directory) if "run_id" in row)
    return progress.run_id or next(told, "") or uuid.uuid4().hex


def _obey(directory: Path, wanted: Path) -> None:
    marker = directory / RESUMED_FROM
    if marker.exists() and marker.read_text() == str(wanted):
        return
    found = checkpoint_at(directory, wanted)
    (directory / GOING_BACK).touch()
    set_aside(directory, [d.name for d in complete_checkpoints(directory) if d.name > found.name])
    marker.write_text(str(wanted))
