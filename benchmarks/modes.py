"""Compare the modes: the same task, samples and seeds in every mode, with long-tailed response lengths.

`python -m benchmarks.modes [--reps 3] [--only MODE ...]` runs every mode, repetitions interleaved, and writes
`modes.{json,md,png}`. `--ablate staleness|require_batches|split` varies one thing about the last mode
instead. Trainer and rollouter are bound to a core each; colocated sync has both cores for each phase. A run
that has finished is not run again (`--fresh` forgets them). Seconds are those of this machine: compare them
only within one result.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, finished_run, grouped, rows_of, slug, spread, summary_of
from headrace.metrics import row_keys

BOUND = ["trainer.cpus=[0]", "rollout.cpus=[1]"]
# Half a batch for each engine: the first to ask would take it all.
BOTH_CORES = ["trainer.n_gpus_per_node=2", "rollout.replicas=2", "rollout.max_concurrent_samples=8"]
MODES = {
    "colocated_sync": BOTH_CORES,
    "one_step_off": BOUND,
    "on_policy_pipeline": BOUND,
    "stream_off_policy": BOUND,
    "async_stale_samples": BOUND,
    "async_partial_rollout": BOUND,
}
SAMPLES = 960
VALIDATE_EVERY = 320
"""Samples between two validations, in every mode."""

ABLATIONS: dict[str, dict[str, list[str]]] = {
    "staleness": {
        "eta 0": ["async_training.staleness_threshold=0", "async_training.partial_rollout=false"],
        **{f"eta {eta}": [f"async_training.staleness_threshold={eta}"] for eta in (0.1, 0.3, 0.5)},
    },
    "require_batches": {
        f"R {r}": [
            f"async_training.require_batches={r}",
            f"async_training.trigger_parameter_sync_step={4 // r}",
        ]
        for r in (1, 2, 4)
    },
    "split": {
        "a core each": [],
        "trainer both, rollouter one": ["trainer.cpus=[0,1]", "trainer.n_gpus_per_node=2"],
        "trainer one, rollouters both": ["rollout.cpus=[0,1]", "rollout.replicas=2"],
        "nothing bound": ["trainer.cpus=null", "rollout.cpus=null"],
    },
}


def words(mode: str, seed: int, extra: list[str]) -> list[str]:
    return [
        "configs/long_tail.yaml",
        f"configs/modes/{mode}.yaml",
        f"seed={seed}",
        f"rollout.total_rollout_steps={SAMPLES}",
        "trainer.save_freq=0",
        *extra,
    ]


def measure(name: str, mode: str, seed: int, extra: list[str], fresh: bool) -> dict[str, Any]:
    """One run and what it showed."""
    from headrace.config.loading import load

    paths = [str(ROOT / w) if w.endswith(".yaml") else w for w in words(mode, seed, extra)]
    config = load(Path(paths[0]), paths[1:])
    every = max(1, VALIDATE_EVERY // config.rule.window)
    directory = finished_run(
        f"bench-{slug(name)}-seed{seed}", [*words(mode, seed, extra), f"rollout.test_freq={every}"], fresh
    )
    rows, summary = rows_of(directory), summary_of(directory)
    began, committed = clock(directory, config.rollout.replicas)
    total = max(committed.values()) - began

    def per_update(key: str) -> float:
        return statistics.fmean(r.get(f"timing_s/{key}", 0.0) for r in rows[1:])

    def second(version: int) -> float:
        """When the weights of `version` were there."""
        return committed[version] - began if version else 0.0

    scores = [[second(e["version"]), e["reward"]] for e in summary["eval"]]
    samples = summary["trained_samples"]
    return {
        "name": name,
        "seed": seed,
        "balanced": summary["balanced"],
        "requeued": summary["ledger"]["requeued"],
        "samples": samples,
        "total_s": total,
        "timing_s": {
            key: per_update(key)
            for key in ("step", "gen_wait", "wait_prev_gen", "old_log_prob", "update_actor", "param_sync")
        },
        "idle": summary["idle_ratio"],
        "stale_ratio": rows[-1][row_keys.FULLY_ASYNC_COUNT_STALE_SAMPLES_PROCESSED] / samples,
        "partial_ratio": sum(
            r[row_keys.FULLY_ASYNC_PARTIAL_PARTIAL_RATIO] for r in rows if row_keys.SYNC_TOTAL_S in r
        ) / max(1, sum(row_keys.SYNC_TOTAL_S in r for r in rows)),
        "largest_gap": max(int(g) for g in summary["version_gap"]),
        "length": {
            "mean": statistics.fmean(r[row_keys.RESPONSE_LENGTH_MEAN] for r in rows),
            "max": max(r[row_keys.RESPONSE_LENGTH_MAX] for r in rows),
        },
        "ess": statistics.fmean(r[row_keys.ROLLOUT_CORR_ESS] for r in rows),
        "scores": scores,
    }  # fmt: skip


def clock(directory: Path, replicas: int) -> tuple[float, dict[int, float]]:
    """When the last engine had its first weights, and when each version was committed, in seconds.

    All by the coordinator's log. Engines take longer to load than the trainer, whose first commit they miss.
    """
    joined: list[float] = []
    committed: dict[int, float] = {}
    for line in (directory / "logs" / "coordinator.log").read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue  # what a library printed
        at = datetime.fromisoformat(event["ts"]).timestamp()
        if event["event"] == "catch-up ended" and event["phase"] == "done":
            joined.append(at)
        elif event["event"] == "committed":
            committed.setdefault(event["version"], at)
            joined += [at] * (len(event["members"]) - len(joined))
    return joined[replicas - 1], committed


def table(results: list[dict[str, Any]]) -> str:
    """In the form of the recipes: seconds per update, the whole, the speed-up against the first line."""
    lines = [
        "| | step | gen_wait | wait_prev_gen | update_actor | sync | total | speed-up | trainer idle "
        "| rollouter idle | stale | partial | largest gap | ESS | held-out |",
        "|---" * 15 + "|",
    ]
    base: Mapping[int, float] = {}
    for name, runs in grouped(results).items():
        base = base or {r["seed"]: r["total_s"] for r in runs}
        ratios = [base[r["seed"]] / r["total_s"] for r in runs]

        def mean(*path: str, runs: list[dict[str, Any]] = runs) -> float:
            values = []
            for r in runs:
                value: Any = r
                for key in path:
                    value = value[key]
                values.append(float(value or 0.0))
            return statistics.fmean(values)

        ends = [r["scores"][-1][1] for r in runs]
        lines.append(
            f"| {name} | {mean('timing_s', 'step'):.2f} s | {mean('timing_s', 'gen_wait'):.2f} "
            f"| {mean('timing_s', 'wait_prev_gen'):.2f} | {mean('timing_s', 'update_actor'):.2f} "
            f"| {mean('timing_s', 'param_sync'):.2f} | {mean('total_s'):.0f} s "
            f"| {spread(ratios, 2)} "
            f"| {mean('idle', 'trainer'):.0%} | {mean('idle', 'rollouter'):.0%} | {mean('stale_ratio'):.0%} "
            f"| {mean('partial_ratio'):.0%} | {max(r['largest_gap'] for r in runs)} | {mean('ess'):.3f} "
            f"| {spread(ends)} |"
        )
    starts = statistics.fmean(r["scores"][0][1] for r in results)
    some = results[0]
    lines += [
        "",
        f"{some['samples']} samples in every run; seeds {sorted({r['seed'] for r in results})}. Seconds are "
        "per local update; speed-up and held-out score with their smallest and largest. Held-out score "
        f"before training: {starts:.3f}. Response length: mean {some['length']['mean']:.1f}, largest "
        f"{some['length']['max']}.",
    ]
    hurt = [f"{r['name']} (seed {r['seed']}): {r['requeued']} samples" for r in results if r["requeued"]]
    if hurt:
        lines += [
            "",
            "Samples started again, so a part died and these times are not the mode's: " + ", ".join(hurt),
        ]
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.4), constrained_layout=True)
    for number, (name, runs) in enumerate(grouped(results).items()):
        for index, r in enumerate(runs):
            xs, ys = zip(*r["scores"], strict=True)
            label = name if not index else None
            axis.plot(
                xs, ys, color=f"C{number}", marker="o", markersize=3, linewidth=1.2, alpha=0.8, label=label
            )
    axis.set(xlabel="seconds since the engines had version 0", ylabel="held-out score, greedy")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reps", type=int, default=3, help="repetitions, each with a seed of its own")
    parser.add_argument("--only", nargs="+", choices=list(MODES), help="these modes only")
    parser.add_argument("--ablate", choices=list(ABLATIONS), help="vary one thing instead of the mode")
    parser.add_argument("--fresh", action="store_true", help="run again what has finished before")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.ablate:
        cases = {
            f"{args.ablate} {name}": ("async_partial_rollout", [*BOUND, *extra])
            for name, extra in ABLATIONS[args.ablate].items()
        }
    else:
        cases = {
            f"{mode}": (mode, extra) for mode, extra in MODES.items() if not args.only or mode in args.only
        }
    results = []
    for seed in range(args.reps):  # interleaved: what the machine does meanwhile hits every mode alike
        for name, (mode, extra) in cases.items():
            results.append(measure(name, mode, seed, extra, args.fresh))
            r = results[-1]
            print(f"{name}, seed {seed}: {r['total_s']:.0f} s, held-out {r['scores'][-1][1]:.3f}", flush=True)
    results.sort(key=lambda r: (list(cases).index(r["name"]), r["seed"]))
    args.out.mkdir(parents=True, exist_ok=True)
    stem = f"modes_{args.ablate}" if args.ablate else "modes"
    (args.out / f"{stem}.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / f"{stem}.md").write_text(table(results))
    plot(results, args.out / f"{stem}.png")
    print(table(results))


if __name__ == "__main__":
    main()
