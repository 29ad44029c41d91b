"""Configuration sections that define how rewards become a policy update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from headrace.config.base import RUN, Section
from headrace.plugins.optimizers import OPTIMIZERS


class OptimConfig(Section):
    """The optimizer and its schedule."""

    optimizer: Annotated[str, AfterValidator(OPTIMIZERS.checked), RUN] = "AdamW"
    """`AdamW`, or one from an installed package."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up, until the run's last optimizer step."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final rate of a linear or cosine schedule, as a share of `lr`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Global norm that the gradient is clipped to."""


class ActorConfig(Section):
    """The policy update."""

    ppo_mini_batch_size: Annotated[int, RUN] = Field(gt=0)
    """Samples (not trajectories) per optimizer step, over all ranks."""
    ppo_max_token_len_per_gpu: int = Field(16384, gt=0)
    """Tokens per micro-batch and rank, prompts included; a batch is split to fit."""
    policy_loss: str = "ppo"
    """Loss per token; docs/algorithms.md lists the names."""
    policy_loss_settings: dict[str, float] = {}
    """Parameters of the loss other than the clip ratios, e.g. `{tau_neg: 1.05}` for sapo."""
    clip_ratio_low: float = Field(0.2, gt=0)
    """The ratio is clipped below 1 - this."""
    clip_ratio_high: float = Field(0.28, gt=0)
    """The ratio is clipped above 1 + this."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Lower bound of the dual clip for negative advantages."""
    behaviour_weight_cap: float | None = Field(5.0, gt=0)
    """decoupled_ppo: bound on the weight proximal / behaviour; unset: no weight."""
    behaviour_weight_action: Literal["mask", "clamp"] = "mask"
    """decoupled_ppo: what happens to tokens beyond the bound."""
    prox_logp_method: Literal["recompute", "loglinear", "linear"] = "recompute"
    """decoupled_ppo: where the proximal log-probs come from. `recompute`: from the weights at the start of
    the sync window. The others interpolate between behaviour and current ones by the update gap, without a
    pass."""
    use_kl_loss: bool = False
    """Add the KL divergence to the reference model to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0)
    """Weight of the KL loss."""
    kl_loss_type: str = "low_var_kl"
    """KL estimator: kl (k1), abs, mse (k2), low_var_kl (k3); a trailing `+` takes the gradient of k2."""
    loss_agg_mode: str | None = None
    """How token losses are aggregated over the mini-batch on all ranks; unset: as the loss defines it."""
    entropy_coeff: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    optim: OptimConfig = OptimConfig()


class RefConfig(Section):
    """The frozen reference model of the KL divergence; loaded only when used."""

    path: str | None = None
    """Model directory; unset: `model.path`, the policy before training."""
    param_offload: bool = False
    """Keep its shards in host memory and load them onto the device layer by layer."""


class CriticConfig(Section):
    """The value model of gae and tppo: the policy's architecture with a value head."""

    enable: Annotated[bool, RUN] = False
    """Train a critic along with the policy."""
    path: str | None = None
    """Model directory that its backbone is initialised from; unset: `model.path`."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    """AdamW of the critic."""
    cliprange_value: float = Field(0.5, gt=0)
    """Clip range of new values around those that the advantages were computed with."""
    loss_agg_mode: str = "token-mean"
    """How token value losses are aggregated."""
    warmup_updates: int = Field(0, ge=0)
    """Local updates that train only the critic."""


class RolloutCorrectionSection(Section):
    """Importance weights and rejection for the mismatch between trainer and engine, under verl's names."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights old / behaviour; only with `async_training.use_rollout_log_probs: false`."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates weights; `lower_upper` zeroes those outside the range (IcePop)."""
    rollout_rs: str | None = None
    """Rejection criteria, separated by commas, e.g. `token_k1,seq_mean_k3`."""
    rollout_rs_threshold: float | str | None = None
    """One threshold per criterion, or one for all."""
    rollout_token_veto_threshold: float | None = Field(None, gt=0)
    """Reject every sequence with a token whose trainer / engine ratio is below this."""

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
    """`adaptive` adjusts it to bring the divergence to `target_kl`."""
    kl_coef: float = Field(0.001, ge=0)
    """The coefficient, or the initial value of the adaptive one."""
    target_kl: float = Field(0.1, gt=0)
    """Divergence per token that the adaptive controller targets."""
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
    """Subtract the KL divergence to the reference model from the reward, token by token."""
    kl_penalty: str = "kl"
    """KL estimator: kl (k1), abs, mse (k2) or low_var_kl (k3)."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    gdpo_reward_keys: list[str] = []
    """gdpo: parts of the reward that are normalised separately; unset: the reward as a whole."""
    gdpo_reward_weights: list[float] | None = None
    """gdpo: weights of those parts; unset: 1 each."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    modules: list[str] = []
    """Modules or Python files that register your own estimators, losses or aggregations."""
