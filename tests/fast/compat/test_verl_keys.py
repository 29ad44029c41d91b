"""verl's keys are read as ours where they mean the same, and refused elsewhere, naming ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.convert_config import render
from headrace.compat.verl import translation
from headrace.compat.verl.keys import DIFFERENT_DEFAULTS, KEYS, PREFIX, NoEffect, Refused, Same
from headrace.config.loading import ConfigError, known_keys, load, value_at
from headrace.config.run import RunConfig
from tests.support.cli_desk import REPO

DEMO = REPO / "configs" / "demo.yaml"
EXAMPLE = REPO / "docs" / "examples" / "verl_fully_async.yaml"

_QUICK_START = """
train_batch_size=0
data.train_batch_size=0
data.gen_batch_size=1
data.return_raw_chat=True
actor_rollout_ref.rollout.n=16
actor_rollout_ref.actor.strategy=fsdp2
critic.strategy=fsdp2
actor_rollout_ref.hybrid_engine=False
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.calculate_log_probs=True
actor_rollout_ref.actor.ppo_mini_batch_size=32
trainer.nnodes=1
trainer.n_gpus_per_node=4
rollout.total_rollout_steps=204800
rollout.test_freq=10
async_training.staleness_threshold=0
async_training.trigger_parameter_sync_step=16
async_training.require_batches=2
async_training.partial_rollout=False
"""
"""The overrides of the recipe's quick start; the first one lacks its section there."""


@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_the_quick_start_is_understood(prefix: str) -> None:
    overrides = [text.replace(PREFIX, prefix) for text in _QUICK_START.split()]
    config = load(DEMO, overrides)
    assert (config.rollout.n, config.actor.ppo_mini_batch_size) == (16, 32)
    assert (config.trainer.n_gpus_per_node, config.rollout.total_rollout_steps) == (4, 204800)
    assert (config.rule.window, config.rule.partial_rollout) == (16 * 2 * 32, False)


