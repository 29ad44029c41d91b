"""torchrun as the launcher starts it: what it says of ranks that could not say why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.comm.store import serve_store
from headrace.net import free_port
from headrace_trainer import torchrun, verdict

MEETING = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-conf=is_host=0", "--rdzv-id=x"]
KILLED = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_a_rank_that_was_killed_is_named_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(KILLED)
    store = serve_store("127.0.0.1")
    words = [*MEETING, f"--rdzv-endpoint=127.0.0.1:{store.port}", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace_trainer.torchrun", str(tmp_path), *words, str(tmp_path / "rank.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = verdict.find(tmp_path)
    assert found is not None
    assert found.code == 1
    assert found.reason.startswith("rank 1 (process ")
    assert "was killed by SIGKILL" in found.reason


def test_a_store_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    where = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(torchrun, "MEET_S", 0.1)
    words = ["torchrun", str(tmp_path), *MEETING, f"--rdzv-endpoint={where}", "rank.py"]
    monkeypatch.setattr(sys, "argv", words)
    assert torchrun.main() == 1
    found = verdict.find(tmp_path)
    assert found is not None
    assert where in found.reason
    assert "no store has answered" in found.reason
    assert capfd.readouterr().err == ""
