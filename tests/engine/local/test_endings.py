"""How a run ends that cannot go on: what the logs and the screen say, and how much. One run for all of it.

First the engine is killed in the middle of its work, which a restart mends. The reward is constant, so no
group has any spread: the trainer finds that beyond repair.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from tests.support.run_process import Run, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
SENTENCE = "the task is too easy or too hard for this model, or the reward is constant"


def held_out_rows_done(run: Run) -> int:
    ends = run.endpoints
    with connect(ends["redis_url"], timeout_s=5.0) as client:
        return SyncLedger(client, ends["run"]).run(ops.val_status()).done


def kill_engine(run: Run) -> None:
    """The process that holds the model, as when the kernel is out of memory."""
    pid = run.pid("rollouter-0")
    assert pid is not None
    max(psutil.Process(pid).children(), key=lambda child: child.memory_info().rss).kill()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str, int, str]:
    """The run; what its rollouter had logged when its engine was killed; exit code and screen."""
    base: Path = tmp_path_factory.mktemp("runs")
    (base / "constant.py").write_text(REWARD)
    run = make_run(
        base,
        "ended",
        "rollout.replicas=1",
        "rollout.total_rollout_steps=2560",
        "algorithm.filter_groups.enable=true",
        f"custom_reward_function.path={base / 'constant.py'}",
    )
    process = run.start()
    try:
        wait_for("the rollouter", lambda: '"event": "engine loaded"' in run.log("rollouter-0"), process, 200)
        wait_for("held-out rows", lambda: held_out_rows_done(run) > 0, process, 60)
        before = run.log("rollouter-0")
        kill_engine(run)
        screen, _ = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait(30)
    return run, before, process.returncode, screen


def test_a_killed_engine_ends_its_work_quietly(ended: tuple[Run, str, int, str]) -> None:
    """All that runs fails at once: dozens of held-out rows and samples, one cause."""
    run, before, _, screen = ended
    after = run.log("rollouter-0").removeprefix(before)
    death, told, _ = after.partition("headrace-rollouter: ")
    assert told, after[-3000:]
    assert len(death) < 12_000, death[:12_000]
    assert len(death.splitlines()) < 60
    assert sum('"level": "error"' in line for line in death.splitlines()) <= 2
    assert death.count("Traceback") <= 1, death
    (note,) = [line for line in screen.splitlines() if "restart 1 of" in line]
    assert "the engine" in note


def test_what_is_beyond_repair_ends_the_run_once_with_one_sentence(ended: tuple[Run, str, int, str]) -> None:
    run, _, code, screen = ended
    assert code == 1, screen
    assert run.summary["status"] == "failed"
    assert run.summary["reason"].startswith("trainer: ")
    assert run.summary["reason"].endswith(SENTENCE)
    assert "trainer exited" not in screen, "it is not started again"
    log = run.log("trainer")
    assert log.splitlines()[-1].startswith("headrace-trainer: ")
    assert log.splitlines()[-1].endswith(SENTENCE)
    assert log.count('"event": "lineage opened"') == 1
    assert "Traceback" not in log


def test_who_had_to_end_with_it_leaves_no_traceback(ended: tuple[Run, str, int, str]) -> None:
    run = ended[0]
    last_start = run.log("rollouter-0").rpartition('"event": "engine loaded"')[2]
    for log in (last_start, run.log("queue"), run.log("coordinator")):
        assert "Traceback" not in log
        assert "never awaited" not in log
        assert "was destroyed" not in log
