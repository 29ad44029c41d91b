"""A short run on the demo task for every estimator and every loss, on real parts that they share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.config import loading
from headrace.config.run import RunConfig
from headrace.demo import prepare
from headrace.local.assets import resolve
from headrace.metrics.row_keys import CRITIC, KL_LOSS, KL_REWARD, SCORED, SYNC, TELEMETRY, WEIGHTS, problems
from headrace.plugins.registry import Registry
from tests.single_rank import single_rank
from tests.support.learners import NEEDS
from tests.support.shared_stack import Finished, SharedStack, shared_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
SAMPLES, MINI = 8, 4
UPDATES = SAMPLES // MINI

COMMON: dict[str, Any] = {
    "rollout": {"n": 4, "total_rollout_steps": SAMPLES, "test_freq": 0},
    "actor": {"ppo_mini_batch_size": MINI},
    "trainer": {"n_gpus_per_node": 1, "save_freq": 0, "claim_timeout_s": 120.0},
    "async_training": {"trigger_parameter_sync_step": 1},
}
NO_OLD = NEEDS["decoupled_ppo"]

MORE: dict[str, dict[str, Any]] = {
    "log-linear proximal policy": {
        "actor": {"policy_loss": "decoupled_ppo", "prox_logp_method": "loglinear"},
    },
    "truncated importance sampling": {
        **NO_OLD,
        "algorithm": {"rollout_correction": {"rollout_is": "token"}},
    },
    "kl in the loss": {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.01}, "ref": {"param_offload": True}},
    "kl in the reward": {
        "algorithm": {
            "adv_estimator": "reinforce_plus_plus",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive"},
        }
    },
}


def once(registry: Registry[Any]) -> list[str]:
    """One name for each function: the others are aliases."""
    return sorted({registry.get(name): name for name in reversed(registry.names())}.values())


def merged(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for change in changes:
        for key, value in change.items():
            both = isinstance(value, dict) and isinstance(out.get(key), dict)
            out[key] = merged(out[key], value) if both else value
    return out


def paired() -> dict[str, dict[str, Any]]:
    """Every estimator and every loss in one run: two at a time where they may go together."""
    base = merged(loading.load(ROOT / "configs" / "demo.yaml").model_dump(), COMMON)
    losses = {n: {"actor": {"policy_loss": n}, **NEEDS.get(n, {})} for n in once(POLICY_LOSSES)}
    cases = {}
    for e in once(ADVANTAGE_ESTIMATORS):
        name, case = e, merged({"algorithm": {"adv_estimator": e}}, NEEDS.get(e, {}))
        for loss, settings in losses.items():
            both = merged(case, settings)
            with contextlib.suppress(ValueError):  # refused together
                RunConfig.model_validate(merged(base, both))
                name, case = f"{e} with {loss}", both
                del losses[loss]
                break
        cases[name] = case
    return cases | losses


CASES = {**paired(), **MORE}


@pytest.fixture(scope="module")
def demo_config() -> dict[str, Any]:
    prepare(ROOT / ".cache" / "demo", 0, None)
    plain = resolve(loading.load(ROOT / "configs" / "demo.yaml")).model_dump()
    return merged(plain, COMMON)


@pytest.fixture(scope="module")
def stack(demo_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStack]:
    with (
        single_rank() as ranks,
        shared_stack(RunConfig.model_validate(demo_config), tmp_path_factory.mktemp("stack"), ranks) as found,
    ):
        yield found


def check(finished: Finished, config: RunConfig) -> None:
    assert finished.code == 0
    assert finished.balanced
    assert finished.stats.counts["trained"] == finished.stats.issued_total == SAMPLES
    rows = finished.rows
    assert [row["step"] for row in rows] == list(range(1, UPDATES + 1))
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row
        assert row["actor/skipped_steps"] == 0
    met = {SYNC, TELEMETRY, "in the last row of a window"}
    met |= {CRITIC} if config.critic.enable else set()
    met |= {SCORED} if config.uses_reference else set()
    met |= {WEIGHTS} if config.algorithm.rollout_correction.rollout_is else set()
    met |= {KL_LOSS} if config.actor.use_kl_loss else set()
    met |= {KL_REWARD} if config.algorithm.use_kl_in_reward else set()
    missing = problems({key for row in rows for key in row}, met)
    assert [m for m in missing if not m.startswith("rollouter/")] == [], "telemetry is not part of this stack"
    start = load_file(Path(config.model.path) / "model.safetensors")
    end = load_file(finished.directory / "final" / "model.safetensors")
    assert any(not torch.equal(start[name], end[name]) for name in start), "the policy did not move"


@pytest.mark.parametrize("case", list(CASES))
def test_short_run(case: str, stack: SharedStack, demo_config: dict[str, Any]) -> None:
    name = "".join(c if c.isalnum() else "-" for c in case)
    config = RunConfig.model_validate(merged(demo_config, {"name": name}, CASES[case]))
    finished = stack.run(config)
    check(finished, config)
    if config.critic.enable:
        assert finished.rows[-1]["critic/vf_loss"] > 0
    if config.uses_reference:
        assert any(key in finished.rows[-1] for key in ("actor/kl_loss", "actor/reward_kl_penalty"))


def test_dynamic_sampling_drops_and_refills(stack: SharedStack, demo_config: dict[str, Any]) -> None:
    """Groups without spread leave through the gate, with recomputed log-probs and a proximal policy."""
    total = 48
    changes = {
        "name": "dynamic-sampling",
        "rollout": {"total_rollout_steps": total},
        "actor": {"policy_loss": "decoupled_ppo"},
        "algorithm": {"filter_groups": {"enable": True}},
        "async_training": {"use_rollout_log_probs": False, "partial_rollout": False},
    }
    finished = stack.run(RunConfig.model_validate(merged(demo_config, changes)))
    assert finished.code == 0
    assert finished.balanced
    counts = finished.stats.counts
    assert counts["dropped"] > 0, "no group was without spread: the test is blind"
    assert finished.stats.dropped_reasons == {"zero_spread": counts["dropped"]}
    assert counts["trained"] + counts["dropped"] == finished.stats.issued_total == total
    gaps = [int(gap) for row in finished.rows for gap in row["staleness/version_gap/hist"]]
    assert max(gaps) <= 1, "eta = 0.5, running work finishes: the gap is 1"
    for row in finished.rows:
        assert row["group/zero_std_ratio"] == 0
        assert row["actor/skipped_steps"] == 0
        assert "timing_s/old_log_prob" in row
