"""Which checkpoint a trainer resumes from, and the lineage that it opens there.

`auto` means the newest checkpoint and no other. If that one is damaged, belongs to another run or to an
abandoned history, the trainer stops and names one that could be used instead. Skipping it would silently lose
its progress and retrain steps. And damage to a complete file points to a failing disk or to interference,
which somebody should investigate.

A path means that checkpoint, once. Newer checkpoints are set aside, and a trainer that restarts later resumes
from what it has saved since. `checkpoints/resumed_from` records that a path has been followed; the runner
removes it when somebody asks again.

Finished and parked samples of the previous lineage are kept if they fit. None are kept after a return to a
path: everything after that checkpoint is redone. `checkpoints/going_back` says so until the ledger agrees.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from pathlib import Path

from headrace.config import identity
from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger, adopt
from headrace.ledger.keep import Keep, keep_under
from headrace.ledger.marks import Marks
from headrace.records.checkpoints import (
    RESUMED_FROM,
    CheckpointError,
    checkpoint_at,
    complete_checkpoints,
    instead_of,
)
from headrace.service.startup import wait_until_configured
from headrace_trainer.checkpoints.checkpoint import Checkpoints, set_aside, trained_rows
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.batch import ClaimFailed

log = logging.getLogger("headrace.trainer.resume")

GOING_BACK = "going_back"


def recover(config: RunConfig, ranks: Ranks, checkpoints: Checkpoints, directory: Path) -> TrainingProgress:
    """Load the requested checkpoint on every rank. `directory`: where the run's checkpoints are.

    Raises CheckpointError when it cannot be used.
    """
    progress = TrainingProgress()
    name = ranks.share(chosen(directory, config.trainer.resume) if ranks.is_first else None)
    if name is not None:
        try:
            progress = checkpoints.load(directory / name)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. {_remedy(config, ranks, directory / name)}") from None
    progress.run_id = ranks.share(run_id(directory, progress) if ranks.is_first else None)
    return progress


def _remedy(config: RunConfig, ranks: Ranks, checkpoint: Path) -> str:
    """What to do about an unusable checkpoint. Rank 0 looks for another, which may take as long as a load."""
    told = None
    if ranks.is_first:
        told = instead_of(checkpoint, config.name, trained_rows(checkpoint.parent), heartbeat.beat)
    return str(ranks.share(told))


def open_lineage(
    config: RunConfig, ledger: SyncLedger, progress: TrainingProgress, directory: Path
) -> tuple[int, int, int]:
    """Rank 0: open a new lineage and make the ledger agree with the checkpoint. Returns the lineage's number,
    the committed version and the samples kept from the previous lineage."""
    heartbeat.beat(max(heartbeat.LONG_S, config.services.start_timeout_s))
    # A ledger behind the checkpoint is a different ledger, or has lost earlier commits.
    saved = Marks(version=progress.version, lineage=progress.lineage)
    ledger.seen = ledger.seen.with_(saved)
    impatient = SyncLedger(ledger.redis, config.name, retry_s=0.0, seen=ledger.seen)
    wait_until_configured(impatient, config)
    expected = ledger.run(ops.stats()).lineage
    reply = ledger.run(ops.open_lineage(expected))
    if not reply.ok:
        raise ClaimFailed("another trainer opened a lineage at the same time")
    keep = work_to_keep(config, progress, reply.version, directory)
    done = adopt(ledger, reply.lineage, progress.trained, keep)
    adopted(directory)
    started = {"lineage": reply.lineage, "from_step": progress.step}
    log.info("lineage opened", extra={**started, "kept": done.kept, "restarted": done.restarted})
    return reply.lineage, reply.version, done.kept


def work_to_keep(config: RunConfig, progress: TrainingProgress, version: int, directory: Path) -> Keep:
    """Which finished and parked samples to keep of a ledger whose committed version is `version`."""
    keep = keep_under(config.rule, *progress.origin(version), identity.scoring(config))
    keep = replace(keep, snapshot=progress.snapshot)
    return replace(keep, limit=0) if (directory / GOING_BACK).exists() else keep


def adopted(directory: Path) -> None:
    """Note that the ledger agrees with the checkpoint."""
    (directory / GOING_BACK).unlink(missing_ok=True)


def chosen(directory: Path, resume: str) -> str | None:
    """Name of the checkpoint to resume from; None to start from scratch.

    Raises ValueError for a path that is no checkpoint of this run.
    """
    if resume not in ("auto", "never"):
        _obey(directory, Path(resume))
    return next((d.name for d in reversed(complete_checkpoints(directory))), None)


def run_id(directory: Path, progress: TrainingProgress) -> str:
    """The run's id, which it has from its first start on."""
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
