"""From the ledger to samples: claiming, reading payloads, dropping and rejecting."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass

from headrace.config.run import RunConfig
from headrace.ledger import ops
from headrace.ledger.client import LedgerUnavailable, SyncLedger
from headrace.ledger.replies import Claimed, ClaimStatus, FailStatus, Payload
from headrace.wire.payloads import Sample, WireError
from headrace.wire.sample_checks import SampleReader, Window
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.window_rule import WindowRule
from headrace_trainer.model.plan import assign, mini_batches, order

log = logging.getLogger("headrace.trainer.batch")

_POLL_S = 0.01
_MEMBERS_EVERY_S = 10.0


class Stopped(Exception):
    """An orderly stop was requested during a wait."""


class ClaimFailed(RuntimeError):
    """No samples came in time, or the ledger refuses this trainer's request about them."""


class TrainerSuperseded(ClaimFailed):
    """Another trainer has taken over."""


class RefillExhausted(ClaimFailed):
    """Dynamic sampling dropped more groups than `max_num_gen_batches` allows."""


def refused(what: str, verdict: str, lineage: int) -> ClaimFailed:
    """The error for a request of this trainer that the ledger answered with `verdict`."""
    if verdict == "fenced":
        return TrainerSuperseded(
            f"another trainer has taken over: lineage {lineage} is no longer the newest, and the ledger "
            f"refused {what}"
        )
    return ClaimFailed(f"the ledger refused {what}: {verdict}")


@dataclass
class Batch:
    """One rank's part of R*M claimed samples."""

    items: list[Claimed]
    """All samples of the batch, in order of training."""
    mini: list[list[Sample]]
    """Per mini-batch the samples of this rank."""

    def remove(self, ids: Collection[str]) -> None:
        """Leave out samples that were not trained."""
        self.items = [i for i in self.items if i.sample_id not in ids]
        self.mini = [[s for s in mini if s.prompt.sample_id not in ids] for mini in self.mini]


