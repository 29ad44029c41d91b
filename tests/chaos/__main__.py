"""A real run under random faults, then the audit: was a sample lost, or trained twice?

Every fault has to be recovered from: all services up, every rollouter taking part, one more update trained,
the ledger balanced. At the end the run has to complete, and every sample that was ever issued has to be
trained exactly once on the path of the lineages, or dead or dropped with a reason. The same seed gives the
same faults in the same order; when they strike depends on the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import redis

from headrace import trained_log
from headrace.ledger.audit import read_op, states
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.redis_connect import connect
from headrace.runner.layout import read_rows
from tests.chaos.faults import FAULTS, LIMIT_S, plan
from tests.chaos.world import NAME, ROLLOUTERS, Stuck, World

SAMPLES_PER_FAULT = 240
START_LIMIT_S = 300.0
END_LIMIT_S = 1200.0
ENDS = ("trained", "dead", "dropped")


@dataclass
class Outcome:
    kind: str
    what: str
    recovered_s: float | None = None
    trouble: str = ""

    def __str__(self) -> str:
        after = "NOT recovered" if self.recovered_s is None else f"recovered in {self.recovered_s:.1f} s"
        return f"{self.what}: {after}" + (f": {self.trouble}" if self.trouble else "")


@dataclass
class Verdict:
    faults: int
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        return f"chaos: {self.faults} faults, {len(self.lost)} lost, {len(self.twice)} trained twice"


def strike(world: World, kind: str, rng: random.Random) -> Outcome:
    """One fault, and the wait until nothing shows of it any more."""
    outcome = Outcome(kind, kind)
    began, done = time.monotonic(), world.steps
    try:
        outcome.what = FAULTS[kind](world, rng)
        done = world.steps
        world.wait("all services and rollouters", world.is_well, LIMIT_S)
        world.wait("an update", lambda: world.steps > done, LIMIT_S)
        world.wait("all services and rollouters after it", world.is_well, LIMIT_S)
        outcome.recovered_s = time.monotonic() - began
        report = world.audit()
        if not report.balanced:
            outcome.trouble = "; ".join(report.problems[:3])
        if world.rollouters != ROLLOUTERS and not world.ended:
            world.scale(ROLLOUTERS)
            world.wait(f"{ROLLOUTERS} rollouters again", world.is_well, LIMIT_S)
    except Stuck as error:
        outcome.trouble = str(error)
    except (IndexError, KeyError, OSError, LedgerError, redis.RedisError) as error:
        outcome.trouble = f"not as a run should be before a fault: {error!r}"
    if world.ended and world.process.returncode != 0:
        outcome.trouble = outcome.trouble or f"the run ended with {world.process.returncode}"
    return outcome


def judge(world: World, outcomes: list[Outcome]) -> Verdict:
    """Id by id: what became of every sample."""
    with connect(world.valkey.url, timeout_s=60.0) as client:
        found = states(SyncLedger(client, NAME).run(read_op()))
    path = trained_log.read_path(read_rows(world.layout.trained))
    counts: dict[str, int] = {}
    for sample_id in path.ids:
        counts[sample_id] = counts.get(sample_id, 0) + 1
    verdict = Verdict(len(outcomes))
    verdict.twice = sorted(i for i, n in counts.items() if n > 1)
    completed = world.summary().get("status") == "completed"
    verdict.lost = sorted(
        i
        for i, state in found.items()
        if (completed and state not in ENDS) or (state == "trained" and i not in counts)
    )
    verdict.troubles = [f"{o.kind}: {o.trouble}" for o in outcomes if o.trouble]
    verdict.troubles += trained_log.compare(path, found)[:10] + path.problems[:10]
    issued = int(world.summary().get("ledger", {}).get("issued_total", -1))
    if issued != len(found):
        verdict.troubles.append(f"{issued} samples were issued, the ledger has {len(found)}")
    return verdict


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'fault':<20} {'times':>5} {'recovered':>9} {'median s':>9} {'longest s':>9}"]
    for kind in FAULTS:
        of_kind = [o for o in outcomes if o.kind == kind]
        if not of_kind:
            continue
        times = [o.recovered_s for o in of_kind if o.recovered_s is not None]
        shown = f"{statistics.median(times):>9.1f} {max(times):>9.1f}" if times else f"{'-':>9} {'-':>9}"
        lines.append(f"{kind:<20} {len(of_kind):>5} {len(times):>9} {shown}")
    return "\n".join(lines)


def run(
    directory: Path, kinds: list[str], seed: int, samples_per_fault: int, overrides: list[str]
) -> Verdict:
    rng = random.Random(seed)
    samples = -(-max(1, len(kinds)) * samples_per_fault // 8) * 8
    world = World(directory, samples, seed, overrides)
    outcomes: list[Outcome] = []
    try:
        world.wait("the first update", lambda: world.steps >= 1 and world.is_well(), START_LIMIT_S)
        for number, kind in enumerate(kinds, start=1):
            time.sleep(rng.uniform(0.0, 2.0))  # a fault may strike at any moment of a round
            outcomes.append(strike(world, kind, rng))
            last = outcomes[-1]
            print(f"{number}/{len(kinds)} {last}", flush=True)
            if world.ended or last.recovered_s is None:
                break
        world.wait("the end of the run", lambda: False, END_LIMIT_S)
        code = world.process.wait(30)
        verdict = judge(world, outcomes)
        if code != 0:
            verdict.troubles.append(f"the run ended with {code}:\n{world.said()}")
        audited = world.command("audit", str(world.layout.root))
        print(audited.stdout, end="")
        if audited.returncode:
            verdict.troubles.append(
                f"headrace audit ended with {audited.returncode}: {audited.stderr[-500:]}"
            )
    except Stuck as error:
        verdict = judge(world, outcomes)
        verdict.troubles.append(f"{error}:\n{world.said()}")
    finally:
        world.close()
    if len(outcomes) < len(kinds):
        verdict.troubles.append(
            f"only {len(outcomes)} of {len(kinds)} faults struck; if the run was over, raise "
            "--samples-per-fault"
        )
    ledger = world.summary().get("ledger") or {}
    print(table(outcomes))
    for key in ("requeued_by_reason", "dead_by_reason", "dropped_by_reason", "fenced"):
        print(f"{key}: {ledger.get(key)}")
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=40, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of kinds and moments (default: drawn, shown)")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), metavar="KIND", help="these kinds only")
    parser.add_argument(
        "--samples-per-fault",
        type=int,
        default=SAMPLES_PER_FAULT,
        help="how long the run is: too few and it is over before the last fault (default: %(default)s)",
    )
    parser.add_argument("--keep", type=Path, help="keep the run in this new directory")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="of the run's configuration")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    kinds = plan(args.faults, random.Random(seed), args.only)
    print(f"{len(kinds)} faults, seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as scratch:
        where = args.keep or Path(scratch) / "run"
        verdict = run(where, kinds, seed, args.samples_per_fault, args.overrides)
    for trouble in verdict.troubles:
        print(f"trouble: {trouble}")
    print(verdict.line)
    sys.exit(1 if verdict.lost or verdict.twice or verdict.troubles else 0)


if __name__ == "__main__":
    main()
