"""Settings that may change during a run: the fields whose lifetime is `LIVE`.

These are eta, S and the cluster settings that only the coordinator reads. A change of any other is refused by
name. A change is requested once it is in the file. The trainer applies eta and S at its next snapshot, so
that S is constant within a window, and the gate follows when that snapshot is committed.
"""

from __future__ import annotations

from headrace.config import lifetime, loading
from headrace.config.redis_memory import too_small
from headrace.config.run import RunConfig

TUNABLE = lifetime.keys("live")
GATE = tuple(key for key in TUNABLE if not key.startswith("kubernetes."))
"""Only the coordinator reads the others, whenever it needs them."""
_LEFT_ALONE = frozenset((*TUNABLE, *lifetime.keys("initial")))
_HINT = {
    "async_training.partial_rollout": "write it down as it is: unset, it follows staleness_threshold",
}


def refused(before: RunConfig, after: RunConfig) -> list[str]:
    """Return one sentence for every key that must not change but does."""
    out = []
    for key in loading.known_keys():
        if key in _LEFT_ALONE:
            continue
        was, now = loading.value_at(before, key), loading.value_at(after, key)
        if was != now:
            hint = _HINT.get(key, "set it back, or stop the run and start it again")
            out.append(f"{key}: is {was!r} in the run that is on and cannot become {now!r} now; {hint}")
    return out


def changed(before: RunConfig, after: RunConfig) -> list[str]:
    """Return `key: was -> is` for every key that may change and does."""
    out = []
    for key in TUNABLE:
        was, now = loading.value_at(before, key), loading.value_at(after, key)
        if was != now:
            out.append(f"{key}: {was} -> {now}")
    return out


def too_large(config: RunConfig, limit_bytes: int) -> str | None:
    """Say why a server with `limit_bytes` cannot hold what the gate of `config` admits; else None."""
    why = too_small(config, limit_bytes)
    return why and f"{' and '.join(GATE)}: Redis has maxmemory {limit_bytes}: {why}"
