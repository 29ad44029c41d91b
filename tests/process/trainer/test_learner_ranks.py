"""A whole local update on two ranks: critic, reference, and samples that only one of them cannot score."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from headrace.config.run import RunConfig
from headrace.connections.net import free_port
from headrace.wire.payloads import Sample
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.optimize import Learnable
from tests.process.trainer import test_gradient_equivalence as equivalence
from tests.process.weights.test_weights import Children

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
    rank: int,
    pipe: Connection,
    port: int,
    world: int,
    model_dir: str,
    shares: list[list[str]],
    folder: Path,
) -> None:
    """`shares`: per rank the samples of two updates, `!` behind one whose tokens are broken. Two ranks save a
    checkpoint in `folder` in the end; a single one loads that. They answer with the state that is in it."""
    from headrace_trainer.checkpoints.checkpoint import Checkpoints
    from headrace_trainer.checkpoints.progress import TrainingProgress
    from headrace_trainer.learning.learner import Learner

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
    checkpoints = Checkpoints(folder, config(model_dir), learner.parts, ranks)
    c10d = "torch.distributed.distributed_c10d"
    with (
        mock.patch(f"{c10d}._object_to_tensor"),
        mock.patch(f"{c10d}._tensor_to_object", side_effect=OSError),
    ):
        if world > 1:
            checkpoints.save(TrainingProgress(run_id="r", step=1))
        else:
            checkpoints.load(folder / "step_00000001")
    pipe.send(("ok", (everything(learner.parts), odd_ones(ranks, folder.parent) if world > 1 else None)))
    ranks.close()


def everything(parts: Mapping[str, Learnable]) -> dict[str, np.ndarray[Any, Any]]:
    """Parameters and moments, whole; all ranks together."""
    out: dict[str, Any] = {}
    for name, part in parts.items():
        for number, p in enumerate(part.model.parameters()):
            out[f"{name}/{number}"] = p.detach()
            for key, value in part.optimizer.state[p].items():
                out[f"{name}/{number}/{key}"] = value
    return {k: getattr(v, "full_tensor", lambda v=v: v)().numpy() for k, v in out.items()}


def odd_ones(ranks: Ranks, folder: Path) -> tuple[list[str], bool]:
    """By one of two ranks: write what is sharded unevenly, not at all or alike on both, and read it back
    sharded another way. Returns what it wrote, and whether it read the same."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from headrace_trainer.checkpoints import shards

    mesh = DeviceMesh("cpu", [0, 1])
    tensors = odd_tensors()
    placed = {
        name: distribute_tensor(t, mesh, [Replicate() if name == "replicated" else Shard(0)])
        for name, t in tensors.items()
        if name != "plain"
    }
    shard = shards.own_shard({**placed, "plain": tensors["plain"]}, ranks.is_first)
    shard.write(folder / shards.file_name(ranks.rank))
    ranks.meet()
    into: dict[str, Any] = {
        name: distribute_tensor(torch.zeros_like(t), mesh, [Shard(1) if t.dim() > 1 else Replicate()])
        for name, t in tensors.items()
    }
    shards.Reader(folder).load(into)
    return sorted(shard.tensors), all(torch.equal(into[n].full_tensor(), t) for n, t in tensors.items())


def odd_tensors() -> dict[str, Any]:
    import torch

    return {
        "plain": torch.tensor(7.5),
        "replicated": torch.arange(4),
        "short": torch.arange(3.0).reshape(1, 3),
        "uneven": torch.arange(14.0, dtype=torch.bfloat16).reshape(7, 2),
    }


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch

    from tests.support import tiny_models

    out = tmp_path_factory.mktemp("model")
    model = tiny_models.build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = torch.nan
    model.save_pretrained(out)
    return str(out)


def outcomes(model_dir: str, folder: Path, *shares: list[str]) -> tuple[list[list[Answer]], list[Any]]:
    """Per update the answers in order of rank, and by rank the state in the checkpoint and `odd_ones`."""
    world = len(shares)
    with Children(_rank, range(world), free_port(), world, model_dir, list(shares), folder) as children:
        updates = [[children.answer(rank) for rank in range(world)] for _ in shares[0]]
        return updates, [children.answer(rank) for rank in range(world)]


@pytest.fixture(scope="module")
def saved(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks with broken samples on one of them, and one rank that never saw those."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    two = outcomes(model_dir, folder, ["0 1", "0", "0!"], ["2! 3", "2! 3!", "1!"])
    one = outcomes(model_dir, folder, ["0 1 3", "0", ""])
    return two, one, folder


@pytest.fixture(scope="module")
def found(saved: Any) -> tuple[list[list[Answer]], list[list[Answer]]]:
    """What their updates came to."""
    return saved[0][0], saved[1][0]


def test_a_mini_batch_of_which_nothing_is_left_is_no_step(model_dir: str) -> None:
    """Neither the schedule nor the clock of optimizer steps may count it as taken."""
    from headrace_trainer.learning.learner import Learner
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


def test_a_checkpoint_of_two_ranks_comes_back_on_one(saved: Any) -> None:
    """Policy and critic, weights and moments, to the bit."""
    (_, ((first, _), (second, _))), (_, ((alone, _),)), _ = saved
    assert first.keys() == second.keys() == alone.keys()
    assert any(key.endswith("exp_avg_sq") for key in alone)
    for key, value in first.items():
        np.testing.assert_array_equal(value, alone[key], err_msg=key)


def test_each_rank_writes_and_reads_what_is_its_own(saved: Any) -> None:
    """Two write and read in other parts; one without a process group reads it whole."""
    import torch

    from headrace_trainer.checkpoints.shards import Reader

    (_, ((_, first), (_, second))), _, folder = saved
    assert first == (["plain", "replicated", "short", "uneven"], True)
    assert second == (["uneven"], True), "the short one has no row for the second rank"
    reader = Reader(folder.parent)
    into = reader.empty("")
    reader.load(into)
    assert into.keys() == odd_tensors().keys()
    for name, tensor in odd_tensors().items():
        assert torch.equal(into[name], tensor)
        assert into[name].dtype == tensor.dtype
