"""Learning curves of the main algorithms, and what a large lag does to them.

`python -m benchmarks.algorithms [curves] [lag] [--seeds 0 1 2]` runs the demo task once per algorithm and
seed and writes `algorithms_<experiment>.{json,md,png}`. Finished runs are reused unless `--fresh` is given,
so an interrupted benchmark resumes where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, finished_run, grouped, rows_of, slug, spread, summary_of
from headrace.metrics import row_keys

CURVES = {
    "GRPO": [],
    "Dr.GRPO": ["algorithm.norm_adv_by_std=false", "actor.loss_agg_mode=seq-mean-token-sum-norm"],
    "RLOO": ["algorithm.adv_estimator=rloo"],
    "REINFORCE++-baseline": ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
    "OPO": ["algorithm.adv_estimator=opo"],
    "DAPO": [
        "algorithm.filter_groups.enable=true",
        "reward.overlong_buffer.enable=true",
        "reward.overlong_buffer.len=3",
        "reward.overlong_buffer.penalty_factor=0.5",
    ],
    "GSPO": ["actor.policy_loss=gspo", "actor.clip_ratio_low=0.05", "actor.clip_ratio_high=0.05"],
    "decoupled PPO": ["actor.policy_loss=decoupled_ppo", "async_training.use_rollout_log_probs=false"],
    "GAE": ["algorithm.adv_estimator=gae", "critic.enable=true", "critic.optim.lr=1e-3"],
}
"""Name -> what differs from configs/demo.yaml."""

LAG = {
    "PPO, behaviour log-probs": [],
    "decoupled PPO": ["actor.policy_loss=decoupled_ppo", "async_training.use_rollout_log_probs=false"],
    "truncated IS": [
        "async_training.use_rollout_log_probs=false",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
    ],
    "old from current weights": [
        "actor.policy_loss=wrong_old",
        "actor.loss_agg_mode=token-mean",
        'algorithm.modules=["benchmarks/wrong_old.py"]',
    ],
}
"""A sync after every update and eta = 8: samples wait in the queue until they are about 8 versions old."""

COMMON = ["rollout.total_rollout_steps=1600", "trainer.save_freq=0"]
EXPERIMENTS: dict[str, tuple[dict[str, list[str]], list[str]]] = {
    "curves": (CURVES, [*COMMON, "rollout.test_freq=5"]),
    "lag": (
        LAG,
        [
            *COMMON,
            "rollout.test_freq=10",
            "async_training.trigger_parameter_sync_step=1",
            "async_training.staleness_threshold=8",
        ],
    ),
}


def run(experiment: str, name: str, seed: int, fresh: bool) -> Path:
    """The directory of the finished run, which is started unless it is there already."""
    runs, common = EXPERIMENTS[experiment]
    words = ["configs/demo.yaml", f"seed={seed}", *common, *runs[name]]
    return finished_run(f"bench-{experiment}-{slug(name)}-seed{seed}", words, fresh)


def read(directory: Path, name: str, seed: int) -> dict[str, Any]:
    summary, rows = summary_of(directory), rows_of(directory)

    def mean(key: str) -> float:
        return statistics.fmean(r[key] for r in rows)

    scores = [[e["version"], e["reward"]] for e in summary["eval"]]
    per_version = summary["trained_samples"] / scores[-1][0]
    return {
        "name": name,
        "seed": seed,
        "scores": [[v * per_version, score] for v, score in scores],
        "updates": len(rows),
        "samples": summary["trained_samples"],
        "dropped": summary["ledger"]["dropped"],
        "balanced": summary["balanced"],
        "ess": mean(row_keys.ROLLOUT_CORR_ESS),
        "worst_ess": min(r[row_keys.ROLLOUT_CORR_ESS] for r in rows),
        "kl": mean(row_keys.ROLLOUT_CORR_KL),
        "clip_fraction": mean(row_keys.ACTOR_PG_CLIPFRAC),
        "entropy_end": statistics.fmean(r[row_keys.ACTOR_ENTROPY] for r in rows[-10:]),
        "gap": mean(row_keys.STALENESS_VERSION_GAP_MEAN),
        "largest_gap": max(r[row_keys.STALENESS_VERSION_GAP_MAX] for r in rows),
        "grad_norm": statistics.median(r[row_keys.ACTOR_GRAD_NORM] for r in rows),
        "skipped": sum(r[row_keys.ACTOR_SKIPPED_STEPS] for r in rows),
        "update_s": statistics.median(r[row_keys.TIMING_S_UPDATE_ACTOR] for r in rows),
    }


def area(scores: list[list[float]]) -> float:
    """Mean held-out score over the run: the area under the curve, over its width."""
    parts = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(scores)]
    return sum(parts) / (scores[-1][0] - scores[0][0])


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| | held-out at the end | mean over the run | ESS | worst ESS | KL to behaviour | clip fraction "
        "| version gap | updates |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in grouped(results).items():

        def mean(key: str, runs: list[dict[str, Any]] = runs) -> float:
            return statistics.fmean(r[key] for r in runs)

        lines.append(
            f"| {name} | {spread([r['scores'][-1][1] for r in runs])} "
            f"| {spread([area(r['scores']) for r in runs])} | {mean('ess'):.3f} "
            f"| {min(r['worst_ess'] for r in runs):.3f} | {mean('kl'):.4f} | {mean('clip_fraction'):.4f} "
            f"| {mean('gap'):.1f} (max {max(r['largest_gap'] for r in runs)}) | {mean('updates'):.0f} |"
        )
    starts = spread([r["scores"][0][1] for r in next(iter(grouped(results).values()))])
    seeds = sorted({r["seed"] for r in results})
    lines += ["", f"Held-out score before training: {starts}. Seeds {seeds}; mean (smallest to largest)."]
    return "\n".join(lines) + "\n"


def plot(results: list[dict[str, Any]], title: str, place: str, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.6), constrained_layout=True)
    for number, (name, runs) in enumerate(grouped(results).items()):
        colour = f"C{number}"
        style = "-" if number < 5 else "--"
        for r in runs:
            xs, ys = zip(*r["scores"], strict=True)
            axis.plot(xs, ys, color=colour, alpha=0.2, linewidth=0.8)
        points = min(len(r["scores"]) for r in runs)
        xs = [statistics.fmean(r["scores"][i][0] for r in runs) for i in range(points)]
        ys = [statistics.fmean(r["scores"][i][1] for r in runs) for i in range(points)]
        axis.plot(xs, ys, style, color=colour, label=name, linewidth=1.8)
    axis.set(xlabel="samples trained", ylabel="exact match on held-out words, greedy", title=title)
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.legend(loc=place, fontsize=8, ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


PICTURES = {
    "curves": ("learning curves: mean over the seeds, each seed faint", "lower right"),
    "lag": ("a version gap of about 8: mean over the seeds, each seed faint", "upper left"),
}
"""Title, and where the legend is in nobody's way."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="*", help="curves, lag or both (default)")
    parser.add_argument("--only", nargs="+", help="these algorithms only")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--fresh", action="store_true", help="run again what has finished before")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    unknown = set(args.experiments) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"unknown experiments: {', '.join(sorted(unknown))}; known: {', '.join(EXPERIMENTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for experiment in args.experiments or list(EXPERIMENTS):
        names = [n for n in EXPERIMENTS[experiment][0] if args.only is None or n in args.only]
        results = []
        for seed in args.seeds:  # seeds outermost: an interrupted benchmark has every algorithm
            for name in names:
                results.append(read(run(experiment, name, seed, args.fresh), name, seed))
                print(f"{experiment}: {name}, seed {seed}: {results[-1]['scores'][-1][1]:.3f}", flush=True)
        results.sort(key=lambda r: (names.index(r["name"]), r["seed"]))
        (args.out / f"algorithms_{experiment}.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.out / f"algorithms_{experiment}.md").write_text(table(results))
        plot(results, *PICTURES[experiment], args.out / f"algorithms_{experiment}.png")
        print(table(results))


if __name__ == "__main__":
    main()
