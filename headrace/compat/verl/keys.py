"""Table of verl's configuration keys: same meaning here, no effect, or refused.

The keys are those of verl's `ppo_trainer` and its recipes `fully_async_policy` and `one_step_off_policy`.
Keys under `actor_rollout_ref` are listed without that prefix. Both spellings are accepted.

Similar names are never matched: a key that is not in this table is unknown. docs/from-verl.md is generated
from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from headrace.algorithms.registries import POLICY_LOSSES
from headrace.plugins.engines import ENGINES
from headrace.plugins.trackers import CONSOLE, TRACKERS

PREFIX = "actor_rollout_ref."


NOTHING = object()
"""Returned by `Same.value` if there is nothing to set."""


@dataclass(frozen=True)
class Same:
    """A key with the same meaning as one of ours."""

    key: str
    value: Callable[[Any], Any] = lambda value: value
    """Converts verl's value to ours. Raises ValueError, with advice, if we have no such value."""
    note: str = ""


@dataclass(frozen=True)
class NoEffect:
    """A key with nothing to set: we always behave as verl does with these values."""

    because: str
    values: tuple[Any, ...] | None = None
    """Accepted values; None for any."""
    otherwise: str = ""
    """Advice for any other value."""
    equal_to: str = ""
    """Our key whose value it must equal."""


@dataclass(frozen=True)
class Refused:
    """A key with a different meaning here, or none, and what to set instead."""

    advice: str


Meaning = Same | NoEffect | Refused


class Partly(ValueError):
    """Some items of a list have no counterpart. `kept`: the items that have one."""

    def __init__(self, message: str, kept: list[str]) -> None:
        super().__init__(message)
        self.kept = kept


def _loggers(found: Any) -> list[str]:
    names = list(found or []) if isinstance(found, list | tuple | NoneType) else [found]
    known = [CONSOLE, *TRACKERS.names()]
    kept = [name for name in names if name in known]
    if len(kept) < len(names):
        there, unknown = ", ".join(known), ", ".join(str(n) for n in names if n not in kept)
        raise Partly(f"{unknown} has no counterpart; there are {there}", kept)
    return kept


def _one_of(**names: Any) -> Callable[[Any], Any]:
    def value(found: Any) -> Any:
        text = str(found).lower() if isinstance(found, bool) or found is None else str(found)
        if text not in names:
            raise ValueError(f"{found!r} has no counterpart; there are {', '.join(names)}")
        return names[text]

    return value


def _off_is_0(found: Any) -> Any:
    return 0 if isinstance(found, int) and found < 0 else found


def _loss(found: Any) -> Any:
    if not isinstance(found, str) or not POLICY_LOSSES.knows(found):
        known = ", ".join(POLICY_LOSSES.names())
        raise ValueError(f"{found!r} is no loss here; actor.policy_loss has {known}")
    return "ppo" if found == "vanilla" else found


def _engine(found: Any) -> Any:
    if not isinstance(found, str) or not ENGINES.knows(found):
        raise ValueError(f"{found!r} is no engine here; set {' or '.join(ENGINES.names())}")
    return found


def _mebibytes(found: Any) -> Any:
    return found * 1024 * 1024 if isinstance(found, int) else found


def _truncation(found: Any) -> Any:
    if found in ("right", "middle"):
        raise ValueError(f"{found!r} would cut the question; data.truncation has error, skip, truncate_left")
    return "truncate_left" if found == "left" else found


def _unset_is_zero(found: Any) -> Any:
    return 0.0 if found is None else found


def _steps(found: Any) -> Any:
    if isinstance(found, int) and found < 0:
        raise ValueError("leave it out, or count the optimizer steps of the warm-up")
    return found


def _kept(found: Any) -> Any:
    if found is None:
        raise ValueError("keeps every checkpoint in verl; say how many with trainer.max_ckpt_to_keep")
    return found


