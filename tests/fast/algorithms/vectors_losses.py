"""Losses, their aggregation and KL terms against the file of expected numbers."""

from __future__ import annotations

import re
from typing import Any

import torch

from headrace.algorithms import kl, shaping, value_loss
from headrace.algorithms.aggregation import Denominators, aggregate, count
from headrace.algorithms.importance_weights import effective_sample_size
from headrace.algorithms.log_probs import token_log_probs
from headrace.algorithms.masked import masked_mean
from headrace.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInput,
    PolicyLossSettings,
    TokenLosses,
    policy_loss,
)
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig
from tests.fast.algorithms.vectors_file import Vectors, compare_correction_metric, gradient, lookup, number


def agg_loss(v: Vectors, name: str) -> None:
    path = ("agg_loss", name)
    info = dict(pair.split("=") for pair in v.read("agg_loss", "_global_info").split(","))
    if name == "_global_info":
        return
    matrix, mask = v.tensor("agg_loss_matrix"), v.batch("response_mask")
    horizon = float(mask.shape[1])
    for key in lookup(path):
        if row := re.fullmatch(r"one_seq_fully_masked_row(\d+)", key):
            partly = mask.clone()
            partly[int(row[1])] = 0
            v.compare(aggregate(name, matrix, partly, count(partly, horizon)), *path, key)
        elif key == "full":
            v.compare(aggregate(name, matrix, mask, count(mask, horizon)), *path, key)
        else:
            assert key == "global_info", key
            denominators = Denominators(
                float(info["batch_num_tokens"]),
                float(info["global_batch_size"]),
                float(info["loss_scale_factor"]),
                int(info["dp_size"]),
            )
            v.compare(aggregate(name, matrix, mask, denominators), *path, key)


def kl_penalty(v: Vectors, name: str) -> None:
    path = ("kl_penalty", name)
    if name.startswith("extreme_"):
        value = kl.kl_penalty(
            name.removeprefix("extreme_"), v.tensor(*path, "logprob"), v.tensor(*path, "ref")
        )
        v.compare(value, *path, "value")
        v.read(*path, "note")
        return
    mask = v.batch("response_mask")
    log_probs = v.batch("log_probs").requires_grad_()
    value = kl.kl_penalty(name, log_probs, v.batch("ref_log_probs"), mask)
    v.compare(value, *path, "value", mask=mask)
    v.compare(gradient((value * mask).sum(), log_probs), *path, "grad_of_masked_sum", mask=mask)
    v.compare(masked_mean(value, mask), *path, "masked_mean")


def adaptive_kl(v: Vectors, _: str) -> None:
    path = ("adaptive_kl",)
    init, target, horizon, n = (v.read(*path, key) for key in ("init", "target", "horizon", "n_steps"))
    controller = kl.AdaptiveKl(init, target, horizon)
    betas = []
    for current in v.read(*path, "current_kl"):
        controller = controller.updated(current, n)
        betas.append(controller.beta)
    v.compare(betas, *path, "values")


def value_loss_cases(v: Vectors, name: str) -> None:
    if name == "returns_from":
        v.read("value_loss", name)
        return
    source = v.read("value_loss", "returns_from")
    returns = torch.tensor(lookup(("advantage_estimators", source, "returns")), dtype=torch.float64)
    mask = v.batch("response_mask")
    for case in lookup(("value_loss", name)):
        path = ("value_loss", name, case)
        settings = re.fullmatch(r"clip([\d.]+)_(.+)", case)
        assert settings, case
        predictions = v.batch("vpreds").requires_grad_()
        per_token, clipped = value_loss.clipped_value_loss(
            predictions, v.batch("values"), returns, mask, float(settings[1])
        )
        loss = aggregate(settings[2], per_token, mask, count(mask))
        v.compare(loss, *path, "loss")
        v.compare(masked_mean(clipped.double(), mask), *path, "clipfrac")
        v.compare(gradient(loss, predictions), *path, "grad_vpreds", mask=mask)


def entropy(v: Vectors, _: str) -> None:
    mask = v.tensor("entropy", "mask")
    logits = v.tensor("entropy", "logits")
    ids = torch.zeros(logits.shape[:2], dtype=torch.int64)
    per_token = token_log_probs(logits, ids, torch.ones(1, 1))[1]
    v.compare(per_token, "entropy", "token_entropy", mask=mask)
    loss = aggregate("token-mean", per_token, mask, count(mask))
    v.compare(loss, "entropy", "entropy_loss_token_mean")


def dapo_overlong(v: Vectors, index: str) -> None:
    path = ("dapo_overlong", index)
    length, longest, buffer, factor = (
        v.read(*path, key) for key in ("length", "max_len", "buffer", "factor")
    )
    penalty = shaping.overlong_penalty(torch.tensor([length]), longest, buffer, factor)
    v.compare(penalty[0], *path, "penalty")


# ---- policy losses ----

VERL_CLIP, VERL_DUAL_CLIP, VERL_DIVERGENCE_CAP = 0.2, 3.0, 20.0
"""verl's defaults where an entry's config is silent."""


def loss_input(v: Vectors, settings: PolicyLossSettings, **changes: Any) -> PolicyLossInput:
    return PolicyLossInput(
        log_probs=v.batch("log_probs").requires_grad_(),
        old_log_probs=changes.pop("old_log_probs", v.batch("old_log_probs")),
        advantages=v.tensor("loss_advantages"),
        mask=v.batch("response_mask"),
        behaviour_log_probs=v.batch("rollout_log_probs"),
        settings=settings,
        **changes,
    )


