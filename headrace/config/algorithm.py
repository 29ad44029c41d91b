"""Configuration sections that define how rewards become a policy update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from headrace.config.base import RUN, Section
from headrace.plugins.optimizers import OPTIMIZERS


class OptimConfig(Section):
    """The optimizer and its schedule."""

    optimizer: Annotated[str, AfterValidator(OPTIMIZERS.checked), RUN] = "AdamW"
    """`AdamW`, or one of an installed package."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the rate rises linearly."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up, until the run's last optimizer step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the rate that is left at the end of a linear or cosine schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global norm of the gradient."""


class ActorConfig(Section):
    """The policy update."""

    ppo_mini_batch_size: Annotated[int, RUN] = Field(gt=0)
    """Samples (not trajectories) per optimizer step, over all ranks."""
    ppo_max_token_len_per_gpu: int = Field(16384, gt=0)
    """Tokens per micro-batch and rank, prompts included; a batch is cut to fit."""
    policy_loss: str = "ppo"
    """Loss per token; docs/algorithms.md lists the names."""
    policy_loss_settings: dict[str, float] = {}
    """Numbers that a loss has beside the clip ratios, e.g. `{tau_neg: 1.05}` for sapo."""
    clip_ratio_low: float = Field(0.2, gt=0)
    """The ratio counts down to 1 - this."""
    clip_ratio_high: float = Field(0.28, gt=0)
    """The ratio counts up to 1 + this."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Lower bound of the dual clip for negative advantages."""
    behaviour_weight_cap: float | None = Field(5.0, gt=0)
    """decoupled_ppo: bound on the weight proximal / behaviour; unset: no weight."""
    behaviour_weight_action: Literal["mask", "clamp"] = "mask"
    """decoupled_ppo: what becomes of tokens beyond the bound."""
    prox_logp_method: Literal["recompute", "loglinear", "linear"] = "recompute"
    """decoupled_ppo: where the proximal log-probs come from. `recompute`: from the weights at the start of
    the sync window; the others lie between behaviour and current ones by the update gap, without a pass."""
    use_kl_loss: bool = False
    """Add the KL divergence to the reference model to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Its weight."""
    kl_loss_type: str = "low_var_kl"
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3); `+` behind it takes the gradient of k2."""
    loss_agg_mode: str | None = None
    """How token losses become one, over the mini-batch on all ranks; unset: as the loss is defined."""
    entropy_coeff: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    optim: OptimConfig = OptimConfig()


class RefConfig(Section):
    """The frozen reference model of the KL divergence; loaded only where it is used."""

    path: str | None = None
    """Model directory; unset: `model.path`, the policy before training."""
    param_offload: bool = False
    """Keep its shards in host memory and bring them to the device layer by layer."""


class CriticConfig(Section):
    """The value model of gae and tppo: the policy's architecture with a value head."""

    enable: Annotated[bool, RUN] = False
    """Train a critic beside the policy."""
    path: str | None = None
    """Model directory that its backbone starts from; unset: `model.path`."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """AdamW of the critic."""
    cliprange_value: float = Field(0.5, gt=0)
    """New values count at most this far from those that the advantages were computed with."""
    loss_agg_mode: str = "token-mean"
    """How value losses of tokens become one."""
    warmup_updates: int = Field(0, ge=0)
    """Local updates in which only the critic learns."""


class RolloutCorrectionSection(Section):
    """Weights and rejection for the difference of trainer and engine; the names are verl's."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights old / behaviour; only with `async_training.use_rollout_log_probs: false`."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates, `lower_upper` zeroes what is outside (IcePop)."""
    rollout_rs: str | None = None
    """Rejection criteria, separated by commas, e.g. `token_k1,seq_mean_k3`."""
    rollout_rs_threshold: float | str | None = None
    """A threshold for each criterion, or one for all."""
    rollout_token_veto_threshold: float | None = Field(None, gt=0)
    """Leave out every sequence with a token of trainer / engine below this."""

    @property
    def is_set(self) -> bool:
        return any((self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold))


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: groups whose rewards are all equal are dropped and replaced."""

    enable: bool = False
    """Drop them before training; the ledger counts them as `dropped(zero_spread)`."""
    max_num_gen_batches: int = Field(10, gt=0)
    """Batches' worth of samples that one update may use up before the run stops with an error."""


class KlControlConfig(Section):
    """The coefficient of the KL divergence in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` steers it so that the divergence comes to `target_kl`."""
    kl_coef: float = Field(0.001, ge=0)
    """The coefficient, or where the adaptive one starts."""
    target_kl: float = Field(0.1, gt=0)
    """Divergence per token that the adaptive controller aims at."""
    horizon: int = Field(10000, gt=0)
    """Trajectories over which the adaptive controller corrects an error of 100 %."""


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: str = "grpo"
    """How rewards become advantages; docs/algorithms.md lists the names."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation; false gives Dr.GRPO's advantage."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token, for estimators that look at tokens."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of gae and tppo."""
    use_kl_in_reward: bool = False
    """Take the KL divergence to the reference model off the reward, token by token."""
    kl_penalty: str = "kl"
    """Its estimator: kl (k1), abs, mse (k2) or low_var_kl (k3)."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    gdpo_reward_keys: list[str] = []
    """gdpo: parts of the reward that are normalised one by one; unset: the reward as a whole."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: their weights; 1 each when unset."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    modules: list[str] = []
    """Modules or Python files that register estimators, losses or aggregations of your own."""
