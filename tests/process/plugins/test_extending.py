"""One plugin of each kind, installed as a package is, used where the run would use it; docs/extending.md."""

from __future__ import annotations

import csv
import logging
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from headrace.algorithms.estimator import AdvantageInput, estimate
from headrace.algorithms.policy_loss import PolicyLossInput, PolicyLossSettings, policy_loss
from headrace.config.algorithm import OptimConfig
from headrace.config.algorithm_checks import load_algorithms
from headrace.config.environment import EnvironmentConfig
from headrace.config.run import RunConfig
from headrace.data.rows import DataError, load_rows
from headrace.environments import Done, Observation, Task, Turn
from headrace.environments.loading import load_environment
from headrace.local import plugin_probe, trackers
from headrace.plugins.engines import ENGINES
from headrace.rewards import build_scorer
from headrace.weights.transports import connect
from headrace.weights.transports.store import serve_store
from headrace.wire.payloads import FinishReason, Trajectory
from headrace_rollouter.inference.engine import Engine
from headrace_rollouter.service import start_engine
from headrace_trainer.model.optimize import learnable
from headrace_trainer.records.trackers import Tracking

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ROOT / "tests" / "plugins"
NAMES: dict[str, dict[str, Any]] = {
    "algorithm": {"adv_estimator": "above_greedy"},
    "actor": {
        "policy_loss": "squared",
        "policy_loss_settings": {"pull": 0.5},
        "optim": {"optimizer": "sgd"},
    },
    "reward": {"sources": {"short": {"kind": "shortest"}}},
    "environment": {"name": "guess"},
    "data": {"train_files": ["counting:8"]},
    "sync": {"transport": "store"},
    "trainer": {"logger": ["console", "csv"]},
    "rollout": {"name": "timed"},
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process and those that it starts."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGINS), os.environ.get("PYTHONPATH", "")]))


def config(**sections: dict[str, Any]) -> RunConfig:
    plain: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train_files": ["a"], "max_prompt_length": 8, "max_response_length": 8},
        "rollout": {"total_rollout_steps": 8, "test_freq": 0},
        "actor": {"ppo_mini_batch_size": 2},
    }
    if "reward" not in sections:
        plain["custom_reward_function"] = {"path": "r"}
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **values}
    return RunConfig.model_validate(plain)


@pytest.mark.usefixtures("installed")
def test_a_configuration_may_name_what_is_installed() -> None:
    config(**NAMES)
    ready = {name: values for name, values in NAMES.items() if name != "rollout"}  # which imports vLLM
    assert list(plugin_probe.problems(config(**ready))) == []
    assert list(trackers.problems(config(**ready))) == []


@pytest.mark.parametrize("section", [name for name in NAMES if name != "data"])
def test_what_is_not_installed_is_refused(section: str) -> None:
    with pytest.raises(ValidationError, match=r"unknown|is not installed"):
        config(**{section: NAMES[section]})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("section", "values", "nearest"),
    [
        ("sync", {"transport": "stor"}, "nearest first: store, "),
        ("rollout", {"name": "time"}, "nearest first: timed, "),
        ("trainer", {"logger": ["cvs"]}, "nearest first: csv, "),
        ("actor", {"optim": {"optimizer": "SGD"}}, "known, nearest first: .*sgd"),
        ("reward", {"sources": {"a": {"kind": "shortst"}}}, "nearest first: shortest, .*function, http"),
        ("environment", {"name": "guss"}, "calculator, guess are"),
        ("algorithm", {"adv_estimator": "above_gredy"}, "did you mean above_greedy"),
    ],
)
def test_a_name_that_is_nearly_one_is_answered_with_the_list(
    section: str, values: dict[str, Any], nearest: str
) -> None:
    with pytest.raises(ValidationError, match=nearest):
        config(**{section: values})


@pytest.mark.usefixtures("installed")
def test_the_algorithm() -> None:
    run = config(algorithm=NAMES["algorithm"], actor=NAMES["actor"])
    load_algorithms(run)
    assert run.has_greedy_baseline
    rewards, mask = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2)
    batch = AdvantageInput(
        rewards, mask, torch.zeros(1, dtype=torch.int64), reward_baselines=torch.tensor([0.25])
    )
    assert estimate("above_greedy", batch).advantages.tolist() == [[0.75, 0.75]]
    settings = PolicyLossSettings(extra={"pull": 0.5})
    inputs = PolicyLossInput(torch.zeros(1, 2), torch.ones(1, 2), mask, mask, settings=settings)
    assert policy_loss("squared", inputs).per_token.tolist() == [[0.5, 0.5]]
    with pytest.raises(ValidationError, match="did you mean pull"):
        config(actor={"policy_loss": "squared", "policy_loss_settings": {"pul": 0.5}})


@pytest.mark.usefixtures("installed")
async def test_the_reward() -> None:
    scorer = build_scorer(config(reward=NAMES["reward"]))
    await scorer.start()
    score, parts = await scorer.score("s", " so 42 ", "42", {})
    await scorer.close()
    assert (score, parts) == (0.4, {"short": 0.4})


