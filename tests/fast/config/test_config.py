"""The configuration's own rules: what fits together, what is derived, and what people are told."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.config.loading import load
from headrace.config.modes import warnings
from headrace.config.run import RunConfig
from headrace.config.staleness import Mode

GOOD: dict[str, Any] = {
    "model": {"path": "m", "max_model_len": 96},
    "data": {
        "train_files": ["a"],
        "val_files": ["b"],
        "max_prompt_length": 32,
        "max_response_length": 64,
    },
    "rollout": {"total_rollout_steps": 64, "n": 2},
    "actor": {"ppo_mini_batch_size": 8, "ppo_max_token_len_per_gpu": 96},
    "trainer": {"n_gpus_per_node": 2},
    "custom_reward_function": {"path": "r"},
}


def changed(**values: Any) -> dict[str, Any]:
    """GOOD with `section__key=value`; the value None removes the key."""
    data = copy.deepcopy(GOOD)
    for dotted, value in values.items():
        *sections, leaf = dotted.split("__")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        if value is None:
            node.pop(leaf, None)
        else:
            node[leaf] = value
    return data


def message(data: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(data)
    (problem,) = caught.value.errors()
    assert problem["loc"] == (), "a check over several keys belongs to none of them"
    return problem["msg"].removeprefix("Value error, ")


def test_the_good_one_is_good() -> None:
    RunConfig.model_validate(GOOD)


# (what breaks it, the keys that the message names, the fix that it tells, and that fix applied)
CROSS_FIELD: dict[str, tuple[dict[str, Any], list[str], str, dict[str, Any]]] = {
    "group of one": (
        {"rollout__n": 1},
        ["rollout.n"],
        "set rollout.n to 2 or more",
        {"rollout__n": 2},
    ),
    "too long for the model": (
        {"data__max_response_length": 65, "actor__ppo_max_token_len_per_gpu": 97},
        ["data.max_prompt_length", "data.max_response_length", "model.max_model_len = 96", "= 97"],
        "shorten them or raise model.max_model_len",
        {
            "data__max_response_length": 65,
            "actor__ppo_max_token_len_per_gpu": 97,
            "model__max_model_len": 97,
        },
    ),
    "lower clip": (
        {"actor__clip_ratio_low": 1.0},
        ["actor.clip_ratio_low"],
        "must be below 1",
        {"actor__clip_ratio_low": 0.99},
    ),
    "micro-batch holds no trajectory": (
        {"actor__ppo_max_token_len_per_gpu": 95},
        ["actor.ppo_max_token_len_per_gpu = 95", "96 tokens"],
        "raise it to at least 96",
        {"actor__ppo_max_token_len_per_gpu": 96},
    ),
    "more ranks than samples of a mini-batch": (
        {"trainer__n_gpus_per_node": 5, "trainer__nnodes": 4},
        ["actor.ppo_mini_batch_size = 8 samples", "20 ranks"],
        "raise it to at least 20",
        {"trainer__n_gpus_per_node": 5, "trainer__nnodes": 4, "actor__ppo_mini_batch_size": 20},
    ),
    "less than one update": (
        {"async_training__require_batches": 9},
        ["rollout.total_rollout_steps = 64", "72 samples"],
        "raise it",
        {"async_training__require_batches": 9, "rollout__total_rollout_steps": 72},
    ),
    "nccl on the CPU": (
        {"sync__transport": "nccl"},
        ["sync.transport: nccl", "trainer.device: cuda"],
        "use gloo on CPU",
        {"sync__transport": "nccl", "trainer__device": "cuda"},
    ),
    "validation without rows": (
        {"data__val_files": None},
        ["rollout.test_freq", "data.val_files"],
        "name a file or set test_freq to 0",
        {"data__val_files": None, "rollout__test_freq": 0},
    ),
}


@pytest.mark.parametrize(("broken", "keys", "fix", "mended"), CROSS_FIELD.values(), ids=CROSS_FIELD)
def test_what_does_not_fit_names_keys_and_fix(
    broken: dict[str, Any], keys: list[str], fix: str, mended: dict[str, Any]
) -> None:
    told = message(changed(**broken))
    assert all(key in told for key in keys), told
    assert fix in told
    RunConfig.model_validate(changed(**mended))


@given(st.sets(st.sampled_from(sorted(CROSS_FIELD)), min_size=2))
def test_problems_are_told_together(names: set[str]) -> None:
    values: dict[str, Any] = {}
    for name in sorted(names):
        values |= CROSS_FIELD[name][0]
    told = message(changed(**values))
    surely = names - {"micro-batch holds no trajectory"}  # another one's change may mend or reword it
    assert all(CROSS_FIELD[name][2] in told for name in surely), told
    assert told.count("; ") >= len(surely) - 1


def test_every_rank_gets_a_whole_group() -> None:
    """The plan gives whole samples to ranks: fewer samples than ranks leave one idle at every step."""
    assert "raise it to at least 2" in message(changed(actor__ppo_mini_batch_size=1))


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 64),
    st.integers(0, 400).map(lambda n: n / 100),
    st.booleans(),
)
def test_the_rule_is_read_from_the_right_keys(s: int, r: int, m: int, eta: float, partial: bool) -> None:
    config = RunConfig.model_validate(
        changed(
            async_training__trigger_parameter_sync_step=s,
            async_training__require_batches=r,
            async_training__staleness_threshold=eta,
            async_training__partial_rollout=partial and eta > 0,
            actor__ppo_mini_batch_size=m,
            trainer__n_gpus_per_node=1,
            rollout__total_rollout_steps=10_000,
        )
    )
    rule = config.rule
    assert (rule.sync_steps, rule.require_batches, rule.mini_batch) == (s, r, m)
    assert (rule.threshold, rule.partial_rollout) == (eta, partial and eta > 0)
    assert config.samples_per_update == r * m
    assert rule.window == s * config.samples_per_update


@pytest.mark.parametrize(
    "key",
    [
        "rollout__temperature",
        "rollout__sample_timeout_s",
        "actor__clip_ratio_high",
        "actor__optim__lr",
        "trainer__claim_timeout_s",
        "sync__transfer_timeout_s",
        "ledger__lease_s",
    ],
)
@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0])
def test_numbers_that_make_no_sense_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate(changed(**{key: value}))


@pytest.mark.parametrize("key", ["rollout__temperature", "actor__optim__lr", "actor__optim__eps"])
def test_infinity_is_refused(key: str) -> None:
    """A temperature of infinity divides every logit to 0, a rate of infinity destroys the model."""
    with pytest.raises(ValidationError):
        RunConfig.model_validate(changed(**{key: math.inf}))


@pytest.mark.parametrize("eta", [-0.1, 65, math.nan, math.inf])
def test_a_threshold_out_of_range_is_refused(eta: float) -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate(changed(async_training__staleness_threshold=eta))


def test_an_unknown_key_is_refused_in_every_section() -> None:
    for section in [None, *RunConfig.model_fields]:
        data = (
            changed(**{"surprise" if section is None else f"{section}__surprise": 1})
            if (section is None or isinstance(GOOD.get(section, {}), dict))
            else None
        )
        if data is not None and section not in ("name", "runs_dir", "seed", "mode"):
            with pytest.raises(ValidationError, match="surprise"):
                RunConfig.model_validate(data)


PRESETS = sorted((Path(__file__).parents[3] / "configs" / "modes").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_each_preset_is_the_mode_it_is_named_for(preset: Path) -> None:
    """On top of a configuration that says something else about every parameter."""
    demo = preset.parents[1] / "demo.yaml"
    other = ["async_training.max_version_gap=3", "async_training.staleness_threshold=0.25"]
    assert load(demo, [*other, str(preset)]).derived_mode == preset.stem
    assert {p.stem for p in PRESETS} == {str(mode) for mode in Mode}


SHARE = "rollout__engine__gpu_memory_utilization"
COLOCATED_ON_GPUS = {"mode": "colocated_sync", "trainer__device": "cuda"}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"async_training__partial_rollout": True}, "has no effect"),
        ({"async_training__max_version_gap": 2}, "bounds partial rollout, which is off"),
        (
            {"async_training__max_version_gap": 0, "async_training__staleness_threshold": 0.5},
            "greater than 0",
        ),
        (
            {"mode": "one_step_off", "async_training__trigger_parameter_sync_step": 2},
            "sync_step = 1, found 2",
        ),
        (
            {"mode": "one_step_off", "async_training__partial_rollout": True},
            "partial_rollout = false, found true",
        ),
        ({"mode": "colocated_sync", "async_training__staleness_threshold": 0.5}, "= 0.0, found 0.5"),
        ({"mode": "colocated_sync", "trainer__cpus": [0]}, "unset trainer.cpus"),
        (COLOCATED_ON_GPUS, "gpu_memory_utilization = 0.9 leaves the trainer no tenth of it: set it to 0.85"),
        (COLOCATED_ON_GPUS | {"rollout__replicas": 4}, "2 engines, and"),
        (
            COLOCATED_ON_GPUS | {"rollout__replicas": 4, SHARE: 0.5},
            "= 0.5 leaves the trainer no tenth of it: set it to 0.42 or less, e.g. 0.25",
        ),
        (COLOCATED_ON_GPUS | {SHARE: 0.4, "sync__transport": "nccl"}, "set sync.transport to gloo"),
        (
            COLOCATED_ON_GPUS | {SHARE: 0.4, "rollout__engine__tensor_parallel_size": 4},
            "has 2 GPUs on a node, and rollout.engine.tensor_parallel_size = 4: lower it",
        ),
        ({"mode": "two_steps_off"}, "one_step_off"),
        ({"val__n": 4}, "set val.temperature above 0"),
    ],
)
def test_modes_that_contradict_themselves_are_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(told)):
        RunConfig.model_validate(changed(**values))


def test_partial_rollout_follows_from_the_threshold_where_it_is_unset() -> None:
    """And the resolved configuration, which says so, is read back as the same."""
    for eta, partial in ((0.0, False), (0.5, True)):
        config = RunConfig.model_validate(changed(async_training__staleness_threshold=eta))
        assert config.async_training.partial_rollout is partial
        assert RunConfig.model_validate(config.to_plain()) == config
    for mode in ("one_step_off", "colocated_sync"):
        config = RunConfig.model_validate(changed(mode=mode))
        assert config.derived_mode == mode
        assert RunConfig.model_validate(config.to_plain()) == config


def test_plain_data_masks_the_password_and_reads_back() -> None:
    config = RunConfig.model_validate(changed(redis__url="redis://user:secret@host:6379/0"))
    plain = config.to_plain()
    assert "secret" not in str(plain)
    assert config.redis.url == "redis://user:secret@host:6379/0", "only the copy is masked"
    without = RunConfig.model_validate(GOOD)
    assert RunConfig.model_validate(without.to_plain()) == without


@pytest.mark.parametrize(("engines", "share"), [(1, 0.85), (2, 0.42), (3, 0.28)])
def test_gpus_are_shared_in_colocated_sync(engines: int, share: float) -> None:
    """The share that the refusal names is taken, and what is left is the trainer's."""
    given = changed(**COLOCATED_ON_GPUS, **{SHARE: share, "rollout__replicas": 2 * engines})
    shared = RunConfig.model_validate(given).gpu_sharing
    assert shared is not None
    assert (shared.engines, shared.largest_engine_share) == (engines, share)
    assert 0.0999 < shared.trainer_share < 0.12
    assert RunConfig.model_validate(changed(mode="colocated_sync")).gpu_sharing is None
    assert RunConfig.model_validate(changed(trainer__device="cuda")).gpu_sharing is None


def test_engines_that_leave_gpus_idle_are_told() -> None:
    given = changed(**COLOCATED_ON_GPUS, **{SHARE: 0.4, "rollout__replicas": 1})
    (text,) = warnings(RunConfig.model_validate(given))
    assert text.startswith("mode: colocated_sync means all 2 GPUs for each phase, but the engines use 1: set")
    assert warnings(RunConfig.model_validate(given | changed(**COLOCATED_ON_GPUS, **{SHARE: 0.4}))) == []
