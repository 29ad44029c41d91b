"""The samples of the in-memory ledger, as feeder, rollouters and trainer move them.

The in-memory ledger keeps one record per sample and derives every place and count from the records. The
server keeps places and derives the counts from them. The property tests compare the two. `log` records the
(event, from, to) of every transition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.ledger import replies as r
from headrace.ledger.keys import sample_id
from headrace.ledger.states import OUTSTANDING, Event, State

SUSPECT = 2
"""With this many dead owners, a sample is handed out only to an owner that holds no other such sample."""


@dataclass
class Record:
    issue: int
    prompt: bytes | None
    state: State = State.READY
    owner: str = ""
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    work: bytes | None = None
    payload: bytes = b""
    min_version: int = 0
    max_version: int = 0
    tokens: int = 0
    finished: int = 0
    """Sequence number of its finish."""
    survived: bool = False
    """A trainer ended while it was claimed."""
    window: int = 0
    step: int = 0
    lineage: int = 0
    reason: str = ""
    last: tuple[object, ...] = ()
    """How the last ownership, or the trainer's claim, ended. Identifies a repeated request."""

    @property
    def id(self) -> str:
        return sample_id(self.issue)


@dataclass
class InMemorySamples:
    max_required: int = 0
    claim_size: int = 0
    max_retries: int = 0
    max_crashes: int = 0
    total: int = 0
    fingerprint: str | None = None
    version: int = -1
    digest: str = ""
    term: int = 0
    round: int = 0
    commit_round: int = -1
    phase: str = "idle"
    held: bool = True
    lineage: int = 0
    window: int = 0
    end_of_data: bool = False
    final: bool = False
    completed: bool = False
    ending: bool = False
    """A claim got a reply after which the trainer may stop."""
    trimmed: int = -1
    records: list[Record] = field(default_factory=list)
    members: dict[str, int] = field(default_factory=dict)
    windows: Counter[int] = field(default_factory=Counter)
    fenced_by: Counter[str] = field(default_factory=Counter)
    requeued: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    forks: dict[int, tuple[int, int]] = field(default_factory=dict)
    scoring: str = ""
    died: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    restarted: int = 0
    finishes: int = 0
    stored: dict[str, object] = field(default_factory=dict)
    val_version: int = -1
    val_open: bool = False
    val_rows: dict[int, bytes] = field(default_factory=dict)
    val_todo: set[int] = field(default_factory=set)
    val_taken: dict[int, str] = field(default_factory=dict)
    val_done: dict[int, str] = field(default_factory=dict)
    log: list[tuple[str, str | None, str]] = field(default_factory=list)

    # -- reading ---------------------------------------------------------------------------------

    def get(self, sample: str) -> Record | None:
        known = len(sample) == 10 and sample.isdigit() and int(sample) < len(self.records)
        return self.records[int(sample)] if known else None

    def within(self, *states: State) -> list[Record]:
        return [s for s in self.records if s.state in states]

    @property
    def trained_since_sync(self) -> int:
        return sum(self.windows.values())

    def dry(self) -> bool:
        return self.end_of_data and not self.within(State.READY, State.IN_FLIGHT, State.PARKED)

    # -- moving ----------------------------------------------------------------------------------

    def _move(self, event: Event, s: Record, target: State) -> None:
        self.log.append((event, s.state, target))
        s.state = target

    def _ready(self, event: Event, s: Record, reason: str, last: tuple[object, ...] = ()) -> None:
        self._move(event, s, State.READY)
        s.owner, s.work, s.reason, s.last, s.survived = "", None, reason, last, False
        self.requeued[reason] += 1

    def _end(self, event: Event, s: Record, target: State, reason: str, last: tuple[object, ...]) -> None:
        self._move(event, s, target)
        s.work, s.reason, s.last = None, reason, last
        (self.died if target is State.DEAD else self.left)[reason] += 1

    def _fenced(self, op: str) -> r.Verdict:
        self.fenced_by[op] += 1
        return r.Verdict.FENCED

    # -- feeder and rollouter --------------------------------------------------------------------

    def issue(self, cursor: int, prompts: Sequence[bytes], end: bool, request: str) -> r.IssueReply:
        if request in self.stored:
            return self.stored[request]  # type: ignore[return-value]
        if cursor != len(self.records) or self.end_of_data:
            return r.IssueReply("conflict", len(self.records))
        for prompt in prompts:
            self.records.append(Record(len(self.records), prompt))
            self.log.append((Event.ISSUE, None, State.READY))
        self.end_of_data = end
        reply = self.stored[request] = r.IssueReply("issued", len(self.records))
        return reply

    def take(self, owner: str, version: int, count: int, request: str, oldest: int = -1) -> r.TakeReply:
        if request in self.stored:
            return self._taken(owner, self.stored[request])  # type: ignore[arg-type]
        if self.held:
            return r.TakeReply(r.TakeStatus.HELD, [])
        if version != self.version:
            return r.TakeReply(r.TakeStatus.STALE_VERSION, [])
        if owner not in self.members:
            return r.TakeReply(r.TakeStatus.NOT_MEMBER, [])
        chosen = self.within(State.PARKED)[:count]
        room = self.max_required - len(self.within(*OUTSTANDING)) - self.trained_since_sync
        # Retries come before new prompts; within each, in order of issue.
        waiting = sorted(self.within(State.READY), key=lambda s: (s.reason == "", s.issue))
        chosen += self._one_suspect(owner, waiting)[: max(0, min(count - len(chosen), room))]
        if not chosen:
            status = r.TakeStatus.EMPTY
            if self.dry():
                status = r.TakeStatus.DONE
            elif waiting and count > 0:
                status = r.TakeStatus.GATE_CLOSED
            return r.TakeReply(status, [])
        for s in chosen:
            if s.state is State.PARKED and s.min_version < oldest:
                s.work = None
                self.restarted += 1
            self._move(Event.TAKE, s, State.IN_FLIGHT)
            s.owner, s.attempt = owner, s.attempt + 1
        self.stored[request] = [(s, s.attempt) for s in chosen]
        return self._taken(owner, [(s, s.attempt) for s in chosen])

    def _one_suspect(self, owner: str, waiting: list[Record]) -> list[Record]:
        """Leave out samples that may kill their owner, except the first one if the owner holds none yet."""
        suspects = [s for s in waiting if s.crashes >= SUSPECT]
        has = any(s.owner == owner and s.crashes >= SUSPECT for s in self.within(State.IN_FLIGHT))
        left_out = suspects if has else suspects[1:]
        return [s for s in waiting if s not in left_out]

    def _taken(self, owner: str, pairs: Iterable[tuple[Record, int]]) -> r.TakeReply:
        items = [
            r.Taken(s.id, s.attempt, s.prompt or b"", s.work, s.failures)
            for s, attempt in pairs
            if self._holds(s, owner, attempt)
        ]
        return r.TakeReply(r.TakeStatus.OK, items)

    @staticmethod
    def _holds(s: Record, owner: str, attempt: int) -> bool:
        return s.state is State.IN_FLIGHT and s.owner == owner and s.attempt == attempt

    def finish(
        self, owner: str, sample: str, attempt: int, payload: bytes, low: int, high: int, tokens: int
    ) -> r.Verdict:
        s = self.get(sample)
        if s and s.last == ("finish", owner, attempt):
            return r.Verdict.DUPLICATE
        if not s or not self._holds(s, owner, attempt) or owner not in self.members or high > self.version:
            return self._fenced("finish")
        self._move(Event.FINISH, s, State.QUEUED)
        self.finishes += 1
        s.last, s.finished, s.work = ("finish", owner, attempt), self.finishes, None
        s.payload, s.min_version, s.max_version, s.tokens = payload, low, high, tokens
        return r.Verdict.OK

    def park(self, owner: str, sample: str, attempt: int, work: bytes, low: int) -> r.Verdict:
        s = self.get(sample)
        if s and s.last == ("park", owner, attempt):
            return r.Verdict.DUPLICATE
        if not s or not self._holds(s, owner, attempt) or low > self.version:
            return self._fenced("park")
        self._move(Event.PARK, s, State.PARKED)
        s.owner, s.work, s.last = "", work, ("park", owner, attempt)
        s.min_version, s.max_version = low, self.version
        return r.Verdict.OK

    def hand_back(self, owner: str, sample: str, attempt: int) -> r.Verdict:
        s = self.get(sample)
        if s and s.last == ("hand_back", owner, attempt):
            return r.Verdict.DUPLICATE
        if not s or not self._holds(s, owner, attempt):
            return self._fenced("hand_back")
        self._ready(Event.HAND_BACK, s, "handback", ("hand_back", owner, attempt))
        return r.Verdict.OK

    def fail(self, owner: str, sample: str, attempt: int, reason: str, detail: str) -> r.FailStatus:
        s = self.get(sample)
        if s and (before := self._outcome_before(s, owner, attempt)):
            return before
        if not s or not self._holds(s, owner, attempt):
            self._fenced("fail")
            return r.FailStatus.FENCED
        return self._failed(Event.FAIL, s, owner, attempt, "failed", reason)

    @staticmethod
    def _outcome_before(s: Record, by: str, attempt: int) -> r.FailStatus | None:
        outcomes = (r.FailStatus.RETRIED, r.FailStatus.DEAD)
        return next((o for o in outcomes if s.last == (o, by, attempt)), None)

    def _failed(
        self, event: Event, s: Record, by: str, attempt: int, requeued: str, reason: str
    ) -> r.FailStatus:
        s.failures += 1
        if s.failures > self.max_retries:
            self._end(event, s, State.DEAD, reason, (r.FailStatus.DEAD, by, attempt))
            return r.FailStatus.DEAD
        self._ready(event, s, requeued, (r.FailStatus.RETRIED, by, attempt))
        return r.FailStatus.RETRIED

    def expire(self, owner: str, reason: str, seen: int | None = None, left: bool = False) -> r.ExpireReply:
        """The model has no beats: `seen` always counts as the last one."""
        self.members.pop(owner, None)
        for row in [row for row, name in self.val_taken.items() if name == owner]:
            del self.val_taken[row]
            self.val_todo.add(row)
        reply = r.ExpireReply([], [])
        for s in self.within(State.IN_FLIGHT):
            if s.owner != owner:
                continue
            s.crashes += not left
            if left:
                self._ready(Event.EXPIRE, s, "handback")
                reply.requeued.append(s.id)
            elif s.crashes > self.max_crashes:
                self._end(Event.EXPIRE, s, State.DEAD, "poison", ())
                reply.dead.append(s.id)
            else:
                self._ready(Event.EXPIRE, s, "expired")
                reply.requeued.append(s.id)
        return reply

    # -- trainer ---------------------------------------------------------------------------------

    def claim(self, lineage: int, window: int, count: int, request: str) -> r.ClaimReply:
        if lineage != self.lineage:
            self._fenced("claim")
            return r.ClaimReply(r.ClaimStatus.FENCED, [])
        if request in self.stored:
            return self._claimed(*self.stored[request])  # type: ignore[misc]
        if window < self.window or window not in (self.version, self.version + 1):
            self._fenced("claim")
            return r.ClaimReply(r.ClaimStatus.FENCED, [])
        if self.phase == "adopting":
            return r.ClaimReply(r.ClaimStatus.WAIT, [])
        queue = sorted(self.within(State.QUEUED), key=lambda s: s.finished)
        status = r.ClaimStatus.BATCH
        if len(queue) < count:
            if not self.dry():
                return r.ClaimReply(r.ClaimStatus.WAIT, [])
            self.ending = True
            if not queue:
                return r.ClaimReply(r.ClaimStatus.DONE, [])
            status = r.ClaimStatus.FINAL_SHORT
        self.window = window
        for s in queue[:count]:
            self._move(Event.CLAIM, s, State.TRAINING)
            s.window, s.lineage = window, lineage
        self.stored[request] = (status, [(s, s.attempt) for s in queue[:count]])
        return self._claimed(status, [(s, s.attempt) for s in queue[:count]])

    @staticmethod
    def _claimed(status: r.ClaimStatus, pairs: Iterable[tuple[Record, int]]) -> r.ClaimReply:
        items = [
            r.Claimed(s.id, s.attempt, s.min_version, s.max_version, s.tokens)
            for s, attempt in pairs
            if s.state is State.TRAINING and s.attempt == attempt
        ]
        return r.ClaimReply(status, items)

    def payloads(self, ids: Sequence[str]) -> list[r.Payload | None]:
        return [
            r.Payload(s.payload, s.prompt or b"", s.owner)
            if s is not None and s.state in (State.QUEUED, State.TRAINING)
            else None
            for s in map(self.get, ids)
        ]

    def train(self, lineage: int, step: int, ids: Sequence[str]) -> r.Verdict:
        if lineage != self.lineage:
            return self._fenced("train")
        found = [self.get(i) for i in ids]
        if any(
            s is None or s.lineage != lineage or s.state not in (State.TRAINING, State.TRAINED) for s in found
        ):
            return r.Verdict.UNKNOWN
        for s in found:
            if s and s.state is State.TRAINING:
                self._move(Event.TRAIN, s, State.TRAINED)
                s.step = step
                self.windows[s.window] += 1
        return r.Verdict.OK

    def drop(self, lineage: int, ids: Sequence[str], reason: str) -> r.Verdict:
        if lineage != self.lineage:
            return self._fenced(Event.DROP)
        last = (Event.DROP, lineage, reason)
        todo = []
        for s in map(self.get, ids):
            if s and s.state is State.DROPPED and s.last == last:
                continue
            mine = s is not None and (
                s.state is State.QUEUED or (s.state is State.TRAINING and s.lineage == lineage)
            )
            if s is None or not mine:
                return r.Verdict.UNKNOWN
            if s not in todo:
                todo.append(s)
        for s in todo:
            self._end(Event.DROP, s, State.DROPPED, reason, last)
        return r.Verdict.OK

    def reject(
        self, lineage: int, sample: str, attempt: int, reason: str, detail: str, replaced: bool = False
    ) -> r.FailStatus:
        s = self.get(sample) if lineage == self.lineage else None
        by = f"trainer:{lineage}"
        if s and (before := self._outcome_before(s, by, attempt)):
            return before
        if not s or s.state is not State.TRAINING or (s.lineage, s.attempt) != (lineage, attempt):
            self._fenced("reject")
            return r.FailStatus.FENCED
        self.windows[s.window] += not replaced
        return self._failed(Event.REJECT, s, by, attempt, "rejected", reason)

    def requeue_dead(self, sample: str, request: str, ended: bool = False) -> r.Verdict:
        if request in self.stored:
            return r.Verdict.OK
        s = self.get(sample)
        if s is None or s.state is not State.DEAD:
            return r.Verdict.UNKNOWN
        if self.ending and not ended:
            return r.Verdict.REFUSED
        self._ready(Event.REQUEUE_DEAD, s, "operator")
        s.failures = s.crashes = 0
        self.stored[request] = sample
        return r.Verdict.OK
