"""S and eta of the present window, and those before: how old may what is trained be."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import replace

from headrace.config.staleness import StalenessRule, gap_bound

log = logging.getLogger("headrace.trainer")


class WindowRule:
    """A change is taken up with a snapshot, so a window has one rule from beginning to end."""

    def __init__(self, rule: StalenessRule) -> None:
        self.present = rule
        self._history = [(-1, rule)]
        self._kept = 0

    def resumed(self, first: int, kept: int) -> None:
        """A lineage begins with version `first` and `kept` samples of the one before, which fit the rule."""
        self._history, self._kept = [(first, self.present)], kept

    def take_up(self, version: int, sync_steps: int, threshold: float) -> None:
        """What holds for the window that `version` opens."""
        rule = replace(self.present, sync_steps=sync_steps, threshold=threshold)
        if rule != self.present:
            log.info("tuned", extra={"version": version, "sync_steps": sync_steps, "threshold": threshold})
            self.present = rule
            self._history.append((version, rule))

    @property
    def nothing_waits(self) -> bool:
        """No sample is left over from one window to the next."""
        return self.present.max_required == self.present.window

    def bound(self, oldest: int) -> int | None:
        """Largest version gap of a sample whose oldest token is of version `oldest`; None when unbounded."""
        return gap_bound(self._history, oldest, self._kept)

    def check(self, window: int, oldest: Iterable[int]) -> float:
        """The largest bound that held, infinity for none. `oldest`: version of the oldest token, of each
        sample that the window trains. The gate bounds the gap; a sample beyond the bound would mean that the
        gate is broken. Raises RuntimeError."""
        bounds = [0.0]
        for version in oldest:
            gap, bound = window - version, self.bound(version)
            if gap < 0 or (bound is not None and gap > bound):
                raise RuntimeError(f"version gap {gap} in window {window}, the bound is {bound}")
            bounds.append(math.inf if bound is None else bound)
        return max(bounds)