class Batches:
    """Claims batches. Rank 0 plans ids only; every rank reads the payloads of its own samples."""

    def __init__(
        self,
        config: RunConfig,
        ledger: SyncLedger,
        ranks: Ranks,
        lineage: int,
        stopping: Callable[[], bool],
        reader: SampleReader,
        rule: WindowRule,
    ) -> None:
        self._config = config
        self._reader = reader
        self._rule = rule
        self._ledger = ledger
        self._ranks = ranks
        self._lineage = lineage
        self._stopping = stopping
        self._alone = False
        """No rollouter takes part, and that has been said."""

    def next(self, window: int) -> Batch | None:
        """The next R*M samples, or the last ones, or None at the end of data. All ranks together.

        Raises Stopped or ClaimFailed, the same on every rank.
        """
        want = self._config.samples_per_update
        claimed: list[Claimed] = []
        decoded: dict[str, Sample] = {}
        filtered = 0
        while True:
            more = self._claim(window, want - len(claimed))
            claimed += more
            if self._config.data.drop_last and len(claimed) < want:  # the end of the data
                self._drop([c.sample_id for c in claimed], "drop_last")
                return None
            if not claimed:
                return None
            # If no sample waits from one window to the next, runs are repeatable: sort the batch by id.
            items = order(claimed, self._rule.nothing_waits)
            cut = mini_batches(items, self._config.actor.ppo_mini_batch_size)
            shares = [assign(mini, self._ranks.world_size)[self._ranks.rank] for mini in cut]
            mine = [i for share in shares for i in share]
            bad = self._read(mine, decoded, window)
            flat = [] if bad else self._drop_flat_groups([decoded[i.sample_id] for i in mine])
            filtered += len(flat)
            if not bad and not flat:
                mini = [[decoded[i.sample_id] for i in share] for share in shares]
                return Batch(items, mini)
            self._replace(items, bad)
            claimed = [c for c in claimed if c.sample_id not in bad and c.sample_id not in flat]
            self._check_refills(filtered, want)

    def _drop_flat_groups(self, mine: Sequence[Sample]) -> list[str]:
        """Dynamic sampling: drop groups without spread in the ledger. Returns their ids, over all ranks.

        A refill needs nothing more: a dropped group gives its place at the gate back.
        """
        if not self._config.algorithm.filter_groups.enable:
            return []
        own = [s.prompt.sample_id for s in mine if len({t.reward for t in s.trajectories}) == 1]
        flat = [i for part in self._ranks.gather_all(own) for i in part]
        self._drop(flat, "zero_spread")
        return flat

    def _drop(self, ids: Sequence[str], reason: str) -> None:
        if ids and self._ranks.is_first:
            with self._ledger.unless_stopping():
                verdict = self._ledger.run(ops.drop(self._lineage, ids, reason))
                if verdict != "ok":
                    raise refused(f"to drop {len(ids)} samples ({reason})", verdict, self._lineage)

    def _check_refills(self, filtered: int, want: int) -> None:
        limit = self._config.algorithm.filter_groups.max_num_gen_batches
        if filtered > limit * want:
            raise RefillExhausted(
                f"{filtered} groups without spread were dropped for one update of {want} samples "
                f"(algorithm.filter_groups.max_num_gen_batches = {limit}): the task is too easy or too hard "
                "for this model, or the reward is constant"
            )

    def _claim(self, window: int, count: int) -> list[Claimed]:
        """Rank 0 claims and shares the result with all ranks. [] at the end of data."""
        deadline = time.monotonic() + self._config.trainer.claim_timeout_s
        while True:
            found = self._claim_on_first(window, count, deadline) if self._ranks.is_first else None
            told = self._ranks.share(found)
            if told["status"] != "wait":
                break
            # Rank 0 sees only its own node's stop request, so a stop on another node would not end the wait.
            if self._ranks.largest(int(self._stopping())):
                raise Stopped
            self._say_alone(bool(told["nobody"]))
            if told["nobody"]:  # not an error: somebody may scale up
                deadline = time.monotonic() + self._config.trainer.claim_timeout_s
        status = str(told["status"])
        if status == "stopped":
            raise Stopped
        if status == "failed":
            raise ClaimFailed(told["why"])
        if status == "superseded":
            raise refused("the claim", "fenced", self._lineage)
        self._say_alone(False)
        return [Claimed(*row) for row in told["items"]]

    def _say_alone(self, alone: bool) -> None:
        """Log each change once: this wait may last for days."""
        if alone != self._alone and self._ranks.is_first:
            log.info("no rollouter takes part; waiting" if alone else "a rollouter takes part again")
        self._alone = alone

    def _claim_on_first(self, window: int, count: int, deadline: float) -> dict[str, object]:
        """Return `wait` now and then: the other ranks wait in a collective, which has its own timeout."""
        try:
            return self._claimed(window, count, deadline)
        except LedgerUnavailable:
            if not self._stopping():
                raise
            return {"status": "stopped"}

    def _claimed(self, window: int, count: int, deadline: float) -> dict[str, object]:
        look = time.monotonic() + _MEMBERS_EVERY_S
        while True:
            reply = self._ledger.run(ops.claim(self._lineage, window, count))
            if reply.status is ClaimStatus.FENCED:
                if self._ledger.run(ops.stats()).lineage != self._lineage:
                    return {"status": "superseded"}
                return {"status": "failed", "why": f"the ledger has no samples for window {window}"}
            if reply.status is not ClaimStatus.WAIT:
                return {"status": str(reply.status), "items": [astuple(item) for item in reply.items]}
            if self._stopping():
                return {"status": "stopped"}
            if time.monotonic() > look:
                return {"status": "wait", "nobody": not self._ledger.run(ops.stats()).members}
            if time.monotonic() > deadline:
                s = self._ledger.run(ops.stats())
                return {
                    "status": "failed",
                    "why": f"no {count} samples came within trainer.claim_timeout_s "
                    f"({self._config.trainer.claim_timeout_s:g} s): counts {s.counts}, "
                    f"members {sorted(s.members)}",
                }
            heartbeat.sleep(_POLL_S)

    def _read(self, items: Sequence[Claimed], decoded: dict[str, Sample], window: int) -> dict[str, str]:
        """Fetch and decode this rank's samples. Returns id -> reason of every rank's malformed ones.

        Raises Stopped on every rank if one of them is stopping and Redis went away first.
        """
        bad: dict[str, str] = {}
        missing = [i for i in items if i.sample_id not in decoded]
        payloads: list[Payload | None] | None = None
        with self._ledger.unless_stopping():
            payloads = self._ledger.run(ops.payloads([i.sample_id for i in missing]))
        if any(self._ranks.gather_all(payloads is None)) or payloads is None:
            raise Stopped  # the next start's lineage returns the claimed samples
        for item, payload in zip(missing, payloads, strict=True):
            try:
                decoded[item.sample_id] = self._sample(item, payload, window)
            except WireError as error:
                bad[item.sample_id] = str(error)
        return {k: v for part in self._ranks.gather_all(bad) for k, v in part.items()}

    def _sample(self, item: Claimed, payload: Payload | None, window: int) -> Sample:
        if payload is None:
            raise WireError("payload is missing")
        return self._reader.sample(payload, item, Window(window, self._rule.bound))

    def reject(self, batch: Batch, rejected: Mapping[str, str]) -> None:
        """Take samples that could not be trained out of a claimed batch.

        `rejected`: id -> reason, the same on all ranks. The samples start again from their prompts; after too
        many attempts the ledger buries them.
        """
        if not rejected:
            return
        if self._ranks.is_first:
            with self._ledger.unless_stopping():
                self._take_back(batch, rejected)
        batch.remove(rejected)

    def _take_back(self, batch: Batch, rejected: Mapping[str, str]) -> None:
        for item in batch.items:
            if (detail := rejected.get(item.sample_id)) is None:
                continue
            answer = self._ledger.run(
                ops.reject(self._lineage, item.sample_id, item.attempt, "non_finite", detail)
            )
            if answer is FailStatus.FENCED:
                raise ClaimFailed(f"the ledger refused to take back sample {item.sample_id}")
            log.error("sample rejected", extra={"sample": item.sample_id, "answer": str(answer)})

    def _replace(self, items: Sequence[Claimed], bad: Mapping[str, str]) -> None:
        """Send malformed samples back to their prompts; after too many attempts the ledger buries them. The
        next claim brings replacements, or reports that this lineage is over."""
        if self._ranks.is_first:
            for item in items:
                if (reason := bad.get(item.sample_id)) is None:
                    continue
                with self._ledger.unless_stopping():
                    answer = self._ledger.run(
                        ops.reject(
                            self._lineage, item.sample_id, item.attempt, "malformed", reason, replaced=True
                        )
                    )
                    told = {"sample": item.sample_id, "reason": reason, "answer": str(answer)}
                    log.error("malformed sample", extra=told)
        self._ranks.share(None)  # nobody claims a replacement before they are returned
