"""Which charts the page has, and which keys of the run's files they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.report.collect import Point, RunData

Read = Callable[[RunData, str], list[Point]]


@dataclass(frozen=True)
class Lines:
    """A chart of lines over steps or wall clock."""

    title: str
    keys: tuple[tuple[str, str], ...]
    """(key, its name in the legend)."""
    unit: str = ""
    percent: bool = False
    log: bool = False
    smooth: bool = False
    """Noisy: a moving mean is drawn over the faint values."""
    marks: bool = False
    """Few points: each is marked."""
    read: Read = RunData.series
    about: str = ""


def _one(title: str, key: str, unit: str = "", name: str = "", **options: object) -> Lines:
    return Lines(title, ((key, name or title.lower()),), unit, **options)  # type: ignore[arg-type]


def _sync(run: RunData, key: str) -> list[Point]:
    return run.sync_series(key)


def held_out(runs: Sequence[RunData]) -> Iterator[Lines]:
    """A chart for each data source that any run was validated on."""
    sources = dict.fromkeys(source for run in runs for source in run.sources)
    for source in sources:
        keys = [("reward", "mean reward")]
        for key, name in (("best", "best of k"), ("majority", "majority of k")):
            if any(run.scores(source, key) for run in runs):
                keys.append((key, name))
        yield Lines(
            f"Held-out score: {source}",
            tuple(keys),
            "mean reward",
            marks=True,
            read=lambda run, key, source=source: run.scores(source, key),  # type: ignore[misc]
            about="Prompts that are never trained on, at the policy version that they were validated with.",
        )


LEARNING = (
    _one("Reward", "reward/mean", "mean of the update", "mean", smooth=True),
    _one("Spread of the reward", "reward/std", "standard deviation", "std", smooth=True),
    _one(
        "Groups without spread",
        "group/zero_std_ratio",
        "share of groups",
        "share",
        percent=True,
        smooth=True,
        about="All rewards of the group are equal: it teaches nothing.",
    ),
)
TIME = (
    _one(
        "Trainer idle",
        "trainer/idle_ratio",
        "share of the step",
        "idle",
        percent=True,
        smooth=True,
        about="Seconds waiting for samples ÷ seconds of the step.",
    ),
    _one(
        "Rollouters idle",
        "rollouter/idle_ratio",
        "share of the time between syncs",
        "idle",
        percent=True,
        smooth=True,
        about="Time in which an engine had no running request.",
    ),
    _one(
        "Rollouter slots in use",
        "rollouter/utilization",
        "share of slots",
        "in use",
        percent=True,
        smooth=True,
    ),
    _one("Seconds per step", "timing_s/step", "s", "step", smooth=True),
    _one("Training throughput", "perf/tokens_per_s", "response tokens/s", "tokens/s", smooth=True),
    _one("Samples trained", "perf/samples_per_s", "samples/s", "samples/s", smooth=True),
    _one("Model FLOPs utilisation", "perf/mfu", "share of peak", "mfu", percent=True, smooth=True),
)
STALENESS = (
    Lines(
        "Version gap",
        (("staleness/version_gap/mean", "mean"), ("staleness/version_gap/max", "largest")),
        "versions",
        smooth=True,
        about="Version of the window that trains a sample − the oldest version in it.",
    ),
    Lines(
        "Update gap",
        (("staleness/update_gap/mean", "mean"), ("staleness/update_gap/max", "largest")),
        "optimizer steps",
        smooth=True,
        about="Optimizer steps between the weights that sampled and the update.",
    ),
    _one(
        "Stale samples",
        "staleness/stale_sample_ratio",
        "share of the update",
        "stale",
        percent=True,
        smooth=True,
    ),
    _one(
        "Partial samples",
        "fully_async/partial/partial_ratio",
        "share between syncs",
        "partial",
        percent=True,
        smooth=True,
        about="Samples with tokens of several versions.",
    ),
    _one("Largest span of a partial sample", "fully_async/partial/max_partial_span", "versions", "span"),
    _one(
        "Length and order of training",
        "staleness/length_order_corr",
        "rank correlation",
        "correlation",
        smooth=True,
        about="Far above 0: long answers are always trained late, so they are the stale ones.",
    ),
)
LENGTHS = (
    Lines(
        "Response length",
        (("response_length/mean", "mean"), ("response_length/max", "longest")),
        "tokens",
        smooth=True,
    ),
    _one("Cut by the length limit", "response_length/clip_ratio", "share of responses", "cut", percent=True),
)
QUEUE = (
    Lines(
        "Queue",
        (("queue/depth", "finished, waiting"), ("queue/in_flight", "in flight")),
        "samples",
        smooth=True,
    ),
    _one("Wait in the queue", "queue/message_latency_s", "s from written to read", "mean", smooth=True),
    _one("Oldest finished sample", "queue/oldest_age_s", "s", "age", smooth=True),
    Lines("Requeued and dead", (("queue/requeued", "requeued"), ("queue/dead", "dead")), "samples so far"),
)
SYNC = (
    Lines(
        "Sync rounds",
        (("total_s", "total"), ("transfer_s", "transfer"), ("pause_s", "pause")),
        "s",
        read=_sync,
    ),
    _one("Time between syncs", "interval_s", "s", "interval", read=_sync),
    _one("Rollouters in the round", "members", "members", "members", read=_sync),
    _one(
        "Canary",
        "logprob_max_abs_diff",
        "largest |Δ log-prob|, log scale",
        "difference",
        log=True,
        read=_sync,
        about="Engine against trainer, right after a sync: what they disagree by on a sampled trajectory.",
    ),
)
POLICY = (
    _one(
        "Effective sample size",
        "rollout_corr/ess",
        "share",
        "ESS",
        percent=True,
        smooth=True,
        about="Of current ÷ behaviour importance weights; 100 % is on-policy.",
    ),
    Lines(
        "KL divergence",
        (("rollout_corr/kl", "behaviour → current"), ("actor/ppo_kl", "old → current")),
        "nats per token",
        smooth=True,
    ),
    Lines(
        "Clipped tokens",
        (("actor/pg_clipfrac", "upper bound"), ("actor/pg_clipfrac_lower", "lower bound")),
        "share of tokens",
        percent=True,
        smooth=True,
    ),
    _one("Entropy", "actor/entropy", "nats per token", "entropy", smooth=True),
    _one("Gradient norm", "actor/grad_norm", "before clipping", "norm", smooth=True),
    _one("Policy loss", "actor/pg_loss", "", "loss", smooth=True),
    _one("Learning rate", "actor/lr", "", "lr"),
    _one(
        "Tokens left out",
        "rollout_corr/masked_fraction",
        "share of tokens",
        "masked",
        percent=True,
        smooth=True,
    ),
    _one("χ² divergence", "rollout_corr/chi2_token", "mean of w² − 1", "χ²", smooth=True),
    Lines(
        "Reference",
        (("actor/kl_loss", "KL loss"), ("actor/reward_kl_penalty", "penalty in the reward")),
        "nats per token",
        smooth=True,
    ),
    _one("Critic loss", "critic/vf_loss", "", "loss", smooth=True),
    _one("Explained variance of the critic", "critic/vf_explained_var", "share", "explained", smooth=True),
)

PHASES: dict[str, tuple[str, str]] = {
    "gen_wait": ("waiting for samples", "wait0"),
    "wait_prev_gen": ("waiting for the batch that generates meanwhile", "wait1"),
    "old_log_prob": ("old log-probs", "p2"),
    "ref": ("reference", "p4"),
    "values": ("values", "p5"),
    "update_actor": ("policy update", "p0"),
    "update_critic": ("critic update", "p3"),
    "param_sync": ("snapshot and sync", "p1"),
    "save_checkpoint": ("checkpoint", "p6"),
}
"""Phases of a step, in order of their layers: name and colour. All others are one layer."""
