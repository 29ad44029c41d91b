"""KL divergence to a reference policy, estimated per token, and the controller of its coefficient.

The estimators k1, k2 and k3 are those of http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.algorithms.masked import zero_outside
from headrace.algorithms.registries import KL_PENALTIES

K3_INPUT_LIMIT = 20.0
K3_OUTPUT_LIMIT = 10.0
CONTROLLER_LIMIT = 0.2


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """lp - ref: unbiased value, but a gradient whose expectation is 0."""
    return log_probs - ref_log_probs


def absolute(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """|lp - ref|."""
    return (log_probs - ref_log_probs).abs()


def k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """(lp - ref)^2 / 2: biased value, but its gradient is unbiased for that of the KL divergence."""
    return 0.5 * (log_probs - ref_log_probs).square()


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """e^d - d - 1 with d = ref - lp: unbiased and never negative. d within +-20, the result within +-10."""
    d = (ref_log_probs - log_probs).clamp(-K3_INPUT_LIMIT, K3_INPUT_LIMIT)
    return (d.exp() - d - 1).clamp(-K3_OUTPUT_LIMIT, K3_OUTPUT_LIMIT)


def kl_penalty(
    name: str, log_probs: torch.Tensor, ref_log_probs: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """KL estimate per token. (B, T) each, same shape back; 0 outside the mask when there is one.

    A name ending in "+" has the value of its estimator and the gradient of k2 (straight through), which in
    expectation is the gradient of the divergence, whereas those of k1 and k3 are not.
    """
    if mask is not None:
        log_probs, ref_log_probs = zero_outside(log_probs, mask > 0), zero_outside(ref_log_probs, mask > 0)
    value = KL_PENALTIES.get(name.removesuffix("+"))(log_probs, ref_log_probs)
    if not name.endswith("+"):
        return value
    gradient = k2(log_probs, ref_log_probs)
    return value.detach() + (gradient - gradient.detach())


@dataclass(frozen=True)
class AdaptiveKl:
    """Coefficient that steers the KL divergence to `target`. arXiv 1909.08593."""

    beta: float
    target: float
    horizon: int

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(f"target and horizon must be positive, got {self.target} and {self.horizon}")

    def updated(self, kl: float, n: int) -> AdaptiveKl:
        """After n samples (or steps, as `horizon` counts) with mean divergence `kl`:

        beta * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon).
        """
        error = min(max(kl / self.target - 1, -CONTROLLER_LIMIT), CONTROLLER_LIMIT)
        return AdaptiveKl(self.beta * (1 + error * n / self.horizon), self.target, self.horizon)
