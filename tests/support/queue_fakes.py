"""Stand-ins for the ledger in the queue service's unit tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.data.feed_order import feed_order
from headrace.data.rows import DataRow
from headrace.ledger.ops import Op
from headrace.ledger.replies import Stats, ValStatus
from headrace.ledger.states import State
from headrace_queue.feeder import PromptSource


class NoTelemetry:
    """A Redis client for which nobody has told anything."""

    async def hkeys(self, key: str) -> list[bytes]:
        return []


class FakeLedger:
    """Answers each script with a value, by calling it, or by raising it."""

    run_name = "run"
    redis = NoTelemetry()

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    async def run(self, op: Op[Any]) -> Any:
        self.calls.append((op.script, op.args))
        answer = self.answers[op.script]
        if isinstance(answer, Exception):
            raise answer
        return answer(*op.args) if callable(answer) else answer


def make_stats(**changes: Any) -> Stats:
    values: dict[str, Any] = {
        "counts": {state.value: place for place, state in enumerate(State)},
        "issued_total": 28,
        "version": 3,
        "digest": "d",
        "lineage": 1,
        "term": 1,
        "round": 4,
        "phase": "idle",
        "held": False,
        "window": 3,
        "trained_since_sync": 2,
        "max_required": 16,
        "claim_size": 4,
        "end_of_data": False,
        "final": False,
        "completed": False,
        "cursor": 28,
        "total": 100,
        "fenced": 1,
        "fenced_by": {"finish": 1},
        "requeued": {"expired": 5},
        "kept": {"queued": 2},
        "finished": 0,
        "restarted": 0,
        "died": {"poison": 2},
        "left": {},
        "dead_reasons": {"poison": 1},
        "dropped_reasons": {},
        "members": {"one": 3},
        "in_flight_by_owner": {"one": 1},
        "oldest_queued_age_s": 1.5,
        "val": ValStatus(-1, 0, 0, False),
    }
    return Stats(**{**values, **changes})


def source(n_rows: int = 3) -> PromptSource:
    rows = [DataRow(i, "f", i + 1, "p", "s", str(i), None, {"i": i}) for i in range(n_rows)]
    tokens = [np.asarray([i, i + 1], np.int32) for i in range(n_rows)]
    return PromptSource(rows, tokens, feed_order([n_rows], None, seed=1, shuffle=True))
