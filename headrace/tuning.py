"""What of its configuration may change while a run is on: eta, S, and what the coordinator alone reads of its
cluster. Everything else is refused by name.

A change is wanted as soon as it is in the file. The trainer takes eta and S up with its next snapshot, so
that a window has one S from its beginning to its end, and the gate follows with the commit of that snapshot.
"""

from __future__ import annotations

from headrace import config_load
from headrace.config import RunConfig
from headrace.config_kubernetes import RecommendationConfig
from headrace.memory import too_small

GATE = ("async_training.staleness_threshold", "async_training.trigger_parameter_sync_step")
COORDINATOR = (
    *(f"kubernetes.recommendation.{key}" for key in RecommendationConfig.model_fields),
    "kubernetes.scale_to_zero_on_completion",
    "kubernetes.deletion_cost_interval_s",
    "kubernetes.request_timeout_s",
)
"""Read by the coordinator alone, whenever it needs them."""
TUNABLE = (*GATE, *COORDINATOR)
AT_START = ("rollout.replicas",)
"""Only looked at when a run starts: `headrace scale` and `kubectl scale` change what it stands for."""
_HINT = {
    "async_training.partial_rollout": "write it down as it is: unset, it follows staleness_threshold",
}


def refused(before: RunConfig, after: RunConfig) -> list[str]:
    """One sentence for every key that differs and must not."""
    out = []
    for key in config_load.known_keys():
        if key in TUNABLE or key in AT_START:
            continue
        was, now = config_load.value_at(before, key), config_load.value_at(after, key)
        if was != now:
            hint = _HINT.get(key, "set it back, or stop the run and start it again")
            out.append(f"{key}: is {was!r} in the run that is on and cannot become {now!r} now; {hint}")
    return out


def changed(before: RunConfig, after: RunConfig) -> list[str]:
    """`key: was -> is` for what may change and does."""
    out = []
    for key in TUNABLE:
        was, now = config_load.value_at(before, key), config_load.value_at(after, key)
        if was != now:
            out.append(f"{key}: {was} -> {now}")
    return out


def too_large(config: RunConfig, limit_bytes: int) -> str | None:
    """Why a server that may use `limit_bytes` does not hold what the gate of `config` lets in."""
    why = too_small(config, limit_bytes)
    return why and f"{' and '.join(GATE)}: Redis has maxmemory {limit_bytes}: {why}"
