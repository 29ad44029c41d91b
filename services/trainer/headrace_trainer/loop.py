"""One trainer rank: recover, sync, then claim -> advantage -> update -> acknowledge, until data ends.

The first act is always a full sync, also onto unchanged weights: no engine generates before it holds
what this lineage starts from.
"""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path

import torch

from headrace import environment
from headrace.checkpoints import CheckpointError, instead_of
from headrace.comm import nccl_version
from headrace.comm.store import serve_store
from headrace.config import RunConfig
from headrace.endings import EX_STOPPED
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger, adopt
from headrace.ledger.marks import Marks
from headrace.ledger_record import LedgerRecord
from headrace.model_files import vocabulary_size
from headrace.net import interface_address
from headrace.redis_connect import connect
from headrace.sample_checks import SampleReader
from headrace.startup import wait_until_configured
from headrace.trained_log import TrainedLog
from headrace.v1 import sync_pb2 as pb
from headrace.weights.checkpoint_format import check_names
from headrace.weights.layout import units_to_pb
from headrace.weights.snapshot import Snapshot
from headrace_trainer import heartbeat
from headrace_trainer.batch import Batch, Batches, ClaimFailed, Stopped, Superseded, refused
from headrace_trainer.checkpoint import Checkpoints, trained_rows
from headrace_trainer.launcher import STARTED
from headrace_trainer.learner import Learned, Learner
from headrace_trainer.ledger_watch import LedgerWatch
from headrace_trainer.policy import export_model
from headrace_trainer.progress import Progress
from headrace_trainer.ranks import Ranks
from headrace_trainer.report import Report
from headrace_trainer.resume import adopted, chosen, run_id, work_to_keep
from headrace_trainer.sync_client import SyncClient, SyncFailed
from headrace_trainer.weight_server import WeightServer
from headrace_trainer.window_rule import WindowRule

log = logging.getLogger("headrace.trainer")

_CANARY_TOKENS = 48
_TURN_S = 1.0
"""Of a wait for a commit: in between ranks look whether a node was told to stop."""


class NotFinite(RuntimeError):
    """Nothing of several local updates in a row was finite."""


class NothingTrained(RuntimeError):
    """The data ended, and no sample was fit to be trained."""


