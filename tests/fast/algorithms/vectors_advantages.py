"""Advantages and whitening against the file of expected numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from headrace.algorithms import whitening
from headrace.algorithms.advantages import normalised
from headrace.algorithms.estimator import AdvantageInput, estimate
from headrace.algorithms.groups import centred, group_stats
from headrace.algorithms.masked import masked_mean, masked_var
from tests.fast.algorithms.vectors_file import Vectors, group_ids, lookup, number


def outcome_batch(rewards: list[float], labels: list[str], **options: Any) -> AdvantageInput:
    """One token per trajectory, which carries the reward."""
    column = torch.tensor(rewards, dtype=torch.float64)[:, None]
    return AdvantageInput(column, torch.ones_like(column), group_ids(labels), **options)


def advantage_estimators(v: Vectors, name: str) -> None:
    path = ("advantage_estimators", name)
    if name == "otb_inputs":
        v.read(*path)
        return
    if name.startswith("hazard_f32_equal"):
        hazard_equal_rewards(v, path)
        return
    tool = "tool_mask" in name
    mask = v.batch("response_mask_tool" if tool else "response_mask")
    rewards = v.batch("token_level_rewards_kl" if "kl_rewards" in name else "token_level_rewards").clone()
    options: dict[str, Any] = {
        "lengths": v.batch("lengths"),
        "values": v.batch("values"),
        "old_log_probs": v.batch("old_log_probs"),
        "sum_pi_squared": v.tensor("advantage_estimators", "otb_inputs", "sum_pi_squared"),
        "reward_baselines": torch.full((len(mask),), number(r"baseline=\[([\d.]+)\]", name, 0.0)),
    }
    if changed := re.search(r"row(\d+) reward ([\d.]+)", name):
        row = int(changed[1])
        last = int(mask[row].nonzero()[-1])
        rewards[row] = 0
        rewards[row, last] = float(changed[2])
    ids = group_ids(v.read("batch", "uid"))
    if rows := re.search(r"rows (\d+)-(\d+)", name):
        chosen = slice(int(rows[1]), int(rows[2]) + 1)
        rewards, mask, ids = rewards[chosen], mask[chosen], ids[chosen]
        options = {key: value[chosen] for key, value in options.items()}
    base = re.sub(r"\(.*", "", name)
    estimator = re.sub("_(no_std|tool_mask|raw_no_whiten|distinct_max|group_of_1)", "", base)
    options |= {
        "norm_by_std": "no_std" not in name,
        "whiten": False if "no_whiten" in name else None,
        "gamma": number(r"\bg(?:amma)?([\d.]+)", name, 1.0),
        "lam": number(r"\bl([\d.]+)", name, 1.0),
    }
    batch = AdvantageInput(rewards, mask, ids, **options)
    if "raises" in lookup(path):
        label = re.search(r"for group (\w+)", v.read(*path, "raises"))
        assert label
        group = sorted(set(v.read("batch", "uid"))).index(label[1])
        with pytest.raises(ValueError, match=rf"group {group} has one"):
            estimate(estimator, batch)
        return
    out = estimate(estimator, batch)
    v.compare(out.advantages, *path, "advantages", mask=mask)
    v.compare(out.returns, *path, "returns", mask=mask)
    if "function" in lookup(path):
        v.read(*path, "function")


def hazard_equal_rewards(v: Vectors, path: tuple[str, ...]) -> None:
    """The recorded numbers are what the plain formula gives in float32. Ours is exactly 0 instead."""
    rewards = torch.tensor(v.read(*path, "rewards"), dtype=torch.float32)
    plain = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    if plain.any():
        v.compare(plain, *path, "grpo_advantages")
    else:
        # In the order in which this machine adds, the rounding cancels.
        v.read(*path, "grpo_advantages")
    column = rewards[:, None]
    batch = AdvantageInput(column, torch.ones_like(column), torch.zeros(len(rewards), dtype=torch.int64))
    assert torch.equal(estimate("grpo", batch).advantages, torch.zeros_like(column))


def masked_whiten(v: Vectors, _: str) -> None:
    x, mask = v.batch("values"), v.batch("response_mask")
    section = "masked_whiten"
    v.compare(whitening.whiten(x, mask), section, "shift_mean", mask=mask)
    v.compare(whitening.whiten(x, mask, shift_mean=False), section, "no_shift", mask=mask)
    v.compare(masked_mean(x, mask), section, "masked_mean")
    v.compare(masked_var(x, mask), section, "masked_var_unbiased")
    v.compare(masked_var(x, mask, unbiased=False), section, "masked_var_biased")


def parameters(name: str) -> tuple[float, float]:
    """gamma and lambda of names like g099_l095, where 1 is 1 and 095 is 0.95."""
    found = re.search(r"_g(\d+)_l(\d+)", name)
    assert found, name
    gamma, lam = (float(d[0] + "." + d[1:]) if len(d) > 1 else float(d) for d in found.groups())
    return gamma, lam


def tppo_egae(v: Vectors, name: str) -> None:
    path = ("tppo_egae", name)
    if name in ("source", "values"):
        v.read(*path)
        return
    values = v.tensor("tppo_egae", "values")[None]
    gamma, lam = parameters(name)
    wrong = name.startswith("wrong_if_treated_as_terminal")
    # The wrong number is that of the truncated rewards without the bootstrap.
    rewards_of = name.replace("wrong_if_treated_as_terminal", "truncated")
    rewards = v.tensor("tppo_egae", rewards_of, "rewards")[None]
    batch = AdvantageInput(
        rewards,
        torch.ones_like(rewards),
        torch.zeros(1, dtype=torch.int64),
        values=values,
        truncated=torch.tensor([name.startswith("truncated")]),
        gamma=gamma,
        lam=lam,
    )
    advantages = estimate("tppo", batch).advantages[0]
    v.compare(advantages, *path, *(() if wrong else ("adv",)))


def magistral_advantage(v: Vectors, _: str) -> None:
    path = ("magistral_advantage",)
    v.read(*path, "source")
    rewards, labels = v.read(*path, "rewards"), v.read(*path, "uid")
    batch = outcome_batch(rewards, labels)
    stats = group_stats(batch.scores(), batch.group_ids)
    relative = torch.where(stats.size > 1, centred(batch.scores(), stats), 0.0)
    v.compare(relative, *path, "centered")
    v.compare(normalised(relative, unbiased=False), *path, "norm_ddof0")
    v.compare(estimate("magistral", batch).advantages[:, 0], *path, "norm_ddof1")


def pipelinerl_advantage(v: Vectors, _: str) -> None:
    path = ("pipelinerl_advantage",)
    v.read(*path, "source")
    rewards, labels = v.read(*path, "rewards"), v.read(*path, "uid")
    for key, norm_by_std in (("adv", True), ("no_std", False)):
        batch = outcome_batch(rewards, labels, norm_by_std=norm_by_std)
        v.compare(estimate("pipelinerl", batch).advantages[:, 0], *path, key)
