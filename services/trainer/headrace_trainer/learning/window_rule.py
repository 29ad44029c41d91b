"""S and eta of the present window and of those before: how old trained samples may be."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace

from headrace.config.staleness import StalenessRule, gap_bound

log = logging.getLogger("headrace.trainer")


class WindowRule:
    """The staleness rule per window. It changes only with a snapshot, so a window has one rule throughout."""

    def __init__(self, rule: StalenessRule) -> None:
        self.present = rule
        self._history = [(-1, rule)]
        self._kept = 0

    def resumed(self, first: int, kept: int) -> None:
        """Begin a lineage at version `first`, with `kept` samples of the previous one, which fit the rule."""
        self._history, self._kept = [(first, self.present)], kept

    def take_up(self, version: int, sync_steps: int, threshold: float) -> None:
        """Set the rule for the window that `version` opens."""
        rule = replace(self.present, sync_steps=sync_steps, threshold=threshold)
        if rule != self.present:
            log.info("tuned", extra={"version": version, "sync_steps": sync_steps, "threshold": threshold})
            self.present = rule
            self._history.append((version, rule))

    @property
    def nothing_waits(self) -> bool:
        """Whether no sample is left over from one window to the next."""
        return self.present.max_required == self.present.window

    def bound(self, oldest: int) -> int | None:
        """Largest version gap of a sample whose oldest token is of version `oldest`; None when unbounded."""
        return gap_bound(self._history, oldest, self._kept)

    def check(self, window: int, oldest: Iterable[int]) -> float:
        """The largest bound that applied; infinity for none. `oldest`: version of the oldest token of each
        sample that the window trains. Raises RuntimeError for a sample beyond its bound: the gate enforces
        the bound, so the gate would be broken."""
        bounds = [0.0]
        for version in oldest:
            gap, bound = window - version, self.bound(version)
            if gap < 0 or (bound is not None and gap > bound):
                raise RuntimeError(f"version gap {gap} in window {window}, the bound is {bound}")
            bounds.append(math.inf if bound is None else bound)
        return max(bounds)
