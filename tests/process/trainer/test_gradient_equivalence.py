"""The gradient of a mini-batch does not depend on how it was cut: ranks, micro-batches, order.

The real `Updater` under FSDP2, one rank and two, on models in float64. The reference is another computation
altogether: trajectory by trajectory, without padding, with the loss written out by hand.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config.run import RunConfig
from headrace.connections.net import free_port
from headrace.models.packed_model import install
from headrace.wire.payloads import FinishReason, Prompt, Sample, Segment, Trajectory
from headrace_trainer.model.optimize import Learnable
from tests.process.weights.test_weights import Children

RTOL = 1e-9
KINDS = ["llama-tied", "qwen3-moe"]
LONGEST = 20
MASKED = (1, 2)
"""(sample, trajectory) without a single token that counts."""


@dataclass
class Case:
    """How the rows of the batch (by index) lie on the ranks, and what differs from the usual."""

    ranks: list[list[int]]
    limit: int = 10_000
    grad_clip: float = 1e9
    only_masked: bool = False
    """Every token is masked."""
    poison: int | None = None
    """This row's advantage is nan."""


@dataclass
class Outcome:
    stepped: bool
    norm: float
    sums: list[float]
    """`UpdateSums.vector` summed over the ranks."""
    grads: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


ROWS = 16
EVEN, ODD = list(range(0, ROWS, 2)), list(range(1, ROWS, 2))
SHUFFLED = [int(i) for i in np.random.default_rng(5).permutation(ROWS)]
LONE = 4 * MASKED[0] + MASKED[1]

ONE_RANK = {
    "whole": Case([list(range(ROWS))]),
    "each alone": Case([list(range(ROWS))], limit=LONGEST),
    "cut": Case([list(range(ROWS))], limit=3 * LONGEST),
    "shuffled": Case([SHUFFLED], limit=3 * LONGEST),
    "reversed": Case([list(range(ROWS))[::-1]], limit=LONGEST),
}
TWO_RANKS = {
    "halves": Case([list(range(8)), list(range(8, ROWS))]),
    "interleaved": Case([EVEN, ODD], limit=LONGEST),
    "swapped": Case([ODD, EVEN], limit=3 * LONGEST),
    "shuffled": Case([SHUFFLED[:5], SHUFFLED[5:]], limit=2 * LONGEST),
    "nothing on one": Case([list(range(ROWS)), []], limit=3 * LONGEST),
    "nothing on the first": Case([[], list(range(ROWS))], limit=LONGEST),
    "only masked on one": Case([[i for i in range(ROWS) if i != LONE], [LONE]], limit=LONGEST),
}
SPECIAL = {
    "clipped": Case([EVEN, ODD], grad_clip=0.01),
    "all masked": Case([EVEN, ODD], limit=LONGEST, only_masked=True),
    "poisoned": Case([EVEN, ODD], limit=2 * LONGEST, poison=3),
}


def config(case: Case) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "unused", "dtype": "float32"},
            "data": {"train_files": ["unused"], "max_prompt_length": 6, "max_response_length": 14},
            "rollout": {"total_rollout_steps": 8, "test_freq": 0, "n": 4},
            "actor": {
                "ppo_mini_batch_size": 4,
                "ppo_max_token_len_per_gpu": case.limit,
                "optim": {"grad_clip": case.grad_clip},
            },
            "custom_reward_function": {"path": "unused"},
        }
    )


def build(kind: str) -> torch.nn.Module:
    from tests.support import tiny_models

    model = tiny_models.build(kind).double()
    if kind == "qwen3-moe":
        model.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return model


def packed(kind: str) -> torch.nn.Module:
    """As the trainer has it: it reads packed rows and scores tokens."""
    model = build(kind)
    install(model)
    return model