@pytest.mark.usefixtures("installed")
async def test_the_environment() -> None:
    made = load_environment(EnvironmentConfig(name="guess", kwargs={"hint": "It is {}."}))
    assert made is not None
    task = Task("0000000001", "?", "source", "42", {}, 1)
    assert await made.step(Turn(task, 1, "7", (), {}, False)) == Observation(text="It is larger.")
    assert await made.step(Turn(task, 2, "42", (), {}, False)) == Done()


@pytest.mark.usefixtures("installed")
def test_the_data_source() -> None:
    assert [row.ground_truth for row in load_rows(["counting:3"])] == ["2", "3", "4"]
    with pytest.raises(DataError, match=r"counting:x.*write counting:100"):
        load_rows(["counting:x"])
    with pytest.raises(DataError, match=r"no such file.*unknown data source 'cuonting'.*first: counting, "):
        load_rows(["cuonting:3"])


@pytest.mark.usefixtures("installed")
def test_the_transport() -> None:
    store, cpu, kinds = serve_store("127.0.0.1"), torch.device("cpu"), list[str]()
    buffers = [torch.full((5,), 7 if rank == 0 else 0, dtype=torch.uint8) for rank in range(3)]

    def peer(rank: int) -> None:
        member = connect("store", "127.0.0.1", store.port, 1, rank, 3, 30.0, cpu)
        kinds.append(type(member).__name__)
        for _ in range(2):
            member.broadcast(buffers[rank])
        member.close()

    threads = [threading.Thread(target=peer, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert [buffer.tolist() for buffer in buffers] == [[7] * 5] * 3
    assert kinds == ["StoreCommunicator"] * 3


@pytest.mark.usefixtures("installed")
def test_the_tracker(tmp_path: Path) -> None:
    tracking = Tracking(config(trainer=NAMES["trainer"]), tmp_path, 0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    tracking.close()
    with (tmp_path / "csv" / "points.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["1", "step", "1.0"], ["1", "reward/mean", "0.5"]]


@pytest.mark.usefixtures("installed")
def test_the_optimizer() -> None:
    part = learnable(torch.nn.Linear(2, 1), OptimConfig(optimizer="sgd", lr=0.5), total_steps=5)
    assert isinstance(part.optimizer, torch.optim.SGD)
    part.model(torch.ones(1, 2)).sum().backward()
    weight = part.model.get_parameter("weight")
    before = weight.detach().clone()
    part.apply_gradients(100.0)
    assert torch.allclose(weight, before - 0.5)


class Llm:
    """Stands in for vLLM: two tokens to every prompt."""

    async def generate(self, *_: Any) -> Any:
        tokens = [5, 6]
        entries = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
        span = SimpleNamespace(version="0", start=0, end=2)
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=tokens, logprobs=entries, finish_reason="stop", weight_versions=[span]
                )
            ]
        )


@pytest.mark.usefixtures("installed")
async def test_the_engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def start(kind: type[Engine], run: RunConfig, stop: list[int]) -> Engine:
        return kind(run, Llm(), stop)

    monkeypatch.setattr(Engine, "start", classmethod(start))
    engine = await start_engine(config(rollout=NAMES["rollout"]), [])
    assert type(engine).__module__ == "headrace_example.engine"
    assert ENGINES.origin("timed") == "headrace-example 1.0"
    empty = np.zeros(0, np.float32)
    head = Trajectory(empty.astype(np.int32), empty, empty.astype(np.uint8), [], 1.0, FinishReason.UNFINISHED)
    with caplog.at_level(logging.INFO):
        await engine.generate(np.asarray([1, 2], dtype=np.int32), head, 1)
    assert [record.__dict__["tokens"] for record in caplog.records if record.msg == "response"] == [2]


def test_a_plugin_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "misfit-2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: misfit\nVersion: 2.0\n")
    (about / "entry_points.txt").write_text(
        "[headrace.engines]\nmisfit = test_misfit:Misfit\n[headrace.transports]\nabsent = test_absent:T\n"
    )
    (tmp_path / "test_misfit.py").write_text("class Misfit: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"engine 'misfit' \(misfit 2\.0, .*it has no start, generate"):
        ENGINES.get("misfit")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    [problem] = plugin_probe.problems(config(sync={"transport": "absent"}))
    assert problem.startswith("sync.transport: transport 'absent' (misfit 2.0, test_absent:T): test_absent ")


def test_the_page_shows_these_files() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    shown = dict(re.findall(r"`(headrace_example/\w+\.py)`.*?```python\n(.*?)```", page, re.DOTALL))
    there = {
        f"headrace_example/{file.name}": file.read_text()
        for file in (PLUGINS / "headrace_example").glob("*.py")
        if file.name != "__init__.py"
    }
    assert shown == there
    [points] = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    assert points == (PLUGINS / "headrace_example-1.0.dist-info" / "entry_points.txt").read_text()