def leaf_loss(
    name: str, inputs: PolicyLossInput, aggregation: str, denominators: Denominators | None = None
) -> tuple[TokenLosses, torch.Tensor, torch.Tensor]:
    """Token losses, the scalar, and its gradient by log-prob."""
    losses = policy_loss(name, inputs)
    if denominators is None:
        denominators = count(losses.mask, float(losses.mask.shape[1]))
    loss = aggregate(aggregation, losses.per_token, losses.mask, denominators)
    return losses, loss, gradient(loss, inputs.log_probs)


def verl_settings(config: dict[str, Any]) -> PolicyLossSettings:
    low = config.get("clip_ratio_low", config.get("clip_ratio", VERL_CLIP))
    high = config.get("clip_ratio_high", config.get("clip_ratio", VERL_CLIP))
    correction = {k: x for k, x in config.items() if k.startswith("rollout_")}
    same = ("tau_pos", "tau_neg", "dro_beta", "kl_cov_ratio", "ppo_kl_coef")
    return PolicyLossSettings(
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=config.get("clip_ratio_c", VERL_DUAL_CLIP),
        divergence_low=low,
        divergence_high=high,
        divergence_ratio_cap=config.get("clip_ratio_c", VERL_DIVERGENCE_CAP),
        rollout_correction=RolloutCorrectionConfig(**correction),
        **{key: config[key] for key in same if key in config},
    )


def policy_losses(v: Vectors, name: str) -> None:
    path = ("policy_losses", name)
    mode, aggregation = v.read(*path, "loss_mode"), v.read(*path, "agg")
    config = v.read(*path, "config")
    if "note" in lookup(path):
        v.read(*path, "note")
    changes: dict[str, Any] = {}
    if v.read(*path, "is_weights"):
        changes["importance_weights"] = v.tensor("loss_is_weights")
    if name.endswith("old_is_rollout"):
        changes["old_log_probs"] = v.batch("rollout_log_probs")
    if mode == "bypass_mode":
        mode = f"bypass_{config['loss_type']}"
    if POLICY_LOSSES.get(mode).aggregation != "token-mean":
        aggregation = POLICY_LOSSES.get(mode).aggregation
    inputs = loss_input(v, verl_settings(config), **changes)
    losses, loss, grad = leaf_loss(mode, inputs, aggregation)
    mask = v.batch("response_mask")
    v.compare(loss, *path, "loss")
    v.compare(grad, *path, "grad", mask=mask)
    for key in lookup((*path, "metrics")):
        if key.startswith("rollout_corr/"):
            compare_correction_metric(v, losses.scalars, *path, "metrics", key)
            continue
        ours = {
            "actor/pg_clipfrac": "clip_fraction",
            "actor/pg_clipfrac_lower": "clip_fraction_lower",
            "actor/ppo_kl": "absolute_kl" if mode == "kl_cov" else "kl",
        }[key]
        # A loss that does not clip has no such metric; verl reports 0.
        value = losses.metrics.get(ours, torch.zeros_like(mask))
        v.compare(masked_mean(value, losses.mask), *path, "metrics", key)


def prime_rl_default_loss(v: Vectors, _: str) -> None:
    path = ("prime_rl_default_loss",)
    config = v.read(*path, "config")
    settings = PolicyLossSettings(
        divergence_low=config["dppo_mask"],
        divergence_high=config["dppo_mask"],
        adv_tau=config["adv_tau"],
        kl_tau=config["kl_tau"],
    )
    inputs = loss_input(v, settings)
    losses, loss, grad = leaf_loss("prime_rl", inputs, "token-mean")
    v.compare(losses.per_token.sum(), *path, "loss_sum_over_tokens")
    v.compare(loss, *path, "loss_token_mean")
    v.compare(grad, *path, "grad_token_mean", mask=inputs.mask)
    (rows,) = (key for key in lookup(path) if key.startswith("metrics_row"))
    row = int(rows.removeprefix("metrics_row"))
    metrics = {key: value[row] for key, value in losses.metrics.items()}
    on, dropped = losses.mask[row], metrics["clip_fraction"] > 0
    advantages = inputs.advantages[row]
    expected = {
        "masked_mismatch_kl": masked_mean(metrics["mismatch_kl"], on & dropped),
        "unmasked_mismatch_kl": masked_mean(metrics["mismatch_kl"], on & ~dropped),
        "is_masked": masked_mean(metrics["clip_fraction"], on),
        "is_masked_low": masked_mean(metrics["dropped_low"], on),
        "is_masked_high": masked_mean(metrics["dropped_high"], on),
        "masked_advantage_positive": masked_mean((advantages > 0).double(), on & dropped),
        "masked_advantage_negative": masked_mean((advantages < 0).double(), on & dropped),
    }
    for key in lookup((*path, rows)):
        v.compare(expected[key], *path, rows, key)


def aipo_hand(v: Vectors, _: str) -> None:
    path = ("aipo_hand",)
    rho = number(r"rho=([\d.]+)", v.read(*path, "source"), 0.0)
    inputs = loss_input(v, PolicyLossSettings(rho_max=rho))
    loss = leaf_loss("aipo", inputs, "token-mean")[1]
    v.compare(loss, *path, "loss")
    log_weights = (inputs.log_probs - inputs.behaviour).detach()
    v.compare(effective_sample_size(log_weights, inputs.mask), *path, "ess")
