"""Corrects for the difference between the trainer's and the engine's policy by weights and rejection.

log r = old - behaviour. Weights reduce the bias of what stays; rejection takes out what is beyond repair.
When the engine's log-probs are the old ones the ratio of the loss corrects already: reject, but do not weigh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.algorithms.importance_weights import importance_weights, parse_band
from headrace.algorithms.log_probs import safe_log_ratio
from headrace.algorithms.masked import masked_max, masked_mean, masked_min, masked_sum, zero_outside
from headrace.algorithms.rejection import reject, veto


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """What to do; everything is off by default. The names are verl's."""

    rollout_is: str | None = None
    """Importance weights per "token" or "sequence"."""
    rollout_is_threshold: str | float = 2.0
    """A number truncates; "lower_upper" zeroes outside (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: str | None = None
    """Rejection criteria, separated by commas."""
    rollout_rs_threshold: str | float | None = None
    """A threshold for each criterion, or one for all."""
    rollout_token_veto_threshold: float | None = None
    """Leave out every sequence with a token of trainer / engine below this."""


@dataclass(frozen=True)
class RolloutCorrection:
    """`weights`: (B, T), or None. `mask`: (B, T), without what was rejected. `metrics`: scalars."""

    weights: torch.Tensor | None
    mask: torch.Tensor
    metrics: dict[str, torch.Tensor]


def correct_rollout(
    old_log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    mask: torch.Tensor,
    config: RolloutCorrectionConfig,
    batch_mean: torch.Tensor | None = None,
) -> RolloutCorrection:
    """Weights, mask and metrics of `config`; all tensors (B, T).

    `batch_mean`: the mean weight over all ranks, for `rollout_is_batch_normalize` of a part of the batch.
    """
    on = mask > 0
    old = zero_outside(old_log_probs.detach(), on)
    behaviour = zero_outside(behaviour_log_probs.detach(), on)
    log_ratio = old - behaviour
    metrics = mismatch_metrics(old, behaviour, mask)
    weights = None
    if config.rollout_is is not None:
        truncated = importance_weights(
            log_ratio,
            mask,
            config.rollout_is,
            parse_band(config.rollout_is_threshold),
            config.rollout_is_batch_normalize,
            batch_mean,
        )
        weights = truncated.weights
        metrics |= truncated.metrics
    kept = mask.clone()
    if config.rollout_rs is not None:
        if config.rollout_rs_threshold is None:
            raise ValueError(f"rollout_rs {config.rollout_rs!r} needs a rollout_rs_threshold")
        rejection = reject(log_ratio, mask, config.rollout_rs, config.rollout_rs_threshold)
        kept = rejection.mask
        metrics |= rejection.metrics
    if config.rollout_token_veto_threshold is not None:
        vetoed = veto(log_ratio, mask, config.rollout_token_veto_threshold)
        kept = kept * vetoed.mask
        metrics |= vetoed.metrics
    return RolloutCorrection(weights, kept, metrics)


def mismatch_metrics(
    old_log_probs: torch.Tensor, behaviour_log_probs: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far trainer and engine are apart. (B, T) each; scalars back.

    kl and k3_kl estimate KL(engine || trainer); ppl are means of the sequences' perplexities, their ratio
    trainer / engine; chi2 = E[r^2] - 1 over tokens, and over sequences with the product of their ratios.
    """
    on = mask > 0
    rows = on.any(-1)
    old = zero_outside(old_log_probs.detach(), on)
    behaviour = zero_outside(behaviour_log_probs.detach(), on)
    log_ratio = old - behaviour

    def row_mean(x: torch.Tensor) -> torch.Tensor:
        return masked_mean(x, rows)

    trained, sampled = masked_mean(old, mask, -1), masked_mean(behaviour, mask, -1)
    difference = sampled - trained
    product = safe_log_ratio(masked_sum(log_ratio, mask, -1))
    safe = safe_log_ratio(log_ratio)
    return {
        "training_ppl": row_mean((-trained).exp()),
        "training_log_ppl": row_mean(-trained),
        "rollout_ppl": row_mean((-sampled).exp()),
        "rollout_log_ppl": row_mean(-sampled),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, mask),
        "log_ppl_diff": row_mean(difference),
        "log_ppl_abs_diff": row_mean(difference.abs()),
        "log_ppl_diff_max": masked_max(difference, rows),
        "log_ppl_diff_min": masked_min(difference, rows),
        "ppl_ratio": row_mean(difference.exp()),
        "chi2_token": masked_mean((2 * safe).exp(), mask) - 1,
        "chi2_seq": row_mean((2 * product).exp()) - 1,
    }
