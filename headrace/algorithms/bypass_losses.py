"""Policy losses that take the engine's log-probs as the old ones and correct the mismatch themselves.

`old_log_probs` are ignored: the ratio is current / behaviour. The correction looks at the current policy.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.algorithms.clipped_losses import ppo
from headrace.algorithms.masked import zero_outside
from headrace.algorithms.policy_loss import PolicyLossInput, TokenLosses, finish
from headrace.algorithms.rollout_correction import RolloutCorrection, correct_rollout


def _correction(inputs: PolicyLossInput) -> RolloutCorrection:
    return correct_rollout(
        inputs.log_probs.detach(), inputs.behaviour, inputs.mask, inputs.settings.rollout_correction
    )


def bypass_ppo_clip(inputs: PolicyLossInput) -> TokenLosses:
    """ppo with current / behaviour as ratio, on the tokens that rejection leaves.

    No importance weight: the ratio is one already, a second would count the mismatch twice.
    """
    correction = _correction(inputs)
    result = ppo(
        replace(inputs, old_log_probs=inputs.behaviour, mask=correction.mask, importance_weights=None)
    )
    return replace(result, scalars=correction.metrics)


def bypass_reinforce(inputs: PolicyLossInput) -> TokenLosses:
    """-w * A * lp with the correction's weight w (1 without one), on the tokens that rejection leaves."""
    correction = _correction(inputs)
    log_ratio = inputs.log_probs.detach() - inputs.behaviour
    loss = -inputs.advantages * inputs.log_probs
    if correction.weights is not None:
        loss = loss * zero_outside(correction.weights, inputs.on)
    plain = replace(inputs, importance_weights=None)
    return finish(plain, loss, {"kl": -log_ratio}, correction.mask > 0, correction.metrics)
