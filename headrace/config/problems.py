"""Finds inconsistencies between the settings of a configuration, each reported with its fix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.algorithms.registries import (
    ADVANTAGE_ESTIMATORS,
    KL_PENALTIES,
    POLICY_LOSSES,
    REJECTION_CRITERIA,
    PolicyLoss,
)
from headrace.config.algorithm_names import estimator_of, loss_of, name_problems
from headrace.config.gpu_arithmetic import Sharing
from headrace.config.redis_memory import too_small
from headrace.config.reward import reward_problems
from headrace.config.staleness import MODE_PARAMETERS
from headrace.plugins.transports import TRANSPORTS

if TYPE_CHECKING:
    from headrace.config.run import RunConfig


def cross_field_problems(c: RunConfig) -> list[str]:
    """Return all inconsistencies, each with its fix."""
    out = list(algorithm_problems(c))
    out += list(_mode_problems(c))
    out += list(reward_problems(c))
    out += c.environment.problems(c.sync.drain_stall_s)
    if (why := too_small(c, c.redis.max_memory_bytes)) is not None:
        out.append(f"redis.max_memory_bytes: {why}")
    length = c.data.max_prompt_length + c.data.max_response_length
    if c.model.max_model_len is not None and length > c.model.max_model_len:
        out.append(
            f"data.max_prompt_length + data.max_response_length = {length} is longer than "
            f"model.max_model_len = {c.model.max_model_len}: shorten them or raise model.max_model_len"
        )
    if c.actor.clip_ratio_low >= 1:
        out.append("actor.clip_ratio_low must be below 1 (the ratio's lower bound is 1 - clip_ratio_low)")
    if length > c.actor.ppo_max_token_len_per_gpu:
        out.append(
            f"actor.ppo_max_token_len_per_gpu = {c.actor.ppo_max_token_len_per_gpu} does not hold one "
            f"trajectory of {length} tokens: raise it to at least {length}"
        )
    if c.actor.ppo_mini_batch_size < c.world_size:
        out.append(
            f"actor.ppo_mini_batch_size = {c.actor.ppo_mini_batch_size} samples do not give each of "
            f"{c.world_size} ranks one: raise it to at least {c.world_size}"
        )
    if c.rollout.total_rollout_steps < c.samples_per_update:
        out.append(
            f"rollout.total_rollout_steps = {c.rollout.total_rollout_steps} is less than one update of "
            f"{c.samples_per_update} samples: raise it"
        )
    if _needs_gpus(c) and c.trainer.device != "cuda":
        out.append(f"sync.transport: {c.sync.transport} needs trainer.device: cuda; use gloo on CPU")
    if c.val.n > 1 and c.val.temperature == 0:
        out.append(
            f"val.n = {c.val.n} greedy responses to a prompt are all the same: set val.temperature above 0, "
            "or val.n to 1"
        )
    advice = c.kubernetes.recommendation
    if advice.min_rollouters > advice.max_rollouters:
        out.append(
            f"kubernetes.recommendation.min_rollouters = {advice.min_rollouters} is more than "
            f"max_rollouters = {advice.max_rollouters}: lower it"
        )
    if c.rollout.test_freq and not c.data.val_files:
        out.append("rollout.test_freq is set but data.val_files is empty: name a file or set test_freq to 0")
    return out


def _mode_problems(c: RunConfig) -> Iterator[str]:
    """Yield inconsistencies in how generation and training overlap."""
    a = c.async_training
    if a.partial_rollout and a.staleness_threshold == 0:
        yield (
            "async_training.partial_rollout: true has no effect with staleness_threshold 0, where nothing "
            "runs at a sync: set it to false, or async_training.staleness_threshold above 0"
        )
    if a.max_version_gap is not None and not a.partial_rollout:
        yield (
            "async_training.max_version_gap bounds partial rollout, which is off (running work finishes "
            "before each sync, as with 1): unset it, or set async_training.partial_rollout to true"
        )
    if c.mode is None:
        return
    for key, value in MODE_PARAMETERS[c.mode].items():
        found = getattr(a, key)
        if found != value:
            yield (
                f"mode: {c.mode} means async_training.{key} = {_yaml(value)}, found {_yaml(found)}: "
                "leave the key out, or leave mode out"
            )
    if (shared := c.gpu_sharing) is not None:
        yield from _sharing_problems(c, shared)
    bound = [f"{key}.cpus" for key in ("trainer", "rollout") if getattr(c, key).cpus is not None]
    if c.mode == "colocated_sync" and bound:
        yield f"mode: colocated_sync gives every phase all cores: unset {' and '.join(bound)}"


def _sharing_problems(c: RunConfig, shared: Sharing) -> Iterator[str]:
    """Yield problems of colocated sync on GPUs, where trainer and engines use the same ones."""
    if _needs_gpus(c):
        yield (
            f"mode: colocated_sync puts a trainer's rank and an engine on one GPU, where {c.sync.transport} "
            "takes no two ranks: set sync.transport to gloo"
        )
    if not shared.fits:
        yield (
            f"mode: colocated_sync shares every GPU between the trainer and {shared.engines} "
            f"{'engine' if shared.engines == 1 else 'engines'}, and "
            f"rollout.engine.gpu_memory_utilization = {shared.engine_share:g} leaves the trainer no tenth of "
            f"it: set it to {shared.largest_engine_share:g} or less, e.g. {_half(shared):g}"
        )
    engine = c.rollout.engine
    if engine.tensor_parallel_size > c.trainer.n_gpus_per_node:
        yield (
            f"mode: colocated_sync has {c.trainer.n_gpus_per_node} GPUs on a node, and "
            f"rollout.engine.tensor_parallel_size = {engine.tensor_parallel_size}: lower it"
        )


def _needs_gpus(c: RunConfig) -> bool:
    """Whether every rank of the weight group needs its own GPU. False if the transport is not imported."""
    transport = TRANSPORTS.loaded(c.sync.transport)
    return transport is not None and transport.memory == "cuda"


def _half(shared: Sharing) -> float:
    """Return an engine's share if the trainer gets as much as all engines of a GPU together."""
    return int(100 * 0.5 / shared.engines) / 100


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def algorithm_problems(c: RunConfig) -> Iterator[str]:
    """Yield inconsistencies in the algorithm's settings.

    For algorithms that are not imported yet, only what can be checked without knowing their requirements.
    """
    yield from name_problems(c)
    correction, recomputed = c.algorithm.rollout_correction, c.recomputes_old
    if (loss := loss_of(c)) is not None:
        yield from _loss_problems(c, loss)
    if (estimator := estimator_of(c)) is not None and estimator.sum_pi_squared and not recomputed:
        yield (
            f"{c.algorithm.adv_estimator} needs sums over the vocabulary under the old policy, which only "
            "the trainer can compute: set async_training.use_rollout_log_probs to false"
        )
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        yield "algorithm.rollout_correction.rollout_rs needs a rollout_rs_threshold"
    yield from _correction_problems(c)
    yield from _sampling_problems(c)
    yield from _critic_problems(c)
    a = c.algorithm
    known = ", ".join(KL_PENALTIES.names())
    if a.use_kl_in_reward and not KL_PENALTIES.knows(a.kl_penalty):
        yield f"algorithm.kl_penalty = {a.kl_penalty} is unknown; known: {known}"
    if c.actor.use_kl_loss and not KL_PENALTIES.knows(c.actor.kl_loss_type.removesuffix("+")):
        yield f"actor.kl_loss_type = {c.actor.kl_loss_type} is unknown; known: {known}, each also with a +"
    if a.gdpo_reward_weights is not None and len(a.gdpo_reward_weights) != len(a.gdpo_reward_keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(a.gdpo_reward_weights)} numbers for "
            f"{len(a.gdpo_reward_keys)} algorithm.gdpo_reward_keys: give one for each"
        )
    if a.gdpo_reward_keys and estimator is not None and not estimator.reward_components:
        names = " or ".join(ADVANTAGE_ESTIMATORS.having(lambda e: e.reward_components))
        yield (
            f"algorithm.gdpo_reward_keys is for algorithm.adv_estimator = {names}: set that, or leave it out"
        )
    if a.gdpo_reward_keys and (
        a.use_kl_in_reward or c.reward.overlong_buffer.enable or a.filter_groups.enable
    ):
        yield (
            "algorithm.gdpo_reward_keys takes the parts of the reward as they are; use_kl_in_reward, "
            "reward.overlong_buffer and filter_groups work on the whole: unset them (gdpo goes with "
            "actor.use_kl_loss)"
        )
    trajectories = c.samples_per_update * c.rollout.n
    control = a.kl_ctrl
    if a.use_kl_in_reward and control.type == "adaptive" and control.horizon <= 0.2 * trajectories:
        yield (
            f"algorithm.kl_ctrl.horizon = {control.horizon} is too short for {trajectories} trajectories per "
            f"update (the coefficient could turn negative): raise it above {int(0.2 * trajectories)}"
        )
    if a.filter_groups.enable and c.rollout.n < 2:
        yield "algorithm.filter_groups needs groups, but rollout.n is 1: set rollout.n to 2 or more"