def still(model: torch.nn.Module) -> Learnable:
    """Steps change nothing: the gradients stay to be looked at."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Learnable(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))


def samples(kind: str, only_masked: bool = False) -> list[Sample]:
    """Four groups of four: unequal lengths, temperatures and masks, ratios on both sides of the clip."""
    rng = np.random.default_rng(11)
    model = build(kind)
    out = []
    for number in range(4):
        prompt = Prompt(
            str(number), number, 0, 0, rng.integers(3, 96, 1 + int(rng.integers(6))).astype("int32"), "", ""
        )
        group = []
        for index in range(4):
            count = 14 if (number, index) == (2, 0) else 1 + int(rng.integers(14))
            ids = rng.integers(3, 96, count).astype("int32")
            temperature = [0.7, 1.0, 1.3][(number + index) % 3]
            mask = (rng.random(count) < 0.8).astype("uint8")
            if only_masked or (number, index) == MASKED:
                mask[:] = 0
            with torch.no_grad():
                log_probs = response_log_probs(model, prompt.token_ids, ids, temperature).numpy()
            behaviour = np.minimum(log_probs + rng.normal(0, 0.3, count), 0.0).astype("float32")
            reward = 0.7 if number == 3 else float(rng.random())  # group 3 teaches nothing
            group.append(
                Trajectory(
                    ids, behaviour, mask, [Segment(0, 0, count)], temperature, FinishReason.STOP, reward
                )
            )
        out.append(Sample(prompt, group, "owner", 1))
    return out


def response_log_probs(
    model: torch.nn.Module, prompt: Any, response: Any, temperature: float
) -> torch.Tensor:
    """log p of each response token, in float64, one sequence and no padding."""
    ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    logits = model(input_ids=ids).logits[0] / temperature
    where = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    rows = torch.log_softmax(logits, -1)
    return torch.stack([rows[at, int(token)] for at, token in zip(where, response, strict=True)])


# ---- what the ranks do ----


def _rank(rank: int, pipe: Connection, port: int, world: int, work: list[tuple[str, str, Case]]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from headrace_trainer.distributed.ranks import Ranks
    from headrace_trainer.learning.advantages import with_advantages
    from headrace_trainer.learning.update import Updater, UpdateSums

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world),
    }  # fmt: skip
    ranks = Ranks("cpu", 120.0)
    models: dict[str, torch.nn.Module] = {}
    for kind, name, case in work:
        if kind not in models:
            models[kind] = packed(kind)
            mesh = init_device_mesh("cpu", (world,))
            for layer in models[kind].model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            fully_shard(models[kind], mesh=mesh)
        model = models[kind]
        (rows,) = with_advantages(config(case), [samples(kind, case.only_masked)])
        if case.poison is not None:
            rows[case.poison].advantages[:] = math.nan
        updater = Updater(config(case), still(model), ranks)
        sums = UpdateSums()
        stepped = updater.step([rows[i] for i in case.ranks[rank]], sums)
        outcome = Outcome(stepped, sums.grad_norms[0], ranks.sums(sums.vector()))
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                outcome.grads[key] = parameter.grad.full_tensor().numpy()  # type: ignore[attr-defined]
        if rank:
            outcome.grads = {}
        pipe.send(("ok", (kind, name, outcome)))
    ranks.close()


# ---- the reference ----


def reference(kind: str) -> tuple[float, dict[str, np.ndarray[Any, Any]], int]:
    """(token mean of the loss, its gradient, tokens), from the formulas alone."""
    model = build(kind)
    c = config(Case([]))
    low, high, lower_bound = c.actor.clip_ratio_low, c.actor.clip_ratio_high, c.actor.clip_ratio_c
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for sample in samples(kind):
        rewards = np.array([t.reward for t in sample.trajectories])
        spread = rewards.std(ddof=1)
        for t, reward in zip(sample.trajectories, rewards, strict=True):
            advantage = 0.0 if len(set(rewards)) == 1 else (reward - rewards.mean()) / (spread + 1e-6)
            log_probs = response_log_probs(model, sample.prompt.token_ids, t.token_ids, t.temperature)
            for lp, old, on in zip(log_probs, t.log_probs, t.loss_mask, strict=True):
                if not on:
                    continue
                tokens += 1
                ratio = torch.exp(lp - float(old))
                kept = min(max(ratio.item(), 1 - low), 1 + high)
                if advantage < 0 and ratio.item() > lower_bound:
                    total = total - lower_bound * advantage
                elif -advantage * kept > -advantage * ratio.item():
                    total = total - advantage * kept
                else:
                    total = total - advantage * ratio
    mean = total / tokens
    mean.backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return float(mean.detach()), grads, tokens


# ---- tests ----


def chosen(kind: str, name: str) -> bool:
    """Experts cost time: they get the cuts that differ most."""
    return kind == KINDS[0] or name in ("whole", "each alone", "interleaved", "nothing on the first")


Results = dict[tuple[str, int, str], list[Outcome]]


@pytest.fixture(scope="module")
def results() -> Results:
    """Everything is computed once: two processes and one, started together. Outcomes in order of rank."""
    one = [(kind, name, case) for kind in KINDS for name, case in ONE_RANK.items() if chosen(kind, name)]
    two = [(kind, name, case) for kind in KINDS for name, case in TWO_RANKS.items() if chosen(kind, name)]
    two += [(KINDS[0], name, case) for name, case in SPECIAL.items()]
    found: Results = {}
    with (
        Children(_rank, range(2), free_port(), 2, two) as pair,
        Children(_rank, range(1), free_port(), 1, one) as single,
    ):
        for children, work in ((single, one), (pair, two)):
            for _ in work:
                for rank in children.pipes:
                    kind, name, outcome = children.answer(rank)
                    found.setdefault((kind, len(children.pipes), name), []).append(outcome)
    return found


@pytest.fixture(scope="module")
def expected() -> Callable[[str], tuple[float, dict[str, np.ndarray[Any, Any]], int]]:
    return functools.cache(reference)


def distance(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Largest over the parameters of |difference| / |wanted|; tiny gradients count against the whole."""
    assert sorted(found) == sorted(wanted)
    whole = math.sqrt(sum(float((g * g).sum()) for g in wanted.values()))
    return max(
        float(np.linalg.norm(found[n] - g)) / max(float(np.linalg.norm(g)), 1e-3 * whole)
        for n, g in wanted.items()
    )


