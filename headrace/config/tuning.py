"""What of its configuration may change while a run is on: the fields whose lifetime is `LIVE`, which are eta,
S and what the coordinator alone reads of its cluster. Everything else is refused by name.

A change is wanted as soon as it is in the file. The trainer takes eta and S up with its next snapshot, so
that a window has one S from its beginning to its end, and the gate follows with the commit of that snapshot.
"""

from __future__ import annotations

from headrace.config import lifetime, loading
from headrace.config.redis_memory import too_small
from headrace.config.run import RunConfig

TUNABLE = lifetime.keys("live")
GATE = tuple(key for key in TUNABLE if not key.startswith("kubernetes."))
"""The others are read by the coordinator alone, whenever it needs them."""
_LEFT_ALONE = frozenset((*TUNABLE, *lifetime.keys("initial")))
_HINT = {
    "async_training.partial_rollout": "write it down as it is: unset, it follows staleness_threshold",
}


def refused(before: RunConfig, after: RunConfig) -> list[str]:
    """One sentence for every key that differs and must not."""
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
    """`key: was -> is` for what may change and does."""
    out = []
    for key in TUNABLE:
        was, now = loading.value_at(before, key), loading.value_at(after, key)
        if was != now:
            out.append(f"{key}: {was} -> {now}")
    return out


def too_large(config: RunConfig, limit_bytes: int) -> str | None:
    """Why a server that may use `limit_bytes` does not hold what the gate of `config` lets in."""
    why = too_small(config, limit_bytes)
    return why and f"{' and '.join(GATE)}: Redis has maxmemory {limit_bytes}: {why}"