class Trainer:
    def __init__(self, config: RunConfig, ranks: Ranks, run_dir: Path, stop_file: Path) -> None:
        self.config = config
        self.ranks = ranks
        self.run_dir = run_dir
        self._stop_file = stop_file
        self.record = LedgerRecord(run_dir)
        self._watch: LedgerWatch | None = None
        self.ledger = SyncLedger(
            connect(environment.redis_url()),
            config.name,
            retry_s=config.redis.outage_timeout_s,
            sleep=heartbeat.sleep,
            stopping=self._stopping,
            seen=self.record.marks,
        )
        self.learner = Learner(config, ranks)
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config, self.learner.parts, ranks)
        self._saved_at = time.monotonic()
        self.progress = Progress()
        self.snapshot = Snapshot(
            self.learner.model, config.model.dtype, config.sync.bucket_bytes, ranks.weights
        )
        parameters = sum(p.numel() for p in self.learner.model.parameters())  # of shards: the whole tensor's
        self.report = Report(config, self.ledger, ranks, run_dir, parameters)
        self.canary_ids = self._first_canary()
        self.rule = WindowRule(config.rule)
        self.window = -1
        self.updates_in_window = 0
        self.sync: SyncClient | None = None
        self.trained_log: TrainedLog | None = None
        self._pending = False
        self._validated = -1
        self._skipped_in_a_row = 0
        self._began = False
        """This lineage has committed: from then on there is something to save."""

    # -- start -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Recover from the newest checkpoint, fence older trainers, be ready to serve our weights."""
        if self.ranks.is_first:
            names = [t.name for unit in self.snapshot.units for t in unit.tensors]
            check_names(Path(self.config.model.path), names)
        self._recover()
        self.progress.lineage, version, kept = self.ranks.share(
            self._open_lineage() if self.ranks.is_first else None
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
            self._watch = LedgerWatch(environment.redis_url(), self.config.name, self.ledger.seen)
            self.report.began(self.progress.step)
        self.batches = Batches(
            self.config,
            self.ledger,
            self.ranks,
            self.progress.lineage,
            self._stopping,
            SampleReader(self.config, vocabulary_size(Path(self.config.model.path))),
            self.rule,
        )
        store = serve_store(self._host()) if self.ranks.is_first else None
        address = self.ranks.share([self._host(), store.port] if store is not None else None)
        if store is None:
            from torch.distributed import TCPStore

            store = TCPStore(address[0], address[1], is_master=False, wait_for_workers=False)
        self.server = WeightServer(self.snapshot, store, self.ranks)
        if self.ranks.is_first:
            self.sync = SyncClient(
                self.server,
                self.progress.lineage,
                address[0],
                address[1],
                environment.coordinator(),
                environment.token(),
                self.report.canary,
                nccl_version(self.config.sync.transport),
            )
        gc.collect()
        gc.freeze()  # what is loaded stays: full collections need not walk it

    def _recover(self) -> None:
        """From the checkpoint that is asked for. Raises CheckpointError when it cannot be used."""
        directory, first = self.run_dir / "checkpoints", self.ranks.is_first
        name = self.ranks.share(chosen(directory, self.config.trainer.resume) if first else None)
        if name is not None:
            try:
                self.progress = self.checkpoints.load(directory / name)
            except CheckpointError as error:
                raise CheckpointError(f"{error}. {self._remedy(directory / name)}") from None
            self.learner.resumed(self.progress.step, self.progress.kl_coef)
            self.report.resumed(self.progress.wall_s)
        self.progress.run_id = self.ranks.share(run_id(directory, self.progress) if first else None)

    def _remedy(self, checkpoint: Path) -> str:
        """For one that cannot be used: rank 0 looks for another, which may take as long as reading it."""
        told = None
        if self.ranks.is_first:
            told = instead_of(checkpoint, self.config.name, trained_rows(checkpoint.parent), heartbeat.beat)
        return str(self.ranks.share(told))

    def _open_lineage(self) -> tuple[int, int, int]:
        """Rank 0: a new lineage, and a ledger that agrees with the checkpoint. Returns its number, the
        committed version and the samples that it keeps of the one before."""
        heartbeat.beat(max(heartbeat.LONG_S, self.config.services.start_timeout_s))
        # A ledger that is behind the checkpoint is another one, or has lost what was committed before it.
        saved = Marks(version=self.progress.version, lineage=self.progress.lineage)
        self.ledger.seen = self.ledger.seen.with_(saved)
        impatient = SyncLedger(self.ledger.redis, self.config.name, retry_s=0.0, seen=self.ledger.seen)
        wait_until_configured(impatient, self.config)
        expected = self.ledger.run(ops.stats()).lineage
        reply = self.ledger.run(ops.open_lineage(expected))
        if not reply.ok:
            raise ClaimFailed("another trainer opened a lineage at the same time")
        directory = self.run_dir / "checkpoints"
        keep = work_to_keep(self.config, self.progress, reply.version, directory)
        done = adopt(self.ledger, reply.lineage, self.progress.trained, keep)
        adopted(directory)
        started = {"lineage": reply.lineage, "from_step": self.progress.step}
        log.info("lineage opened", extra={**started, "kept": done.kept, "restarted": done.restarted})
        return reply.lineage, reply.version, done.kept

    def _host(self) -> str:
        return interface_address(environment.coordinator().rsplit(":", 1)[0])

    def _first_canary(self) -> list[int]:
        """Before anything was sampled: fixed pseudo-random tokens."""
        vocabulary = vocabulary_size(Path(self.config.model.path))
        generator = torch.Generator().manual_seed(self.config.seed)
        length = min(
            _CANARY_TOKENS, self.config.data.max_prompt_length + self.config.data.max_response_length
        )
        return [int(t) for t in torch.randint(0, vocabulary, (length,), generator=generator)]

    # -- loop ------------------------------------------------------------------------------------

    def run(self) -> int:
        self.start()
        try:
            self.begin_sync(final=False)
            if not self.finish_sync():
                raise Stopped
            self._began = True
            self._stop_file.with_name(STARTED).touch()
            while (batch := self._next()) is not None:
                self.train(batch)
            if not self.progress.step:
                raise NothingTrained(self._why_nothing())
            self.finish()
        except Stopped:
            self.stop()
            return EX_STOPPED
        except Exception:  # rank 0 takes the store with it: the others hear why they end
            self.server.dismiss()
            raise
        return 0

    def _why_nothing(self) -> str:
        """All data are used up and no sample was trained: the run must not look completed."""
        s = self.ledger.run(ops.stats())
        return (
            f"the data ended before a single sample was trained: dead {s.dead_reasons}, dropped "
            f"{s.dropped_reasons}"
        )

    def _next(self) -> Batch | None:
        if self.ranks.largest(int(self._stopping())):  # any node's launcher may be told to stop
            raise Stopped
        return self.batches.next(self.window)

    def train(self, batch: Batch) -> None:
        """One local update: R optimizer steps over the claimed samples, then the acknowledgement."""
        bound = self.rule.check(self.window, (item.min_version for item in batch.items))
        self.report.begin_update(batch, self.window, bound)
        p = self.progress
        learned = self.learner.learn(batch.mini, p.step_of_version, p.optimizer_steps, self.report.phase)
        p.kl_coef = self.learner.adapted_kl_coef
        with self.report.phase("ack"):
            self._count_skipped(learned)
            self.batches.reject(batch, learned.rejected)
            if batch.items:
                self._acknowledge(batch, learned)
            # Also of an update whose samples all went back: they have used up their places in the window.
            self.updates_in_window += 1
            last = self.ranks.share(self._nothing_left() if self.ranks.is_first else None)
        if last or self.updates_in_window >= self.rule.present.sync_steps:
            with self.report.phase("param_sync"):
                if self.finish_sync(snapshot=self.window + 1):
                    self.begin_sync(final=last)
                    if self.config.waits_for_commit:
                        self.report.wait_for_generation()
                        self.finish_sync()
            if self.config.waits_for_commit and self.ranks.is_first:
                self.report.waited_for_generation()
        self.server.check()
        self.checkpoints.check()
        self.report.end_update(batch, p, learned, self.learner.policy.learning_rate)

    def _acknowledge(self, batch: Batch, learned: Learned) -> None:
        p = self.progress
        p.step += 1
        p.optimizer_steps += learned.optimizer_steps
        ids = [i.sample_id for i in batch.items]
        p.trained.update(dict.fromkeys(ids, p.step))
        if self.ranks.is_first:
            heard = False
            with self.ledger.unless_stopping():  # the checkpoint is what counts, and it is written next
                verdict = self.ledger.run(ops.train(p.lineage, p.step, ids))
                if verdict != "ok":
                    raise refused(f"the acknowledgement of step {p.step}", verdict, p.lineage)
                heard = True
            if self.trained_log is not None:
                self.trained_log.trained(p.lineage, p.step, ids, window=self.window, acknowledged=heard)
        self._keep_canary(batch)

    def _count_skipped(self, learned: Learned) -> None:
        """Raises NotFinite when updates in a row taught nothing: going on would only use up samples."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.learner.is_stuck(learned) else 0
        if self._skipped_in_a_row >= self.config.trainer.max_skipped_updates:
            raise NotFinite(
                f"{self._skipped_in_a_row} local updates in a row were not finite "
                "(trainer.max_skipped_updates): the policy or the critic is broken; lower lr or grad_clip "
                "of actor.optim or critic.optim, and start again from an older checkpoint"
            )

    def _nothing_left(self) -> bool:
        """Rank 0: no sample can come any more, so this was the last update."""
        with self.ledger.unless_stopping():
            s = self.ledger.run(ops.stats())
            return s.end_of_data and not any(
                s.counts[state] for state in ("ready", "in_flight", "parked", "queued", "training")
            )
        return False

    def _keep_canary(self, batch: Batch) -> None:
        """From now on the canary is a trajectory that was really sampled: rank 0's first."""
        ids: list[int] | None = None
        if self.ranks.is_first:
            samples = [s for mini in batch.mini for s in mini]
            if samples:
                t = samples[0].trajectories[0]
                ids = [*samples[0].prompt.token_ids.tolist(), *t.token_ids.tolist()][:_CANARY_TOKENS]
        self.canary_ids = self.ranks.share(ids) or self.canary_ids

    # -- sync ------------------------------------------------------------------------------------

    def begin_sync(self, final: bool) -> None:
        """Write the snapshot of the next version and ask for the round; training may go on meanwhile."""
        version = self.window + 1 if self.window >= 0 else self.progress.version + 1
        self._take_up_tuning(version)
        heartbeat.beat()
        scores = self.learner.score(self.canary_ids)
        if self.window >= 0:
            self.report.window_ends()
        self.server.write_snapshot(version)
        self.learner.begin_window()
        self.window = version
        self.updates_in_window = 0
        self.progress.step_of_version[str(version)] = self.progress.optimizer_steps
        self._pending = True
        freq = self.config.rollout.test_freq
        validate = freq > 0 and (final or version == 0 or version % freq == 0)
        if validate:
            self._validated = version
        wait_s, step_s = self.report.window_seconds()
        if self.sync is not None:
            self.sync.begin(
                pb.BeginSync(
                    lineage=self.progress.lineage,
                    optimizer_step=self.progress.optimizer_steps,
                    version=version,
                    manifest=pb.Manifest(
                        units=units_to_pb(self.snapshot.units),
                        bucket_bytes=self.config.sync.bucket_bytes,
                        bytes=self.snapshot.nbytes,
                        canary=pb.Canary(token_ids=self.canary_ids, log_probs=scores),
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
        """What the coordinator wants of S and eta by now holds for the window that `version` opens."""
        wanted = self.sync.tuning(self.rule.present) if self.sync is not None else None
        self.rule.take_up(version, *self.ranks.share(wanted))

    def finish_sync(self, snapshot: int = -1) -> bool:
        """Wait until the round that is under way, if any, has committed; then checkpoint if it is time.
        `snapshot`: the version that will be made of the present weights next.

        False when a node is told to stop meanwhile: nobody may be left to commit, and nobody needs the round.
        """
        if not self._pending:
            return True
        deadline = time.monotonic() + sync_limit_s(self.config)
        while (told := self.ranks.share(self._commit(deadline))) is None:
            if self.ranks.largest(int(self._stopping())):
                return False
        (self.progress.version,) = told
        self._pending = False
        if self.progress.step and self._is_time_to_save():
            self.save(snapshot=snapshot)
        return True

    def _commit(self, deadline: float) -> list[int] | None:
        """Rank 0: the version that was committed, if it comes within a turn. Raises SyncFailed."""
        if self.sync is None:
            return None
        self._check_ledger()
        heartbeat.beat()
        try:
            answer = self.sync.committed(_TURN_S)
        except SyncFailed:
            if not self._stopping():
                raise
            return None
        if answer is not None:
            self.report.committed(answer, self.snapshot.nbytes)
            return [answer.version]
        if time.monotonic() > deadline:
            limit, where = sync_limit_s(self.config), environment.coordinator()
            raise SyncFailed(f"the coordinator at {where} committed nothing in {limit:g} s")
        return None

    def _check_ledger(self) -> None:
        """Rank 0, wherever it may not have asked it for long. Raises LedgerWentBack."""
        if self._watch is not None:
            self._watch.check()
        self._note_ledger()

    def _note_ledger(self) -> None:
        try:
            self.record.keep(self.ledger.seen)
        except OSError as error:  # the queue service notes it, too
            log.warning("not noted how far the ledger is", extra={"error": str(error)})

    def _is_time_to_save(self) -> bool:
        t = self.config.trainer
        if t.save_freq and self.progress.version % t.save_freq == 0:
            return True
        if not t.save_interval_s:
            return False
        elapsed = time.monotonic() - self._saved_at
        return bool(self.ranks.share(elapsed >= t.save_interval_s if self.ranks.is_first else None))

    def save(self, wait: bool = False, snapshot: int = -1) -> None:
        """A checkpoint of what is true now; it is written while training goes on, unless `wait`."""
        self.progress.snapshot = snapshot
        with self.report.phase("save_checkpoint"):
            self.progress.wall_s = self.report.wall_s
            (self.checkpoints.save if wait else self.checkpoints.begin)(self.progress)
            self._saved_at = time.monotonic()

    # -- ends ------------------------------------------------------------------------------------

    def _stopping(self) -> bool:
        return self._stop_file.exists()

    def stop(self) -> None:
        """An orderly stop: all that was trained is in the checkpoint. It needs nobody but the other ranks."""
        log.info("stopping", extra={"step": self.progress.step})
        if self.sync is not None and self._pending and self._began:
            try:
                answer = self.sync.committed()
            except SyncFailed as error:
                answer = None
                log.warning("the last round failed", extra={"reason": str(error)})
            if answer is not None:
                self.report.committed(answer, self.snapshot.nbytes)
                self.progress.version = answer.version
        self._give_way()
        if self._began:
            self.save(wait=True)
        self._say_ended()
        self.close()

    def finish(self) -> None:
        """After the last update: its sync, the checkpoint, its validation, the exported model.

        Raises Stopped.
        """
        self._last_sync()
        self._give_way()
        freq = self.config.rollout.test_freq
        if self.updates_in_window or (freq and self._validated != self.window):
            # The end was not seen coming (the last samples died), or this start had nothing left to train.
            self.begin_sync(final=True)
            self._last_sync()
        self.save(wait=True)  # before the last questions to Redis, which may be told to stop by now
        if self.ranks.is_first:
            self._wait_for_validation()
        self.ranks.share(None)
        state = self.checkpoints.full_state()
        if self.ranks.is_first:
            export_model(self.config, state, self.run_dir / "final")
            self._say_ended()  # first: what the ledger calls completed has its end in the files
            with self.ledger.unless_stopping():
                verdict = self.ledger.run(ops.complete(self.progress.lineage))
                if verdict != "ok":
                    raise refused("that it is complete", verdict, self.progress.lineage)
        self.ranks.share(None)
        self.close()
        log.info("completed", extra={"step": self.progress.step, "version": self.progress.version})

    def _give_way(self) -> None:
        """All ranks. A trainer that another has followed leaves the files to that one. Raises Superseded."""
        followed = False
        if self.ranks.is_first:
            with self.ledger.unless_stopping():
                followed = self.ledger.run(ops.stats()).lineage != self.progress.lineage
        if self.ranks.share(followed):
            raise Superseded(f"another trainer has followed lineage {self.progress.lineage}")

    def _last_sync(self) -> None:
        if not self.finish_sync():
            raise Stopped

    def _wait_for_validation(self) -> None:
        deadline = time.monotonic() + self.config.val.max_delay_s
        with self.ledger.unless_stopping():
            while (status := self.ledger.run(ops.val_status())).open and not self._stopping():
                if time.monotonic() > deadline:
                    log.warning("validation unfinished", extra={"done": status.done, "total": status.total})
                    self.ledger.run(ops.val_close(status.version))
                    return
                heartbeat.sleep(0.05)

    def _say_ended(self) -> None:
        """In the files: all that was trained and committed is in them."""
        if self.trained_log is not None:
            self.report.flush_round()
            p = self.progress
            self.trained_log.ended(p.lineage, p.step, version=p.version)

    def close(self) -> None:
        if self.sync is not None:
            self.sync.close()
        self.server.close()
        self.report.close()
        if self._watch is not None:
            self._watch.close()
        if self.trained_log is not None:
            self.trained_log.close()


def sync_limit_s(config: RunConfig) -> float:
    """Longest a sync round may take, in seconds: validation, running work, every attempt."""
    c = config.sync
    drain = 0.0 if config.rule.crosses is None else config.rollout.sample_timeout_s
    attempts = (c.max_attempts + 2) * (c.rendezvous_timeout_s + c.transfer_timeout_s + 5.0)
    return config.val.max_delay_s + c.drain_stall_s + c.pause_timeout_s + drain + attempts
