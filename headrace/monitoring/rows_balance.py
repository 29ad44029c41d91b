"""Dashboard rows on the run as a whole, and on which side waits for the other."""

from __future__ import annotations

from headrace.metrics import coordinator, queue, rollouter, row_keys, trainer
from headrace.monitoring.expressions import (
    largest,
    lines,
    mean,
    number,
    of,
    of_pods,
    of_run,
    rate,
    share,
)
from headrace.monitoring.panels import Panel, PanelRow

_TRAINER_IDLE = share(trainer.WAIT_SECONDS, trainer.STEP_SECONDS)
_BUSY = share(rollouter.ACTIVE, rollouter.WINDOW)
_ROLLOUTER_IDLE = f"clamp_min(1 - {_BUSY}, 0)"
_UP = of_run("up", 'job="rollouter"')
_FIRING = of_run("ALERTS", 'alertname=~"Headrace.*", alertstate="firing"')
# The chart shortens long release names for its objects, so the Deployment's name is derived from a pod's. Any
# of the run's pods will do, since there may be no rollouters.
_DEPLOYMENT = (
    f"label_replace({of_run('up')}, "
    '"deployment", "$1-rollouter", "pod", "(.+)-(?:coordinator|queue|rollouter|trainer)-.+")'
)
_DESIRED = (
    'sum(kube_deployment_spec_replicas{namespace=~"$namespace"} '
    f"and on (namespace, deployment) {_DEPLOYMENT}) or count({_UP})"
)

OVERVIEW = PanelRow(
    "Overview",
    [
        number(
            "Trainer idle",
            "percentunit",
            of_run("release:headrace_trainer_idle:ratio_rate15m"),
            "Share of its time in which the trainer waited for samples, over 15 minutes.",
            low=0.3,
            high=0.5,
        ),
        number(
            "Rollouters idle",
            "percentunit",
            of_run("release:headrace_rollouter_idle:ratio_rate15m"),
            "Share of the time in which an engine had no running request, over 15 minutes.",
            low=0.3,
            high=0.5,
        ),
        number("Policy version", "none", largest(of_run(coordinator.POLICY_VERSION))),
        number(
            "Local updates per hour",
            "none",
            f"sum by (release) (increase({of_run(trainer.UPDATES)}[1h]))",
        ),
        number(
            "Stale samples",
            "percentunit",
            of_run("release:headrace_stale_samples:ratio_rate15m"),
            "Share of the trained samples that an older version began, over 15 minutes.",
        ),
        Panel(
            "stat",
            "Alerts",
            "none",
            [
                (
                    "firing",
                    f"count({_FIRING}) or vector(0)",
                )
            ],
            "docs/operations.md says what each means and what to do.",
            width=4,
            height=4,
            high=1,
        ),
        lines("Idle", "percentunit", ("trainer", _TRAINER_IDLE), ("rollouters", _ROLLOUTER_IDLE)),
        lines(
            "Rollouters",
            "none",
            ("desired", _DESIRED),
            ("up", f"sum({_UP})"),
            ("take part", largest(of_run(queue.MEMBERS))),
            ("about to go", largest(of_run(coordinator.LEAVING))),
            ("recommended", largest(of_run(coordinator.RECOMMENDED_ROLLOUTERS))),
            about="Desired: the Deployment's replicas, or what is scraped where nothing tells them. "
            "Recommended: what both idle ratios ask for, three syncs in a row.",
        ),
        lines(
            "Tokens per second",
            "short",
            ("generated", rate(of_run(rollouter.TOKENS))),
            ("trained", rate(of_run(trainer.TOKENS))),
        ),
        of(trainer.GAUGES[row_keys.REWARD_MEAN]),
        of(queue.VALIDATION_SCORE),
        of(trainer.SAMPLES),
    ],
)

_WHAT_TO_DO = """
| trainer idle | rollouters idle | what to do |
|---|---|---|
| high | low | move GPUs to the rollouters, or add replicas |
| low | high | move GPUs to the trainer, or raise η a little |
| high | high | the sync or the reward takes the time: look at the sync row, then at the reward's seconds |
| low | low | balanced |

A high wait with **uniform lengths** asks for more rollout GPUs. A high wait with a **long tail** (p99 far
above p50) asks for stop criteria or partial rollout, not for GPUs. With η = 0 the two sides take turns by
design.
"""
_VERDICT = (
    f"({of_run('release:headrace_trainer_idle:ratio_rate15m')} > bool 0.3) "
    f"+ 2 * ({of_run('release:headrace_rollouter_idle:ratio_rate15m')} > bool 0.3)"
)

BALANCE = PanelRow(
    "Balance",
    [
        Panel("text", "What to do", text=_WHAT_TO_DO, width=12),
        Panel(
            "stat",
            "Who waits",
            "none",
            [("{{release}}", _VERDICT)],
            "Above 30 % over 15 minutes.",
            width=4,
            names=(
                ("balanced", "green"),
                ("trainer: more rollout GPUs", "yellow"),
                ("rollouters: more trainer GPUs", "yellow"),
                ("both: sync or reward", "red"),
            ),
        ),
        lines(
            "Idle by rollouter",
            "percentunit",
            ("{{pod}}", of_pods("pod:headrace_rollouter_idle:ratio_rate15m")),
        ),
        lines(
            "Slots in use",
            "percentunit",
            ("{{release}}", of_run("release:headrace_rollouter_utilization:ratio")),
            about="Running sequences over those of full slots.",
        ),
        of(rollouter.REWARD_SECONDS),
        lines(
            "Seconds of an update by phase",
            "s",
            ("{{phase}}", mean(trainer.PHASE, "phase")),
            stacked=True,
            about="Mean per update in which the phase occurred.",
        ),
        of(rollouter.RESPONSE_TOKENS),
        lines(
            "Gate",
            "none",
            ("allowed", largest(of_run(queue.MAX_REQUIRED))),
            (
                "outstanding or trained since the sync",
                " + ".join(
                    largest(of_run(metric))
                    for metric in (
                        queue.IN_FLIGHT,
                        queue.PARKED,
                        queue.DEPTH,
                        queue.TRAINING,
                        queue.TRAINED_SINCE_SYNC,
                    )
                ),
            ),
            about="At the limit no new sample is started: the rollouters wait for the trainer.",
        ),
        lines(
            "Requests for work by answer",
            "short",
            ("{{status}}", rate(of_pods(rollouter.TAKES), "status")),
            about="gate_closed: waiting for the trainer; empty: waiting for prompts; held: a sync round.",
        ),
    ],
)
