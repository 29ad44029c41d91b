"""What a run keeps from its beginning to its end, as its ledger remembers it: fields whose lifetime is `RUN`.

The queue service writes it at the first start (with digests of the data, which it alone reads) and recognises
the run by it. Every other service compares what it knows, so that a file that has changed under a run is
refused by all alike. A run that an earlier release began lacks some keys; what it lacks is not compared.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from headrace.config import lifetime
from headrace.config.run import RunConfig

_ALWAYS = ("data.shuffle", "rollout.n", "rollout.total_rollout_steps", "seed")
LATER = frozenset(lifetime.in_ledger()).difference(_ALWAYS)
"""What runs of earlier releases may lack."""


def of(config: RunConfig) -> dict[str, object]:
    """By key, what of the configuration the samples and checkpoints are made with."""
    return {key: _noted(key, _attribute(config, key)) for key in lifetime.in_ledger()}


def _attribute(config: RunConfig, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), config)


def _noted(key: str, value: Any) -> object:
    if key == "model.path":  # its name, not where it lies: a checkout or a cache may have moved
        return Path(value).name
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict) else value


def scoring(config: RunConfig) -> str:
    """Digest of what may change within a run and makes finished samples unlike new ones: their rewards."""
    how_called = {"timeout_s", "concurrency", "retries", "token_env"}
    facts = {
        "function": config.custom_reward_function.model_dump(exclude=how_called),
        "sources": {
            name: source.model_dump(exclude=how_called) for name, source in config.reward.sources.items()
        },
        "baseline": config.has_greedy_baseline,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def changes(fingerprint: str, config: RunConfig) -> list[str]:
    """One sentence for every key in which `config` is another run than the one of the ledger."""
    try:
        begun = json.loads(fingerprint)
    except ValueError:
        begun = None
    if not isinstance(begun, dict):
        return []
    return [
        f"{key}: was {begun[key]!r} when the run {config.name!r} was begun and is {now!r} now, which its "
        "samples and checkpoints do not fit; set it back, or choose another name to start a new run"
        for key, now in of(config).items()
        if key in begun and begun[key] != now
    ]
