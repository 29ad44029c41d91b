"""What became of the faults, and of every sample, id by id."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.connections.redis_client import connect
from headrace.ledger.audit import read_op, states
from headrace.ledger.client import SyncLedger
from headrace.records import trained_log
from headrace.records.row_file import read_lines
from headrace.records.trained_log import TrainedPath
from tests.chaos.kinds import KINDS
from tests.chaos.world import NAME, World

ENDS = ("trained", "dead", "dropped")


@dataclass
class Outcome:
    kind: str
    what: str
    recovered_s: float | None = None
    """Of a fault that a run must not survive: the seconds until it was over, as it should be."""
    trouble: str = ""

    def __str__(self) -> str:
        after = "NOT recovered" if self.recovered_s is None else f"recovered in {self.recovered_s:.1f} s"
        return f"{self.what}: {after}" + (f": {self.trouble}" if self.trouble else "")


@dataclass
class Verdict:
    """Of one run, or of all."""

    outcomes: list[Outcome] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        return f"chaos: {len(self.outcomes)} faults, {len(self.lost)} lost, {len(self.twice)} trained twice"

    @property
    def good(self) -> bool:
        return not (self.lost or self.twice or self.troubles)

    def add(self, other: Verdict) -> None:
        self.outcomes += other.outcomes
        self.lost += other.lost
        self.twice += other.twice
        self.troubles += other.troubles


def judge(world: World) -> Verdict:
    """What became of every sample of a run."""
    with connect(world.valkey.url, timeout_s=60.0) as client:
        found = states(SyncLedger(client, NAME).run(read_op()))
    path = trained_log.follow(read_lines(world.layout.trained))
    counts: dict[str, int] = {}
    for sample_id in path.ids:
        counts[sample_id] = counts.get(sample_id, 0) + 1
    verdict = Verdict()
    verdict.twice = sorted(i for i, n in counts.items() if n > 1)
    completed = world.summary().get("status") == "completed"
    verdict.lost = sorted(
        i
        for i, state in found.items()
        if (completed and state not in ENDS) or (state == "trained" and i not in counts)
    )
    verdict.troubles = compare(path, found)[:10] + path.problems[:10]
    issued = int(world.summary().get("ledger", {}).get("issued_total", -1))
    if issued != len(found):
        verdict.troubles.append(f"{issued} samples were issued, the ledger has {len(found)}")
    return verdict


def table(outcomes: Sequence[Outcome], kinds: Iterable[str] = KINDS) -> str:
    lines = [f"{'fault':<28} {'times':>5} {'recovered':>9} {'median s':>9} {'longest s':>9}"]
    for kind in kinds:
        of_kind = [o for o in outcomes if o.kind == kind]
        if not of_kind:
            continue
        times = [o.recovered_s for o in of_kind if o.recovered_s is not None]
        shown = f"{statistics.median(times):>9.1f} {max(times):>9.1f}" if times else f"{'-':>9} {'-':>9}"
        lines.append(f"{kind:<28} {len(of_kind):>5} {len(times):>9} {shown}")
    return "\n".join(lines)


def compare(path: TrainedPath, states: dict[str, str]) -> list[str]:
    """What differs between the path and the ledger (`states`: state of every issued id) of an ended run."""
    seen = set(path.ids)
    out = []
    for sample_id in sorted(seen):
        state = states.get(sample_id)
        if state != "trained":
            out.append(f"{sample_id}: trained, the ledger says {state or 'it was never issued'}")
    for sample_id, state in sorted(states.items()):
        if state == "trained" and sample_id not in seen:
            out.append(f"{sample_id}: trained in the ledger, but in no step of the last lineage's path")
    return out
