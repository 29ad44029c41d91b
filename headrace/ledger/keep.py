"""The rule by which a new lineage keeps finished and parked work of an abandoned one.

Kept work must still be trained within the bound on the version gap. docs/staleness.md gives the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.staleness import StalenessRule, gap_bound

UNBOUNDED = -1


@dataclass(frozen=True)
class Keep:
    """The criteria of `finish_adopt`. Counts are samples."""

    parent: int
    """The committed version from which the checkpoint's weights were trained."""
    windows: int
    """Training windows between `parent` and the checkpoint; 0 when the weights are the same."""
    gap: int
    """Largest version gap, or UNBOUNDED."""
    crosses: int
    """K: how many versions the tokens of parked work may come from, or UNBOUNDED."""
    window: int
    """B: samples trained between two syncs."""
    limit: int
    """Most samples to keep; 0 keeps none."""
    scoring: str
    """What scores depend on (`headrace.config.identity`). Work scored otherwise is not kept."""
    snapshot: int = -1
    """The version that the trainer was about to publish with these very weights. If it has committed, it
    replaces `parent`."""

    def args(self) -> tuple[int | str, ...]:
        """The arguments of the script."""
        return (
            *(self.parent, self.windows, self.gap, self.crosses, self.window, self.limit, self.scoring),
            self.snapshot,
        )


def keep_under(rule: StalenessRule, parent: int, windows: int, scoring: str) -> Keep:
    """The criteria that keep everything that fits `rule` and the gate."""
    gap = gap_bound([(-1, rule)], 0)
    return Keep(
        parent,
        windows,
        UNBOUNDED if gap is None else gap,
        UNBOUNDED if rule.crosses is None else rule.crosses,
        rule.window,
        rule.max_required,
        scoring,
    )
