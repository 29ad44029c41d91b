"""What may change while a run is on, and what is refused by name."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import yaml

from headrace.cli.tune import tune
from headrace.config import loading, tuning
from headrace.config.loading import ConfigError, load
from headrace.config.redis_memory import needed_bytes
from headrace.config.run import RunConfig
from headrace.connections.net import PortTaken
from headrace.connections.redis_client import connect
from headrace.ledger.client import LedgerUnavailable
from headrace.local.valkey_server import start_valkey
from headrace.records.json_files import write_json
from headrace.records.layout import RunLayout
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator import service as coordinator
from headrace_coordinator.advice import Adviser
from headrace_coordinator.kube.agent import Agent
from headrace_coordinator.rounds.notices import ConfigRefused, Notice, Notices, Tuned
from headrace_coordinator.tuning import ConfigWatch, check_memory, stamp_of
from tests.support.cli_desk import Desk

BASE: dict[str, Any] = {
    "name": "x",
    "model": {"path": "nowhere"},
    "data": {"train_files": ["nowhere.jsonl"]},
    "rollout": {"n": 2, "total_rollout_steps": 100, "test_freq": 0},
    "actor": {"ppo_mini_batch_size": 4},
    "async_training": {"staleness_threshold": 0.5, "trigger_parameter_sync_step": 2},
    "custom_reward_function": {"path": "headrace.demo.reward"},
}


class FakeDriver:
    def __init__(self) -> None:
        self.notices = Notices()
        self.heard = self.notices.listen()
        self.tunings: list[tuple[int, float]] = []

    def tune(self, found: pb.Tuning) -> None:
        self.tunings.append((found.sync_steps, found.staleness_threshold))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def rewrite(path: Path, **changes: Any) -> None:
    """As `headrace tune` and the kubelet do: another file in its place. `a__b=v` for a.b."""
    text = {section: dict(v) if isinstance(v, dict) else v for section, v in BASE.items()}
    for key, value in changes.items():
        section, _, leaf = key.partition("__")
        text.setdefault(section, {})[leaf] = value
    fresh = path.with_suffix(".new")
    fresh.write_text(yaml.safe_dump(text))
    os.replace(fresh, path)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeRedis:
    """A server of `maxmemory` bytes that tells it by CONFIG or, like managed ones, only by INFO."""

    def __init__(self, maxmemory: int = 0, config: bool = True) -> None:
        self.maxmemory = maxmemory
        self.config = config
        self.away = False
        self.asked = 0

    async def config_get(self, *_: str) -> dict[bytes, bytes]:
        self.asked += 1
        if self.away:
            raise redis.ConnectionError("away")
        if not self.config:
            raise redis.ResponseError("unknown command 'CONFIG'")
        return {b"maxmemory": str(self.maxmemory).encode()}

    async def info(self, _: str) -> dict[str, Any]:
        return {"maxmemory": self.maxmemory}


def watch(
    path: Path,
    server: FakeRedis | None = None,
    followers: Sequence[Callable[[RunConfig], None]] = (),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[ConfigWatch, FakeDriver]:
    driver, seen = FakeDriver(), stamp_of(path)
    client: Any = server or FakeRedis()
    return ConfigWatch(path, load(path), seen, driver, client, followers, clock), driver  # type: ignore[arg-type]


def heard(driver: FakeDriver) -> Notice:
    return driver.heard.get_nowait()


async def test_eta_and_s_are_passed_on(file: Path) -> None:
    watching, driver = watch(file)
    await watching.look()
    rewrite(file, async_training__staleness_threshold=0.25, async_training__trigger_parameter_sync_step=3)
    await watching.look()
    await watching.look()
    assert driver.tunings == [(3, 0.25)]
    assert isinstance(heard(driver), Tuned)
    rewrite(file, rollout__replicas=5)
    await watching.look()
    assert driver.tunings == [(3, 0.25), (2, 0.5)], (
        "set back; the number of rollouters is looked at elsewhere"
    )


async def test_what_the_coordinator_alone_reads_is_followed(file: Path) -> None:
    followed: list[RunConfig] = []
    watching, driver = watch(file, followers=[followed.append])
    rewrite(file, kubernetes__recommendation={"max_rollouters": 3}, kubernetes__deletion_cost_interval_s=5.0)
    await watching.look()
    (found,) = followed
    assert found.kubernetes.recommendation.max_rollouters == 3
    assert driver.tunings == [], "the trainer has nothing to do with it"
    told = heard(driver)
    assert isinstance(told, Tuned)
    assert "kubernetes.recommendation.max_rollouters: 64 -> 3" in told.what
    assert "syncs" not in told.what
    rewrite(file, kubernetes__enable=True)
    await watching.look()
    assert "kubernetes.enable" in heard(driver).reason  # type: ignore[union-attr]
    assert len(followed) == 1


async def test_the_adviser_and_the_agent_follow(file: Path) -> None:
    config = load(file)
    adviser = Adviser(config, None, None)  # type: ignore[arg-type]
    cluster = SimpleNamespace(timeout_s=10.0)
    agent = Agent(config, FakeDriver(), cluster)  # type: ignore[arg-type]
    rewrite(file, kubernetes__recommendation={"max_rollouters": 3}, kubernetes__request_timeout_s=2.0)
    watching, _ = watch(file)
    rewrite(file, kubernetes__scale_to_zero_on_completion=True, kubernetes__request_timeout_s=3.0)
    watching._followers = [adviser.follow, agent.follow]
    await watching.look()
    assert adviser._config.kubernetes.request_timeout_s == 3.0
    assert (agent._settings.scale_to_zero_on_completion, cluster.timeout_s) == (True, 3.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout__n", 3),
        ("actor__ppo_mini_batch_size", 5),
        ("async_training__partial_rollout", False),
        ("async_training__max_version_gap", 2),
        ("redis__url", "redis://elsewhere:6379/0"),
        ("model__path", "elsewhere"),
    ],
)
async def test_anything_else_is_refused_as_a_whole(file: Path, key: str, value: Any) -> None:
    watching, driver = watch(file)
    rewrite(file, async_training__staleness_threshold=0.25, **{key: value})
    await watching.look()
    refused = heard(driver)
    assert isinstance(refused, ConfigRefused)
    assert key.replace("__", ".") in refused.reason
    assert driver.tunings == []
    rewrite(file, async_training__staleness_threshold=0.25)
    await watching.look()
    assert driver.tunings == [(2, 0.25)], "mended"


async def test_what_does_not_fit_together_is_refused(file: Path) -> None:
    watching, driver = watch(file)
    rewrite(file, async_training__staleness_threshold=-1)
    await watching.look()
    assert "staleness_threshold" in heard(driver).reason  # type: ignore[union-attr]
    file.write_text("{")
    await watching.look()
    assert isinstance(heard(driver), ConfigRefused)
    file.unlink()
    await watching.look()
    assert (driver.heard.empty(), driver.tunings) == (True, [])


@pytest.mark.parametrize("config", [True, False])
async def test_what_the_server_cannot_hold_is_refused(file: Path, config: bool) -> None:
    """The queue service would not start any more with it."""
    server = FakeRedis(needed_bytes(load(file)) + 1, config)
    watching, driver = watch(file, server)
    rewrite(file, async_training__staleness_threshold=3.0)
    await watching.look()
    refused = heard(driver)
    assert isinstance(refused, ConfigRefused)
    assert f"maxmemory {server.maxmemory}" in refused.reason
    assert "async_training.staleness_threshold" in refused.reason
    server.maxmemory = 1
    rewrite(file, async_training__staleness_threshold=0.25)
    await watching.look()
    assert driver.tunings == [(2, 0.25)], "what needs less is no worse than what is"


async def test_more_memory_is_noticed_without_another_change(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is tried again now and then, and told of once."""
    clock, server = Clock(), FakeRedis(needed_bytes(load(file)) + 1)
    watching, driver = watch(file, server, clock=clock)
    rewrite(file, async_training__staleness_threshold=3.0)
    for clock.now in (0.0, 1.0, 29.0, 31.0, 40.0, 62.0):
        await watching.look()
    assert server.asked == 3
    assert isinstance(heard(driver), ConfigRefused)
    assert driver.heard.empty()
    assert [record.msg for record in caplog.records] == ["the changed configuration is refused"]
    server.maxmemory *= 10
    clock.now = 63.0
    await watching.look()
    assert driver.tunings == []
    clock.now = 93.0
    await watching.look()
    assert driver.tunings == [(2, 3.0)]
    assert isinstance(heard(driver), Tuned)
    clock.now = 1000.0
    await watching.look()
    assert server.asked == 4, "there is nothing left to try"


