"""What no configuration offers, kept for the experiment that shows why: old log-probs taken from the current
weights. The ratio is 1 at every step, so stale data looks on-policy and nothing is ever clipped.
"""

from __future__ import annotations

from dataclasses import replace

from headrace.algorithms.policy_loss import POLICY_LOSSES, PolicyLossInput, TokenLosses, policy_loss


@POLICY_LOSSES.register("wrong_old")
def wrong_old(inputs: PolicyLossInput) -> TokenLosses:
    return policy_loss("ppo", replace(inputs, old_log_probs=inputs.log_probs.detach()))