_BAND = re.compile(r"^\s*[0-9.]+(e[-+]?[0-9]+)?(_[0-9.]+(e[-+]?[0-9]+)?)?\s*$", re.IGNORECASE)


def _correction_problems(c: RunConfig) -> Iterator[str]:
    """Check names and thresholds that would otherwise fail only in the first update."""
    r = c.algorithm.rollout_correction
    where = "algorithm.rollout_correction"
    names = [name.strip() for name in (r.rollout_rs or "").split(",") if name.strip()]
    unknown = [name for name in names if name not in REJECTION_CRITERIA]
    if unknown:
        known = ", ".join(sorted(REJECTION_CRITERIA))
        yield f"{where}.rollout_rs: {', '.join(unknown)} is unknown; known: {known}"
    bands = {"rollout_is_threshold": [str(r.rollout_is_threshold)]}
    bands["rollout_rs_threshold"] = str(r.rollout_rs_threshold).split(",") if names else []
    for key, found in bands.items():
        wrong = [text for text in found if not _BAND.match(text)]
        if wrong and not (key == "rollout_rs_threshold" and r.rollout_rs_threshold is None):
            yield f'{where}.{key}: {", ".join(wrong)!r} is no threshold: write a number or "lower_upper"'
    thresholds = len(bands["rollout_rs_threshold"])
    if names and r.rollout_rs_threshold is not None and thresholds not in (1, len(names)):
        yield f"{where}.rollout_rs_threshold: {thresholds} for {len(names)} criteria: give one or all"


