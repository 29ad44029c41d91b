"""How services end: which exit codes are final, and where the last sentence is found."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import main as cli
from headrace.config.loading import ConfigError
from headrace.ledger.client import AdoptError, LedgerUnavailable, LedgerWentBack, LoginRefused
from headrace.records.checkpoints import CheckpointError
from headrace.system.endings import EX_BEYOND_REPAIR, FINAL, REASON_FILE, say_why
from headrace.weights.transports import CommunicatorError
from headrace_rollouter.generation.failures import Failures
from headrace_rollouter.inference.engine import EngineFailed
from headrace_trainer.checkpoints.checkpoint import SaveFailed
from headrace_trainer.launch import verdict
from headrace_trainer.launch.verdict import LaunchVerdict
from headrace_trainer.learning.batch import ClaimFailed, RefillExhausted, TrainerSuperseded, refused
from headrace_trainer.loop import NotFinite, NothingTrained
from headrace_trainer.sync.sync_client import SyncFailed
from headrace_trainer.worker import exit_code
from tests.fast.rollouter.test_environment_work import Broken, Engine, Ledger, worker


def test_the_last_line_and_the_file_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REASON_FILE, str(tmp_path / "reason"))
    say_why("trainer", ConfigError(["one", "two"]))
    said = (tmp_path / "reason").read_text()
    assert "one" in said
    assert capsys.readouterr().err == f"headrace-trainer: {said}\n"


def test_without_anybody_who_looks_there_is_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(REASON_FILE, str(tmp_path / "no-such-folder" / "reason"))
    say_why("queue", "the port is taken")
    assert capsys.readouterr().err == "headrace-queue: the port is taken\n"


def test_a_kubelets_file_is_written_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(REASON_FILE, raising=False)
    file = tmp_path / "termination-log"
    monkeypatch.setattr("headrace.system.endings._TERMINATION_LOG", str(file))
    say_why("queue", "first")
    assert not file.exists(), "none is made where no kubelet looks"
    file.touch()
    say_why("queue", "second")
    assert file.read_text() == "second"


def test_ctrl_c_before_a_command_has_begun_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parse", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 130


def test_a_trainer_ends_for_good_where_a_restart_cannot_help() -> None:
    final = [
        *(ConfigError(["x"]), LoginRefused("x"), CommunicatorError("x"), ValueError("x"), AdoptError("x")),
        LedgerWentBack("x"),
        CheckpointError("x"),
        *(RefillExhausted("x"), TrainerSuperseded("x"), NothingTrained("x"), NotFinite("x")),
    ]
    passing = [LedgerUnavailable("x"), ClaimFailed("x"), SyncFailed("x"), SaveFailed("x")]
    assert {type(e).__name__ for e in final if exit_code(e) not in FINAL} == set()
    assert {type(e).__name__ for e in passing if exit_code(e) in (None, 0, *FINAL)} == set()
    assert exit_code(CheckpointError("x")) == EX_BEYOND_REPAIR
    assert exit_code(RuntimeError("a bug")) is None


def test_only_a_fence_says_that_another_trainer_has_taken_over() -> None:
    assert isinstance(refused("the claim", "fenced", 3), TrainerSuperseded)
    assert not isinstance(refused("the claim", "unknown", 3), TrainerSuperseded)


def test_the_first_verdict_of_a_launch_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict.find(tmp_path) is None
    assert verdict.leave(tmp_path, LaunchVerdict(65, "no spread"))
    monkeypatch.setattr("os.getpid", lambda: 1)  # another rank
    assert not verdict.leave(tmp_path, LaunchVerdict(1, "the peer is gone"))
    assert verdict.find(tmp_path) == LaunchVerdict(65, "no spread")


@pytest.fixture
def failures(caplog: pytest.LogCaptureFixture) -> Failures:
    caplog.set_level(logging.INFO)
    return Failures(logging.getLogger("failures"))


def raised(make: Callable[[], Exception]) -> Exception:
    try:
        raise make()
    except Exception as error:  # whatever it makes, with a traceback
        return error


def test_a_dead_engine_is_told_once_and_without_a_traceback(
    failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    for row in range(50):
        error = raised(lambda: EngineFailed("it does not answer"))
        failures.add("task failed", error, fatal=True, row=row)
    (line,) = caplog.records
    assert line.exc_info is None
    assert line.__dict__["reason"] == "it does not answer"
    assert str(failures.fatal) == "it does not answer"


def test_a_mistake_shows_one_traceback_for_each_place(
    failures: Failures, caplog: pytest.LogCaptureFixture
) -> None:
    def here() -> Exception:
        return json.loads("{}")["x"]  # type: ignore[no-any-return]

    def there() -> Exception:
        return json.loads("{}")["y"]  # type: ignore[no-any-return]

    for make in (here, there, here, there):
        failures.add("task failed", raised(make), fatal=False)
    assert len([line for line in caplog.records if line.exc_info]) == 2
    assert len(caplog.records) == 2
    assert failures.fatal is None


async def test_a_dead_engine_ends_many_held_out_rows_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Dead(Engine):
        async def check(self) -> None:
            raise EngineFailed("the engine does not answer")

    made = worker(Ledger(held_out=True, rows=tuple(range(16))), Broken("step"))
    made._validation._engine = Dead(made._state)  # type: ignore[assignment]
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(made.run(), 10)
    await asyncio.gather(*made._validation.tasks, return_exceptions=True)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.exc_info is None
