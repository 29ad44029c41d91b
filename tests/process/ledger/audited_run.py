"""A small run without engines: the real ledger, and the files by those who write them in a trainer.

Everything that a process can be killed behind ends in `SmallRun.moment`, also every answer of the ledger.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis
import yaml

from headrace.ledger import keys, ops
from headrace.ledger.client import SyncLedger, adopt
from headrace.ledger.keep import UNBOUNDED, Keep
from headrace.ledger.marks import Marks
from headrace.ledger.ops import Op
from headrace.ledger.record import LedgerRecord
from headrace.ledger.replies import ClaimStatus
from headrace.records.checkpoints import complete_checkpoints, read_manifest
from headrace.records.layout import RunLayout
from headrace.records.trained_log import TrainedLog
from headrace.v1 import sync_pb2 as pb
from headrace_trainer.checkpoints.checkpoint import Checkpoints
from headrace_trainer.checkpoints.progress import TrainingProgress, progress_of
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.records.run_log import RunLog
from tests.fast.config.test_config import GOOD
from tests.support.learners import config, training

NAME = "audited"
LEDGER_ID = "of-the-audited-run"
SAMPLES = 26
BATCH = 2
STEPS = 2
"""Updates of a window."""

MOMENTS = (
    *(
        "open_lineage",
        "adopt_trained",
        "adopt_rest",
        "finish_adopt",
        "began",
        "hold",
        "commit",
        "heard",
        "claim",
    ),
    *("take", "finish", "park", "fail", "drop", "train", "row", "saved", "flushed", "ended", "complete"),
)
"""Where a start may be killed."""


class Killed(Exception):
    """The trainer is gone, at this very moment."""


class WatchedLedger(SyncLedger):
    """Tells of every answer."""

    told: Callable[[str], None] = staticmethod(lambda _: None)

    def run(self, op: Op[Any]) -> Any:
        answer = super().run(op)
        self.told(op.script)
        return answer


class SmallRun:
    def __init__(self, root: Path, client: redis.Redis, ranks: Ranks, rng: random.Random) -> None:
        self.layout = RunLayout(root)
        root.mkdir()
        self.layout.checkpoints.mkdir()
        self.layout.config.write_text(yaml.safe_dump({**GOOD, "name": NAME}))
        self.ledger = WatchedLedger(client, NAME, seen=Marks(ledger=LEDGER_ID))
        self.ledger.told = self.moment
        LedgerRecord(self.layout.root).keep(Marks(ledger=LEDGER_ID))
        self.checkpoints = Checkpoints(
            self.layout.checkpoints, config(trainer={"max_ckpt_to_keep": 2}), {"policy": training(0)}, ranks
        )
        self.rng = rng
        self.watch: Callable[[str], None] = lambda _: None
        """Called at every moment."""
        self.kill_at: str | None = None
        self.kill_in = 1
        """The how many-th moment of that name."""
        self.trained_log: TrainedLog | None = None
        self.run_log: RunLog | None = None
        self.begin()

    def moment(self, name: str) -> None:
        self.watch(name)
        if name == self.kill_at:
            self.kill_in -= 1
            if self.kill_in <= 0:
                self.kill_at = None
                raise Killed(name)

    # -- the others ------------------------------------------------------------------------------

    def begin(self) -> None:
        self.ledger.run(ops.configure(1000, BATCH, 0, 1, SAMPLES, "print"))
        self.term = self.ledger.run(ops.open_term()).term
        self.round = 0
        self.ledger.run(ops.issue(0, [b"prompt"] * SAMPLES, True))

    def commit(self, version: int, lineage: int) -> None:
        self.round += 1
        self.ledger.run(ops.hold(self.term, self.round, lineage))
        self.ledger.run(ops.commit(self.term, self.round, lineage, version, "d", ["a"], False))

    def generate(self, count: int) -> None:
        """The rollouter finishes some samples, parks one, fails one."""
        version = self.ledger.run(ops.stats()).version
        for item in self.ledger.run(ops.take("a", version, count)).items:
            luck = self.rng.random()
            if luck < 0.08:
                self.ledger.run(ops.fail("a", item.sample_id, item.attempt, "reward_error", "E"))
            elif luck < 0.2:
                self.ledger.run(ops.park("a", item.sample_id, item.attempt, b"work", version))
            elif luck < 0.25:
                self.ledger.run(ops.hand_back("a", item.sample_id, item.attempt))
            else:
                finish = ops.finish("a", item.sample_id, item.attempt, b"payload", version, version, 7)
                self.ledger.run(finish)

    # -- the trainer -----------------------------------------------------------------------------

    def train(self, end: str, after: int) -> None:
        """One start of the trainer. `end`: `finish`, or `stop` or `stop first` (the server goes before it)
        after so many updates. Raises Killed where it was to be."""
        self.ledger.run(ops.expire("a", "gone"))
        there = complete_checkpoints(self.layout.checkpoints)
        p = progress_of(read_manifest(there[-1])) if there else TrainingProgress(run_id="r")
        reply = self.ledger.run(ops.open_lineage(self.ledger.run(ops.stats()).lineage))
        keep = Keep(-1, 0, UNBOUNDED, UNBOUNDED, STEPS * BATCH, 1000, "same")
        adopt(self.ledger, reply.lineage, p.trained, keep if self.rng.random() < 0.7 else None)
        p.lineage, p.version = reply.lineage, reply.version
        self.trained_log, self.run_log = TrainedLog(self.layout.root), RunLog(self.layout.root)
        self.trained_log.began(p.lineage, p.step, version=p.version, run_id="r")
        self.moment("began")
        window, updates, asked = p.version + 1, 0, p.version + 1
        self.hear(p, asked)
        for number in range(after if end != "finish" else 10**6):
            batch = self.claim(p.lineage, window)
            if batch is None:
                break
            if self.rng.random() < 0.1:
                self.ledger.run(ops.drop(p.lineage, [batch.pop()], "zero_spread"))
            if batch:
                p.step += 1
                p.trained.update(dict.fromkeys(batch, p.step))
                heard = not (end == "stop first" and number == after - 1)
                if heard:
                    assert self.ledger.run(ops.train(p.lineage, p.step, batch)) == "ok"
                self.trained_log.trained(p.lineage, p.step, batch, window=window, acknowledged=heard)
                self.moment("row")
            updates += 1
            if updates == STEPS and not (end == "stop first" and number == after - 1):
                if asked > p.version:
                    self.hear(p, asked)
                    if p.step and self.rng.random() < 0.6:
                        self.checkpoints.save(p)
                        self.moment("saved")
                window, updates, asked = window + 1, 0, window + 1
            elif asked > p.version and self.rng.random() < 0.5:
                self.hear(p, asked)  # of a round that went on meanwhile
        if end == "finish" and asked > p.version:
            self.hear(p, asked)
        self.checkpoints.save(p)
        self.moment("saved")
        self.run_log.flush_round()
        self.moment("flushed")
        self.trained_log.ended(p.lineage, p.step, version=p.version)
        self.moment("ended")
        if end == "finish":
            self.ledger.run(ops.complete(p.lineage))
        self.close()

    def hear(self, p: TrainingProgress, version: int) -> None:
        self.commit(version, p.lineage)
        assert self.run_log is not None
        self.run_log.committed(pb.Committed(version=version, round=self.round, members=1), 10, 1.0)
        p.version = version
        self.moment("heard")

    def claim(self, lineage: int, window: int) -> list[str] | None:
        while True:
            reply = self.ledger.run(ops.claim(lineage, window, BATCH))
            if reply.status is ClaimStatus.BATCH or reply.items:
                return [c.sample_id for c in reply.items]
            if reply.status is not ClaimStatus.WAIT:
                return None
            self.generate(3)

    def close(self) -> None:
        assert self.trained_log is not None
        assert self.run_log is not None
        self.trained_log.close()
        self.run_log.close()
        self.trained_log = self.run_log = None

    def killed(self, where: str, cut: bool) -> None:
        """What the kernel leaves: files as they are, the last row perhaps in part. The open round is lost."""
        if self.run_log is not None and self.trained_log is not None:
            self.trained_log.close()
            self.run_log._open_round = None
            self.run_log.close()
        if cut and where in ("row", "began"):
            data = self.layout.trained.read_bytes()
            row = len(data) - data[:-1].rfind(b"\n") - 1
            self.layout.trained.write_bytes(data[: -self.rng.randint(1, row - 1)])


def story(run: SmallRun, rng: random.Random, starts: int) -> list[str]:
    """Some starts that are killed or stopped, and one that comes to the end of the data."""
    ends = []
    for _ in range(starts):
        run.kill_at, run.kill_in = rng.choice([None, *MOMENTS]), rng.randint(1, 4)
        try:
            run.train(rng.choice(["stop", "stop first"]), rng.randint(1, 4))
            ends.append("stopped")
        except Killed as moment:
            run.killed(str(moment), cut=rng.random() < 0.5)
            ends.append(f"killed behind {moment}")
        run.kill_at = None
        run.watch("the end of a start")
    run.train("finish", 0)
    return ends


class Picture:
    """Ledger and files at one moment, to be brought back after each damage."""

    def __init__(self, run: SmallRun, folder: Path) -> None:
        self.run, self.folder = run, folder
        shutil.copytree(run.layout.root, folder)
        self.ledger = dumped(run.ledger.redis)

    def bring_back(self) -> None:
        root = self.run.layout.root
        shutil.rmtree(root)
        shutil.copytree(self.folder, root)
        restore(self.run.ledger.redis, self.ledger)


def dumped(client: redis.Redis) -> dict[bytes, bytes]:
    names = [key for key in client.scan_iter(f"{keys.prefix(NAME)}*", count=1000) if b":reply:" not in key]
    with client.pipeline(transaction=False) as pipe:
        for key in names:
            pipe.dump(key)
        return dict(zip(names, pipe.execute(), strict=True))


def restore(client: redis.Redis, pictured: Mapping[bytes, bytes]) -> None:
    client.flushall()
    with client.pipeline(transaction=False) as pipe:
        for key, value in pictured.items():
            pipe.restore(key, 0, value)
        pipe.execute()
