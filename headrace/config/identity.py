"""The fingerprint of a run in its ledger: the fields whose lifetime is `RUN`, which never change.

The queue service writes it at the first start, with digests of the data, which only it reads, and identifies
the run by it. Every other service compares the keys that it knows, so all of them refuse a file that changed
during a run. A run begun by an earlier release lacks some keys; missing keys are not compared.
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
"""Keys that runs of earlier releases may lack."""


def of(config: RunConfig) -> dict[str, object]:
    """Return, by key, the settings that samples and checkpoints depend on."""
    return {key: _noted(key, _attribute(config, key)) for key in lifetime.in_ledger()}


def _attribute(config: RunConfig, dotted: str) -> Any:
    return functools.reduce(getattr, dotted.split("."), config)


def _noted(key: str, value: Any) -> object:
    if key == "model.path":  # the name without its directory: a checkout or a cache may have moved
        return Path(value).name
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict) else value


def scoring(config: RunConfig) -> str:
    """Return a digest of the settings that may change within a run but change the rewards of new samples."""
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
    """Return one sentence for every key in which `config` differs from the ledger's run."""
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
