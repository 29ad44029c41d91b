"""One trainer rank: recover, sync, then claim -> advantage -> update -> acknowledge, until data ends.

`resume` recovers, `rounds` is the trainer's side of syncs, `learner` does the update, `ends` ends the run.

The first step is always a full sync, even if the weights are unchanged: no engine generates before it holds
the weights that this lineage starts from.
"""

from __future__ import annotations

import gc
import logging
from pathlib import Path

from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.connections.net import address_facing
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.ledger.record import LedgerRecord
from headrace.models.checkpoint_format import check_names
from headrace.models.files import vocabulary_size
from headrace.records.trained_log import TrainedLog
from headrace.system.endings import EX_STOPPED
from headrace.weights.snapshot import Snapshot
from headrace.weights.transports import library_version
from headrace.weights.transports.store import serve_store
from headrace.wire.sample_checks import SampleReader
from headrace_trainer import ends
from headrace_trainer.checkpoints.checkpoint import Checkpoints
from headrace_trainer.checkpoints.resume import open_lineage, recover
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.launch.launcher import STARTED
from headrace_trainer.learning.batch import Batch, Batches, Stopped, refused
from headrace_trainer.learning.learner import Learned, Learner
from headrace_trainer.learning.window_rule import WindowRule
from headrace_trainer.ledger_watch import LedgerWatch
from headrace_trainer.records.report import StepReport
from headrace_trainer.save_schedule import SaveSchedule
from headrace_trainer.sync.rounds import Rounds
from headrace_trainer.sync.sync_client import SyncClient
from headrace_trainer.sync.weight_server import WeightServer

log = logging.getLogger("headrace.trainer")


class NotFinite(RuntimeError):
    """Several local updates in a row had nothing finite."""


class NothingTrained(RuntimeError):
    """The data ended and no sample could be trained."""


