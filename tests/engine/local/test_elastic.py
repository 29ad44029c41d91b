"""A run that is on: rollouters come and go, and another user wants to take the place of what has crashed."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from headrace.config import redis_url
from headrace.connections.net import unix_path
from tests.chaos import reward
from tests.listeners import listeners
from tests.pretender import IS_ANOTHER, Place, Pretender
from tests.support.run_process import ROOT, SAMPLES_PER_UPDATE, Run, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATES = 16
LIMIT_S = 180.0
PLUGINS = (
    "rollout.name=timed",
    "sync.transport=store",
    "algorithm.adv_estimator=above_greedy",
    "actor.optim.optimizer=sgd",
    "trainer.logger=[console,csv]",
)
"""Of an installed package (docs/extending.md): what they replace is part of every other run."""
UP_AGAIN = "coordinator stream is up again"


def test_from_none_to_one_to_two_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = os.pathsep.join([f"{ROOT}/tests/plugins", os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", plugins)
    run = make_run(
        tmp_path,
        "scaled",
        f"rollout.total_rollout_steps={UPDATES * SAMPLES_PER_UPDATE}",
        "rollout.replicas=0",
        "rollout.test_freq=0",
        "rollout.max_concurrent_samples=4",
        "async_training.trigger_parameter_sync_step=2",
        "trainer.save_freq=0",
        "trainer.n_gpus_per_node=1",
        f"custom_reward_function.path={ROOT}/tests/chaos/reward.py",
        *PLUGINS,
    )
    where = str(run.directory)
    assert run.command("scale", where, "rollouter=1").returncode == 2, "it is not on yet"
    slow = tmp_path / reward.SLOW  # so that the run is not over before an engine has loaded
    slow.touch()
    process = run.start(env={"HEADRACE_CHAOS_DIR": str(tmp_path)})
    wait_for(
        "the trainer to wait", lambda: run.log("trainer").count("no rollouter takes part"), process, LIMIT_S
    )
    assert "0 rollouters taking part" in run.command("status", where).stdout
    for wrong in ("rollouter=-1", "trainer=2", "rollouter=1000", "rollouter"):
        refused = run.command("scale", where, wrong)
        assert (refused.returncode, "rollouter=N" in refused.stderr) == (2, True), refused

    scale(run, 1)
    first = run.pid("rollouter-0")
    wait_for("the first update", lambda: len(run.rows()) >= 1, process, LIMIT_S)
    rounds = len(run.rows("sync.jsonl"))
    scale(run, 2)  # in the middle of a window: it gets the committed version, not the live weights
    assert names(run) == {"rollouter-0", "rollouter-1"}
    assert run.pid("rollouter-0") == first, "who was there goes on"
    second = run.pid("rollouter-1")
    wait_for("a round of both", lambda: len(run.rows("sync.jsonl")) > rounds, process, LIMIT_S)
    assert run.pid("rollouter-1") == second, "its canary did not pass"

    another_user_takes_no_place(run, process)
    assert (run.pid("rollouter-0"), run.pid("rollouter-1")) == (first, second), "they go on"

    wait_for("work in the hands of both", lambda: len(run.stats().in_flight_by_owner) == 2, process, LIMIT_S)
    scale(run, 1)
    assert names(run) == {"rollouter-0"}
    slow.unlink()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output[-4000:]
    for told in ("no rollouter: the trainer waits", "rollouters: 0 -> 1", "rollouters: 2 -> 1", "has left"):
        assert told in output
    ledger = run.summary["ledger"]
    assert run.summary["balanced"]
    assert ledger["trained"] == ledger["issued_total"] == UPDATES * SAMPLES_PER_UPDATE
    assert [r["step"] for r in run.rows()] == list(range(1, UPDATES + 1)), "a step was lost or counted twice"
    assert "expired" not in ledger["requeued_by_reason"], "who leaves in order parks and hands back by itself"
    assert run.command("audit", where).returncode == 0
    engine = run.summary["engine"]
    assert (engine["name"], engine["package"]) == ("timed", "headrace-example 1.0")
    assert '"package": "headrace-example 1.0"' in run.log("rollouter-0")
    assert f"{UPDATES},reward/mean," in (run.directory / "csv" / "points.csv").read_text()


def another_user_takes_no_place(run: Run, process: subprocess.Popen[str]) -> None:
    """Coordinator and Valkey are killed, and whatever they listened on is taken at once by whoever can: no
    service sends him anything, and all find those that come after."""
    names = ("coordinator", "valkey")
    killed = {name: run.pid(name) for name in names}
    ends = run.endpoints
    tcp = [(one.address, one.port) for one in listeners([p for p in killed.values() if p])]
    ports = [f"{host}:{port}" for host, port in tcp]
    doors: list[Place] = [*tcp]
    if IS_ANOTHER:  # who is not root cannot play another user: the folder's mode keeps himself out of nothing
        doors += [str(unix_path(ends["coordinator"])), str(redis_url.parse(ends["redis_url"]).path)]
    services = ("rollouter-0", "rollouter-1", "trainer")
    streams = {name: run.log(name).count(UP_AGAIN) for name in services}
    with Pretender(doors) as other:
        for pid in killed.values():
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        wait_for("successors", lambda: all(run.pid(n) not in (None, killed[n]) for n in names), process, 60)
        again = lambda: all(run.log(name).count(UP_AGAIN) > streams[name] for name in services)  # noqa: E731
        wait_for("every stream to the coordinator", again, process, 60)
        notes = other.notes()
    assert {place: note["heard"] for place, note in notes.items() if note["heard"]} == {}
    assert [place for place, note in notes.items() if note["taken"]] == ports, "else he has not tried"
    assert {note["error"] for note in notes.values() if not note["taken"]} <= {"Permission denied"}
    assert len(ports) == 1, "the coordinator's metrics"
    assert "metrics are not served" in run.log("coordinator")


def waits(run: Run) -> bool:
    return "no rollouter takes part" in run.log("trainer")


def scale(run: Run, rollouters: int) -> None:
    done = run.command("scale", str(run.directory), f"rollouter={rollouters}", "--wait", "120")
    assert done.returncode == 0, done.stderr


def names(run: Run) -> set[str]:
    return {member.rsplit("-", 1)[0] for member in run.stats().members}