def test_a_file_may_use_both_spellings(tmp_path: Path) -> None:
    demo = yaml.safe_load(DEMO.read_text())
    data = {**demo["data"], "train_batch_size": 0, "truncation": "left"}
    actor = {"ppo_mini_batch_size": 8, "policy_loss": {"loss_mode": "vanilla"}, "grad_clip": 0.5}
    file = tmp_path / "run.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                **demo,
                "data": data,
                "actor_rollout_ref": {"actor": actor, "rollout": {"gpu_memory_utilization": 0.6}},
                "actor": {"optim": {"lr": 1e-5}},
                "trainer": {"n_gpus_per_node": 2, "save_freq": -1, "resume_mode": "disable"},
            }
        )
    )
    config = load(file, ["actor_rollout_ref={rollout: {n: 4}}", "+rollout.temperature=0.5"])
    assert (config.actor.ppo_mini_batch_size, config.actor.policy_loss) == (8, "ppo")
    assert (config.actor.optim.grad_clip, config.actor.optim.lr) == (0.5, 1e-5)
    assert (config.rollout.engine.gpu_memory_utilization, config.rollout.n) == (0.6, 4)
    assert (config.trainer.save_freq, config.trainer.resume, config.data.truncation) == (
        0,
        "never",
        "truncate_left",
    )
    assert config.rollout.temperature == 0.5
    again = load(file, [str(file)])
    assert again.actor.ppo_mini_batch_size == 8


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_batch_size=512", "x actor.ppo_mini_batch_size"),
        ("data.train_batch_size=false", "False has no counterpart; set 0"),
        ("data.gen_batch_size=8", "set 1, or leave it out"),
        ("rollout.nnodes=2", "set rollout.replicas = "),
        ("actor_rollout_ref.rollout.mode=sync", "'sync' has no counterpart; set async"),
        ("actor_rollout_ref.rollout.name=sglang", "set vllm"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "samples are trained once"),
        ("actor_rollout_ref.actor.clip_ratio=0.2", "set actor.clip_ratio_low and actor.clip_ratio_high"),
        ("actor.policy_loss.loss_mode=clip_cov", "'clip_cov' is no loss here; actor.policy_loss has aipo, "),
        ("data.truncation=middle", "data.truncation has error, skip, truncate_left"),
        ("trainer.test_freq=5", "set rollout.test_freq"),
        ("trainer.logger=5", "5 has no counterpart; there are console"),
        ("trainer.logger=true", "True has no counterpart; there are console"),
        ("trainer.logger=[console, mlflow]", "mlflow has no counterpart; there are console"),
        ("actor.policy_loss.loss_mode=[x]", "['x'] is no loss here"),
        ("trainer.total_epochs=5", "rollout.total_rollout_steps"),
        ("async_training.compute_prox_log_prob=true", "set actor.policy_loss to decoupled_ppo"),
        ("actor_rollout_ref.rollout.replicas=5", "unknown key; did you mean rollout.replicas?"),
        ("actor_rollout_ref.model.override_config.rope_theta=1e6", "set it in the model's config.json"),
        ("critic.model.override_config.rope_theta=1e6", "set it in the config.json of critic.path"),
        ("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", "set 1: sequences are not split"),
        ("async_training.use_trainer_do_validate=true", "set false: the rollouters validate"),
        ("actor_rollout_ref.actor.fsdp_config.wrap_policy=x", "about how verl itself runs; leave it out"),
        ("trace.enabel=true", "unknown key; did you mean trace.enable?"),
        ("data.show=3", "unknown key; use `headrace data CONFIG --show 3`"),
    ],
)
def test_other_meanings_are_refused_with_our_key(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(DEMO, [override])
    (line,) = caught.value.lines
    assert line.startswith(f"command line: {override.partition('=')[0]}: ")
    assert said in line


def test_a_file_is_told_all_at_once_and_not_set_twice(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    both = {"rollout": {"n": 4, "nnodes": 2}, "actor_rollout_ref": {"rollout": {"n": 8, "mode": "sync"}}}
    file.write_text(yaml.safe_dump({**yaml.safe_load(DEMO.read_text()), **both}, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [line.removeprefix(f"{file}: ").partition(":")[0] for line in caught.value.lines] == [
        "rollout.nnodes",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.mode",
    ]
    assert "rollout.n means the same and has another value; keep one" in caught.value.lines[1]


def test_every_key_in_the_table_leads_somewhere() -> None:
    known = set(known_keys())
    for key, meaning in KEYS.items():
        assert not key.startswith(PREFIX)
        if isinstance(meaning, Same):
            assert meaning.key in known or meaning.key.rpartition(".")[0] in known, key
        else:
            assert key not in known, f"{key} is a key of ours: it may not be refused or dropped"
    for text in [
        m.advice if isinstance(m, Refused) else m.otherwise for m in KEYS.values() if not isinstance(m, Same)
    ]:
        for named in re.findall(r"\b(?:data|actor|rollout|trainer|async_training)\.[a-z_.]*[a-z_]", text):
            assert named in known | KEYS.keys(), f"{named} in {text!r}"


def test_defaults_that_are_written_out_differ_from_ours() -> None:
    minimal = yaml.safe_load(DEMO.read_text())
    config = RunConfig.model_validate(
        {key: minimal[key] for key in ("model", "data", "custom_reward_function")}
        | {"actor": {"ppo_mini_batch_size": 16}, "rollout": {"total_rollout_steps": 99}}
    )
    for key, value in DIFFERENT_DEFAULTS.items():
        assert value_at(config, key) != value, f"{key} needs no line: both take {value!r}"


def convert(text: str) -> translation.Converted:
    return translation.convert(yaml.safe_load(text))


def test_conversion_of_the_example() -> None:
    found = translation.convert(yaml.safe_load(EXAMPLE.read_text()))
    assert found.values["rollout.replicas"] == 4  # 16 GPUs in engines of 4
    assert found.values["data.truncation"] == "truncate_left"
    assert found.values["data.filter_overlong_prompts"] is True
    assert found.values["async_training.use_rollout_log_probs"] is True  # through an interpolation
    assert found.values["trainer.save_freq"] == 0
    assert found.values["actor.optim.betas"] == [0.9, 0.999]
    assert "actor.optim.betas" in found.defaults
    assert "rollout.n" not in found.defaults
    assert found.values["trainer.logger"] == ["console", "tensorboard"]
    assert [key for key, _ in found.left_out] == [
        "trainer.total_epochs",
        "defaults",
    ]
    assert found.values["sync.transport"] == found.defaults["sync.transport"] == "nccl"


def test_the_transport_goes_with_the_device() -> None:
    assert convert("rollout: {n: 2}").values["sync.transport"] == "nccl"
    assert "sync.transport" not in convert("trainer: {device: cpu}").values


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("data: {train_batch_size: 512}\nactor: {ppo_mini_batch_size: 64}",
         "async_training.trigger_parameter_sync_step", 8),
        ("data: {train_batch_size: 512}\ntrainer: {total_training_steps: 9}", "rollout.total_rollout_steps",
         4608),
        ("algorithm: {adv_estimator: gae}", "critic.enable", True),
        ("trainer: {logger: wandb}", "trainer.logger", ["wandb"]),
        ("actor_rollout_ref: {ref: {fsdp_config: {param_offload: true}}}", "ref.param_offload", True),
        ("rollout: {val_kwargs: {temperature: 0.6, do_sample: false}}", "val.temperature", 0),
        ("rollout: {val_kwargs: {temperature: 0.6, do_sample: true}}", "val.temperature", 0.6),
        ("actor: {grad_clip: '${.other}', other: 0.5}", "actor.optim.grad_clip", 0.5),
        ("algorithm: {gamma: '${oc.select:nothing.there,0.9}'}", "algorithm.gamma", 0.9),
        ("actor_rollout_ref: {rollout: {update_weights_bucket_megabytes: 512}}", "sync.bucket_bytes", 2**29),
    ],
)  # fmt: skip
def test_conversion_of_what_follows_from_other_keys(text: str, key: str, value: Any) -> None:
    found = convert(text)
    assert found.values[key] == value
    assert not [name for name, _ in found.left_out if name != "actor.other"]


def test_what_cannot_be_converted_is_listed() -> None:
    found = convert(
        "actor: {clip_ratio: 0.1, ppo_micro_batch_size_per_gpu: 4, grad_clip: '${nowhere}', lora: 3}\n"
        "data: {train_batch_size: 100, custom_cls: {path: null}, image_key: images}\n"
        "trainer: {profiler: {a: 1, b: {c: 2}}}\nrollout: {n: 4}\n"
        "actor_rollout_ref: {rollout: {n: 8}}"
    )
    told = dict(found.left_out)
    assert told.keys() == {
        "actor.clip_ratio", "actor.grad_clip", "actor.lora", "data.train_batch_size", "data.image_key",
        "trainer.profiler", "actor_rollout_ref.rollout.n",
    }  # fmt: skip
    assert told["trainer.profiler"] == "how verl itself runs (2 keys)"
    assert told["actor.grad_clip"] == "'${nowhere}' leads nowhere; write its value"
    assert told["actor_rollout_ref.rollout.n"] == "rollout.n is 4 by another key"
    assert isinstance(KEYS["actor.ppo_micro_batch_size_per_gpu"], NoEffect)


@pytest.mark.parametrize(
    "value", [0, -1, 7, True, None, "", "2", "text", [], ["x"], [[]], {"a": 1}, 0.5, "${a,[}"]
)
def test_no_value_of_a_known_key_ends_a_conversion(value: Any) -> None:
    """Whatever stands there is converted or listed; the other keys are those that things follow from."""
    sizes = {
        "data.train_batch_size": 64, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8,
        "trainer.total_training_steps": 5,
    }  # fmt: skip
    for key in KEYS:
        nested: dict[str, Any] = {}
        for name, one in {**sizes, key: value}.items():
            node = nested
            *sections, leaf = name.split(".")
            for section in sections:
                node = node.setdefault(section, {})
            node[leaf] = one
        render(translation.convert(nested).values, {}, "verl.yaml")


def test_trackers_that_are_here_are_kept_when_others_are_not() -> None:
    found = convert("trainer: {logger: [console, mlflow]}")
    assert found.values["trainer.logger"] == ["console"]
    assert "mlflow" in dict(found.left_out)["trainer.logger"]
    assert "trainer.logger" not in convert("trainer: {logger: mlflow}").values
