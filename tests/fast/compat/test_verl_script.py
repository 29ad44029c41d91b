"""What the recipe's script for 7 B on 4 + 4 GPUs sets is understood, by `run` and by conversion alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.convert_config import report
from headrace.compat.verl import translation
from headrace.compat.verl.keys import PREFIX
from headrace.config.loading import ConfigError, load, read_plain
from tests.support.cli_desk import REPO

DEMO = REPO / "configs" / "demo.yaml"

_ACTOR = """
strategy=fsdp2 use_dynamic_bsz=True ppo_max_token_len_per_gpu=20480 ppo_mini_batch_size=32
use_kl_loss=False kl_loss_coef=0.0 clip_ratio_low=0.2 clip_ratio_high=0.28 clip_ratio_c=10.0
optim.lr=1e-6 optim.lr_warmup_steps=10 optim.weight_decay=0.1 entropy_coeff=0 grad_clip=1.0
loss_agg_mode=token-mean ulysses_sequence_parallel_size=1
fsdp_config.param_offload=False fsdp_config.optimizer_offload=False fsdp_config.fsdp_size=2
"""
_REFERENCE = """
fsdp_config.param_offload=True ulysses_sequence_parallel_size=1
log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=30720
"""
_ENGINE = """
name=vllm mode=async n=16 temperature=1.0 top_p=1.0 top_k=-1 calculate_log_probs=True
gpu_memory_utilization=0.80 tensor_model_parallel_size=1 enable_chunked_prefill=True
max_num_batched_tokens=10240 log_prob_use_dynamic_bsz=True log_prob_max_token_len_per_gpu=30720
val_kwargs.temperature=1.0 val_kwargs.top_k=-1 val_kwargs.do_sample=True val_kwargs.n=1
"""
_REST = """
data.prompt_key=prompt data.truncation='left' data.max_prompt_length=2048 data.max_response_length=8192
data.train_batch_size=0 data.gen_batch_size=1 data.return_raw_chat=True
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.0
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.hybrid_engine=False critic.strategy=fsdp2
reward_model.reward_manager=dapo
+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096
+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0
+reward_model.reward_kwargs.overlong_buffer_cfg.log=False
+reward_model.reward_kwargs.max_resp_len=8192
trainer.logger=['console','tensorboard'] trainer.project_name=DAPO trainer.experiment_name=fsdp2-4-4
trainer.val_before_train=False trainer.save_freq=-1 trainer.resume_mode=auto
trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.total_rollout_steps=51200 rollout.test_freq=10
async_training.staleness_threshold=0.1 async_training.trigger_parameter_sync_step=16
async_training.partial_rollout=True async_training.use_trainer_do_validate=False
"""
UNDERSTOOD = [
    *(f"{PREFIX}actor.{text}" for text in _ACTOR.split()),
    *(f"{PREFIX}ref.{text}" for text in _REFERENCE.split()),
    *(f"{PREFIX}rollout.{text}" for text in _ENGINE.split()),
    *_REST.split(),
]
WITHOUT_COUNTERPART = [
    "+actor_rollout_ref.model.override_config.max_position_embeddings=32768",
    "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
    "trainer.default_local_dir=ckpts",
    "rollout.total_epochs=10",
]
REPLICAS = ["rollout.nnodes=1", "rollout.n_gpus_per_node=4"]

EXPECTED: dict[str, Any] = {
    "rollout.n": 16,
    "rollout.total_rollout_steps": 51200,
    "data.truncation": "truncate_left",
    "actor.clip_ratio_high": 0.28,
    "actor.optim.lr_warmup_steps": 10,
    "actor.optim.grad_clip": 1.0,
    "ref.param_offload": True,
    "reward.overlong_buffer.enable": True,
    "reward.overlong_buffer.len": 4096,
    "reward.overlong_buffer.penalty_factor": 1.0,
    "rollout.engine.gpu_memory_utilization": 0.8,
    "val.temperature": 1.0,
    "trainer.save_freq": 0,
    "async_training.staleness_threshold": 0.1,
    "name": "fsdp2-4-4",
}


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    file = tmp_path / "empty.yaml"
    file.write_text("")
    return file


def test_run_takes_what_conversion_takes(empty: Path) -> None:
    config = load(DEMO, [*UNDERSTOOD, "model.max_model_len=10240", "data.shuffle=true"])
    converted = translation.convert(read_plain(empty, [*UNDERSTOOD, *REPLICAS]))
    assert converted.left_out == []
    plain = config.to_plain()
    for key, value in EXPECTED.items():
        node: Any = plain
        for part in key.split("."):
            node = node[part]
        assert node == converted.values[key] == value, key
    assert converted.values["rollout.replicas"] == 4
    assert (converted.values["trainer.device"], converted.values["sync.transport"]) == ("cuda", "nccl")


def test_a_converted_script_lacks_only_model_and_data(empty: Path) -> None:
    converted = translation.convert(read_plain(empty, [*UNDERSTOOD, *REPLICAS]))
    missing = [line.split(":")[0].strip() for line in report(converted)[1:]]
    assert missing == ["still to be set", "model", "data.train_files"]


@pytest.mark.parametrize("override", WITHOUT_COUNTERPART)
def test_run_refuses_what_conversion_lists_and_says_the_same(override: str, empty: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(DEMO, [override])
    converted = translation.convert(read_plain(empty, [override]))
    told = [f"command line: {key}: {why}" for key, why in converted.left_out]
    assert caught.value.lines == told


@pytest.mark.parametrize("length", [11, 6])
def test_the_length_of_the_penalty_is_that_of_the_response(length: int, empty: Path, tmp_path: Path) -> None:
    key = "reward_model.reward_kwargs.max_resp_len"
    overrides = [f"+{key}={length}", "data.max_response_length=12"]
    said = (
        f"{key}: {length} is not data.max_response_length (12), and the penalty counts back from there; "
        "set both alike"
    )
    with pytest.raises(ConfigError) as caught:
        load(DEMO, overrides)
    assert caught.value.lines == [f"command line: {said}"]
    assert load(DEMO, [*overrides, f"+{key}=12"]).data.max_response_length == 12
    assert load(DEMO, [*overrides, f"+{key}=null"]).data.max_response_length == 12
    (line,) = [f"{k}: {why}" for k, why in translation.convert(read_plain(empty, overrides)).left_out]
    assert line == said
    layer = tmp_path / "layer.yaml"
    layer.write_text(f"reward_model: {{reward_kwargs: {{max_resp_len: {length}}}}}\n")
    with pytest.raises(ConfigError) as caught:
        load(DEMO, [*overrides[1:], str(layer)])
    assert caught.value.lines == [f"{layer}: {said}"]


def test_an_interpolated_length_is_followed(empty: Path) -> None:
    text = ["reward_model.reward_kwargs.max_resp_len='${data.max_response_length}'"]
    assert translation.convert(read_plain(empty, [*text, "data.max_response_length=64"])).left_out == []
    assert [key for key, _ in translation.convert(read_plain(empty, text)).left_out] == [
        "reward_model.reward_kwargs.max_resp_len"
    ]
