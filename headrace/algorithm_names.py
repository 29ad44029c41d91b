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
}
"""Advantage estimators that the loop can feed, and the smallest `rollout.n` each makes sense with."""

LOSSES = frozenset(
    {
        "ppo", "vanilla", "m2po", "sapo", "prime_rl", "kl_cov", "gpg", "cispo", "aipo", "dro",
        "dppo_tv", "dppo_kl", "gspo", "gmpo", "geo_mean", "decoupled_ppo",
    }
)  # fmt: skip
"""Policy losses that the loop can feed."""

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

_MISSING = {
    "gae": "it needs a critic, which the trainer does not have yet",
    "tppo": "it needs a critic, which the trainer does not have yet",
    "remax": "it needs the reward of a greedy response, which rollouters do not generate yet",
    "optimal_token_baseline": "it needs sums over the vocabulary that the trainer does not keep yet",
    "gdpo": "it needs rewards by component, which are not wired yet",
    "bypass_ppo_clip": "it needs a rollout correction, which is not wired yet",
    "bypass_reinforce": "it needs a rollout correction, which is not wired yet",
}
"""Pure functions that exist, but that the loop cannot feed, and why."""


def _unknown(key: str, name: str, known: Collection[str]) -> str:
    if name in _MISSING:
        return f"{key} = {name} cannot run: {_MISSING[name]}; use one of {', '.join(sorted(known))}"
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
    elif not has_modules or estimator in _MISSING:
        out.append(_unknown("algorithm.adv_estimator", estimator, ESTIMATORS))
    if loss not in LOSSES and (not has_modules or loss in _MISSING):
        out.append(_unknown("actor.policy_loss", loss, LOSSES))
    if aggregation is not None and aggregation not in AGGREGATIONS and not has_modules:
        out.append(_unknown("actor.loss_agg_mode", aggregation, AGGREGATIONS))
    if not has_modules:
        out += [
            _unknown("actor.policy_loss_settings", n, LOSS_SETTINGS)
            for n in sorted(set(settings) - LOSS_SETTINGS)
        ]
    return out
