"""The ledger in plain Python, with the operations and replies of the real one, for tests of its users.

It needs no server and no clock. `run` takes what `SyncLedger.run` takes, so it can stand in for a
`SyncLedger`. A test walks a sample through its states:

>>> from headrace.ledger import ops
>>> from headrace.ledger.in_memory import InMemoryLedger
>>> ledger = InMemoryLedger()
>>> ledger.run(ops.configure(4, claim_size=1, max_retries=1, max_crashes=1, total=1, fingerprint="")).status
'ok'
>>> term = ledger.run(ops.open_term()).term  # a coordinator starts
>>> lineage = ledger.run(ops.open_lineage(0)).lineage  # and a trainer, with nothing to adopt
>>> ledger.run(ops.finish_adopt(lineage)).status.value
'ok'
>>> ledger.run(ops.issue(0, [b"prompt"], end=True)).status
'issued'
>>> ledger.run(ops.hold(term, 1, lineage)).value
'ok'
>>> ledger.run(ops.commit(term, 1, lineage, 0, "digest", ["rollouter"], validate=False)).status.value
'ok'
>>> [taken] = ledger.run(ops.take("rollouter", 0, 1)).items
>>> ledger.run(ops.finish("rollouter", taken.sample_id, taken.attempt, b"sample", 0, 0, 7)).value
'ok'
>>> [claimed] = ledger.run(ops.claim(lineage, 0, 1)).items
>>> ledger.run(ops.payloads([claimed.sample_id]))
[Payload(sample=b'sample', prompt=b'prompt', owner='rollouter')]
>>> ledger.run(ops.train(lineage, 1, [claimed.sample_id])).value
'ok'
>>> ledger.run(ops.stats()).balanced, ledger.records[0].state.value
(True, 'trained')

It is the reference for the Lua scripts: the property tests compare it with the real server, reply by reply,
on random schedules. It lacks what only a server has: beats, marks, details of dead samples, and the audit.

This module holds lineages, rounds, membership and validation; `in_memory_samples` holds the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from headrace.config.staleness import syncs_between
from headrace.ledger import replies as r
from headrace.ledger.in_memory_samples import InMemorySamples, Record
from headrace.ledger.keep import UNBOUNDED, Keep
from headrace.ledger.ops import Op
from headrace.ledger.states import Event, State

T = TypeVar("T")


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


_SPREAD: dict[str, Callable[..., tuple[Any, ...]]] = {
    "issue": lambda cursor, end, request, *prompts: (cursor, prompts, bool(end), request),
    "expire": lambda owner, reason, seen, left: (owner, reason, None if seen == "" else seen, bool(left)),
    "train": lambda lineage, step, *ids: (lineage, step, ids),
    "drop": lambda lineage, reason, *ids: (lineage, ids, reason),
    "payloads": lambda *ids: (ids,),
    "adopt_trained": lambda lineage, *flat: (lineage, _pairs(flat)),
    "adopt_rest": lambda lineage, *ids: (lineage, ids),
    "finish_adopt": lambda lineage, *keep: (lineage, Keep(*keep) if keep else None),
    "commit": lambda term, round_, lineage, version, digest, validate, final, most, *members: (
        *(term, round_, lineage, version, digest, members, bool(validate), bool(final), most),
    ),
    "val_load": lambda *flat: (_pairs(flat),),
}
"""Converts a script's arguments into its method's, where the two differ."""


@dataclass
class InMemoryLedger(InMemorySamples):
    results: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def run(self, op: Op[T]) -> T:
        """Answer as the server would. Raises NotImplementedError for what only a server has."""
        method = getattr(self, op.script, None)
        if not callable(method):
            raise NotImplementedError(f"the in-memory ledger has no {op.script}")
        spread = _SPREAD.get(op.script)
        return cast(T, method(*(spread(*op.args) if spread else op.args)))

    def configure(
        self,
        max_required: int,
        claim_size: int,
        max_retries: int,
        max_crashes: int,
        total: int,
        fingerprint: str,
    ) -> r.ConfigureReply:
        created = self.fingerprint is None
        if self.fingerprint is not None and fingerprint != self.fingerprint:
            return r.ConfigureReply("mismatch", self.fingerprint, False)
        if self.version < 0:
            self.max_required = max_required
        self.fingerprint, self.claim_size = fingerprint, claim_size
        self.max_retries, self.max_crashes, self.total = max_retries, max_crashes, total
        return r.ConfigureReply("ok", fingerprint, created)

    # -- lineages --------------------------------------------------------------------------------

    def open_lineage(self, expected: int, request: str) -> r.OpenLineageReply:
        if request in self.stored and self.stored[request] == self.lineage:
            return r.OpenLineageReply(True, self.lineage, self.version)
        if expected != self.lineage:
            return r.OpenLineageReply(False, self.lineage, self.version)
        self.lineage += 1
        self.phase, self.held, self.final = "adopting", True, False
        self.ending = self.completed = False
        self.window, self.trimmed = self.version + 1, -1
        self.members.clear()
        self.windows.clear()
        self.stored[request] = self.lineage
        return r.OpenLineageReply(True, self.lineage, self.version)

    def _adopting(self, lineage: int) -> bool:
        if lineage == self.lineage and self.phase == "adopting":
            return True
        self._fenced("adopt")
        return False

    def adopt_trained(self, lineage: int, pairs: Sequence[tuple[str, int]]) -> r.AdoptReply:
        if not self._adopting(lineage):
            return r.AdoptReply(r.AdoptStatus.FENCED, "")
        for name, _ in pairs:
            if self.get(name) is None:
                return r.AdoptReply(r.AdoptStatus.UNKNOWN, name)
        for name, step in pairs:
            s = self.records[int(name)]
            s.step = step
            if s.state is not State.TRAINED:
                self._move(Event.ADOPT_TRAINED, s, State.TRAINED)
                s.owner, s.work, s.last = "", None, ()
        return r.AdoptReply(r.AdoptStatus.OK, "")

    def adopt_rest(self, lineage: int, ids: Sequence[str]) -> r.AdoptReply:
        if not self._adopting(lineage):
            return r.AdoptReply(r.AdoptStatus.FENCED, "")
        back = (State.TRAINED, State.IN_FLIGHT)
        for name in ids:
            s = self.get(name)
            if s is None:
                return r.AdoptReply(r.AdoptStatus.UNKNOWN, name)
            if s.state in back and s.prompt is None:
                return r.AdoptReply(r.AdoptStatus.TRIMMED, name)
        for name in ids:
            s = self.records[int(name)]
            if s.state in back:
                self._ready(Event.ADOPT_REST, s, "rollback" if s.state is State.TRAINED else "lineage")
        return r.AdoptReply(r.AdoptStatus.OK, "")

    def finish_adopt(self, lineage: int, keep: Keep | None = None) -> r.AdoptReply:
        if lineage != self.lineage:
            self._fenced("adopt")
            return r.AdoptReply(r.AdoptStatus.FENCED, "")
        if self.phase != "adopting":
            return r.AdoptReply(r.AdoptStatus.OK, "")
        if self.within(State.IN_FLIGHT):
            return r.AdoptReply(r.AdoptStatus.INCOMPLETE, "")
        if (
            keep is not None
            and keep.parent < keep.snapshot <= self.version
            and keep.snapshot not in self.forks
        ):
            keep = replace(keep, parent=keep.snapshot, windows=0)
        finished = sorted(self.within(State.TRAINING, State.QUEUED), key=lambda s: s.finished)
        kept: list[Record] = []
        if keep is not None and keep.scoring == self.scoring:
            for s in [*finished, *self.within(State.PARKED)]:
                if self._fits(keep, s, len(kept)):
                    kept.append(s)
        gone = [s for s in [*finished, *self.within(State.PARKED)] if s not in kept]
        for s in gone:
            if s.prompt is None:
                return r.AdoptReply(r.AdoptStatus.TRIMMED, s.id)
        for s in gone:
            self._ready(Event.FINISH_ADOPT, s, "rollback" if s.state is State.TRAINING else "lineage")
        for s in kept:
            self.kept[s.state] += 1
            if s.state is State.TRAINING:
                self._move(Event.FINISH_ADOPT, s, State.QUEUED)
                s.survived = True
        if keep is not None:
            self.forks[self.version + 1], self.scoring = (keep.parent, keep.windows), keep.scoring
        self.phase = "idle"
        return r.AdoptReply(r.AdoptStatus.OK, "")

    def _fits(self, keep: Keep, s: Record, place: int) -> bool:
        """Whether `s` will be trained within the bound, with `place` kept samples ahead of it."""
        if place >= keep.limit or (s.state is State.TRAINING and s.survived):
            return False
        if keep.gap == UNBOUNDED:
            return True
        first = self.version + 1
        forks = {**self.forks, first: (keep.parent, keep.windows)}
        age = first - s.min_version
        furthest = max(syncs_between(forks, v, first) for v in range(s.min_version, s.max_version + 1))
        if s.state is State.PARKED:
            return keep.gap > 0 and age < keep.crosses and furthest <= age
        return max(age, furthest) + place // keep.window <= keep.gap

    def trim(self, floor: int) -> int:
        if floor <= self.trimmed:
            return 0
        gone = [
            s for s in self.within(State.TRAINED) if self.trimmed < s.step <= floor and s.prompt is not None
        ]
        for s in gone:
            s.prompt = None
        self.trimmed = floor
        return len(gone)

    # -- coordinator -----------------------------------------------------------------------------

    def open_term(self) -> r.Term:
        self.term += 1
        return r.Term(self.term, self.version, self.round, self.phase, self.lineage, self.digest)

    def hold(self, term: int, round_: int, lineage: int) -> r.Verdict:
        again = round_ == self.round and self.phase == "syncing"
        if term != self.term or lineage != self.lineage or self.phase == "adopting":
            return self._fenced("hold")
        if round_ <= self.round and not again:
            return self._fenced("hold")
        self.phase, self.round, self.held = "syncing", round_, True
        return r.Verdict.OK

    def commit(
        self,
        term: int,
        round_: int,
        lineage: int,
        version: int,
        digest: str,
        members: Sequence[str],
        validate: bool = False,
        final: bool = False,
        max_required: int = 0,
    ) -> r.CommitReply:
        if (term, round_, lineage) != (self.term, self.round, self.lineage):
            self._fenced("commit")
            return r.CommitReply(r.CommitStatus.FENCED, 0)
        if (version, round_, "idle") == (self.version, self.commit_round, self.phase):
            return r.CommitReply(r.CommitStatus.OK, 0)
        if self.phase != "syncing" or version != self.version + 1:
            self._fenced("commit")
            return r.CommitReply(r.CommitStatus.FENCED, 0)
        open_ = sum(s.window < version for s in self.within(State.TRAINING))
        if open_:
            return r.CommitReply(r.CommitStatus.TRAINING, open_)
        self.windows = Counter({w: n for w, n in self.windows.items() if w >= version})
        self.version, self.digest, self.commit_round = version, digest, round_
        self.members = dict.fromkeys(members, version)
        self.held = self.val_open = False
        self.final = final
        self.max_required = max_required or self.max_required
        if validate:
            self.val_version, self.val_open = version, bool(self.val_rows)
            self.val_todo, self.val_taken, self.val_done = set(self.val_rows), {}, {}
            self.results[version] = {}
        self.phase, self.window = "idle", max(self.window, version)
        return r.CommitReply(r.CommitStatus.OK, 0)

    def complete(self, lineage: int) -> r.Verdict:
        if lineage != self.lineage:
            return self._fenced("complete")
        self.completed = True
        return r.Verdict.OK

    def admit(self, term: int, incarnation: str, version: int) -> r.Verdict:
        if term != self.term or self.phase != "idle" or self.held or version != self.version:
            return r.Verdict.REFUSED
        self.members[incarnation] = version
        return r.Verdict.OK

    # -- validation ------------------------------------------------------------------------------

    def val_load(self, rows: Sequence[tuple[int, bytes]]) -> int:
        self.val_rows.update(rows)
        return len(self.val_rows)

    def val_take(self, owner: str, version: int, count: int, request: str) -> list[tuple[int, bytes]]:
        if not self.val_open or not version == self.val_version == self.version or owner not in self.members:
            return []
        if request in self.stored:
            rows: list[int] = self.stored[request]  # type: ignore[assignment]
            return [(row, self.val_rows[row]) for row in rows if self.val_taken.get(row) == owner]
        if self.held:
            return []
        chosen = sorted(self.val_todo)[:count]
        if chosen:
            self.stored[request] = chosen
        self.val_todo -= set(chosen)
        self.val_taken.update(dict.fromkeys(chosen, owner))
        return [(row, self.val_rows[row]) for row in chosen]

    def val_finish(self, owner: str, version: int, row: int, result: bytes) -> r.Verdict:
        if version != self.val_version:
            return r.Verdict.REFUSED
        if self.val_done.get(row) == owner:
            return r.Verdict.OK
        if not self.val_open or self.val_taken.get(row) != owner or owner not in self.members:
            return r.Verdict.REFUSED
        del self.val_taken[row]
        self.val_done[row] = owner
        self.results[version][row] = result
        self.val_open = len(self.val_done) < len(self.val_rows)
        return r.Verdict.OK

    def val_status(self) -> r.ValStatus:
        return r.ValStatus(self.val_version, len(self.val_rows), len(self.val_done), self.val_open)

    def val_close(self, version: int) -> r.Verdict:
        if version != self.val_version:
            return r.Verdict.REFUSED
        self.val_open = False
        return r.Verdict.OK

    def val_results(self, version: int) -> list[bytes]:
        return [result for _, result in sorted(self.results.get(version, {}).items())]

    def val_forget(self, version: int) -> r.Verdict:
        if version == self.val_version:
            return r.Verdict.REFUSED
        self.results.pop(version, None)
        return r.Verdict.OK

    def stats(self) -> r.Stats:
        return r.Stats(
            counts={state.value: len(self.within(state)) for state in State},
            issued_total=len(self.records),
            version=self.version,
            digest=self.digest,
            lineage=self.lineage,
            term=self.term,
            round=self.round,
            phase=self.phase,
            held=self.held,
            window=self.window,
            trained_since_sync=self.trained_since_sync,
            max_required=self.max_required,
            claim_size=self.claim_size,
            end_of_data=self.end_of_data,
            final=self.final,
            completed=self.completed,
            cursor=len(self.records),
            total=self.total,
            fenced=sum(self.fenced_by.values()),
            fenced_by=dict(self.fenced_by),
            requeued=dict(self.requeued),
            kept=dict(self.kept),
            finished=self.finishes,
            restarted=self.restarted,
            died=dict(self.died),
            left=dict(self.left),
            dead_reasons=dict(Counter(s.reason for s in self.within(State.DEAD))),
            dropped_reasons=dict(Counter(s.reason for s in self.within(State.DROPPED))),
            members=dict(self.members),
            in_flight_by_owner=dict(Counter(s.owner for s in self.within(State.IN_FLIGHT))),
            oldest_queued_age_s=0.0,
            val=self.val_status(),
        )
