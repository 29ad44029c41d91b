"""The staleness gate and the mode, as pure functions.

With S local updates between two syncs, R mini-batches of M samples per update, threshold eta, and
B = S*R*M samples per window:

    max_required = B + floor(eta * B)
    a new start is allowed  <=>  in_flight + parked + queued + training + trained_since_sync < max_required

The ledger evaluates the right-hand side inside `take` from its own state. There is no other counter.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from typing import Any


class Mode(enum.StrEnum):
    COLOCATED_SYNC = "colocated_sync"
    ONE_STEP_OFF = "one_step_off"
    ON_POLICY_PIPELINE = "on_policy_pipeline"
    STREAM_OFF_POLICY = "stream_off_policy"
    ASYNC_STALE = "async_stale_samples"
    ASYNC_PARTIAL = "async_partial_rollout"


MODE_PARAMETERS: dict[str, dict[str, Any]] = {
    "one_step_off": {
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": 1.0,
        "partial_rollout": False,
    },
    "colocated_sync": {
        "trigger_parameter_sync_step": 1,
        "staleness_threshold": 0.0,
        "partial_rollout": False,
    },
}
"""The parameters that `mode` sets. One batch ahead: with eta = 1 and work that finishes before each sync, the
batch being generated while another trains is the next one."""


@dataclass(frozen=True)
class StalenessRule:
    """The parameters of the gate. Counts are samples."""

    sync_steps: int
    require_batches: int
    mini_batch: int
    threshold: float
    partial_rollout: bool
    max_version_gap: int | None = None
    """K: work whose oldest version is K or more behind the next one finishes first; None: no work does."""

    @property
    def window(self) -> int:
        """B: samples trained between two syncs."""
        return self.sync_steps * self.require_batches * self.mini_batch

    @property
    def max_required(self) -> int:
        """Largest number of samples started and not yet cleared by a sync.

        Decimal(str(eta)) keeps 0.1 * 10 at 1; binary floating point would make it 0.999...
        """
        extra = (Decimal(str(self.threshold)) * self.window).to_integral_value(ROUND_FLOOR)
        return self.window + int(extra)

    @property
    def crosses(self) -> int | None:
        """K: how many versions the tokens of one trajectory may come from; None if unbounded.

        Work that finishes before every sync has tokens of a single version.
        """
        return self.max_version_gap if self.threshold > 0 and self.partial_rollout else 1

    def finish_through(self, next_version: int) -> int | None:
        """Work whose oldest version is at most this must finish before `next_version` commits.

        Newer work is interrupted. None: everything is interrupted.
        """
        return None if self.crosses is None else next_version - self.crosses

    @property
    def largest_gap(self) -> int | None:
        """Largest version gap of a trained sample that the rule allows; None when unbounded.

        K - 1 + ceil(eta): K - 1 syncs while it runs, ceil(eta) while it waits. docs/staleness.md.
        """
        if self.max_required == self.window:
            return 0
        if self.crosses is None:
            return None
        return self.crosses - 1 + int(Decimal(str(self.threshold)).to_integral_value("ROUND_CEILING"))

    @property
    def off_policy_steps(self) -> int:
        """Optimizer steps that precede the last one within a window: S * R - 1."""
        return self.sync_steps * self.require_batches - 1


History = Sequence[tuple[int, StalenessRule]]
"""(version, rule) in order. Each rule is in force from the commit of its version; rules differ in S and eta.
A lineage's history begins with the first version that it commits."""


def waiting_bound(history: History, version: int, kept: int = 0) -> int:
    """Most samples outstanding at the commit of `version`. `kept`: how many the lineage began with.

    Under a single rule: floor(eta * B). After a change, samples admitted before may exceed the new limit.
    Then nothing is started, and each window trains B of them.
    """
    bound = max(kept, history[0][1].max_required - history[0][1].window)
    for number, (at, rule) in enumerate(history):
        end = history[number + 1][0] if number + 1 < len(history) else version
        windows = min(version, end) - at
        if windows > 0:
            bound = max(bound - windows * rule.window, rule.max_required - rule.window)
    return bound


def gap_bound(history: History, oldest: int, kept: int = 0) -> int | None:
    """Largest version gap of a sample whose oldest token is of version `oldest`; None when unbounded.

    Under a single rule: at most its `largest_gap`. In general K - 1 + ceil(W / B): W is the most that waits
    at any of the K commits before which it can finish, and B is the smallest window that may train it. A
    sample older than the lineage was kept under the first rule. After a change it may also have waited behind
    all `kept` ones. See docs/staleness.md.
    """
    begun = history[0][0]
    if oldest < begun and len(history) == 1:
        return gap_bound([(oldest, history[0][1])], oldest)
    if oldest >= begun and waiting_bound(history, oldest + 1, kept) == 0:
        return 0  # nothing is outstanding at the next commit, so it was trained in its own window
    crosses = history[-1][1].crosses
    if crosses is None:
        return None
    waiting = max(waiting_bound(history, max(oldest, begun) + 1 + k, kept) for k in range(crosses))
    started = max((at for at, _ in history if at <= oldest + 1), default=begun)
    # Rules that ended before the sample could finish cannot train it.
    smallest = min(rule.window for at, rule in history if at >= started)
    bound = crosses - 1 + -(-waiting // smallest)
    if oldest < begun:
        bound = max(bound, begun - oldest - 1 + -(-kept // smallest), history[0][1].largest_gap or 0)
    return bound


Forks = Mapping[int, tuple[int, int]]
"""First version of a lineage -> (the committed version before its checkpoint, windows in between)."""


def syncs_between(forks: Forks, one: int, other: int) -> int:
    """Count the training windows between two policies, via their latest common ancestor.

    Every version descends from the one before it, except those that began a lineage.
    """
    windows = 0
    while one != other:
        # The larger version cannot be an ancestor of the smaller one: step back from it.
        one, other = min(one, other), max(one, other)
        other, more = forks.get(other, (other - 1, 1))
        windows += more
    return windows


def derive_mode(rule: StalenessRule) -> Mode:
    """Return the mode that the parameters express."""
    if rule.threshold == 0:
        return Mode.ON_POLICY_PIPELINE if rule.sync_steps == 1 else Mode.STREAM_OFF_POLICY
    return Mode.ASYNC_PARTIAL if rule.partial_rollout else Mode.ASYNC_STALE