class Trainer:
    def __init__(self, config: RunConfig, ranks: Ranks, run_dir: Path, stop_file: Path) -> None:
        self.config = config
        self.ranks = ranks
        self.run_dir = run_dir
        self._stop_file = stop_file
        self.record = LedgerRecord(run_dir)
        self._watch: LedgerWatch | None = None
        self.ledger = SyncLedger(
            connect(variables.redis_url()),
            config.name,
            retry_s=config.redis.outage_timeout_s,
            sleep=heartbeat.sleep,
            stopping=self.stopping,
            seen=self.record.marks,
        )
        self.learner = Learner(config, ranks)
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config, self.learner.parts, ranks)
        self.snapshot = Snapshot(
            self.learner.model, config.model.dtype, config.sync.bucket_bytes, ranks.weights
        )
        parameters = sum(p.numel() for p in self.learner.model.parameters())  # of whole tensors
        self.report = StepReport(config, self.ledger, ranks, run_dir, parameters)
        self.rule = WindowRule(config.rule)
        self.trained_log: TrainedLog | None = None
        self._skipped_in_a_row = 0
        self.began = False
        """This lineage has committed: from then on there is something to save."""

    # -- start -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Recover from the newest checkpoint, fence older trainers, get ready to serve weights."""
        if self.ranks.is_first:
            names = [t.name for unit in self.snapshot.units for t in unit.tensors]
            check_names(Path(self.config.model.path), names)
        directory = self.run_dir / "checkpoints"
        self.progress = recover(self.config, self.ranks, self.checkpoints, directory)
        if self.progress.lineage:  # of a checkpoint
            self.learner.resumed(self.progress.step, self.progress.kl_coef)
            self.report.resumed(self.progress.wall_s)
        self.progress.lineage, version, kept = self.ranks.share(
            open_lineage(self.config, self.ledger, self.progress, directory) if self.ranks.is_first else None
        )
        self.progress.count_lost(version, self.rule.present.sync_steps * self.rule.present.require_batches)
        self.progress.version = version
        self.rule.resumed(version + 1, kept)
        if self.ranks.is_first:
            self.trained_log = TrainedLog(self.run_dir)
            self.trained_log.began(
                self.progress.lineage, self.progress.step, version=version, run_id=self.progress.run_id
            )
            self._note_ledger()
            self._watch = LedgerWatch(variables.redis_url(), self.config.name, self.ledger.seen)
            self.report.began(self.progress.step)
        self.batches = Batches(
            self.config,
            self.ledger,
            self.ranks,
            self.progress.lineage,
            self.stopping,
            SampleReader(self.config, vocabulary_size(Path(self.config.model.path))),
            self.rule,
        )
        store = serve_store(self._host()) if self.ranks.is_first else None
        address = self.ranks.share([self._host(), store.port] if store is not None else None)
        if store is None:
            from torch.distributed import TCPStore

            store = TCPStore(address[0], address[1], is_master=False, wait_for_workers=False)
        server, client = WeightServer(self.snapshot, store, self.ranks), None
        if self.ranks.is_first:
            client = SyncClient(
                server,
                self.progress.lineage,
                address[0],
                address[1],
                variables.coordinator(),
                variables.token(),
                self.report.canary,
                library_version(self.config.sync.transport),
                self.config.services.start_timeout_s,
            )
        self.rounds = Rounds(
            self.config,
            self.ranks,
            self.learner,
            server,
            client,
            self.progress,
            self.rule,
            self.report,
            stopping=self.stopping,
            check_ledger=self._check_ledger,
        )
        self.saving = SaveSchedule(self.config, self.ranks, self.checkpoints, self.progress, self.report)
        gc.collect()
        gc.freeze()  # what is loaded stays; full collections need not traverse it

    def _host(self) -> str:
        return address_facing(variables.coordinator())

    # -- loop ------------------------------------------------------------------------------------

    def run(self) -> int:
        self.start()
        try:
            self.rounds.begin(final=False)
            if not self.finish_round():
                raise Stopped
            self.began = True
            self._stop_file.with_name(STARTED).touch()
            while (batch := self._next()) is not None:
                self.train(batch)
            if not self.progress.step:
                raise NothingTrained(self._why_nothing())
            ends.finish(self)
        except Stopped:
            ends.stop(self)
            return EX_STOPPED
        except Exception:  # rank 0 takes the store down: tell the others why they end
            self.rounds.server.dismiss()
            raise
        return 0

    def _why_nothing(self) -> str:
        """Why no sample was trained although the data ended: such a run must not look completed."""
        s = self.ledger.run(ops.stats())
        return (
            f"the data ended before a single sample was trained: dead {s.dead_reasons}, dropped "
            f"{s.dropped_reasons}"
        )

    def _next(self) -> Batch | None:
        if self.ranks.largest(int(self.stopping())):  # any node's launcher may receive the stop
            raise Stopped
        return self.batches.next(self.rounds.window)

    def train(self, batch: Batch) -> None:
        """One local update: R optimizer steps over the claimed samples, then the acknowledgement."""
        p, rounds = self.progress, self.rounds
        bound = self.rule.check(rounds.window, (item.min_version for item in batch.items))
        self.report.begin_update(batch, rounds.window, bound)
        learned = self.learner.learn(batch.mini, p.step_of_version, p.optimizer_steps, self.report.phase)
        p.kl_coef = self.learner.adapted_kl_coef
        with self.report.phase("ack"):
            self._count_skipped(learned)
            self.batches.reject(batch, learned.rejected)
            if batch.items:
                self._acknowledge(batch, learned)
            # Also if all samples of the update went back: they have used up their places in the window.
            rounds.updates += 1
            last = self.ranks.share(self._nothing_left() if self.ranks.is_first else None)
        if last or rounds.updates >= self.rule.present.sync_steps:
            with self.report.phase("param_sync"):
                if self.finish_round(snapshot=rounds.window + 1):
                    rounds.begin(final=last)
                    if self.config.waits_for_commit:
                        self.report.wait_for_generation()
                        self.finish_round()
            if self.config.waits_for_commit and self.ranks.is_first:
                self.report.waited_for_generation()
        rounds.server.check()
        self.checkpoints.check()
        self.report.end_update(batch, p, learned, self.learner.policy.learning_rate)

    def finish_round(self, snapshot: int = -1) -> bool:
        """Wait for the commit of the present round, then checkpoint if it is due. False if stopping.
        `snapshot`: the version that the present weights will become next."""
        waited = self.rounds.pending
        if not self.rounds.finish():
            return False
        if waited:
            self.saving.committed(snapshot)
        return True

    def _acknowledge(self, batch: Batch, learned: Learned) -> None:
        p = self.progress
        p.step += 1
        p.optimizer_steps += learned.optimizer_steps
        ids = [i.sample_id for i in batch.items]
        p.trained.update(dict.fromkeys(ids, p.step))
        if self.ranks.is_first:
            heard = False
            with self.ledger.unless_stopping():  # the checkpoint is what matters, and it comes next
                verdict = self.ledger.run(ops.train(p.lineage, p.step, ids))
                if verdict != "ok":
                    raise refused(f"the acknowledgement of step {p.step}", verdict, p.lineage)
                heard = True
            if self.trained_log is not None:
                self.trained_log.trained(
                    p.lineage, p.step, ids, window=self.rounds.window, acknowledged=heard
                )
        self.rounds.keep_canary(batch)

    def _count_skipped(self, learned: Learned) -> None:
        """Raises NotFinite after too many updates in a row without a step: more would only waste samples."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.learner.is_stuck(learned) else 0
        if self._skipped_in_a_row >= self.config.trainer.max_skipped_updates:
            raise NotFinite(
                f"{self._skipped_in_a_row} local updates in a row were not finite "
                "(trainer.max_skipped_updates): the policy or the critic is broken; lower lr or grad_clip "
                "of actor.optim or critic.optim, and start again from an older checkpoint"
            )

    def _nothing_left(self) -> bool:
        """Rank 0: whether no more samples can come, so that this was the last update."""
        with self.ledger.unless_stopping():
            s = self.ledger.run(ops.stats())
            return s.end_of_data and not any(
                s.counts[state] for state in ("ready", "in_flight", "parked", "queued", "training")
            )
        return False

    def _check_ledger(self) -> None:
        """Rank 0: check the ledger where it may not have been called for long. Raises LedgerWentBack."""
        if self._watch is not None:
            self._watch.check()
        self._note_ledger()

    def _note_ledger(self) -> None:
        try:
            self.record.keep(self.ledger.seen)
        except OSError as error:  # the queue service notes it, too
            log.warning("not noted how far the ledger is", extra={"error": str(error)})

    # -- ends: `ends` has what is done before --------------------------------------------------------

    def stopping(self) -> bool:
        return self._stop_file.exists()

    def say_ended(self) -> None:
        """Record in the files that the run has ended: everything trained and committed is in them."""
        if self.trained_log is not None:
            self.report.flush_round()
            p = self.progress
            self.trained_log.ended(p.lineage, p.step, version=p.version)

    def close(self) -> None:
        self.rounds.close()
        self.report.close()
        if self._watch is not None:
            self._watch.close()
        if self.trained_log is not None:
            self.trained_log.close()
