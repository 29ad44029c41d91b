"""Rollout correction, decoupled losses and admission rules against the file of expected numbers."""

from __future__ import annotations

import math

import torch

from headrace.algorithms import decoupled
from headrace.algorithms.aggregation import count
from headrace.algorithms.m2po import second_moment_mask
from headrace.algorithms.masked import masked_mean
from headrace.algorithms.policy_loss import PolicyLossSettings
from headrace.algorithms.rollout_correction import RolloutCorrectionConfig, correct_rollout
from headrace.config.staleness import StalenessRule
from tests.fast.algorithms.vectors_file import Vectors, compare_correction_metric, lookup, number
from tests.fast.algorithms.vectors_losses import leaf_loss, loss_input

# ---- rollout correction ----


def rollout_correction(v: Vectors, name: str) -> None:
    path = ("rollout_correction", name)
    config = RolloutCorrectionConfig(**v.read(*path, "args"))
    mask = v.batch("response_mask")
    result = correct_rollout(v.batch("old_log_probs"), v.batch("rollout_log_probs"), mask, config)
    v.compare(result.mask, *path, "mask", mask=mask)
    if lookup((*path, "weights")) is None:
        v.read(*path, "weights")
        assert result.weights is None
    else:
        assert result.weights is not None
        v.compare(result.weights, *path, "weights", mask=mask)
    for key in lookup((*path, "metrics")):
        compare_correction_metric(v, result.metrics, *path, "metrics", key)


def legacy_rollout_correction(v: Vectors, name: str) -> None:
    """Bounds on trainer / engine, each with its own argument, and the veto. Metrics without the criterion."""
    if name == "source":
        v.read("legacy_rollout_correction", name)
        return
    for case in lookup(("legacy_rollout_correction", name)):
        path = ("legacy_rollout_correction", name, case)
        args = v.read(*path, "args")
        criterion = args.get("rollout_rs")
        upper, lower = args.get("rollout_rs_threshold"), args.get("rollout_rs_threshold_lower")
        config = RolloutCorrectionConfig(
            rollout_rs=criterion,
            rollout_rs_threshold=upper if lower is None else f"{lower}_{upper}",
            rollout_token_veto_threshold=args.get("rollout_token_veto_threshold"),
        )
        mask = v.batch("response_mask")
        result = correct_rollout(v.batch("old_log_probs"), v.batch("rollout_log_probs"), mask, config)
        v.compare(result.mask, *path, "mask", mask=mask)
        for key in lookup((*path, "metrics")):
            v.compare(legacy_metric(result.metrics, key, criterion), *path, "metrics", key)


def legacy_metric(ours: dict[str, torch.Tensor], key: str, criterion: str | None) -> torch.Tensor:
    short = key.removeprefix("rollout_corr/")
    vetoes = {
        "rollout_is_veto_fraction": "rollout_veto_fraction",
        "rollout_is_catastrophic_token_fraction": "rollout_catastrophic_token_fraction",
    }
    if short in vetoes:
        return ours.get(vetoes[short], torch.zeros(()))
    if short in ours:
        return ours[short]
    statistic = short.removeprefix("rollout_rs_").replace("ratio_fraction", "fraction")
    return ours[f"rollout_rs_{criterion}_{statistic}"]


# ---- AReaL ----


def areal(v: Vectors, name: str) -> None:
    path = ("areal", name)
    if name == "prox_approx":
        prox_approx(v, path)
    elif name.startswith("m2po_mask"):
        mask = v.batch("response_mask")
        threshold = number(r"threshold ([\d.]+)", name, 0.0)
        kept = second_moment_mask(v.batch("rollout_log_probs"), v.batch("old_log_probs"), mask, threshold)
        v.compare(kept, *path, mask=mask)
    elif name.startswith("reward_norm"):
        v.read(*path)  # rewards normalised by themselves: no estimator of ours does
    elif name == "sapo_token_mean":
        _, loss, _ = leaf_loss("sapo", loss_input(v, PolicyLossSettings()), "token-mean")
        v.compare(loss, *path, "loss")
    else:
        decoupled_loss(v, path)


def decoupled_loss(v: Vectors, path: tuple[str, ...]) -> None:
    args, bounds = v.read(*path, "args"), v.read(*path, "rejection_sampling")
    settings = PolicyLossSettings(
        clip_ratio_low=args["eps_clip"],
        clip_ratio_high=args.get("eps_clip_higher", args["eps_clip"]),
        clip_ratio_c=args.get("c_clip"),
        sequence_ratio=args.get("importance_sampling_level", "token") == "sequence",
        behaviour_filter=None if bounds is None else decoupled.BehaviourFilter(**bounds),
    )
    inputs = loss_input(v, settings)
    mask = inputs.mask
    # Divided by the tokens before any were dropped.
    losses, loss, grad = leaf_loss("decoupled_ppo", inputs, "token-mean", count(mask))
    v.compare(loss, *path, "loss")
    v.compare(grad, *path, "grad", mask=mask)
    v.compare(losses.metrics["clip_fraction"].sum() / mask.sum(), *path, "clip_frac")
    if bounds is None:
        v.read(*path, "filtered_fraction")
        v.read(*path, "behave_imp_weight")
        assert lookup((*path, "behave_imp_weight")) is None
        return
    weights = decoupled.behaviour_weights(
        inputs.old_log_probs, inputs.behaviour, mask, decoupled.BehaviourFilter(**bounds)
    )
    v.compare(masked_mean(weights.filtered.double(), mask), *path, "filtered_fraction")
    v.compare(weights.weights, *path, "behave_imp_weight", mask=mask)


def prox_approx(v: Vectors, path: tuple[str, ...]) -> None:
    versions = torch.tensor(v.read(*path, "versions"))
    current = v.read(*path, "current_version")
    for method in ("loglinear", "linear", "rollout"):
        ours = decoupled.approximate_proximal(
            v.batch("rollout_log_probs"), v.batch("log_probs"), versions, current, method
        )
        v.compare(ours, *path, method, mask=v.batch("response_mask"))


# ---- capacity ----


def capacity(v: Vectors, name: str) -> None:
    """Other systems' rules for how much may be started, in the terms of our gate."""
    if isinstance(lookup(("capacity", name)), str):
        v.read("capacity", name)
        return
    for index in range(len(lookup(("capacity", name)))):
        path = ("capacity", name, str(index))
        if name == "areal":
            areal_capacity(v, path)
        else:
            assert name == "verl_fully_async", name
            c = {k: v.read(*path, k) for k in lookup(path) if k != "rollout_num"}
            rule = StalenessRule(
                c["trigger"], c["require_batches"], c["mini"], c["staleness_threshold"], False
            )
            # Whole samples: a fraction of one cannot be started.
            assert rule.max_required - c["stale"] == math.floor(v.read(*path, "rollout_num"))


def areal_capacity(v: Vectors, path: tuple[str, ...]) -> None:
    """One batch per version, max_staleness as threshold; what earlier versions trained is left behind."""
    c = {k: v.read(*path, k) for k in lookup(path) if k != "capacity"}
    rule = StalenessRule(1, 1, c["batch"], c["max_staleness"], False)
    outstanding = c["accepted"] + c["running"] - c["version"] * c["batch"]
    room = rule.max_required - outstanding
    v.compare(float(min(c["max_concurrent"] - c["running"], room)), *path, "capacity")