_MICRO = NoEffect("batches are cut by actor.ppo_max_token_len_per_gpu")
_SAMPLES = "samples per sync are trigger_parameter_sync_step x require_batches x actor.ppo_mini_batch_size"
_LENGTH = "the length of a run is rollout.total_rollout_steps, in samples: data.train_batch_size x steps"
_ON_DEVICE = NoEffect("weights and optimizer stay on the device: how it is computed, not what")
_SHARDED = NoEffect("weights are sharded over all ranks of the trainer")
_CONFIG_JSON = "set it in the model's config.json, or model.max_model_len for what prompt and answer may take"
_REPLICAS = (
    "rollout.replicas = rollout.nnodes x rollout.n_gpus_per_node / rollout.engine.tensor_parallel_size"
)
_SAME_NAME = (
    "data.train_files", "data.val_files", "data.max_prompt_length", "data.max_response_length",
    "data.shuffle", "data.filter_overlong_prompts", "data.apply_chat_template_kwargs", "model.path",
    "model.trust_remote_code", "model.enable_gradient_checkpointing", "rollout.n",
    "rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.total_rollout_steps",
    "actor.ppo_mini_batch_size", "actor.ppo_max_token_len_per_gpu", "actor.clip_ratio_low",
    "actor.clip_ratio_high", "actor.clip_ratio_c", "actor.use_kl_loss", "actor.kl_loss_coef",
    "actor.kl_loss_type", "actor.loss_agg_mode", "actor.entropy_coeff", "actor.optim.lr",
    "actor.optim.weight_decay", "actor.optim.betas", "actor.optim.lr_scheduler_type",
    "critic.optim.lr_scheduler_type", "critic.optim.lr", "critic.optim.weight_decay",
    "critic.optim.betas", "actor.optim.optimizer", "critic.optim.optimizer",
    "critic.cliprange_value", "critic.loss_agg_mode", "algorithm.adv_estimator",
    "algorithm.gamma", "algorithm.lam", "algorithm.use_kl_in_reward", "algorithm.kl_penalty",
    "algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.horizon",
    "algorithm.kl_ctrl.target_kl", "algorithm.filter_groups.enable",
    "algorithm.filter_groups.max_num_gen_batches", "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_rs_threshold", "trainer.nnodes", "trainer.n_gpus_per_node",
    "async_training.require_batches", "async_training.trigger_parameter_sync_step",
    "async_training.staleness_threshold", "async_training.partial_rollout",
    "async_training.use_rollout_log_probs", "custom_reward_function.path", "custom_reward_function.name",
)  # fmt: skip

