"""Translate verl's configuration keys to ours, one by one (`translate`) or a whole file (`convert`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeGuard

from headrace.algorithms.registries import ADVANTAGE_ESTIMATORS
from headrace.compat.verl.keys import (
    DIFFERENT_DEFAULTS,
    KEYS,
    NOTHING,
    PREFIX,
    Meaning,
    NoEffect,
    Partly,
    Refused,
    Same,
)

_NO_COUNTERPART = re.compile(
    r"(^|\.)(_target_|profiler|fsdp_config|checkpoint|engine_kwargs|agent|trace|ray_kwargs|ray_init|hydra"
    r"|global_profiler|megatron|override_config|sandbox_fusion|pf_ppo|fused_kernel_options)(\.|$)|^defaults$"
)
"""Sections that configure how verl itself runs."""


class NoCounterpart(ValueError):
    """A verl key or value has no counterpart here. The message says what to do."""

    part: tuple[str, Any] | None = None
    """Our key, and the part of the value that has a counterpart."""


def without_prefix(key: str) -> str:
    return key.removeprefix(PREFIX)


def meaning(key: str) -> Meaning | None:
    """Return what a verl key means here; None if it is unknown."""
    key = without_prefix(key)
    found = KEYS.get(key)
    while found is None and "." in key:
        key = key.rpartition(".")[0]
        found = KEYS.get(f"{key}.*")
    return found


def section_of_its_own(key: str, known: frozenset[str]) -> str | None:
    """Return the section on how verl itself runs that contains `key`; None if there is none or it is ours."""
    at = _NO_COUNTERPART.search(key)
    section = key[: at.end()].rstrip(".") if at is not None else None
    return None if section is None or any(f"{one}.".startswith(f"{section}.") for one in known) else section


def is_foreign(key: str, value: Any, known: frozenset[str]) -> bool:
    """Whether a key is to be read as verl's: it is not ours, or its value is not in our notation."""
    found = meaning(key)
    if key not in known:
        return found is not None
    if not isinstance(found, Same):
        return False
    try:
        return bool(found.value(value) != value)
    except ValueError:
        return True


@cache
def _sections() -> frozenset[str]:
    """Return verl's sections that contain known keys."""
    return frozenset(key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1))


