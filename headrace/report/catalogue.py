"""The charts of the page, and the keys of the run's files that they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.metrics import row_keys
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
    """For noisy values: draw a moving mean over the faint values."""
    marks: bool = False
    """For few points: mark each."""
    read: Read = RunData.series
    about: str = ""


def of(key: str) -> Lines:
    """The chart that a `metrics.jsonl` key's entry defines. Raises ValueError if it defines none."""
    chart = row_keys.TABLE.entries[key].chart
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
        of(row_keys.REWARD_MEAN),
        of(row_keys.REWARD_STD),
        of(row_keys.GROUP_ZERO_STD_RATIO),
    ),
    "Where the time goes": (
        of(row_keys.TRAINER_IDLE_RATIO),
        of(row_keys.ROLLOUTER_IDLE_RATIO),
        of(row_keys.ROLLOUTER_UTILIZATION),
        of(row_keys.TIMING_S_STEP),
        of(row_keys.PERF_TOKENS_PER_S),
        of(row_keys.PERF_SAMPLES_PER_S),
        of(row_keys.PERF_MFU),
    ),
    "Staleness": (
        Lines(
            "Version gap",
            (
                (row_keys.STALENESS_VERSION_GAP_MEAN, "mean"),
                (row_keys.STALENESS_VERSION_GAP_MAX, "largest"),
            ),
            "versions",
            smooth=True,
            about="Version of the window that trains a sample − the oldest version in it.",
        ),
        Lines(
            "Update gap",
            (
                (row_keys.STALENESS_UPDATE_GAP_MEAN, "mean"),
                (row_keys.STALENESS_UPDATE_GAP_MAX, "largest"),
            ),
            "optimizer steps",
            smooth=True,
            about="Optimizer steps between the weights that sampled and the update.",
        ),
        of(row_keys.STALENESS_STALE_SAMPLE_RATIO),
        of(row_keys.FULLY_ASYNC_PARTIAL_PARTIAL_RATIO),
        of(row_keys.FULLY_ASYNC_PARTIAL_MAX_PARTIAL_SPAN),
        of(row_keys.STALENESS_LENGTH_ORDER_CORR),
    ),
    "Lengths": (
        Lines(
            "Response length",
            (
                (row_keys.RESPONSE_LENGTH_MEAN, "mean"),
                (row_keys.RESPONSE_LENGTH_MAX, "longest"),
            ),
            "tokens",
            smooth=True,
        ),
        of(row_keys.RESPONSE_LENGTH_CLIP_RATIO),
    ),
    "Queue": (
        Lines(
            "Queue",
            (
                (row_keys.QUEUE_DEPTH, "finished, waiting"),
                (row_keys.QUEUE_IN_FLIGHT, "in flight"),
            ),
            "samples",
            smooth=True,
        ),
        of(row_keys.QUEUE_MESSAGE_LATENCY_S),
        of(row_keys.QUEUE_OLDEST_AGE_S),
        Lines(
            "Requeued and dead",
            (
                (row_keys.QUEUE_REQUEUED, "requeued"),
                (row_keys.QUEUE_DEAD, "dead"),
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
        of(row_keys.ROLLOUT_CORR_ESS),
        Lines(
            "KL divergence",
            (
                (row_keys.ROLLOUT_CORR_KL, "behaviour → current"),
                (row_keys.ACTOR_PPO_KL, "old → current"),
            ),
            "nats per token",
            smooth=True,
        ),
        Lines(
            "Clipped tokens",
            (
                (row_keys.ACTOR_PG_CLIPFRAC, "upper bound"),
                (row_keys.ACTOR_PG_CLIPFRAC_LOWER, "lower bound"),
            ),
            "share of tokens",
            percent=True,
            smooth=True,
        ),
        of(row_keys.ACTOR_ENTROPY),
        of(row_keys.ACTOR_GRAD_NORM),
        of(row_keys.ACTOR_PG_LOSS),
        of(row_keys.ACTOR_LR),
        of(row_keys.ROLLOUT_CORR_MASKED_FRACTION),
        of(row_keys.ROLLOUT_CORR_CHI2_TOKEN),
        Lines(
            "Reference",
            (
                (row_keys.ACTOR_KL_LOSS, "KL loss"),
                (row_keys.ACTOR_REWARD_KL_PENALTY, "penalty in the reward"),
            ),
            "nats per token",
            smooth=True,
        ),
        of(row_keys.CRITIC_VF_LOSS),
        of(row_keys.CRITIC_VF_EXPLAINED_VAR),
    ),
}
"""Charts by section, in page order. Charts of several keys; a chart of one key is defined by its entry."""


def section(title: Section) -> list[Lines]:
    """The charts of a section, followed by those of entries that are not named above."""
    charts = list(_SECTIONS[title])
    shown = {chart.title for chart in charts}
    for entry in row_keys.TABLE.entries.values():
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
"""Phases of a step in the order of their layers: name and colour. All others share one layer."""
