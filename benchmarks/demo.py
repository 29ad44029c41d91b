"""Run the demo over several seeds: measure learning, time and memory growth.

`python -m benchmarks.demo [--seeds 0 1 2] [--out benchmarks/results]` runs `headrace run
configs/demo.yaml` once per seed and writes results.json, a table in Markdown and a plot. Seconds are
those of this machine; compare them only within one result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, finished_run, rows_of, summary_of
from headrace.metrics import row_keys

GAIN_WANTED = 0.25
MEMORY_GROWTH_WANTED = 1.05
LEDGER_KIB_PER_SAMPLE = 2.0
"""Valkey keeps a record of every sample for the audit: it grows by design, but no faster than this."""


def run_demo(seed: int, overrides: list[str]) -> Path:
    """One run; returns its directory."""
    words = ["configs/demo.yaml", f"seed={seed}", *overrides]
    return finished_run(f"bench-demo-seed{seed}", words, fresh=True, show=True)


def read(directory: Path, seed: int, wall_s: float) -> dict[str, Any]:
    summary, rows = summary_of(directory), rows_of(directory)
    first, last = summary["eval"][0], summary["eval"][-1]
    return {
        "seed": seed,
        "command_s": wall_s,
        "training_s": sum(r[row_keys.TIMING_S_STEP] for r in rows[1:]),
        "eval": [[e["version"], e["reward"]] for e in summary["eval"]],
        "gain": last["reward"] - first["reward"],
        "reward": [r[row_keys.REWARD_MEAN] for r in rows],
        "idle_ratio": summary["idle_ratio"],
        "sync": summary["sync"],
        "version_gap": summary["version_gap"],
        "balanced": summary["balanced"],
        "dead": summary["ledger"]["dead"],
        "dropped": summary["ledger"]["dropped"],
        "samples": summary["trained_samples"],
        "memory_mb": {
            name: [m["first_quarter_mb"], m["last_quarter_mb"]] for name, m in summary["memory"].items()
        },
        "step_s": statistics.median(r[row_keys.TIMING_S_STEP] for r in rows),
        "phases_s": {
            key.removeprefix("timing_s/"): statistics.median(r.get(key, 0.0) for r in rows)
            for key in rows[-1]
            if key.startswith("timing_s/") and key != row_keys.TIMING_S_STEP
        },
    }


def table(results: list[dict[str, Any]]) -> str:
    out = [
        "| seed | held-out before | after | gain | trainer idle | rollouters idle | sync p50 | canary |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        out.append(
            f"| {r['seed']} | {r['eval'][0][1]:.3f} | {r['eval'][-1][1]:.3f} | +{r['gain']:.3f} "
            f"| {r['idle_ratio']['trainer']:.0%} | {r['idle_ratio']['rollouter']:.0%} "
            f"| {r['sync']['p50_s']:.2f} s | {r['sync']['logprob_max_abs_diff']:.1e} |"
        )
    return "\n".join(out) + "\n"


def plot(results: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for r in results:
        versions, scores = zip(*r["eval"], strict=True)
        left.plot(versions, scores, marker="o", label=f"seed {r['seed']}")
        width = 8
        smooth = [
            statistics.mean(r["reward"][max(0, i - width + 1) : i + 1]) for i in range(len(r["reward"]))
        ]
        right.plot(range(1, len(smooth) + 1), smooth, label=f"seed {r['seed']}")
    left.set(xlabel="policy version", ylabel="exact match, greedy", title="held-out words")
    right.set(
        xlabel="local update", ylabel="mean reward", title="training reward (mean of the last 8 updates)"
    )
    for axis in (left, right):
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("overrides", nargs="*", help="key.path=value for every run")
    args = parser.parse_args()
    results = []
    for seed in sorted(args.seeds):
        began = time.monotonic()
        directory = run_demo(seed, args.overrides)
        results.append(read(directory, seed, time.monotonic() - began))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "demo.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "demo.md").write_text(table(results))
    plot(results, args.out / "demo.png")
    print(table(results))
    failures = []
    for r in results:
        if r["gain"] < GAIN_WANTED:
            failures.append(f"seed {r['seed']}: gain {r['gain']:.3f} is below {GAIN_WANTED}")
        if not r["balanced"] or r["dead"] or r["dropped"]:
            failures.append(f"seed {r['seed']}: the ledger does not balance or lost samples")
        for name, (first, last) in r["memory_mb"].items():
            allowed = first * MEMORY_GROWTH_WANTED
            if name == "valkey":
                allowed = first + r["samples"] * LEDGER_KIB_PER_SAMPLE / 1024
            if last > allowed:
                failures.append(
                    f"seed {r['seed']}: {name} grew from {first:.0f} to {last:.0f} MB, first to last quarter"
                )
        print(f"seed {r['seed']}: command {r['command_s']:.0f} s, updates {r['training_s']:.0f} s")
    for failure in failures:
        print(f"NOT REACHED: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
