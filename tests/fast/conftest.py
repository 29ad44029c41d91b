"""The fast shelf: logic alone. No test here starts a process, so that all of them take less than a minute."""

from __future__ import annotations

import subprocess
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a fast test starts a process: it belongs to tests/process")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(BaseProcess, "start", refuse)
