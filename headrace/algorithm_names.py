"""Which algorithms a run may name, without importing torch.

The configuration is read by services that have no torch, so the names stand here; a test compares them
with the registries of `headrace.algorithms`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

ESTIMATORS = {
    "grpo": 2,
    "grpo_vectorized": 2,
    "grpo_passk": 2,
    "rloo": 2,
    "rloo_vectorized": 2,
    "pipelinerl": 2,
    "opo": 2,
    "magistral": 2,
    "reinforce_plus_plus_baseline": 2,
    "gpg": 2,
    "reinforce_plus_plus": 1,
    "remax": 1,
    "gae": 1,
    "tppo": 1,
    "optimal_token_baseline": 2,
    "gdpo": 2,
}
"""Advantage estimators, and the smallest `rollout.n` that each makes sense with."""

CRITIC_ESTIMATORS = frozenset({"gae", "tppo"})
"""They need values."""

LOSSES = frozenset(
    {
        "ppo", "vanilla", "m2po", "sapo", "prime_rl", "kl_cov", "gpg", "cispo", "aipo", "dro",
        "dppo_tv", "dppo_kl", "gspo", "gmpo", "geo_mean", "decoupled_ppo", "bypass_ppo_clip",
        "bypass_reinforce",
    }
)  # fmt: skip
"""Policy losses."""

BYPASS_LOSSES = frozenset({"bypass_ppo_clip", "bypass_reinforce"})
"""They apply the rollout correction themselves, to the ratio current / behaviour."""

BEHAVIOUR_LOSSES = BYPASS_LOSSES | {"decoupled_ppo", "aipo", "m2po", "prime_rl"}
"""They read the behaviour log-probs beside the old ones."""

REJECTION_CRITERIA = frozenset(
    {
        "token", "sequence", "geometric", "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2",
        "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    }
)  # fmt: skip
"""What `algorithm.rollout_correction.rollout_rs` may name."""

KL_PENALTIES = frozenset({"kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"})
"""Estimators of the KL divergence; a `+` behind the name takes the gradient of k2."""

AGGREGATIONS = frozenset(
    {"token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"}
)

LOSS_SETTINGS = frozenset(
    {
        "tau_pos", "tau_neg", "rho_max", "divergence_low", "divergence_high", "divergence_ratio_cap",
        "dro_beta", "kl_cov_ratio", "ppo_kl_coef", "m2_threshold", "adv_tau", "kl_tau",
    }
)  # fmt: skip
"""Numbers of the losses that `actor.policy_loss_settings` may set."""


def _unknown(key: str, name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), 1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return f"{key} = {name} is unknown; {hint} (your own need algorithm.modules)"


def algorithm_problems(
    estimator: str,
    loss: str,
    aggregation: str | None,
    settings: Collection[str],
    group: int,
    has_modules: bool,
) -> list[str]:
    """What is wrong with these names together, each with the change that mends it."""
    out: list[str] = []
    if estimator in ESTIMATORS:
        if group < ESTIMATORS[estimator]:
            out.append(
                f"rollout.n is {group}, but {estimator} compares the trajectories of a group: set rollout.n "
                f"to {ESTIMATORS[estimator]} or more"
            )
    elif not has_modules:
        out.append(_unknown("algorithm.adv_estimator", estimator, ESTIMATORS))
    if loss not in LOSSES and not has_modules:
        out.append(_unknown("actor.policy_loss", loss, LOSSES))
    if aggregation is not None and aggregation not in AGGREGATIONS and not has_modules:
        out.append(_unknown("actor.loss_agg_mode", aggregation, AGGREGATIONS))
    if not has_modules:
        out += [
            _unknown("actor.policy_loss_settings", n, LOSS_SETTINGS)
            for n in sorted(set(settings) - LOSS_SETTINGS)
        ]
    return out
