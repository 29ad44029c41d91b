"""Rejects tokens or whole sequences on which trainer and engine disagree too much.

Criteria compose: a token stays only if all keep it. With log r = trainer - engine:

| criterion | statistic | kept |
|---|---|---|
| `token_k1`, `seq_sum_k1`, `seq_mean_k1` | -log r | log lower <= statistic <= log upper |
| `..._k2` (also `seq_max_k2`) | (log r)^2 / 2 | <= upper |
| `..._k3` (also `seq_max_k3`) | r - 1 - log r | <= upper |
| `token`, `sequence`, `geometric` | r; its product; its geometric mean | lower <= statistic <= upper |

Mind the sign: the bounds of k1 apply to engine / trainer, those of the last line to trainer / engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from headrace.algorithms.importance_weights import Band, parse_band
from headrace.algorithms.log_probs import safe_log_ratio
from headrace.algorithms.masked import (
    COUNT_EPS,
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    zero_outside,
)
from headrace.plugins.registry import Registry


@dataclass(frozen=True)
class Criterion:
    """`statistic(log_ratio, mask)` gives (B, T), or (B,) for a decision on whole sequences.

    `bounds`: "log" compares with the logarithms of both, "ratio" with both, "upper" with the upper one.
    """

    statistic: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    bounds: Literal["log", "ratio", "upper"]

    def limits(self, threshold: str | float) -> tuple[float, float]:
        """(lower, upper) of the statistic. Without a lower bound a ratio gets 1 / upper."""
        band = parse_band(threshold)
        if self.bounds == "upper":
            if band.lower is not None:
                raise ValueError(f"this criterion has an upper bound only, got {threshold!r}")
            return -math.inf, band.upper
        lower = 1 / band.upper if band.lower is None else band.lower
        band = Band(band.upper, lower)
        return (math.log(lower), math.log(band.upper)) if self.bounds == "log" else (lower, band.upper)


REJECTION_CRITERIA: Registry[Criterion] = Registry("rejection criterion")


def _k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return -log_ratio


def _k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio.square()


def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.exp() - 1 - log_ratio


Estimate = Callable[[torch.Tensor], torch.Tensor]


def _per_token(estimate: Estimate) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda log_ratio, mask: estimate(safe_log_ratio(log_ratio))


def _per_sequence(
    estimate: Estimate, reduce: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda log_ratio, mask: reduce(estimate(safe_log_ratio(log_ratio)), mask, -1)


def _register_divergences() -> None:
    for name, estimate in (("k1", _k1), ("k2", _k2), ("k3", _k3)):
        bounds: Literal["log", "upper"] = "log" if name == "k1" else "upper"
        entries = {
            f"token_{name}": _per_token(estimate),
            f"seq_sum_{name}": _per_sequence(estimate, masked_sum),
            f"seq_mean_{name}": _per_sequence(estimate, masked_mean),
        }
        if name != "k1":
            entries[f"seq_max_{name}"] = _per_sequence(estimate, masked_max)
        for entry, statistic in entries.items():
            REJECTION_CRITERIA.register(entry)(Criterion(statistic, bounds))


_register_divergences()
REJECTION_CRITERIA.register("token")(Criterion(_per_token(torch.exp), "ratio"))
REJECTION_CRITERIA.register("sequence")(
    Criterion(lambda log_ratio, mask: safe_log_ratio(masked_sum(log_ratio, mask, -1)).exp(), "ratio")
)
REJECTION_CRITERIA.register("geometric")(
    Criterion(lambda log_ratio, mask: safe_log_ratio(masked_mean(log_ratio, mask, -1)).exp(), "ratio")
)


@dataclass(frozen=True)
class Rejection:
    """`mask`: (B, T) in the dtype given, 1 on the tokens kept. `metrics`: scalars."""

    mask: torch.Tensor
    metrics: dict[str, torch.Tensor]


def reject(log_ratio: torch.Tensor, mask: torch.Tensor, criteria: str, thresholds: str | float) -> Rejection:
    """Leave out what any of `criteria` rejects.

    log_ratio, mask: (B, T). `criteria`: names separated by commas; `thresholds`: one for each in the same
    way, or one for all, each a number or "lower_upper".
    """
    names = [part.strip() for part in criteria.split(",") if part.strip()]
    limits = [part.strip() for part in str(thresholds).split(",") if part.strip()]
    if not names or len(limits) not in (1, len(names)):
        raise ValueError(
            f"{len(names)} rejection criteria ({criteria}) need as many thresholds, or one for all, "
            f"got {thresholds!r}"
        )
    on = mask > 0
    log_ratio = zero_outside(log_ratio.detach(), on)
    kept = on
    metrics: dict[str, torch.Tensor] = {}
    for name, limit in zip(names, limits * (len(names) // len(limits)), strict=True):
        criterion = REJECTION_CRITERIA.get(name)
        lower, upper = criterion.limits(limit)
        statistic = criterion.statistic(log_ratio, mask)
        inside = (statistic >= lower) & (statistic <= upper)
        passed = inside if inside.ndim == 2 else inside[:, None].expand_as(on)
        metrics |= _criterion_metrics(f"rollout_rs_{name}", statistic, passed, mask, criterion, lower, upper)
        kept = kept & passed
    metrics |= _fractions("rollout_rs", kept, on, log_ratio.dtype)
    return Rejection(kept.to(mask.dtype), metrics)


def veto(log_ratio: torch.Tensor, mask: torch.Tensor, threshold: float) -> Rejection:
    """Leave out every sequence that has a token with trainer / engine < `threshold`. (B, T) each."""
    on = mask > 0
    catastrophic = on & (log_ratio.detach() < math.log(threshold))
    vetoed = catastrophic.any(-1)
    dtype = log_ratio.dtype
    metrics = {
        "rollout_veto_fraction": masked_mean(vetoed.to(dtype), on.any(-1)),
        "rollout_catastrophic_token_fraction": masked_mean(catastrophic.to(dtype), mask),
    }
    return Rejection((on & ~vetoed[:, None]).to(mask.dtype), metrics)


def _fractions(
    prefix: str, kept: torch.Tensor, on: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    lost = on & ~kept
    return {
        f"{prefix}_masked_fraction": masked_mean(lost.to(dtype), on),
        f"{prefix}_seq_masked_fraction": masked_mean(lost.any(-1).to(dtype), on.any(-1)),
    }


def _criterion_metrics(
    prefix: str,
    statistic: torch.Tensor,
    passed: torch.Tensor,
    mask: torch.Tensor,
    criterion: Criterion,
    lower: float,
    upper: float,
) -> dict[str, torch.Tensor]:
    """Mean, range and spread of a statistic. Its std is of values clamped to the bounds, as is the ESS."""
    on = mask > 0
    rows = on.any(-1)
    dtype = statistic.dtype
    whole = statistic.ndim == 1
    tokens = statistic[:, None].expand_as(on) if whole else statistic
    by_row = statistic if whole else masked_mean(statistic, mask, -1)
    scope = rows if whole else on
    ideal = 1.0 if criterion.bounds == "ratio" else 0.0
    spanned = tokens.clamp(max(lower, 0.0) if criterion.bounds == "upper" else lower, upper)
    mean = masked_mean(spanned, mask)
    several = bool(rows.sum() > 1)

    def fraction(flags: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
        return masked_mean(flags.to(dtype), over)

    metrics = {
        "mean": masked_mean(tokens, mask),
        "max": masked_max(statistic, scope),
        "min": masked_min(statistic, scope),
        "fraction_high": fraction(statistic > upper, scope),
        "fraction_low": fraction(statistic < lower, scope),
        "std": (masked_mean(spanned.square(), mask) - mean.square()).clamp_min(0).sqrt(),
        "seq_mean": by_row[rows].mean(),
        "seq_std": by_row[rows].std() if several else torch.zeros_like(mean),
        "seq_max": masked_max(by_row, rows),
        "seq_min": masked_min(by_row, rows),
        "seq_max_deviation": masked_max((by_row - ideal).abs(), rows),
        "seq_fraction_high": fraction(by_row > upper, rows),
    }
    if criterion.bounds != "upper":
        metrics["seq_fraction_low"] = fraction(by_row < lower, rows)
    if criterion.bounds == "ratio":
        metrics["eff_sample_size"] = 1 / masked_mean((spanned / (mean + COUNT_EPS)).square(), mask)
    return {f"{prefix}_{key}": value for key, value in metrics.items()} | _fractions(
        prefix, passed & on, on, dtype
    )
