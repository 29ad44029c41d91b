"""Dashboard rows on samples and weights: staleness, queue, sync."""

from __future__ import annotations

from headrace.metrics import coordinator, queue, rollouter, row_keys, trainer
from headrace.monitoring.expressions import (
    count_of,
    largest,
    lines,
    of,
    of_pods,
    of_run,
    quantile,
    rate,
    share,
    sum_of,
)
from headrace.monitoring.panels import PanelRow

_STATES = {
    "ready": queue.READY,
    "in_flight": queue.IN_FLIGHT,
    "parked": queue.PARKED,
    "queued": queue.DEPTH,
    "training": queue.TRAINING,
}

STALENESS = PanelRow(
    "Staleness",
    [
        lines(
            "Stale and partial samples",
            "percentunit",
            ("stale", share(trainer.STALE_SAMPLES, trainer.SAMPLES)),
            ("partial", share(trainer.PARTIAL, trainer.SAMPLES)),
        ),
        lines(
            "Version gap",
            "none",
            ("p50", quantile(0.5, trainer.VERSION_GAP)),
            ("p99", quantile(0.99, trainer.VERSION_GAP)),
            ("largest of the update", largest(of_run(trainer.LARGEST_GAP))),
            ("bound", largest(of_run(trainer.GAP_BOUND))),
            about="Version that trains a sample minus the oldest that sampled it. No bound: +Inf, not drawn.",
        ),
        of(trainer.UPDATE_GAP),
        lines("Span of partial samples", "none", ("p99", quantile(0.99, trainer.SPAN))),
        of(trainer.GAUGES[row_keys.ROLLOUT_CORR_ESS]),
        lines(
            "Distance from the sampling policy",
            "short",
            ("KL", largest(of_run(trainer.GAUGES[row_keys.ROLLOUT_CORR_KL]))),
            ("KL, k3", largest(of_run(trainer.GAUGES[row_keys.ROLLOUT_CORR_K3_KL]))),
            ("χ²", largest(of_run(trainer.GAUGES[row_keys.ROLLOUT_CORR_CHI2_TOKEN]))),
        ),
        of(trainer.GAUGES[row_keys.ROLLOUT_CORR_PPL_RATIO]),
        lines(
            "Weights truncated, tokens masked",
            "percentunit",
            ("truncated", largest(of_run(trainer.GAUGES[row_keys.ROLLOUT_CORR_CLIPPED_FRACTION]))),
            ("masked", largest(of_run(trainer.GAUGES[row_keys.ROLLOUT_CORR_MASKED_FRACTION]))),
        ),
        of(trainer.LENGTH_ORDER),
    ],
)

QUEUE = PanelRow(
    "Queue",
    [
        lines(
            "Samples by state",
            "none",
            *((state, largest(of_run(metric))) for state, metric in _STATES.items()),
            stacked=True,
        ),
        lines(
            "Seconds from finish to training",
            "s",
            ("p50", quantile(0.5, trainer.LATENCY)),
            ("p99", quantile(0.99, trainer.LATENCY)),
            ("oldest that waits", largest(of_run(queue.OLDEST_AGE))),
        ),
        lines(
            "Prompts issued, samples finished and trained",
            "short",
            ("issued", rate(of_run(queue.ISSUED))),
            ("finished", rate(of_run(rollouter.SAMPLES))),
            ("trained", rate(of_run(trainer.SAMPLES))),
            about="Per second.",
        ),
        lines(
            "Put back",
            "none",
            (
                "{{reason}}",
                f"sum by (reason) (increase({of_run(queue.REQUEUED_BY)}[$__rate_interval]))",
            ),
            (
                "too old to continue",
                f"sum by (release) (increase({of_run(queue.RESTARTED)}[$__rate_interval]))",
            ),
            (
                "kept: {{state}}",
                f"sum by (state) (increase({of_run(queue.KEPT_BY)}[$__rate_interval]))",
            ),
            about="Too old to continue: partial work that max_version_gap throws away. Kept: finished and "
            "parked work that a new trainer did not put back.",
        ),
        lines(
            "Failures",
            "none",
            (
                "{{reason}}",
                f"sum by (reason) (increase({of_run(rollouter.FAILED)}[$__rate_interval]))",
            ),
        ),
        lines(
            "Dead letters and dropped",
            "none",
            ("dead: {{reason}}", f"sum by (reason) ({of_run(queue.DEAD_LETTERS)})"),
            ("dropped: {{reason}}", f"sum by (reason) ({of_run(queue.SAMPLES_DROPPED)})"),
            about="So far.",
        ),
        lines(
            "Refused as late",
            "none",
            (
                "{{operation}}",
                f"sum by (operation) (increase({of_run(queue.FENCED_BY)}[$__rate_interval]))",
            ),
            about="finish: complete results whose owner had been expired.",
        ),
        lines(
            "Memory of the Redis server",
            "bytes",
            ("used", largest(of_run(queue.REDIS_USED))),
            ("limit", largest(of_run(queue.REDIS_MAX))),
            ("this run at most", largest(of_run(queue.REDIS_NEEDED))),
        ),
        of(queue.LOOP_AGE),
    ],
)

_PHASE_SUM = of_run(sum_of(coordinator.SYNC_PHASE), 'phase!="total"')
_PHASE_COUNT = of_run(count_of(coordinator.SYNC_PHASE), 'phase!="total"')
_ROUNDS = of_run(count_of(coordinator.SYNC_PHASE), 'phase="total"')

SYNC = PanelRow(
    "Sync",
    [
        lines(
            "Seconds of a round by phase",
            "s",
            ("{{phase}}", f"{rate(_PHASE_SUM, 'phase')} / {rate(_PHASE_COUNT, 'phase')}"),
            stacked=True,
            about="Mean. A long pause is work that is let finish; a long transfer is the network.",
        ),
        lines(
            "Seconds of a round",
            "s",
            ("p50", quantile(0.5, coordinator.SYNC_PHASE, 'phase="total"')),
            ("p99", quantile(0.99, coordinator.SYNC_PHASE, 'phase="total"')),
        ),
        lines(
            "Share of the time in rounds",
            "percentunit",
            ("{{release}}", of_run("release:headrace_sync_time:ratio_rate15m")),
        ),
        lines(
            "Rounds per hour",
            "none",
            ("{{release}}", f"3600 * {rate(_ROUNDS)}"),
        ),
        lines(
            "Weights sent per round",
            "bytes",
            ("{{release}}", f"{rate(of_run(coordinator.SYNC_BYTES))} / {rate(_ROUNDS)}"),
        ),
        lines(
            "Members",
            "none",
            ("last round", largest(of_run(coordinator.SYNC_GROUP_SIZE))),
            ("connected", largest(of_run(coordinator.CONNECTED))),
            ("take part", largest(of_run(coordinator.TAKING_PART))),
            ("trainer", largest(of_run(coordinator.TRAINER))),
        ),
        lines(
            "Failures",
            "none",
            (
                "{{reason}}",
                f"sum by (reason) (increase({of_run(coordinator.SYNC_FAILURES)}[$__rate_interval]))",
            ),
        ),
        lines(
            "Canary",
            "short",
            ("largest difference", largest(of_run(coordinator.SYNC_LOGPROB_DIFF))),
            ("tolerance", largest(of_run(coordinator.CANARY_TOLERANCE))),
            about="Log-prob difference of engine and trainer on the same tokens after a sync.",
        ),
        lines(
            "Policy version by rollouter",
            "none",
            ("committed", largest(of_run(coordinator.POLICY_VERSION))),
            ("{{pod}}", of_pods(rollouter.VERSION)),
        ),
    ],
)
