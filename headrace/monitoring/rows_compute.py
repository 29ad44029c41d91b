"""Dashboard rows on computation: vLLM, the trainer, GPUs."""

from __future__ import annotations

from headrace.metrics import rollouter, row_keys, trainer
from headrace.monitoring.expressions import largest, lines, mean, of, of_pods, of_run, quantile, rate, sum_of
from headrace.monitoring.panels import PanelRow

VLLM = PanelRow(
    "vLLM",
    [
        lines(
            "Requests running",
            "none",
            ("{{pod}}", f"sum by (pod) ({of_pods('vllm:num_requests_running')})"),
            about="Stands still while the engine is paused.",
        ),
        lines(
            "Requests waiting",
            "none",
            ("{{pod}}", f"sum by (pod) ({of_pods('vllm:num_requests_waiting')})"),
            about="Within the engine: its slots or its KV cache are full.",
        ),
        lines("KV cache used", "percentunit", ("{{pod}}", of_pods("vllm:kv_cache_usage_perc"))),
        lines(
            "Tokens generated per second",
            "short",
            ("{{pod}}", rate(of_pods("vllm:generation_tokens_total"), "pod")),
        ),
        lines(
            "Prompt tokens per second",
            "short",
            ("{{pod}}", rate(of_pods("vllm:prompt_tokens_total"), "pod")),
            about="Rises at each sync that interrupts: what was running is prefilled again.",
        ),
        lines(
            "Prefix cache hits",
            "percentunit",
            (
                "{{pod}}",
                f"{rate(of_pods('vllm:prefix_cache_hits_total'), 'pod')} / "
                f"{rate(of_pods('vllm:prefix_cache_queries_total'), 'pod')}",
            ),
        ),
        lines(
            "Preemptions",
            "none",
            (
                "{{pod}}",
                f"sum by (pod) (increase({of_pods('vllm:num_preemptions_total')}[$__rate_interval]))",
            ),
            about="Those of a sync are among them.",
        ),
        lines(
            "Seconds between tokens",
            "s",
            ("p50", quantile(0.5, "vllm:inter_token_latency_seconds")),
            ("p99", quantile(0.99, "vllm:inter_token_latency_seconds")),
        ),
        lines(
            "Requests ended",
            "short",
            ("{{finished_reason}}", rate(of_pods("vllm:request_success_total"), "finished_reason")),
            about="Per second, by reason.",
        ),
    ],
)

TRAINER = PanelRow(
    "Trainer",
    [
        lines(
            "Share of the time by phase",
            "percentunit",
            ("{{phase}}", rate(of_run(sum_of(trainer.PHASE)), "phase")),
            stacked=True,
        ),
        lines(
            "Seconds of the update by quantile",
            "s",
            (
                "update_actor p50",
                quantile(0.5, trainer.PHASE, 'phase="update_actor"'),
            ),
            ("gen_wait p50", quantile(0.5, trainer.PHASE, 'phase="gen_wait"')),
            ("gen_wait p99", quantile(0.99, trainer.PHASE, 'phase="gen_wait"')),
        ),
        of(trainer.GAUGES[row_keys.ACTOR_ENTROPY]),
        of(trainer.GAUGES[row_keys.ACTOR_GRAD_NORM]),
        lines(
            "Tokens clipped",
            "percentunit",
            ("upper or lower", largest(of_run(trainer.GAUGES[row_keys.ACTOR_PG_CLIPFRAC]))),
            ("dual clip", largest(of_run(trainer.GAUGES[row_keys.ACTOR_PG_CLIPFRAC_LOWER]))),
        ),
        lines(
            "Loss and KL",
            "short",
            ("policy loss", largest(of_run(trainer.GAUGES[row_keys.ACTOR_PG_LOSS]))),
            ("KL old to current", largest(of_run(trainer.GAUGES[row_keys.ACTOR_PPO_KL]))),
        ),
        lines(
            "Reward of trained trajectories",
            "short",
            ("p10", quantile(0.1, trainer.REWARD)),
            ("mean", largest(of_run(trainer.GAUGES[row_keys.REWARD_MEAN]))),
            ("p90", quantile(0.9, trainer.REWARD)),
        ),
        lines(
            "Mean response length",
            "none",
            ("generated", mean(rollouter.RESPONSE_TOKENS)),
            ("trained", mean(trainer.RESPONSE_TOKENS)),
            about="Trained shorter than generated for long: what is long does not get trained.",
        ),
        lines(
            "Groups that teach nothing, responses cut",
            "percentunit",
            ("groups without spread", largest(of_run(trainer.GAUGES[row_keys.GROUP_ZERO_STD_RATIO]))),
            ("responses at the limit", largest(of_run(trainer.GAUGES[row_keys.RESPONSE_LENGTH_CLIP_RATIO]))),
        ),
        of(trainer.GAUGES[row_keys.ACTOR_LR]),
        lines(
            "Steps skipped",
            "none",
            ("so far", f"sum by (release) ({of_run(trainer.SKIPPED)})"),
            about="Something was not finite.",
        ),
        lines(
            "Memory by pod",
            "bytes",
            ("{{pod}}", f"sum by (pod) ({of_pods('process_resident_memory_bytes')})"),
            about="Of the process that shows the metrics.",
        ),
    ],
)


def on_gpus(expression: str) -> str:
    """A DCGM expression for the GPUs of the chosen pods, in the exporter's label `exported_pod`.

    DCGM does not know releases, so they come from the pods' own `up`.
    """
    chosen = f"0 * {of_pods('up')} + 1"
    for there, here in (("exported_pod", "pod"), ("exported_namespace", "namespace")):
        chosen = f'label_replace({chosen}, "{there}", "$1", "{here}", "(.+)")'
    pods = f"max by (exported_namespace, exported_pod, release, job) ({chosen})"
    return f"{expression} * on (exported_namespace, exported_pod) group_left (release, job) {pods}"


_GPU = "{{job}} {{exported_pod}} GPU {{gpu}}"

GPU = PanelRow(
    "GPU",
    [
        lines(
            "GPU busy",
            "percentunit",
            (_GPU, on_gpus("DCGM_FI_DEV_GPU_UTIL / 100")),
            about="Share of the time in which any kernel ran.",
        ),
        lines(
            "Tensor cores busy",
            "percentunit",
            (_GPU, on_gpus("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")),
            about="What the arithmetic really gets; needs DCGM's profiling metrics.",
        ),
        lines(
            "GPU memory used",
            "bytes",
            (_GPU, on_gpus("DCGM_FI_DEV_FB_USED * 1048576")),
        ),
        lines("Power", "watt", (_GPU, on_gpus("DCGM_FI_DEV_POWER_USAGE"))),
        lines(
            "NVLink received",
            "Bps",
            (_GPU, on_gpus("rate(DCGM_FI_PROF_NVLINK_RX_BYTES[$__rate_interval])")),
        ),
        lines(
            "XID errors",
            "none",
            (_GPU, on_gpus("DCGM_FI_DEV_XID_ERRORS")),
            about="Number of the last error; 0 is well.",
        ),
    ],
)
