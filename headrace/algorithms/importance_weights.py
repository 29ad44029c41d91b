"""Importance weights of the trainer's over the engine's policy, truncated, and their metrics.

Truncation trades bias for variance. Its cost shows only in the weights before truncation: an effective
sample size of clamped weights looks healthy while one token carries the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.algorithms.log_probs import LOG_RATIO_LIMIT, safe_log_ratio
from headrace.algorithms.masked import (
    COUNT_EPS,
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    zero_outside,
)
from headrace.plugins.registry import Registry

LogWeights = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

IMPORTANCE_WEIGHTS: Registry[LogWeights] = Registry("importance weight")


@IMPORTANCE_WEIGHTS.register("token")
def token_log_weights(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One weight per token: little variance, biased. (B, T) each."""
    return log_ratio


@IMPORTANCE_WEIGHTS.register("sequence")
def sequence_log_weights(log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The product over the trajectory for all its tokens: unbiased, much variance. (B, T) each."""
    return masked_sum(log_ratio, mask, -1)[:, None].expand_as(log_ratio)


@dataclass(frozen=True)
class Band:
    """Bounds of a weight. Without `lower`: truncated at `upper`; with it: 0 outside (IcePop)."""

    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        if self.upper <= 0 or (self.lower is not None and not 0 < self.lower <= self.upper):
            raise ValueError(f"bounds must be positive and in order, got {self.lower} and {self.upper}")


def parse_band(text: str | float) -> Band:
    """2.0 or "2.0": upper bound; "0.5_5.0": lower and upper. Raises ValueError."""
    if isinstance(text, bool):
        raise ValueError(f'a threshold is a number or "lower_upper", got {text}')
    try:
        numbers = [float(part) for part in str(text).split("_")]
    except ValueError:
        raise ValueError(f'a threshold is a number or "lower_upper", got {text!r}') from None
    if len(numbers) > 2:
        raise ValueError(f'a threshold is a number or "lower_upper", got {text!r}')
    return Band(numbers[-1], numbers[0] if len(numbers) == 2 else None)


def effective_sample_size(log_weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (n * sum w^2) of the weights as they are, in (0, 1]; 1 for an empty mask. (B, T) each.

    Shifted by the largest first, so no weight is too large to be counted.
    """
    on = mask > 0
    if not bool(on.any()):
        return log_weights.new_ones(())
    peak = masked_max(log_weights, mask)
    w = zero_outside((log_weights - peak).exp(), on)
    return w.sum().square() / (on.sum() * w.square().sum())


@dataclass(frozen=True)
class ImportanceWeights:
    """`weights`: (B, T) without gradient, 0 outside the mask. `metrics`: scalars."""

    weights: torch.Tensor
    metrics: dict[str, torch.Tensor]


def importance_weights(
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    level: str = "token",
    band: Band = Band(2.0),
    batch_normalise: bool = False,
    batch_mean: torch.Tensor | None = None,
) -> ImportanceWeights:
    """min(exp(clamp(log r, +-20)), C), or 0 outside the band (IcePop, arXiv 2510.18855).

    log_ratio, mask: (B, T), log r = trainer - engine. Truncated importance sampling:
    https://fengyao.notion.site/off-policy-rl. `batch_normalise` divides by the mean weight (of tokens, or of
    sequences on that level): of `batch_mean` if given, which must be that of all ranks and micro-batches.
    """
    on = mask > 0
    log_ratio = zero_outside(log_ratio.detach(), on)
    log_weights = IMPORTANCE_WEIGHTS.get(level)(log_ratio, mask)
    raw = zero_outside(safe_log_ratio(log_weights).exp(), on)
    if band.lower is None:
        weights = raw.clamp_max(band.upper)
    else:
        weights = zero_outside(raw, (raw >= band.lower) & (raw <= band.upper))
    metrics = _metrics(weights, raw, log_weights, mask, level, band)
    if batch_normalise:
        mean = weight_mean(weights, mask, level) if batch_mean is None else batch_mean
        factor = torch.where(mean > COUNT_EPS, mean, 1.0)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = factor
    return ImportanceWeights(weights, metrics)


def weight_mean(weights: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Mean of the weights over tokens, or over sequences on that level. (B, T) each. A scalar."""
    if level != "sequence":
        return masked_mean(weights, mask)
    return masked_mean(masked_mean(weights, mask, -1), (mask > 0).any(-1))


def _metrics(
    weights: torch.Tensor,
    raw: torch.Tensor,
    log_weights: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    band: Band,
) -> dict[str, torch.Tensor]:
    """High and low fractions are of the weights before truncation, mean, std and ESS of those applied."""
    on = mask > 0
    rows = on.any(-1)
    lower = 1 / band.upper if band.lower is None else band.lower
    spanned = weights.clamp(0, band.upper)
    mean = masked_mean(spanned, mask)
    by_sequence, raw_by_sequence = masked_mean(weights, mask, -1), masked_mean(raw, mask, -1)
    whole = level == "sequence"
    seen, seen_on = (raw[:, 0], rows) if whole else (raw, on)
    if whole:
        # The row's weight, even if its first token is outside the mask.
        seen = log_weights[:, 0].clamp_max(LOG_RATIO_LIMIT).exp()
    shown = seen if whole else weights
    several = bool(rows.sum() > 1)
    return {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_max": masked_max(shown, seen_on),
        "rollout_is_min": masked_min(shown, seen_on),
        "rollout_is_std": (masked_mean(spanned.square(), mask) - mean.square()).clamp_min(0).sqrt(),
        "rollout_is_ratio_fraction_high": _fraction(seen > band.upper, seen_on, weights.dtype),
        "rollout_is_ratio_fraction_low": _fraction(seen < lower, seen_on, weights.dtype),
        "rollout_is_eff_sample_size": 1 / masked_mean((spanned / (mean + COUNT_EPS)).square(), mask),
        "rollout_is_ess_untruncated": effective_sample_size(log_weights, mask),
        "rollout_is_seq_mean": by_sequence[rows].mean(),
        "rollout_is_seq_std": by_sequence[rows].std() if several else torch.zeros_like(mean),
        "rollout_is_seq_max": masked_max(by_sequence, rows),
        "rollout_is_seq_min": masked_min(by_sequence, rows),
        "rollout_is_seq_max_deviation": masked_max((by_sequence - 1).abs(), rows),
        "rollout_is_seq_fraction_high": _fraction(raw_by_sequence > band.upper, rows, weights.dtype),
        "rollout_is_seq_fraction_low": _fraction(raw_by_sequence < lower, rows, weights.dtype),
    } | ({} if band.lower is None else {"rollout_is_oob_ratio": _outside(raw, mask, band.lower, band.upper)})


def _outside(raw: torch.Tensor, mask: torch.Tensor, lower: float, upper: float) -> torch.Tensor:
    return _fraction((raw < lower) | (raw > upper), mask > 0, raw.dtype)


def _fraction(flags: torch.Tensor, on: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return masked_mean(flags.to(dtype), on)
