"""How a trainer ends: by an orderly stop, or because the run is complete. Every rank makes the same calls."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from headrace.ledger import ops
from headrace_trainer.distributed import heartbeat
from headrace_trainer.learning.batch import Stopped, TrainerSuperseded, refused
from headrace_trainer.model.policy import export_model

if TYPE_CHECKING:
    from headrace_trainer.loop import Trainer

log = logging.getLogger("headrace.trainer")


def stop(trainer: Trainer) -> None:
    """Stop in order: everything trained goes into the checkpoint. Depends on nothing but the other ranks."""
    log.info("stopping", extra={"step": trainer.progress.step})
    if trainer.began:
        trainer.rounds.heard_last()
    _give_way(trainer)
    if trainer.began:
        trainer.saving.save(wait=True)
    trainer.say_ended()
    trainer.close()


def finish(trainer: Trainer) -> None:
    """Finish the run after the last update: sync, checkpoint, validation, export of the model.

    Raises Stopped.
    """
    _last_sync(trainer)
    _give_way(trainer)
    freq = trainer.config.rollout.test_freq
    if trainer.rounds.updates or (freq and trainer.rounds.validated != trainer.rounds.window):
        # The end came unexpectedly (the last samples died), or this start had nothing left to train.
        trainer.rounds.begin(final=True)
        _last_sync(trainer)
    trainer.saving.save(wait=True)  # before the last calls to Redis, which may already be stopping
    if trainer.ranks.is_first:
        _wait_for_validation(trainer)
    trainer.ranks.share(None)
    state = trainer.checkpoints.full_state()
    if trainer.ranks.is_first:
        export_model(trainer.config, state, trainer.run_dir / "final")
        trainer.say_ended()  # first, so that a run the ledger calls completed also ends in the files
        with trainer.ledger.unless_stopping():
            verdict = trainer.ledger.run(ops.complete(trainer.progress.lineage))
            if verdict != "ok":
                raise refused("that it is complete", verdict, trainer.progress.lineage)
    trainer.ranks.share(None)
    trainer.close()
    log.info("completed", extra={"step": trainer.progress.step, "version": trainer.progress.version})


def _give_way(trainer: Trainer) -> None:
    """Leave the files to a successor, if there is one. All ranks together. Raises TrainerSuperseded."""
    followed = False
    if trainer.ranks.is_first:
        with trainer.ledger.unless_stopping():
            followed = trainer.ledger.run(ops.stats()).lineage != trainer.progress.lineage
    if trainer.ranks.share(followed):
        raise TrainerSuperseded(f"another trainer has followed lineage {trainer.progress.lineage}")


def _last_sync(trainer: Trainer) -> None:
    if not trainer.finish_round():
        raise Stopped


def _wait_for_validation(trainer: Trainer) -> None:
    deadline = time.monotonic() + trainer.config.val.max_delay_s
    with trainer.ledger.unless_stopping():
        while (status := trainer.ledger.run(ops.val_status())).open and not trainer.stopping():
            if time.monotonic() > deadline:
                log.warning("validation unfinished", extra={"done": status.done, "total": status.total})
                trainer.ledger.run(ops.val_close(status.version))
                return
            heartbeat.sleep(0.05)
