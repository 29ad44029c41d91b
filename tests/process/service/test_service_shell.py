"""What is the same around every service: how it waits at its start, and how it ends."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from headrace.config.loading import ConfigError
from headrace.config.run import RunConfig
from headrace.connections import tls
from headrace.connections.net import PortTaken
from headrace.connections.variables import NoToken
from headrace.ledger.client import LedgerUnavailable, LedgerWentBack, LoginRefused
from headrace.service.coordinator_stream import CoordinatorRefused, TokenRefused
from headrace.service.module_command import module_command
from headrace.service.shell import Shell
from headrace.system.disk import DiskFull
from headrace.system.endings import (
    EX_BEYOND_REPAIR,
    EX_CONFIG,
    EX_FAILED,
    EX_OSERR,
    EX_UNAVAILABLE,
    REASON_FILE,
)
from tests.fast.config.test_config import GOOD
from tests.waiting import until

SERVICES = ("queue", "coordinator", "rollouter", "trainer")


def started(folder: Path, name: str, start_timeout_s: float) -> subprocess.Popen[bytes]:
    """The service, told to use certificates that are not there."""
    plain = RunConfig.model_validate(GOOD).to_plain()
    plain["services"]["start_timeout_s"] = start_timeout_s
    (folder / "run.yaml").write_text(yaml.safe_dump(plain))
    env = {**os.environ, REASON_FILE: str(folder / "reason")}
    env |= {variable: str(folder / f"{variable}.pem") for variable in tls.VARIABLES}
    command = module_command(f"headrace_{name}", "--config", str(folder / "run.yaml"))
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)


@pytest.mark.parametrize("name", SERVICES)
def test_certificates_that_are_not_there(tmp_path: Path, name: str) -> None:
    process = started(tmp_path, name, 0.2)
    log = tmp_path / "log"
    assert process.wait(60) == EX_CONFIG, log.read_text()
    reason = (tmp_path / "reason").read_text()
    assert reason.startswith(
        f"HEADRACE_TLS_CERT: {tmp_path}/HEADRACE_TLS_CERT.pem cannot be read: No such file"
    )
    assert log.read_text().splitlines()[-1] == f"headrace-{name}: {reason}"
    assert "Traceback" not in log.read_text()


def test_certificates_that_are_no_pem(tmp_path: Path) -> None:
    for variable in tls.VARIABLES:
        (tmp_path / f"{variable}.pem").write_text("half a Secr")
    process = started(tmp_path, "coordinator", 0.2)
    assert process.wait(60) == EX_CONFIG, (tmp_path / "log").read_text()
    reason = (tmp_path / "reason").read_text()
    assert reason.startswith(f"HEADRACE_TLS_CERT: {tmp_path}/HEADRACE_TLS_CERT.pem is no certificate in PEM")


@pytest.mark.parametrize(
    ("name", "number"), [*((name, signal.SIGTERM) for name in SERVICES), ("queue", signal.SIGINT)]
)
def test_told_to_end_while_it_waits(tmp_path: Path, name: str, number: signal.Signals) -> None:
    """`tests/process/service/test_early_stop.py` has the first process of a container."""
    process = started(tmp_path, name, 600.0)
    log = tmp_path / "log"
    try:
        until(
            lambda: "waiting for certificate files" in log.read_text() or process.poll() is not None,
            "it to wait",
        )
        process.send_signal(number)
        assert process.wait(15) == -number
        assert len(log.read_text().splitlines()) == 1
    finally:
        process.kill()
        process.wait(10)


@pytest.mark.parametrize("name", SERVICES)
def test_each_main_is_a_shell_around_a_module_that_works(name: str) -> None:
    main = importlib.import_module(f"headrace_{name}.__main__")
    assert isinstance(main.SHELL, Shell)
    assert main.SHELL.name == name
    work = importlib.import_module(main.SHELL.work)
    assert callable(work.serve)
    assert work.exit_code(KeyError("nobody's")) is None
    assert main.__file__ is not None
    assert len(Path(main.__file__).read_text().splitlines()) < 60


class Own(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["one", "two"]), EX_CONFIG),
        (tls.TlsError("no such file"), EX_CONFIG),
        (NoToken("no token"), EX_CONFIG),
        (LoginRefused("wrong password"), EX_CONFIG),
        (TokenRefused("h:1"), EX_CONFIG),
        (CoordinatorRefused("two nodes"), EX_CONFIG),
        (LedgerUnavailable("away"), EX_UNAVAILABLE),
        (LedgerWentBack("older"), EX_BEYOND_REPAIR),
        (PortTaken("taken"), EX_OSERR),
        (DiskFull("full"), EX_FAILED),
        (Own("its own"), 42),
        (KeyError("nobody's"), EX_FAILED),
    ],
)
def test_an_error_becomes_a_code_and_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    def serve(*_: object) -> int:
        raise error

    ended, said = run(tmp_path, monkeypatch, capfd, serve)
    sentence = 'KeyError: "nobody\'s"' if isinstance(error, KeyError) else str(error)
    assert (ended, said.endswith(f"headrace-x: {sentence}\n")) == (code, True), said
    assert ("Traceback" in said) == isinstance(error, KeyError), (
        "a service's log has one line for what is known"
    )


def test_what_serve_returns_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, monkeypatch, capfd, lambda *_: 75) == (75, "")


def test_a_module_that_cannot_be_imported_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended, said = run(tmp_path, monkeypatch, capfd, None)
    assert ended == EX_FAILED
    assert said.splitlines()[-1].startswith("headrace-x: ModuleNotFoundError: No module named 'headrace_x")


def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], serve: Any
) -> tuple[int, str]:
    """Exit code and log of a service x whose module has this `serve`, or is not there."""
    if serve is not None:
        work: Any = ModuleType("headrace_x_service")
        work.serve, work.exit_code = serve, lambda error: 42 if isinstance(error, Own) else None
        monkeypatch.setitem(sys.modules, "headrace_x_service", work)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(RunConfig.model_validate(GOOD).to_plain()))
    for name in (*tls.VARIABLES, REASON_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TQDM_DISABLE", "1")
    for stream in ("stdout", "stderr"):  # they are guarded from now on
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        with pytest.raises(SystemExit) as end:
            Shell("x", "A service.", "headrace_x_service").run(argparse.Namespace(config=file))
    finally:
        logging.getLogger().handlers[:] = root
        logging.getLogger().setLevel(level)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(end.value.code or 0), capfd.readouterr().err