def _sampling_problems(c: RunConfig) -> Iterator[str]:
    """Yield problems with top-p and top-k.

    With them, the engine's log-probs are renormalised over the kept tokens. The trainer does not know the
    kept set, so the ratio of its probabilities to the engine's is meaningless.
    """
    if c.rollout.top_p == 1 and c.rollout.top_k in (-1, 0):
        return
    what = "rollout.top_p" if c.rollout.top_p < 1 else "rollout.top_k"
    change = f"set rollout.top_p to 1 and rollout.top_k to -1 (found {what})"
    if not c.recomputes_old:
        yield (
            f"{what} makes the engine's log-probs those of the kept tokens only, and they are the old ones "
            f"of the ratio: {change}, or async_training.use_rollout_log_probs to false"
        )
    loss = loss_of(c)
    if (loss is not None and loss.behaviour_log_probs) or c.algorithm.rollout_correction.is_set:
        yield (
            f"{what} makes the engine's log-probs those of the kept tokens only, and {c.actor.policy_loss} "
            f"or the rollout correction compares them with the trainer's: {change}"
        )


def _critic_problems(c: RunConfig) -> Iterator[str]:
    name, enabled, estimator = c.algorithm.adv_estimator, c.critic.enable, estimator_of(c)
    if estimator is None:
        return
    if estimator.values and not enabled:
        yield f"algorithm.adv_estimator = {name} needs a critic: set critic.enable to true"
    if enabled and not estimator.values:
        names = " or ".join(ADVANTAGE_ESTIMATORS.having(lambda e: e.values))
        yield (
            f"critic.enable is set, but {name} uses no values: unset it, take {names}, or register yours "
            "with values=True"
        )


def _loss_problems(c: RunConfig, loss: PolicyLoss) -> Iterator[str]:
    """Yield unmet requirements of a policy loss."""
    correction, recomputed, name = c.algorithm.rollout_correction, c.recomputes_old, c.actor.policy_loss
    if correction.rollout_is and not recomputed and not loss.rollout_weights:
        yield (
            "algorithm.rollout_correction.rollout_is would weigh the ratio twice, since the engine's "
            "log-probs are the old ones: unset it, or set async_training.use_rollout_log_probs to false"
        )
    approximated = c.actor.prox_logp_method != "recompute"
    if loss.proximal:
        if not recomputed and not approximated:
            yield (
                f"actor.policy_loss = {name} needs a proximal policy: set "
                "async_training.use_rollout_log_probs to false, or actor.prox_logp_method to loglinear"
            )
        if recomputed and approximated:
            yield (
                f"actor.prox_logp_method = {c.actor.prox_logp_method} needs no recomputed log-probs: set "
                "async_training.use_rollout_log_probs to true, or actor.prox_logp_method to recompute"
            )
        if correction.rollout_is:
            yield (
                f"{name} weighs proximal / behaviour itself: unset algorithm.rollout_correction.rollout_is"
            )
    elif approximated:
        names = " or ".join(POLICY_LOSSES.having(lambda one: one.proximal))
        yield f"actor.prox_logp_method is for actor.policy_loss = {names}: set that, or leave it out"
    if loss.corrects_rollout and recomputed:
        yield (
            f"{name} takes the engine's log-probs as the old ones: set async_training.use_rollout_log_probs "
            "to true"
        )
