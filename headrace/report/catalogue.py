"""Which charts the page has, and which keys of the run's files they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.metrics import rows
from headrace.metrics.views import Section
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


def of(key: str) -> Lines:
    """The chart of the entry of a key of `metrics.jsonl`. Raises ValueError for one without."""
    chart = rows.TABLE.entries[key].chart
    if chart is None:
        raise ValueError(f"{key} has no chart of its own")
    return Lines(
        chart.title,
        ((key, chart.legend),),
        chart.unit,
        percent=chart.percent,
        log=chart.log,
        smooth=chart.smooth,
        about=chart.about,
    )


def sync_series(run: RunData, key: str) -> list[Point]:
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


_SECTIONS: dict[Section, tuple[Lines, ...]] = {
    "Learning": (
        of(rows.REWARD_MEAN),
        of(rows.REWARD_STD),
        of(rows.GROUP_ZERO_STD_RATIO),
    ),
    "Where the time goes": (
        of(rows.TRAINER_IDLE_RATIO),
        of(rows.ROLLOUTER_IDLE_RATIO),
        of(rows.ROLLOUTER_UTILIZATION),
        of(rows.TIMING_S_STEP),
        of(rows.PERF_TOKENS_PER_S),
        of(rows.PERF_SAMPLES_PER_S),
        of(rows.PERF_MFU),
    ),
    "Staleness": (
        Lines(
            "Version gap",
            (
                (rows.STALENESS_VERSION_GAP_MEAN, "mean"),
                (rows.STALENESS_VERSION_GAP_MAX, "largest"),
            ),
            "versions",
            smooth=True,
            about="Version of the window that trains a sample − the oldest version in it.",
        ),
        Lines(
            "Update gap",
            (
                (rows.STALENESS_UPDATE_GAP_MEAN, "mean"),
                (rows.STALENESS_UPDATE_GAP_MAX, "largest"),
            ),
            "optimizer steps",
            smooth=True,
            about="Optimizer steps between the weights that sampled and the update.",
        ),
        of(rows.STALENESS_STALE_SAMPLE_RATIO),
        of(rows.FULLY_ASYNC_PARTIAL_PARTIAL_RATIO),
        of(rows.FULLY_ASYNC_PARTIAL_MAX_PARTIAL_SPAN),
        of(rows.STALENESS_LENGTH_ORDER_CORR),
    ),
    "Lengths": (
        Lines(
            "Response length",
            (
                (rows.RESPONSE_LENGTH_MEAN, "mean"),
                (rows.RESPONSE_LENGTH_MAX, "longest"),
            ),
            "tokens",
            smooth=True,
        ),
        of(rows.RESPONSE_LENGTH_CLIP_RATIO),
    ),
    "Queue": (
        Lines(
            "Queue",
            (
                (rows.QUEUE_DEPTH, "finished, waiting"),
                (rows.QUEUE_IN_FLIGHT, "in flight"),
            ),
            "samples",
            smooth=True,
        ),
        of(rows.QUEUE_MESSAGE_LATENCY_S),
        of(rows.QUEUE_OLDEST_AGE_S),
        Lines(
            "Requeued and dead",
            (
                (rows.QUEUE_REQUEUED, "requeued"),
                (rows.QUEUE_DEAD, "dead"),
            ),
            "samples so far",
        ),
    ),
    "Sync": (
        Lines(
            "Sync rounds",
            (
                ("total_s", "total"),
                ("transfer_s", "transfer"),
                ("pause_s", "pause"),
            ),
            "s",
            read=sync_series,
        ),
        Lines("Time between syncs", (("interval_s", "interval"),), "s", read=sync_series),
        Lines("Rollouters in the round", (("members", "members"),), "members", read=sync_series),
        Lines(
            "Canary",
            (("logprob_max_abs_diff", "difference"),),
            "largest |Δ log-prob|, log scale",
            read=sync_series,
            log=True,
            about="Engine against trainer, right after a sync: what they disagree by on a sampled "
            "trajectory.",
        ),
    ),
    "Policy": (
        of(rows.ROLLOUT_CORR_ESS),
        Lines(
            "KL divergence",
            (
                (rows.ROLLOUT_CORR_KL, "behaviour → current"),
                (rows.ACTOR_PPO_KL, "old → current"),
            ),
            "nats per token",
            smooth=True,
        ),
        Lines(
            "Clipped tokens",
            (
                (rows.ACTOR_PG_CLIPFRAC, "upper bound"),
                (rows.ACTOR_PG_CLIPFRAC_LOWER, "lower bound"),
            ),
            "share of tokens",
            percent=True,
            smooth=True,
        ),
        of(rows.ACTOR_ENTROPY),
        of(rows.ACTOR_GRAD_NORM),
        of(rows.ACTOR_PG_LOSS),
        of(rows.ACTOR_LR),
        of(rows.ROLLOUT_CORR_MASKED_FRACTION),
        of(rows.ROLLOUT_CORR_CHI2_TOKEN),
        Lines(
            "Reference",
            (
                (rows.ACTOR_KL_LOSS, "KL loss"),
                (rows.ACTOR_REWARD_KL_PENALTY, "penalty in the reward"),
            ),
            "nats per token",
            smooth=True,
        ),
        of(rows.CRITIC_VF_LOSS),
        of(rows.CRITIC_VF_EXPLAINED_VAR),
    ),
}
"""In the order of the page. A chart of one key is that of its entry; those that join several are here."""


def section(title: Section) -> list[Lines]:
    """The charts of a section, and behind them those of entries that are not named above."""
    charts = list(_SECTIONS[title])
    shown = {chart.title for chart in charts}
    for entry in rows.TABLE.entries.values():
        if entry.chart is not None and entry.chart.section == title and entry.chart.title not in shown:
            charts.append(of(entry.name))
    return charts


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