CASES = [
    (kind, world, name)
    for kind in KINDS
    for world, cases in ((1, ONE_RANK), (2, TWO_RANKS))
    for name in cases
    if chosen(kind, name)
]


@pytest.mark.parametrize(("kind", "world", "name"), CASES, ids=[f"{k}-{w}-{n}" for k, w, n in CASES])
def test_loss_and_gradient_do_not_depend_on_the_cut(
    results: Results, expected: Callable[[str], Any], kind: str, world: int, name: str
) -> None:
    loss, grads, tokens = expected(kind)
    outcomes = results[kind, world, name]
    assert len(outcomes) == world
    norm = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
    for outcome in outcomes:
        assert outcome.stepped
        assert outcome.sums[0] == tokens
        assert outcome.sums[1] / tokens == pytest.approx(loss, rel=RTOL, abs=RTOL)
        assert outcome.norm == pytest.approx(norm, rel=RTOL)
    assert distance(outcomes[0].grads, grads) < RTOL


def test_metrics_do_not_depend_on_the_cut(results: Results) -> None:
    for kind, world, name in CASES:
        base = results[kind, 1, "whole"][0].sums
        assert results[kind, world, name][0].sums == pytest.approx(base, rel=RTOL, abs=RTOL), (world, name)


def test_the_batch_exercises_the_clip(results: Results) -> None:
    """Otherwise the gradients say nothing about the clipped branches."""
    tokens, _, clipped, *_ = results[KINDS[0], 1, "whole"][0].sums
    assert 0 < clipped < tokens


def test_clipping_scales_the_same_gradient(results: Results) -> None:
    grads = results[KINDS[0], 1, "whole"][0].grads
    clipped = results[KINDS[0], 2, "clipped"]
    assert [o.norm for o in clipped] == pytest.approx([results[KINDS[0], 1, "whole"][0].norm] * 2, rel=RTOL)
    factor = 0.01 / clipped[0].norm
    assert factor < 0.5
    assert distance(clipped[0].grads, {n: g * factor for n, g in grads.items()}) < 1e-6


def test_a_batch_without_a_token_that_counts_changes_nothing(results: Results) -> None:
    outcomes = results[KINDS[0], 2, "all masked"]
    assert all(o.stepped and o.norm == 0.0 and o.sums[0] == 0.0 for o in outcomes)
    assert all(not g.any() for g in outcomes[0].grads.values())


def test_a_gradient_that_is_not_finite_skips_the_step_on_every_rank(results: Results) -> None:
    outcomes = results[KINDS[0], 2, "poisoned"]
    assert [o.stepped for o in outcomes] == [False, False]
    assert all(math.isnan(o.norm) for o in outcomes)
    assert outcomes[0].grads == {}, "nothing is left for the next step"
