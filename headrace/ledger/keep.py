"""Which finished and parked work of an abandoned lineage a new one keeps: what is left of it must be trained
within the bound on the version gap. docs/staleness.md has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config.staleness import StalenessRule, gap_bound

UNBOUNDED = -1


@dataclass(frozen=True)
class Keep:
    """What `finish_adopt` judges by. Counts are samples."""

    parent: int
    """The committed version that the weights of the checkpoint come after."""
    windows: int
    """Of training between the two: 0 when they are the same weights."""
    gap: int
    """Largest version gap, or UNBOUNDED."""
    crosses: int
    """K: how many versions the tokens of parked work may come from, or UNBOUNDED."""
    window: int
    """B: samples trained between two syncs."""
    limit: int
    """Most that is kept; 0: nothing."""
    scoring: str
    """What scores depend on (`run_identity.scoring`). Work scored otherwise is not kept."""
    snapshot: int = -1
    """The version that the trainer was about to make of these very weights; it counts if it has committed."""

    def args(self) -> tuple[int | str, ...]:
        """As the script takes them."""
        return (
            *(self.parent, self.windows, self.gap, self.crosses, self.window, self.limit, self.scoring),
            self.snapshot,
        )


def keep_under(rule: StalenessRule, parent: int, windows: int, scoring: str) -> Keep:
    """All that fits `rule`, and the gate."""
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
