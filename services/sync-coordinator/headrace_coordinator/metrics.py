"""Updates the coordinator's metrics."""

from __future__ import annotations

import math

from headrace.config.run import RunConfig
from headrace.metrics import coordinator as table
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator.connections import Connections

table.SERVICE.show()


class Canary:
    """The largest difference that a member has reported for the newest version."""

    def __init__(self) -> None:
        self._version = -1
        self._largest = 0.0

    def reported(self, version: int, difference: float) -> None:
        """Take a member's report. NaN, which compares with nothing, counts as infinite."""
        shown = math.inf if math.isnan(difference) else difference
        self._largest = max(shown, self._largest) if version == self._version else shown
        self._version = version
        table.SYNC_LOGPROB_DIFF.set(self._largest)


CANARY = Canary()


def follow(config: RunConfig, connections: Connections) -> None:
    """Report the state of `connections` at each scrape."""
    table.CANARY_TOLERANCE.set(config.canary_limit)
    table.CONNECTED.set_function(lambda: len(connections.members))
    table.TAKING_PART.set_function(lambda: len(connections.taking_part))
    table.TRAINER.set_function(lambda: connections.trainer is not None)


def observe_round(c: pb.Committed, nbytes: int) -> None:
    table.POLICY_VERSION.set(c.version)
    for phase, seconds in zip(table.PHASES, (c.pause_s, c.transfer_s, c.commit_s, c.total_s), strict=True):
        table.SYNC_PHASE.labels(phase=phase).observe(seconds)
    table.SYNC_FAILURES.labels(reason="attempt").inc(max(0, c.attempts - 1))
    table.SYNC_BYTES.inc(nbytes)
    table.SYNC_GROUP_SIZE.set(c.members)
