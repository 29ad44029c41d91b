"""Every algorithm by name, with what it needs; no torch here.

The configuration is read by services that have no torch. They see names and needs; a function is imported
when it is first called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from headrace.plugins.registry import Registry, imported

if TYPE_CHECKING:
    import torch

    from headrace.algorithms.aggregation import Denominators
    from headrace.algorithms.estimator import AdvantageInput, AdvantageOutput
    from headrace.algorithms.policy_loss import PolicyLossInput, TokenLosses

    Aggregation = Callable[[torch.Tensor, torch.Tensor, Denominators], torch.Tensor]
    KlPenalty = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator: its function, and what it requires of the run."""

    function: Callable[[AdvantageInput], AdvantageOutput] | str
    """Or `module:function`."""
    smallest_group: int = 1
    """The smallest `rollout.n` that it makes sense with."""
    values: bool = False
    """A critic's values: `AdvantageInput.values`."""
    greedy_baseline: bool = False
    """The reward of a greedy response in addition to every group: `AdvantageInput.reward_baselines`."""
    sum_pi_squared: bool = False
    """Recomputed old log-probs and sums over the vocabulary: `AdvantageInput.old_log_probs` and
    `AdvantageInput.sum_pi_squared`."""
    reward_components: bool = False
    """Takes the parts of the reward that `algorithm.gdpo_reward_keys` names."""

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        return cast("AdvantageOutput", _called(self.function, batch))


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss: its function, its settings, and what goes with it."""

    function: Callable[[PolicyLossInput], TokenLosses] | str
    """Or `module:function`."""
    aggregation: str = "token-mean"
    """How its token losses become one where `actor.loss_agg_mode` is unset."""
    settings: Collection[str] | None = None
    """The numbers of `actor.policy_loss_settings` that it reads; None: not said, so any may be set."""
    behaviour_log_probs: bool = False
    """It compares the trainer's log-probs with those of the engine."""
    corrects_rollout: bool = False
    """It applies the rollout correction itself, to the ratio current / behaviour: the engine's log-probs are
    the old ones."""
    rollout_weights: bool = False
    """With `corrects_rollout`: it takes importance weights too (`rollout_correction.rollout_is`)."""
    proximal: bool = False
    """It weighs proximal / behaviour itself, and needs a proximal policy between behaviour and current."""

    def __call__(self, inputs: PolicyLossInput) -> TokenLosses:
        return cast("TokenLosses", _called(self.function, inputs))


def _called(function: Callable[..., Any] | str, argument: Any) -> Any:
    return imported(function)(argument)


A = TypeVar("A", Estimator, PolicyLoss)


def _as(kind: type[A], shipped: Iterable[A]) -> Callable[..., A]:
    """Convert what is given to `register` into a `kind`. A function without stated needs gets those of the
    shipped algorithm whose function it is."""
    known = {one.function: one for one in shipped}

    def convert(entry: Any, **needs: Any) -> A:
        if not isinstance(entry, kind):
            place = f"{getattr(entry, '__module__', '')}:{getattr(entry, '__qualname__', '')}"
            entry = known.get(place) or kind(entry)
        if not callable(entry.function) and not isinstance(entry.function, str):
            raise TypeError(f"{entry.function!r} is no function")
        out: A = dataclasses.replace(entry, **needs)
        return out

    return convert


_GROUP = "headrace.algorithms.advantages:"
_TOKENS = "headrace.algorithms.reward_to_go:"
_GRPO = Estimator(_GROUP + "grpo_advantages", 2)
_ESTIMATORS = {
    "grpo": _GRPO,
    "grpo_vectorized": _GRPO,
    "grpo_passk": Estimator(_GROUP + "grpo_passk_advantages", 2),
    "rloo": Estimator(_GROUP + "rloo_advantages", 2),
    "rloo_vectorized": Estimator(_GROUP + "rloo_or_zero_advantages", 2),
    "pipelinerl": Estimator(_GROUP + "pipelinerl_advantages", 2),
    "opo": Estimator(_GROUP + "opo_advantages", 2),
    "magistral": Estimator(_GROUP + "magistral_advantages", 2),
    "reinforce_plus_plus_baseline": Estimator(_GROUP + "reinforce_plus_plus_baseline_advantages", 2),
    "gpg": Estimator(_GROUP + "gpg_advantages", 2),
    "gdpo": Estimator(_GROUP + "gdpo_advantages", 2, reward_components=True),
    "reinforce_plus_plus": Estimator(_TOKENS + "reinforce_plus_plus_advantages"),
    "remax": Estimator(_TOKENS + "remax_advantages", greedy_baseline=True),
    "optimal_token_baseline": Estimator(
        _TOKENS + "optimal_token_baseline_advantages", 2, sum_pi_squared=True
    ),
    "gae": Estimator("headrace.algorithms.gae:gae_advantages", values=True),
    "tppo": Estimator("headrace.algorithms.gae:tppo_advantages", values=True),
}