KEYS: dict[str, Meaning] = {
    **{key: Same(key) for key in _SAME_NAME},
    # -- same meaning, under another name or with other values
    "rollout.name": Same("rollout.name", _engine),
    "data.truncation": Same("data.truncation", _truncation, "`left` is `truncate_left`"),
    "data.trust_remote_code": Same("model.trust_remote_code"),
    "model.custom_chat_template": Refused("write the template into a file and name it in data.chat_template"),
    "actor.policy_loss.loss_mode": Same("actor.policy_loss", _loss, "`vanilla` is `ppo`"),
    "actor.policy_loss.kl_cov_ratio": Same("actor.policy_loss_settings.kl_cov_ratio"),
    "actor.policy_loss.ppo_kl_coef": Same("actor.policy_loss_settings.ppo_kl_coef"),
    "actor.grad_clip": Same("actor.optim.grad_clip"),
    "actor.optim.lr_warmup_steps": Same("actor.optim.lr_warmup_steps", _steps, "not -1"),
    "critic.optim.lr_warmup_steps": Same("critic.optim.lr_warmup_steps", _steps, "not -1"),
    "actor.optim.warmup_style": Same("actor.optim.lr_scheduler_type"),
    "actor.optim.min_lr_ratio": Same("actor.optim.min_lr_ratio", _unset_is_zero),
    "critic.optim.min_lr_ratio": Same("critic.optim.min_lr_ratio", _unset_is_zero),
    "critic.grad_clip": Same("critic.optim.grad_clip"),
    "critic.model.path": Same("critic.path"),
    "critic.enable": Same(
        "critic.enable",
        lambda found: NOTHING if found is None else found,
        "not null: true for gae and tppo",
    ),
    "trainer.critic_warmup": Same("critic.warmup_updates"),
    "ref.model.path": Same("ref.path"),
    "ref.fsdp_config.param_offload": Same("ref.param_offload"),
    "rollout.prompt_length": Same("data.max_prompt_length"),
    "rollout.response_length": Same("data.max_response_length"),
    "rollout.dtype": Same("model.dtype"),
    "rollout.max_model_len": Same("model.max_model_len"),
    "rollout.tensor_model_parallel_size": Same("rollout.engine.tensor_parallel_size"),
    "rollout.gpu_memory_utilization": Same("rollout.engine.gpu_memory_utilization"),
    "rollout.max_num_seqs": Same("rollout.engine.max_num_seqs"),
    "rollout.enforce_eager": Same("rollout.engine.enforce_eager"),
    "rollout.val_kwargs.n": Same("val.n"),
    "rollout.val_kwargs.temperature": Same("val.temperature"),
    "rollout.update_weights_bucket_megabytes": Same("sync.bucket_bytes", _mebibytes, "in bytes"),
    "rollout.test_freq": Same("rollout.test_freq", _off_is_0, "0 turns it off"),
    "actor.use_rollout_log_probs": Same("async_training.use_rollout_log_probs"),
    "algorithm.norm_adv_by_std_in_grpo": Same("algorithm.norm_adv_by_std"),
    "reward_model.overlong_buffer.enable": Same("reward.overlong_buffer.enable"),
    "reward_model.overlong_buffer.len": Same("reward.overlong_buffer.len"),
    "reward_model.overlong_buffer.penalty_factor": Same("reward.overlong_buffer.penalty_factor"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": Same("reward.overlong_buffer.enable"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": Same("reward.overlong_buffer.len"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": Same(
        "reward.overlong_buffer.penalty_factor"
    ),
    "reward.custom_reward_function.path": Same("custom_reward_function.path"),
    "reward.custom_reward_function.name": Same("custom_reward_function.name"),
    "trainer.experiment_name": Same("name"),
    "trainer.project_name": Same("trainer.project_name"),
    "trainer.logger": Same("trainer.logger", _loggers, "`console`, `tensorboard`, `wandb`"),
    "trainer.save_freq": Same("trainer.save_freq", _off_is_0, "in policy versions; 0 turns it off"),
    "trainer.device": Same("trainer.device"),
    "trainer.max_actor_ckpt_to_keep": Same("trainer.max_ckpt_to_keep", _kept),
    "trainer.resume_from_path": Same("trainer.resume"),
    "trainer.resume_mode": Same(
        "trainer.resume",
        _one_of(auto="auto", disable="never", resume_path=NOTHING),
        "`disable` is `never`; the path of `resume_path` is the value itself",
    ),
    # -- nothing to do
    "data.train_batch_size": NoEffect("samples are streamed", (0, None), f"set 0: {_SAMPLES}"),
    "train_batch_size": NoEffect("samples are streamed", (0,), f"set 0: {_SAMPLES}"),
    "data.gen_batch_size": NoEffect("prompts are issued one by one", (1, None), "set 1, or leave it out"),
    "data.val_batch_size": NoEffect("validation is streamed"),
    "data.return_raw_chat": NoEffect("the feeder applies the chat template"),
    "data.return_raw_input_ids": NoEffect("the feeder applies the chat template"),
    "data.return_full_prompt": NoEffect("prompts travel as tokens"),
    "data.dataloader_num_workers": NoEffect("data is read once, at the start"),
    "data.filter_overlong_prompts_workers": NoEffect("prompts are tokenised in parallel"),
    "data.validation_shuffle": NoEffect("every held-out prompt is answered"),
    "data.prompt_key": NoEffect("it is `prompt`", ("prompt",), "rename the column to prompt"),
    "data.reward_fn_key": NoEffect(
        "it is `data_source`", ("data_source",), "rename the column to data_source"
    ),
    "data.tokenizer": NoEffect("the model's", (None,), "put the tokenizer into the model's directory"),
    "hybrid_engine": NoEffect(
        "both sides have resources of their own", (False,), "set false, or mode: colocated_sync"
    ),
    "actor.strategy": NoEffect("FSDP2 it is", ("fsdp", "fsdp2"), "there is FSDP2 only"),
    "critic.strategy": NoEffect("FSDP2 it is", ("fsdp", "fsdp2"), "there is FSDP2 only"),
    "ref.strategy": NoEffect("FSDP2 it is", ("fsdp", "fsdp2"), "there is FSDP2 only"),
    "actor.use_dynamic_bsz": _MICRO,
    "actor.ppo_micro_batch_size": _MICRO,
    "actor.ppo_micro_batch_size_per_gpu": _MICRO,
    "ref.log_prob_use_dynamic_bsz": _MICRO,
    "ref.log_prob_micro_batch_size": _MICRO,
    "ref.log_prob_micro_batch_size_per_gpu": _MICRO,
    "ref.log_prob_max_token_len_per_gpu": _MICRO,
    "rollout.log_prob_use_dynamic_bsz": _MICRO,
    "rollout.log_prob_micro_batch_size": _MICRO,
    "rollout.log_prob_micro_batch_size_per_gpu": _MICRO,
    "rollout.log_prob_max_token_len_per_gpu": _MICRO,
    "critic.use_dynamic_bsz": _MICRO,
    "critic.ppo_micro_batch_size": _MICRO,
    "critic.ppo_micro_batch_size_per_gpu": _MICRO,
    "critic.ppo_max_token_len_per_gpu": _MICRO,
    "actor.ppo_epochs": NoEffect("a sample is trained once", (1,), "set 1: samples are trained once"),
    "critic.ppo_epochs": NoEffect("a sample is trained once", (1,), "set 1: samples are trained once"),
    "actor.optim.num_cycles": NoEffect("half a wave, from the full rate to the least", (0.5,), "set 0.5"),
    "actor.optim.lr_warmup_steps_ratio": NoEffect(
        "no warm-up by share", (0, 0.0), "count the steps in actor.optim.lr_warmup_steps"
    ),
    "actor.ulysses_sequence_parallel_size": NoEffect("none", (1,), "set 1: sequences are not split"),
    "ref.ulysses_sequence_parallel_size": NoEffect("none", (1,), "set 1: sequences are not split"),
    "critic.ulysses_sequence_parallel_size": NoEffect("none", (1,), "set 1: sequences are not split"),
    "actor.fsdp_config.param_offload": _ON_DEVICE,
    "actor.fsdp_config.optimizer_offload": _ON_DEVICE,
    "actor.fsdp_config.offload_policy": _ON_DEVICE,
    "actor.fsdp_config.fsdp_size": _SHARDED,
    "ref.fsdp_config.fsdp_size": _SHARDED,
    "critic.model.fsdp_config.param_offload": _ON_DEVICE,
    "critic.model.fsdp_config.optimizer_offload": _ON_DEVICE,
    "critic.model.fsdp_config.offload_policy": _ON_DEVICE,
    "critic.model.fsdp_config.fsdp_size": _SHARDED,
    "model.use_remove_padding": NoEffect("rows are always packed"),
    "model.use_fused_kernels": NoEffect("logits are always made in chunks"),
    "model.lora_rank": NoEffect("all weights are trained", (0,), "set 0: all weights are trained"),
    "rollout.mode": NoEffect("asynchronous it is", ("async",), "set async"),
    "rollout.calculate_log_probs": NoEffect("always on", (True,), "set true: they travel with each token"),
    "rollout.free_cache_engine": NoEffect("engines keep their memory"),
    "rollout.do_sample": NoEffect("always on", (True,), "set true"),
    "rollout.ignore_eos": NoEffect("always off", (False,), "set false"),
    "rollout.load_format": NoEffect("weights come by the sync"),
    "rollout.enable_chunked_prefill": NoEffect("vLLM's own default"),
    "rollout.max_num_batched_tokens": NoEffect("vLLM's own default"),
    "rollout.disable_log_stats": NoEffect("metrics are the services' own"),
    "rollout.val_kwargs.do_sample": NoEffect(
        "val.temperature says it", (True,), "set val.temperature to 0 and leave it out"
    ),
    "rollout.val_kwargs.top_p": NoEffect("1", (1, 1.0), "set 1"),
    "rollout.val_kwargs.top_k": NoEffect("all", (-1, 0), "set -1"),
    "async_training.compute_prox_log_prob": NoEffect(
        "off",
        (False,),
        "set actor.policy_loss to decoupled_ppo and async_training.use_rollout_log_probs to false",
    ),
    "async_training.use_trainer_do_validate": NoEffect(
        "the rollouters validate", (False,), "set false: the rollouters validate, not the trainer's GPUs"
    ),
    "algorithm.filter_groups.metric": NoEffect(
        "groups are judged by their reward",
        (None, "score", "seq_reward", "seq_final_reward"),
        "groups whose rewards are all equal are dropped: set seq_final_reward",
    ),
    "reward_model.enable": NoEffect("the reward is a function", (False,), "set custom_reward_function"),
    "reward_model.reward_manager": NoEffect("the reward is a function", ("naive", "dapo"), "set naive"),
    "reward_model.launch_reward_fn_async": NoEffect("rewards never hold up generation"),
    "reward_model.overlong_buffer.log": NoEffect("it is a metric"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": NoEffect("it is a metric"),
    "reward_model.reward_kwargs.max_resp_len": NoEffect(
        "the penalty counts back from there",
        otherwise="set both alike",
        equal_to="data.max_response_length",
    ),
    "trainer.balance_batch": NoEffect("always on"),
    "trainer.val_before_train": NoEffect("version 0 is validated when rollout.test_freq is on"),
    "trainer.max_critic_ckpt_to_keep": NoEffect("the critic is in the same checkpoint"),
    "trainer.default_hdfs_dir": NoEffect("checkpoints are local", (None,), "leave it out"),
    # -- different meaning here
    "model.override_config.*": Refused(_CONFIG_JSON),
    "critic.model.override_config.*": Refused("set it in the config.json of critic.path"),
    "actor.clip_ratio": Refused("set actor.clip_ratio_low and actor.clip_ratio_high; verl looks there first"),
    "rollout.nnodes": Refused(f"set {_REPLICAS}"),
    "rollout.n_gpus_per_node": Refused(f"set {_REPLICAS}"),
    "rollout.total_epochs": Refused(f"leave it out: {_LENGTH}"),
    "trainer.total_epochs": Refused(f"leave it out: {_LENGTH}"),
    "trainer.total_training_steps": Refused(f"leave it out: {_LENGTH}"),
    "trainer.test_freq": Refused("set rollout.test_freq, in policy versions"),
    "trainer.default_local_dir": Refused("set runs_dir and name: a run lives in runs_dir/name"),
    "data.seed": Refused("set seed, which orders the prompts too"),
    "data.train_max_samples": NoEffect("all rows are used", (-1,), "write the rows into a file of their own"),
    "data.val_max_samples": NoEffect("all rows are used", (-1,), "write the rows into a file of their own"),
    "data.custom_cls.path": Refused("write the rows into a file of Parquet or JSON lines"),
    "rollout.multi_turn.enable": NoEffect("one turn", (False,), "turns are an environment's"),
}  # fmt: skip
"""By verl's key. A key that ends in `.*` covers all keys under it."""

DIFFERENT_DEFAULTS: dict[str, Any] = {
    "actor.clip_ratio_high": 0.2,
    "actor.loss_agg_mode": "token-mean",
    "actor.optim.betas": [0.9, 0.999],
    "actor.optim.weight_decay": 0.01,
    "actor.ppo_mini_batch_size": 256,
    "algorithm.adv_estimator": "gae",
    "rollout.engine.enforce_eager": False,
    "rollout.engine.gpu_memory_utilization": 0.5,
    "rollout.engine.max_num_seqs": 1024,
    "rollout.engine.tensor_parallel_size": 2,
    "rollout.n": 1,
    "trainer.device": "cuda",
    "sync.transport": "nccl",
    "trainer.n_gpus_per_node": 8,
}
"""verl's defaults that differ from ours, by our key. NCCL goes with `trainer.device: cuda`."""
