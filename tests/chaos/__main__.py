"""Real runs under random faults, then the audit: was a sample lost, or trained twice?

Every fault has to be recovered from: all services up, every rollouter taking part, one more update trained,
the ledger balanced. At the end the run has to complete, and every sample that was ever issued has to be
trained exactly once on the path of the lineages, or dead or dropped with a reason. Faults that a run must not
survive (FLUSHALL, say) have a run of their own each, whose end is judged. The same seed gives the same faults
in the same order; when they strike depends on the machine. Exit code 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.faults import LIMIT_S
from tests.chaos.kinds import FAULTS, KINDS, LONG, plan, rng_of
from tests.chaos.terminal import TERMINAL
from tests.chaos.verdict import Outcome, Verdict, judge, table
from tests.chaos.world import BATCH, ROLLOUTERS, Stuck, World

SAMPLES_PER_FAULT = 240
TERMINAL_SAMPLES = 4000
"""More than a run trains until its end is due."""
START_LIMIT_S = 300.0
END_LIMIT_S = 1200.0
TRIES = 5
"""Runs that may break under one seed's faults; then the seed is given up."""

Numbered = tuple[int, str]
"""Which fault of its seed, and its kind."""


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
        outcome.recovered_s = None
        outcome.trouble = str(error)
    except Exception as error:  # whatever it was, it must not cost a night: told, and counted
        outcome.trouble = f"not as a run should be before a fault: {error!r}"
    if world.ended and world.process.returncode != 0:
        outcome.recovered_s = None
        outcome.trouble = outcome.trouble or f"the run ended with {world.process.returncode}"
    return outcome


def shared_run(
    directory: Path, faults: list[Numbered], seed: int, samples_per_fault: int, overrides: list[str]
) -> Verdict:
    """One run under as many of `faults` as strike before it is over, or breaks."""
    weight = sum(LONG.get(kind, 1) for _, kind in faults)
    samples = -(-max(1, weight) * samples_per_fault // BATCH) * BATCH
    world = World(directory, samples, seed, overrides)
    outcomes: list[Outcome] = []
    verdict = Verdict()
    try:
        world.wait("the first update", lambda: world.steps >= 1 and world.is_well(), START_LIMIT_S)
        for number, kind in faults:
            rng = rng_of(seed, number, kind)
            time.sleep(rng.uniform(0.0, 2.0))  # a fault may strike at any moment of a round
            outcome = strike(world, kind, rng)
            if world.ended and world.process.returncode == 0 and outcome.recovered_s is None:
                break  # the data ended before the fault: the next run has it
            outcomes.append(outcome)
            print(f"seed {seed}, fault {number}: {outcome}", flush=True)
            if world.ended:
                break
            if outcome.recovered_s is None:  # it is told; one that goes on all the same goes on
                world.wait("the run to go on after it", world.is_well, LIMIT_S)
        world.wait("the end of the run", lambda: False, END_LIMIT_S)
        code = world.process.wait(30)
        verdict = judge(world)
        if code != 0:
            verdict.troubles.append(f"the run ended with {code}:\n{world.said()}")
        audited = world.command("audit", str(world.layout.root))
        print(audited.stdout, end="")
        if audited.returncode:
            verdict.troubles.append(
                f"headrace audit ended with {audited.returncode}: {audited.stderr[-500:]}"
            )
    except Stuck as error:
        verdict = judge(world)
        verdict.troubles.append(f"{error}:\n{world.said()}")
    finally:
        world.close()
    verdict.outcomes = outcomes
    verdict.troubles = [f"{o.kind}: {o.trouble}" for o in outcomes if o.trouble] + verdict.troubles
    ledger = world.summary().get("ledger") or {}
    for key in ("requeued_by_reason", "dead_by_reason", "dropped_by_reason", "fenced"):
        print(f"{key}: {ledger.get(key)}", flush=True)
    return verdict


def terminal_run(directory: Path, fault: Numbered, seed: int, overrides: list[str]) -> Verdict:
    """A run of its own for a fault that must end it."""
    number, kind = fault
    world = World(directory, TERMINAL_SAMPLES, seed, overrides)
    outcome = Outcome(kind, kind)
    try:
        world.wait("the first update", lambda: world.steps >= 1 and world.is_well(), START_LIMIT_S)
        began = time.monotonic()
        outcome.what = TERMINAL[kind](world, rng_of(seed, number, kind))
        outcome.recovered_s = time.monotonic() - began
    except Stuck as error:
        outcome.trouble = str(error)
    except Exception as error:  # whatever it was, it must not cost a night: told, and counted
        outcome.trouble = f"not as a run should be: {error!r}"
    finally:
        world.close()
    ended = "the run ended as it should" if outcome.recovered_s is not None else "NOT as it should"
    print(f"seed {seed}, fault {number}: {outcome.what}: {ended}: {outcome.trouble}".rstrip(": "), flush=True)
    return Verdict([outcome], troubles=[f"{kind}: {outcome.trouble}"] if outcome.trouble else [])


def run_seed(
    folder: Path, kinds: list[str], seed: int, samples_per_fault: int, overrides: list[str]
) -> Verdict:
    """All `kinds` in their order, in as few runs as it takes: those that end a run come last."""
    numbered = list(enumerate(kinds, start=1))
    left = [fault for fault in numbered if fault[1] in FAULTS]
    verdict, tries = Verdict(), 0
    while left and tries < TRIES:
        tries += 1
        try:
            part = shared_run(folder / f"run-{tries}", left, seed, samples_per_fault, overrides)
        except Exception as error:  # a ledger that cannot be read, say: the next run has the same faults
            verdict.troubles.append(f"run {tries} of seed {seed} could not be judged: {error!r}")
            continue
        left = left[len(part.outcomes) :]
        verdict.add(part)
    if left:
        verdict.troubles.append(f"{len(left)} faults of seed {seed} did not strike: {TRIES} runs were over")
    for number, kind in numbered:
        if kind in TERMINAL:
            verdict.add(terminal_run(folder / f"terminal-{number}", (number, kind), seed, overrides))
    return verdict


def _seeds(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=40, help="how many in all (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=_seeds, default=[], metavar="N,N", help="which share the faults (default: one, drawn)"
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help="these kinds only")
    parser.add_argument(
        "--samples-per-fault",
        type=int,
        default=SAMPLES_PER_FAULT,
        help="how long a run is: with too few another one is started (default: %(default)s)",
    )
    parser.add_argument("--keep", type=Path, help="keep the runs in this new directory")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="of the runs' configuration")
    args = parser.parse_args()
    seeds = args.seeds or [random.SystemRandom().randrange(10_000)]
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as scratch:
        where: Path = args.keep or Path(scratch)
        for index, seed in enumerate(seeds):
            count = args.faults // len(seeds) + (index < args.faults % len(seeds))
            kinds = plan(count, random.Random(seed), args.only)
            print(f"{len(kinds)} faults, seed {seed}", flush=True)
            verdict.add(run_seed(where / f"seed-{seed}", kinds, seed, args.samples_per_fault, args.overrides))
            print(f"so far {verdict.line}", flush=True)
    print(table(verdict.outcomes))
    for trouble in verdict.troubles:
        print(f"trouble: {trouble}")
    print(verdict.line)
    sys.exit(0 if verdict.good else 1)


if __name__ == "__main__":
    main()
