"""Rollouters that come and go while a run is on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos import reward
from tests.integration.run_process import ROOT, SAMPLES_PER_UPDATE, Run, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATES = 28
LIMIT_S = 180.0
PLUGINS = (
    "rollout.name=timed",
    "sync.transport=store",
    "algorithm.adv_estimator=above_greedy",
    "actor.optim.optimizer=sgd",
    "trainer.logger=[console,csv]",
)
"""Of an installed package (docs/extending.md): what they replace is part of every other run."""


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
        "async_training.trigger_parameter_sync_step=4",
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


def waits(run: Run) -> bool:
    return "no rollouter takes part" in run.log("trainer")


def scale(run: Run, rollouters: int) -> None:
    done = run.command("scale", str(run.directory), f"rollouter={rollouters}", "--wait", "120")
    assert done.returncode == 0, done.stderr


def names(run: Run) -> set[str]:
    return {member.rsplit("-", 1)[0] for member in run.stats().members}
