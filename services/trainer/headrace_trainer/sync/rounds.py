"""The trainer's side of sync rounds, and the window that each round opens.

`begin` writes the snapshot of the next version and requests the round. Training continues at once in the
window of that version. `finish` waits until the round has committed. There is one round at a time, and every
rank makes the same calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.models.files import vocabulary_size
from headrace.v1 import sync_pb2 as pb
from headrace.weights.layout import units_to_pb
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.batch import Batch
from headrace_trainer.learning.learner import Learner
from headrace_trainer.learning.window_rule import WindowRule
from headrace_trainer.records.report import StepReport
from headrace_trainer.sync.sync_client import SyncClient, SyncFailed
from headrace_trainer.sync.weight_server import WeightServer

log = logging.getLogger("headrace.trainer")

_CANARY_TOKENS = 48
_TURN_S = 1.0
"""Of a wait for a commit: in between ranks look whether a node was told to stop."""


class Rounds:
    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        learner: Learner,
        server: WeightServer,
        client: SyncClient | None,
        progress: TrainingProgress,
        rule: WindowRule,
        report: StepReport,
        *,
        stopping: Callable[[], bool],
        check_ledger: Callable[[], None],
    ) -> None:
        """`client`: on rank 0 only. `check_ledger` raises LedgerWentBack."""
        self.config = config
        self.ranks = ranks
        self.learner = learner
        self.server = server
        self.client = client
        self.progress = progress
        self.rule = rule
        self.report = report
        self._stopping = stopping
        self._check_ledger = check_ledger
        self.window = -1
        """Version whose window is open; -1 before the first snapshot."""
        self.updates = 0
        """Local updates in this window."""
        self.pending = False
        """A round is under way."""
        self.validated = -1
        """The newest version whose validation was asked for."""
        self._canary = _first_canary(config)

    def begin(self, final: bool) -> None:
        """Write the snapshot of the next version and request the round; training may continue meanwhile."""
        version = self.window + 1 if self.window >= 0 else self.progress.version + 1
        self._take_up_tuning(version)
        heartbeat.beat()
        scores = self.learner.score(self._canary)
        if self.window >= 0:
            self.report.window_ends()
        self.server.write_snapshot(version)
        self.learner.begin_window()
        self.window = version
        self.updates = 0
        self.progress.step_of_version[str(version)] = self.progress.optimizer_steps
        self.pending = True
        freq = self.config.rollout.test_freq
        validate = freq > 0 and (final or version == 0 or version % freq == 0)
        if validate:
            self.validated = version
        wait_s, step_s = self.report.window_seconds()
        if self.client is not None:
            snapshot = self.server.snapshot
            self.client.begin(
                pb.BeginSync(
                    lineage=self.progress.lineage,
                    optimizer_step=self.progress.optimizer_steps,
                    version=version,
                    manifest=pb.Manifest(
                        units=units_to_pb(snapshot.units),
                        bucket_bytes=self.config.sync.bucket_bytes,
                        bytes=snapshot.nbytes,
                        canary=pb.Canary(token_ids=self._canary, log_probs=scores),
                        version=version,
                    ),
                    validate=validate,
                    final=final,
                    wait_s=wait_s,
                    step_s=step_s,
                    tuning=pb.Tuning(
                        sync_steps=self.rule.present.sync_steps,
                        staleness_threshold=self.rule.present.threshold,
                    ),
                )
            )

    def _take_up_tuning(self, version: int) -> None:
        """Apply the coordinator's current S and eta to the window that `version` opens."""
        wanted = self.client.tuning(self.rule.present) if self.client is not None else None
        self.rule.take_up(version, *self.ranks.share(wanted))

    def finish(self) -> bool:
        """Wait until the round in progress, if any, has committed.

        False if a node is stopping: nobody may be left to commit, and nobody needs the round any more.
        """
        if not self.pending:
            return True
        deadline = time.monotonic() + sync_limit_s(self.config)
        while (told := self.ranks.share(self._commit(deadline))) is None:
            if self.ranks.largest(int(self._stopping())):
                return False
        (self.progress.version,) = told
        self.pending = False
        return True

    def _commit(self, deadline: float) -> list[int] | None:
        """Rank 0: the committed version, if the commit arrives within one poll. Raises SyncFailed."""
        if self.client is None:
            return None
        self._check_ledger()
        heartbeat.beat()
        try:
            answer = self.client.committed(_TURN_S)
        except SyncFailed:
            if not self._stopping():
                raise
            return None
        if answer is not None:
            self.report.committed(answer, self.server.snapshot.nbytes)
            return [answer.version]
        if time.monotonic() > deadline:
            limit, where = sync_limit_s(self.config), variables.coordinator()
            raise SyncFailed(f"the coordinator at {where} committed nothing in {limit:g} s")
        return None

    def heard_last(self) -> None:
        """Rank 0, at an orderly stop: take a commit that has already arrived, without waiting for one."""
        if self.client is None or not self.pending:
            return
        try:
            answer = self.client.committed()
        except SyncFailed as error:
            answer = None
            log.warning("the last round failed", extra={"reason": str(error)})
        if answer is not None:
            self.report.committed(answer, self.server.snapshot.nbytes)
            self.progress.version = answer.version

    def keep_canary(self, batch: Batch) -> None:
        """Make a sampled trajectory the canary from now on: rank 0's first."""
        ids: list[int] | None = None
        if self.ranks.is_first:
            samples = [s for mini in batch.mini for s in mini]
            if samples:
                t = samples[0].trajectories[0]
                ids = [*samples[0].prompt.token_ids.tolist(), *t.token_ids.tolist()]
                ids = ids[: _canary_length(self.config)]
        self._canary = self.ranks.share(ids) or self._canary

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        self.server.close()


def _first_canary(config: RunConfig) -> list[int]:
    """The canary before anything has been sampled: fixed pseudo-random tokens."""
    vocabulary = vocabulary_size(Path(config.model.path))
    generator = torch.Generator().manual_seed(config.seed)
    shape = (_canary_length(config),)
    return [int(t) for t in torch.randint(0, vocabulary, shape, generator=generator)]


def _canary_length(config: RunConfig) -> int:
    """Return its most tokens. An engine that scores a prompt samples one token more, which has to fit."""
    return min(_CANARY_TOKENS, config.longest_sequence - 1)


def sync_limit_s(config: RunConfig) -> float:
    """Longest time a sync round may take, in seconds, including validation, running work and all attempts."""
    c = config.sync
    drain = 0.0 if config.rule.crosses is None else config.rollout.sample_timeout_s
    attempts = (c.max_attempts + 2) * (c.rendezvous_timeout_s + c.transfer_timeout_s + 5.0)
    return config.val.max_delay_s + c.drain_stall_s + c.pause_timeout_s + drain + attempts