async def test_a_refused_file_that_is_set_back_is_told(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watching, driver = watch(file)
    rewrite(file, rollout__n=3)
    await watching.look()
    rewrite(file)
    await watching.look()
    assert isinstance(heard(driver), ConfigRefused)
    assert driver.tunings == []
    assert caplog.records[-1].msg == "the configuration is what the run goes by again"


async def test_a_change_waits_for_the_server(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = FakeRedis()
    server.away = True
    watching, driver = watch(file, server)
    rewrite(file, async_training__staleness_threshold=3.0)
    for _ in range(5):
        await watching.look()
    assert (driver.heard.empty(), driver.tunings) == (True, [])
    assert len(caplog.records) == 1, "one word about it"
    server.away = False
    await watching.look()
    assert driver.tunings == [(2, 3.0)]


async def test_a_start_with_what_the_server_cannot_hold_is_refused(file: Path) -> None:
    """As by the queue service."""
    config = load(file)
    server: Any = FakeRedis(needed_bytes(config))
    await check_memory(config, server)
    server.maxmemory -= 1
    with pytest.raises(ConfigError, match=r"and async_training.staleness_threshold: .*maxmemory"):
        await check_memory(config, server)
    server.away = True
    with pytest.raises(LedgerUnavailable, match="away"):
        await check_memory(config, server)


async def test_a_change_during_the_start_is_noticed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator may wait for minutes between reading its configuration and watching it."""
    made: list[ConfigWatch] = []

    async def until_configured(*_: Any) -> None:
        rewrite(file, async_training__staleness_threshold=0.25)

    def watching(*args: Any) -> ConfigWatch:
        made.append(ConfigWatch(*args))
        return made[-1]

    def listen(*_: Any) -> int:
        raise RuntimeError("enough")

    monkeypatch.setattr(coordinator, "until_configured", until_configured)
    monkeypatch.setattr(coordinator, "check_memory", until_configured)
    monkeypatch.setattr(coordinator, "ConfigWatch", watching)
    monkeypatch.setattr(coordinator.tls, "listen", listen)  # type: ignore[attr-defined]
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://127.0.0.1:1/0")
    args = argparse.Namespace(config=file, host="127.0.0.1", port=0, socket=None)
    with pytest.raises(PortTaken, match="enough"):
        await coordinator._serve(args)
    (found,) = made
    await found.look()
    assert found._driver.state.tuning.staleness_threshold == 0.25


def test_partial_rollout_does_not_change_by_its_default(file: Path) -> None:
    """Unset it follows eta: turning eta on would turn it on, too."""
    rewrite(file, async_training__staleness_threshold=0.0)
    before = load(file)
    rewrite(file)
    (line,) = tuning.refused(before, load(file))
    assert "async_training.partial_rollout" in line
    assert "write it down" in line


def test_the_command_asks_the_server_first(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refused file in the run's directory would be in the way of every restart."""
    layout = RunLayout(tmp_path / "runs" / "x")
    lock = layout.lock()
    before = load(file)
    for path in (layout.config, layout.requested):
        loading.write(before, path)
    command = ("x", ["async_training.staleness_threshold=3"], tmp_path / "runs")
    with start_valkey(layout.redis, "secret") as server, connect(server.url) as client:
        write_json(layout.endpoints, {"redis_url": server.url})
        client.config_set("maxmemory", needed_bytes(before) + 1)
        assert tune(*command) == 2
        assert "Redis has maxmemory" in capsys.readouterr().err
        assert load(layout.config).async_training.staleness_threshold == 0.5
        client.config_set("maxmemory", 0)
        assert tune(*command) == 0
    lock.release()
    assert load(layout.config).async_training.staleness_threshold == 3.0


def test_the_command(desk: Desk) -> None:
    assert desk.headrace("tune", "nothing", "a=1")[0] == 2
