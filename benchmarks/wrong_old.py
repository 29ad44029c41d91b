"""A deliberately wrong loss for an experiment: old log-probs taken from the current weights.

The ratio is then 1 at every step, so stale data looks on-policy and nothing is ever clipped. No configuration
offers this.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.algorithms.policy_loss import POLICY_LOSSES, PolicyLossInput, TokenLosses, policy_loss


@POLICY_LOSSES.register("wrong_old")
def wrong_old(inputs: PolicyLossInput) -> TokenLosses:
    return policy_loss("ppo", replace(inputs, old_log_probs=inputs.log_probs.detach()))
