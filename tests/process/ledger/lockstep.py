"""The real server and the in-memory ledger in lock-step: every call goes to both, and both must agree."""

from __future__ import annotations

from typing import Any

import redis

from headrace.ledger import SyncLedger, keys, ops, scripts
from headrace.ledger.audit import compare, states
from headrace.ledger.in_memory import InMemoryLedger
from headrace.ledger.keep import UNBOUNDED, Keep
from headrace.ledger.states import ALLOWED, State

KEEP_ALL = Keep(parent=-1, windows=0, gap=UNBOUNDED, crosses=UNBOUNDED, window=1, limit=10**6, scoring="same")


class LockStep:
    """Answers what the server answers, after comparing it with the model's answer.

    `seen` has the (event, from, to) of every change that the server's records showed.
    """

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.ledger = SyncLedger(client, run, retry_s=5.0)
        self.model = InMemoryLedger()
        self.meta = keys.meta(run)
        for script in ("stats", "audit"):
            client.script_load(scripts.source(script))
        self.seen: set[tuple[str, str | None, str]] = set()
        self.states: dict[str, str] = {}
        self.history: list[tuple[str, tuple[Any, ...]]] = []
        self._requests = 0
        self._credit = 0

    def request(self) -> str:
        self._requests += 1
        return f"q{self._requests}"

    def __call__(self, name: str, *args: Any) -> Any:
        self.history.append((name, args))
        op = getattr(ops, name)(*args)
        answer, expected = self.ledger.run(op), self.model.run(op)
        assert answer == expected, f"{name}{args}: server {answer}, model {expected}"
        self.check(name)
        return answer

    def check(self, name: str) -> None:
        """After every call: same stats and records, balance, audit, the gate's bound, only listed changes."""
        with self.ledger.redis.pipeline(transaction=False) as pipe:
            for script in ("stats", "audit"):
                pipe.evalsha(scripts.sha(script), 1, self.meta)
            raw, reading = pipe.execute()
        stats = ops.stats().parse(raw)
        assert stats == self.model.stats(), name
        assert stats.balanced
        report = compare(reading)
        assert report.balanced, report.problems
        before, self.states = self.states, states(reading)
        assert self.states == {s.id: s.state for s in self.model.records}, name
        changes = {(name, before.get(i), state) for i, state in self.states.items() if before.get(i) != state}
        assert changes <= ALLOWED, f"not in the table: {changes - ALLOWED}"
        self.seen |= changes
        # The bound. It is <= max_required while the limit stands; a lowered limit is not exceeded further.
        credit = stats.outstanding + stats.trained_since_sync
        assert credit <= max(stats.max_required, self._credit), (
            f"{name}: credit {credit} > {stats.max_required}"
        )
        if credit > self._credit:
            assert name == "take"
        self._credit = credit

    # -- shorthands that many schedules need -----------------------------------------------------

    def start(self, max_required: int, claim_size: int, max_retries: int = 1, max_crashes: int = 1) -> None:
        """Configure, open a term and the first lineage."""
        self("configure", max_required, claim_size, max_retries, max_crashes, 1000, "print")
        self("open_term")
        self("open_lineage", 0, self.request())
        self("finish_adopt", 1, KEEP_ALL)

    def sync(self, members: list[str], validate: bool = False) -> Any:
        """A whole round onto the next version."""
        m = self.model
        self("hold", m.term, m.round + 1, m.lineage)
        return self(
            "commit", m.term, m.round, m.lineage, m.version + 1, f"d{m.version + 1}", members, validate, False
        )

    def issue(self, count: int, end: bool = False) -> None:
        cursor = len(self.model.records)
        prompts = [f"prompt {n}".encode() for n in range(cursor, cursor + count)]
        self("issue", cursor, prompts, end, self.request())

    def take(self, owner: str, count: int, oldest: int = -1) -> Any:
        return self("take", owner, self.model.version, count, self.request(), oldest)

    def finish(self, owner: str, sample: str, attempt: int) -> Any:
        v = self.model.version
        return self("finish", owner, sample, attempt, f"{sample}/{attempt}".encode() + b"\x00\xff", v, v, 7)

    def claim(self, window: int, count: int) -> Any:
        return self("claim", self.model.lineage, window, count, self.request())


ID = "0000000000"


def bring_to(pair: LockStep, state: State) -> None:
    """A run whose sample 0 is in `state` (owner a, attempt 1 where it has one)."""
    pair.start(max_required=4, claim_size=1)
    pair.issue(1)
    pair.sync(["a", "b"])
    if state is State.READY:
        return
    pair.take("a", 1)
    if state is State.PARKED:
        pair("park", "a", ID, 1, b"work", 0)
    if state is State.DEAD:
        pair("fail", "a", ID, 1, "reward", "")
        pair.take("a", 1)
        pair("fail", "a", ID, 2, "reward", "no score")
    if state in (State.QUEUED, State.TRAINING, State.TRAINED, State.DROPPED):
        pair.finish("a", ID, 1)
    if state in (State.TRAINING, State.TRAINED):
        pair.claim(0, 1)
    if state is State.TRAINED:
        pair("train", 1, 1, [ID])
    if state is State.DROPPED:
        pair("drop", 1, [ID], "filter")