_CLIPPED = "headrace.algorithms.clipped_losses:"
_GRADIENT = "headrace.algorithms.gradient_losses:"
_SEQUENCE = "headrace.algorithms.sequence_losses:"
_BYPASS = "headrace.algorithms.bypass_losses:"
_BY_SEQUENCE = "seq-mean-token-mean"
_DIVERGENCES = ("divergence_low", "divergence_high")
_PPO = PolicyLoss(_CLIPPED + "ppo", settings=())
_GMPO = PolicyLoss(_SEQUENCE + "gmpo", _BY_SEQUENCE, ())
_LOSSES = {
    "ppo": _PPO,
    "vanilla": _PPO,
    "m2po": PolicyLoss(_CLIPPED + "m2po", settings=("m2_threshold",), behaviour_log_probs=True),
    "sapo": PolicyLoss(_CLIPPED + "sapo", _BY_SEQUENCE, ("tau_pos", "tau_neg")),
    "prime_rl": PolicyLoss(
        _CLIPPED + "prime_rl", settings=(*_DIVERGENCES, "adv_tau", "kl_tau"), behaviour_log_probs=True
    ),
    "kl_cov": PolicyLoss(_CLIPPED + "kl_cov", settings=("kl_cov_ratio", "ppo_kl_coef")),
    "gpg": PolicyLoss(_GRADIENT + "gpg", settings=()),
    "cispo": PolicyLoss(_GRADIENT + "cispo", settings=()),
    "aipo": PolicyLoss(_GRADIENT + "aipo", settings=("rho_max",), behaviour_log_probs=True),
    "dro": PolicyLoss(_GRADIENT + "dro", settings=("dro_beta",)),
    "dppo_tv": PolicyLoss(_GRADIENT + "dppo_tv", settings=(*_DIVERGENCES, "divergence_ratio_cap")),
    "dppo_kl": PolicyLoss(_GRADIENT + "dppo_kl", settings=(*_DIVERGENCES, "divergence_ratio_cap")),
    "gspo": PolicyLoss(_SEQUENCE + "gspo", _BY_SEQUENCE, ()),
    "gmpo": _GMPO,
    "geo_mean": _GMPO,
    "decoupled_ppo": PolicyLoss(
        "headrace.algorithms.decoupled_loss:decoupled_ppo",
        settings=(),
        behaviour_log_probs=True,
        proximal=True,
    ),
    "bypass_ppo_clip": PolicyLoss(
        _BYPASS + "bypass_ppo_clip", settings=(), behaviour_log_probs=True, corrects_rollout=True
    ),
    "bypass_reinforce": PolicyLoss(
        _BYPASS + "bypass_reinforce",
        settings=(),
        behaviour_log_probs=True,
        corrects_rollout=True,
        rollout_weights=True,
    ),
}

_KL = "headrace.algorithms.kl:"
_AGGREGATION = "headrace.algorithms.aggregation:"

ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry(
    "advantage estimator",
    _ESTIMATORS,
    group="headrace.advantage_estimators",
    convert=_as(Estimator, _ESTIMATORS.values()),
)
POLICY_LOSSES: Registry[PolicyLoss] = Registry(
    "policy loss", _LOSSES, group="headrace.policy_losses", convert=_as(PolicyLoss, _LOSSES.values())
)
AGGREGATIONS: Registry[Aggregation] = Registry(
    "loss aggregation",
    {
        "token-mean": _AGGREGATION + "token_mean",
        "token-sum": _AGGREGATION + "token_sum",
        "seq-mean-token-sum": _AGGREGATION + "seq_mean_token_sum",
        "seq-mean-token-sum-norm": _AGGREGATION + "seq_mean_token_sum_norm",
        "seq-mean-token-mean": _AGGREGATION + "seq_mean_token_mean",
    },
)
KL_PENALTIES: Registry[KlPenalty] = Registry(
    "KL penalty",
    {
        "kl": _KL + "k1",
        "k1": _KL + "k1",
        "abs": _KL + "absolute",
        "mse": _KL + "k2",
        "k2": _KL + "k2",
        "low_var_kl": _KL + "k3",
        "k3": _KL + "k3",
    },
)
"""A `+` behind the name takes the gradient of k2."""
REJECTION_CRITERIA = frozenset(
    {
        "token", "sequence", "geometric", "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2",
        "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3",
    }
)  # fmt: skip
"""What `algorithm.rollout_correction.rollout_rs` may name; a test compares them with `rejection`."""
LOSS_SETTINGS = frozenset(name for loss in _LOSSES.values() for name in loss.settings or ())
"""Numbers of the shipped losses: fields of `PolicyLossSettings`."""
