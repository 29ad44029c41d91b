"""A whole local update on two ranks: critic, reference, and samples that only one of them cannot score."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from headrace.config import RunConfig
from headrace.net import free_port
from headrace.wire import Sample
from tests.unit import test_gradient_equivalence as equivalence
from tests.unit.test_weights import Children

BROKEN = 2
"""A token whose embedding is nan; no other sample has it."""

Answer = tuple[list[str], int, dict[str, float], list[np.ndarray[Any, Any]]]


def config(model_dir: str, **more: Any) -> RunConfig:
    plain = equivalence.config(equivalence.Case([])).model_dump()
    plain["model"]["path"] = model_dir
    plain["actor"] |= {"use_kl_loss": True, "optim": {"lr": 1e-3}}
    plain["algorithm"]["adv_estimator"] = "gae"
    plain["critic"] = {"enable": True, "optim": {"lr": 1e-3}}
    plain["async_training"] = {"use_rollout_log_probs": False}
    for section, values in more.items():
        plain[section] |= values
    return RunConfig.model_validate(plain)


def broken(sample: Sample) -> Sample:
    ids = np.append(sample.prompt.token_ids, BROKEN).astype("int32")
    return dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, token_ids=ids))


def _rank(
    rank: int, pipe: Connection, port: int, world: int, model_dir: str, shares: list[list[str]]
) -> None:
    """`shares`: per rank the samples of two updates, `!` behind one whose tokens are broken."""
    from headrace_trainer.learner import Learner
    from headrace_trainer.ranks import Ranks

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world),
    }  # fmt: skip
    ranks = Ranks("cpu", 120.0)
    learner = Learner(config(model_dir), ranks)
    learner.begin_window()
    every = {s.prompt.sample_id: s for s in equivalence.samples("llama")}
    for names in shares[rank]:
        mine = [broken(every[n[0]]) if n.endswith("!") else every[n] for n in names.split()]
        learned = learner.learn([mine], {"0": 0}, 0, contextlib.nullcontext)
        parameters = [p.full_tensor().detach().numpy() for p in learner.model.parameters()]  # type: ignore[attr-defined]
        pipe.send(("ok", (sorted(learned.rejected), learned.stepped, learned.metrics, parameters)))
    ranks.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch

    from tests.integration import tiny_models

    out = tmp_path_factory.mktemp("model")
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = torch.nan
    model.save_pretrained(out)
    return str(out)


def outcomes(model_dir: str, *shares: list[str]) -> list[list[Answer]]:
    """Per update the answers in order of rank."""
    world = len(shares)
    with Children(_rank, range(world), free_port(), world, model_dir, list(shares)) as children:
        return [[children.answer(rank) for rank in range(world)] for _ in shares[0]]


@pytest.fixture(scope="module")
def found(model_dir: str) -> tuple[list[list[Answer]], list[list[Answer]]]:
    """Two ranks with broken samples on one of them, and one rank that never saw those."""
    two = outcomes(model_dir, ["0 1", "0", "0!"], ["2! 3", "2! 3!", "1!"])
    one = outcomes(model_dir, ["0 1 3", "0", ""])
    return two, one


def test_a_mini_batch_of_which_nothing_is_left_is_no_step(model_dir: str) -> None:
    """Neither the schedule nor the clock of optimizer steps may count it as taken."""
    from headrace_trainer.learner import Learner
    from tests.single_rank import single_rank

    every = {s.prompt.sample_id: s for s in equivalence.samples("llama")}
    with single_rank() as ranks:
        learner = Learner(config(model_dir), ranks)
        learner.begin_window()
        minis = [[broken(every["0"])], [every["1"]]]
        learned = learner.learn(minis, {"0": 0}, 0, contextlib.nullcontext)
    assert (learned.optimizer_steps, learned.stepped, learned.sums.skipped) == (2, 1, 1)
    assert learner.policy.schedule.last_epoch == 1
    assert len(learned.sums.grad_norms) == 1


def test_all_ranks_agree_on_what_is_left_out(found: tuple[list[list[Answer]], list[list[Answer]]]) -> None:
    two, _ = found
    assert [[a[0] for a in update] for update in two] == [
        [["2"]] * 2,
        [["2", "3"]] * 2,
        [["0", "1"]] * 2,
    ]
    assert [[a[1] for a in update] for update in two] == [[1, 1], [1, 1], [0, 0]]


def test_the_rest_is_trained_as_if_they_had_not_been_there(
    found: tuple[list[list[Answer]], list[list[Answer]]],
) -> None:
    """On two ranks the same policy and critic as on one without the broken samples."""
    two, one = found
    for update, (alone,) in zip(two, one, strict=True):
        for answer in update:
            for p, q in zip(answer[3], alone[3], strict=True):
                np.testing.assert_allclose(p, q, atol=1e-5)
        assert set(update[0][2]) == set(alone[2])
        for key in set(alone[2]) & {"critic/vf_loss", "critic/returns/mean"}:
            assert update[0][2][key] == pytest.approx(alone[2][key], rel=1e-4)