def leaves(values: Mapping[Any, Any], known: frozenset[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a nested mapping.

    A mapping whose key is in `known` or in verl's table is itself a value.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        is_section = without_prefix(key) in _sections() or (key not in known and meaning(key) is None)
        if isinstance(value, Mapping) and value and is_section:
            yield from leaves(value, known, key + ".")
        else:
            yield key, value


def translate(key: str, value: Any) -> tuple[str, Any] | None:
    """Translate a verl key that `meaning` knows and its value to ours; None if there is nothing to set.

    Raises NoCounterpart.
    """
    found = meaning(key)
    if isinstance(found, Refused):
        if value is None or value == {}:
            return None
        raise NoCounterpart(found.advice)
    if isinstance(found, NoEffect):
        if found.values is not None and not _among(value, found.values):
            raise NoCounterpart(f"{value!r} has no counterpart; {found.otherwise}")
        return None
    assert isinstance(found, Same), key
    try:
        ours = found.value(value)
    except ValueError as error:
        refused = NoCounterpart(str(error))
        if isinstance(error, Partly) and error.kept:
            refused.part = found.key, error.kept
        raise refused from None
    return None if ours is NOTHING else (found.key, ours)


def unlike(key: str, value: Any, ours: Any) -> str | None:
    """Say how a verl value differs from `ours`, the value of our key that it must equal; None if equal."""
    found = meaning(key)
    if not isinstance(found, NoEffect) or value is None or value == ours:
        return None
    return f"{value!r} is not {found.equal_to} ({ours!r}), and {found.because}; {found.otherwise}"


def _among(value: Any, values: tuple[Any, ...]) -> bool:
    """Like `in`, but 0 does not equal False."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


# -- a whole file -------------------------------------------------------------------------------------


@dataclass
class Converted:
    """A translated configuration, with notes about it."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values by our dotted key."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Those of `values` that are not in verl's file: verl's defaults that differ from ours."""
    left_out: list[tuple[str, str]] = field(default_factory=list)
    """(verl's key, why it has no counterpart and what to do)."""


def convert(values: Mapping[str, Any]) -> Converted:
    """Convert a verl configuration to ours, resolving interpolations (`${...}`)."""
    out = Converted()
    flat = dict(leaves(values, frozenset()))
    ignored: dict[str, int] = {}
    for key, raw in flat.items():
        if meaning(key) is None and (section := section_of_its_own(key, frozenset())) is not None:
            ignored[section] = ignored.get(section, 0) + 1
            continue
        try:
            value = resolve(raw, key, flat)
            if meaning(key) is None and value:  # a disabled or empty setting needs no counterpart
                raise NoCounterpart("there is no such setting here")
            ours = translate(key, value) if meaning(key) is not None and value is not None else None
        except NoCounterpart as error:
            out.left_out.append((key, str(error)))
            ours = error.part
        if ours is None:
            continue
        if out.values.setdefault(*ours) != ours[1]:
            out.left_out.append((key, f"{ours[0]} is {out.values[ours[0]]!r} by another key"))
    _replicas(flat, out)
    _run_length(flat, out)
    _clip_ratio(out)
    _greedy_validation(flat, out)
    _alike(flat, out)
    out.left_out += [(key, f"how verl itself runs ({n} keys)") for key, n in sorted(ignored.items())]
    for name, value in DIFFERENT_DEFAULTS.items():
        if name == "sync.transport" and out.values.get("trainer.device") != "cuda":
            continue
        if name not in out.values:
            out.values[name] = out.defaults[name] = value
    estimator = ADVANTAGE_ESTIMATORS.loaded(str(out.values["algorithm.adv_estimator"]))
    if estimator is not None and estimator.values and "critic.enable" not in out.values:
        out.values["critic.enable"] = True
    return out


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _replicas(flat: Mapping[str, Any], out: Converted) -> None:
    """Derive the number of engines from the rollout GPUs."""
    nodes, gpus = (flat.get(f"rollout.{key}") for key in ("nnodes", "n_gpus_per_node"))
    parallel = out.values.get("rollout.engine.tensor_parallel_size", 2)
    if not (_is_count(nodes) and _is_count(gpus) and _is_count(parallel)):
        return
    if nodes * gpus % parallel == 0:
        out.values["rollout.replicas"] = nodes * gpus // parallel
        used = {"rollout.nnodes", "rollout.n_gpus_per_node"}
        out.left_out = [(key, why) for key, why in out.left_out if key not in used]


def _run_length(flat: Mapping[str, Any], out: Converted) -> None:
    """Translate verl's batch to a sync window and its steps to the run's length."""
    batch, steps = flat.get("data.train_batch_size"), flat.get("trainer.total_training_steps")
    if not _is_count(batch):
        return
    mini = out.values.get("actor.ppo_mini_batch_size", DIFFERENT_DEFAULTS["actor.ppo_mini_batch_size"])
    batches = out.values.get("async_training.require_batches", 1)
    update = mini * batches if _is_count(mini) and _is_count(batches) else 0
    done = set()
    if update and batch % update == 0:
        done.add("data.train_batch_size")
        out.values.setdefault("async_training.trigger_parameter_sync_step", batch // update)
    if _is_count(steps):
        done.add("trainer.total_training_steps")
        out.values.setdefault("rollout.total_rollout_steps", batch * steps)
    out.left_out = [(key, why) for key, why in out.left_out if key not in done]


def _clip_ratio(out: Converted) -> None:
    """verl uses `clip_ratio` only where the other two are unset."""
    if {"actor.clip_ratio_low", "actor.clip_ratio_high"} <= out.values.keys():
        out.left_out = [(k, why) for k, why in out.left_out if without_prefix(k) != "actor.clip_ratio"]


def _greedy_validation(flat: Mapping[str, Any], out: Converted) -> None:
    """verl validates greedily unless `do_sample` is set, regardless of the temperature."""
    sampled = [value for key, value in flat.items() if without_prefix(key) == "rollout.val_kwargs.do_sample"]
    if True not in sampled and "val.temperature" in out.values:
        out.values["val.temperature"] = 0
    out.left_out = [
        (k, why) for k, why in out.left_out if without_prefix(k) != "rollout.val_kwargs.do_sample"
    ]


def _alike(flat: Mapping[str, Any], out: Converted) -> None:
    """Check the keys whose value must equal that of another key."""
    for key, raw in flat.items():
        found = meaning(key)
        if isinstance(found, NoEffect) and found.equal_to:
            try:
                why = unlike(key, resolve(raw, key, flat), out.values.get(found.equal_to))
            except NoCounterpart:  # already reported
                continue
            out.left_out += [(key, why)] if why else []


_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?(?P<key>[^,{}$]+?)(?:,(?P<default>[^{}$]*))?\}$")


def resolve(value: Any, key: str, flat: Mapping[str, Any], depth: int = 0) -> Any:
    """Resolve `${a.b}`, `${.sibling}` and `${oc.select:a.b,default}` in `value`. Raises NoCounterpart."""
    if not isinstance(value, str) or "${" not in value:
        return value
    at = _REFERENCE.match(value)
    if at is None or depth > 8:
        raise NoCounterpart(f"{value!r} cannot be followed; write its value")
    target = at["key"].strip()
    if target.startswith("."):
        target = f"{key.rpartition('.')[0]}{target}"
    if target in flat:
        return resolve(flat[target], target, flat, depth + 1)
    if at["default"] is None:
        raise NoCounterpart(f"{value!r} leads nowhere; write its value")
    import yaml

    try:
        return yaml.safe_load(at["default"])
    except yaml.YAMLError:
        raise NoCounterpart(f"{value!r} has a default that is no YAML; write its value") from None
