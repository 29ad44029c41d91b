"""The rows on samples and weights: staleness, queue, sync."""

from __future__ import annotations

from headrace.monitoring.dashboard import Row
from headrace.monitoring.expressions import largest, lines, of_pods, of_run, quantile, rate, share

_STATES = ("ready", "in_flight", "parked", "depth", "training")

STALENESS = Row(
    "Staleness",
    [
        lines(
            "Stale and partial samples",
            "percentunit",
            ("stale", share("headrace_stale_samples_trained_total", "headrace_samples_trained_total")),
            ("partial", share("headrace_partial_samples_trained_total", "headrace_samples_trained_total")),
        ),
        lines(
            "Version gap",
            "none",
            ("p50", quantile(0.5, "headrace_version_gap_versions")),
            ("p99", quantile(0.99, "headrace_version_gap_versions")),
            ("largest of the update", largest(of_run("headrace_version_gap_largest_versions"))),
            ("bound", largest(of_run("headrace_version_gap_bound_versions"))),
            about="Version that trains a sample minus the oldest that sampled it. No bound: +Inf, not drawn.",
        ),
        lines(
            "Update gap",
            "none",
            ("p50", quantile(0.5, "headrace_update_gap_steps")),
            ("p99", quantile(0.99, "headrace_update_gap_steps")),
            about="Optimizer steps between the weights that sampled and the update.",
        ),
        lines("Span of partial samples", "none", ("p99", quantile(0.99, "headrace_partial_span_versions"))),
        lines(
            "Effective sample size",
            "percentunit",
            ("{{release}}", largest(of_run("headrace_rollout_corr_ess"))),
            about="On untruncated importance weights. Below a half most samples hardly count.",
        ),
        lines(
            "Distance from the sampling policy",
            "short",
            ("KL", largest(of_run("headrace_rollout_corr_kl"))),
            ("KL, k3", largest(of_run("headrace_rollout_corr_k3_kl"))),
            ("χ²", largest(of_run("headrace_rollout_corr_chi2_token"))),
        ),
        lines(
            "Perplexity ratio",
            "short",
            ("{{release}}", largest(of_run("headrace_rollout_corr_ppl_ratio"))),
        ),
        lines(
            "Weights truncated, tokens masked",
            "percentunit",
            ("truncated", largest(of_run("headrace_rollout_corr_clipped_fraction"))),
            ("masked", largest(of_run("headrace_rollout_corr_masked_fraction"))),
        ),
        lines(
            "Length and order of training",
            "short",
            ("rank correlation", largest(of_run("headrace_length_order_correlation"))),
            about="Far above 0: long answers are always trained late, so they are the stale ones.",
        ),
    ],
)

QUEUE = Row(
    "Queue",
    [
        lines(
            "Samples by state",
            "none",
            *(
                ("queued" if state == "depth" else state, largest(of_run(f"headrace_queue_{state}")))
                for state in _STATES
            ),
            stacked=True,
        ),
        lines(
            "Seconds from finish to training",
            "s",
            ("p50", quantile(0.5, "headrace_queue_message_latency_seconds")),
            ("p99", quantile(0.99, "headrace_queue_message_latency_seconds")),
            ("oldest that waits", largest(of_run("headrace_queue_oldest_age_seconds"))),
        ),
        lines(
            "Prompts issued, samples finished and trained",
            "short",
            ("issued", rate(of_run("headrace_queue_issued_total"))),
            ("finished", rate(of_run("headrace_samples_generated_total"))),
            ("trained", rate(of_run("headrace_samples_trained_total"))),
            about="Per second.",
        ),
        lines(
            "Put back",
            "none",
            (
                "{{reason}}",
                f"sum by (reason) (increase({of_run('headrace_queue_requeued_total')}[$__rate_interval]))",
            ),
            (
                "too old to continue",
                f"sum by (release) (increase({of_run('headrace_queue_restarted_total')}[$__rate_interval]))",
            ),
            (
                "kept: {{state}}",
                f"sum by (state) (increase({of_run('headrace_queue_kept_total')}[$__rate_interval]))",
            ),
            about="Too old to continue: partial work that max_version_gap throws away. Kept: finished and "
            "parked work that a new trainer did not put back.",
        ),
        lines(
            "Failures",
            "none",
            (
                "{{reason}}",
                f"sum by (reason) (increase({of_run('headrace_samples_failed_total')}[$__rate_interval]))",
            ),
        ),
        lines(
            "Dead letters and dropped",
            "none",
            ("dead: {{reason}}", f"sum by (reason) ({of_run('headrace_queue_dead_letters_total')})"),
            ("dropped: {{reason}}", f"sum by (reason) ({of_run('headrace_samples_dropped_total')})"),
            about="So far.",
        ),
        lines(
            "Refused as late",
            "none",
            (
                "{{operation}}",
                f"sum by (operation) (increase({of_run('headrace_queue_fenced_total')}[$__rate_interval]))",
            ),
            about="finish: complete results whose owner had been expired.",
        ),
        lines(
            "Memory of the Redis server",
            "bytes",
            ("used", largest(of_run("headrace_redis_used_memory_bytes"))),
            ("limit", largest(of_run("headrace_redis_max_memory_bytes"))),
            ("this run at most", largest(of_run("headrace_redis_needed_memory_bytes"))),
        ),
        lines(
            "Age of the queue service's loops",
            "s",
            ("{{loop}}", largest(of_run("headrace_queue_loop_age_seconds"), "loop")),
        ),
    ],
)

_PHASE_SUM = of_run("headrace_sync_phase_duration_seconds_sum", 'phase!="total"')
_PHASE_COUNT = of_run("headrace_sync_phase_duration_seconds_count", 'phase!="total"')
_ROUNDS = of_run("headrace_sync_phase_duration_seconds_count", 'phase="total"')

SYNC = Row(
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
            ("p50", quantile(0.5, "headrace_sync_phase_duration_seconds", 'phase="total"')),
            ("p99", quantile(0.99, "headrace_sync_phase_duration_seconds", 'phase="total"')),
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
            ("{{release}}", f"{rate(of_run('headrace_sync_bytes_total'))} / {rate(_ROUNDS)}"),
        ),
        lines(
            "Members",
            "none",
            ("last round", largest(of_run("headrace_sync_group_size"))),
            ("connected", largest(of_run("headrace_coordinator_rollouters_connected"))),
            ("take part", largest(of_run("headrace_coordinator_rollouters_taking_part"))),
            ("trainer", largest(of_run("headrace_coordinator_trainer_connected"))),
        ),
        lines(
            "Failures",
            "none",
            (
                "{{reason}}",
                f"sum by (reason) (increase({of_run('headrace_sync_failures_total')}[$__rate_interval]))",
            ),
        ),
        lines(
            "Canary",
            "short",
            ("largest difference", largest(of_run("headrace_sync_logprob_diff"))),
            ("tolerance", largest(of_run("headrace_sync_canary_tolerance"))),
            about="Log-prob difference of engine and trainer on the same tokens after a sync.",
        ),
        lines(
            "Policy version by rollouter",
            "none",
            ("committed", largest(of_run("headrace_policy_version"))),
            ("{{pod}}", of_pods("headrace_rollouter_policy_version")),
        ),
    ],
)
