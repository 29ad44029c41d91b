"""What processes put under TMPDIR and into shared memory goes with the run, however it ends."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.local import scratch
from tests.support.supervised import FOREVER, Bench, wait_until

LEAVES = """
import os, socket, tempfile
place = tempfile.mkdtemp()
left = socket.socket(socket.AF_UNIX)
left.bind(os.path.join(tempfile.gettempdir(), "f" * 36))
print("left", flush=True)
"""
SHARES = """
from multiprocessing.shared_memory import SharedMemory
own = SharedMemory(create=True, size=4096)
open("shared", "w").write(own.name)
"""
MAKES = "from headrace.local import scratch; made = scratch.create(); print(made.root, flush=True); input()"


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of the test's own, and no other that is looked at."""
    with tempfile.TemporaryDirectory(
        prefix="t", dir="/tmp"
    ) as folder:  # pytest's own are too long for a socket
        monkeypatch.setattr(scratch, "_parents", lambda: [Path(folder)])
        yield Path(folder)


def lives_in(folder: Path) -> subprocess.Popen[str]:
    """A runner without a guardian."""
    code = f"from pathlib import Path\nimport tempfile\ntempfile.tempdir = {str(folder)!r}\n"
    code += "from headrace.local import scratch\n"
    code += f"scratch._parents = lambda: [Path({str(folder)!r})]\n" + MAKES
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_the_folder_goes_with_the_runs_last_process(bench: Bench, temporary: Path) -> None:
    made = scratch.create()
    supervisor = bench.supervise(bench.service("rollouter-0", LEAVES + FOREVER), scratch=made.root)
    log = bench.path("rollouter-0.log")
    bench.poll_until(lambda: log.exists() and "left" in log.read_text(), "something is left")
    assert len(list((made.root / "rollouter-0").iterdir())) == 2
    supervisor._guard._process.stdin.close()  # type: ignore[union-attr]  # as the kernel does when the runner is killed
    wait_until(lambda: not list(temporary.iterdir()), "the guardian to remove the folder")
    made.remove()


def test_a_service_that_starts_again_begins_with_an_empty_folder(bench: Bench) -> None:
    made = scratch.create()
    bench.supervise(bench.service("queue", LEAVES + "raise SystemExit(1)"), max_restarts=2, scratch=made.root)
    bench.outcome()
    assert bench.path("queue.log").read_text().count("left") == 3
    assert len(list((made.root / "queue").iterdir())) == 2
    made.remove()


def test_shared_memory_goes_with_its_process(bench: Bench) -> None:
    """Its tracker, which removes it, is of the run as well: it must not be killed before it has."""
    supervisor = bench.supervise(bench.service("engine", SHARES + FOREVER))
    file = bench.path("shared")
    bench.poll_until(lambda: file.exists() and file.read_text(), "shared memory")
    shared = Path("/dev/shm") / file.read_text()
    assert shared.exists()
    supervisor.kill_all()
    assert not shared.exists()


def test_the_next_start_removes_what_belongs_to_nobody_and_nothing_else(temporary: Path) -> None:
    dead, alive = lives_in(temporary), lives_in(temporary)
    assert dead.stdout is not None
    assert alive.stdout is not None
    left, kept = (Path(process.stdout.readline().strip()) for process in (dead, alive))  # type: ignore[union-attr]
    try:
        (left / "deep").mkdir()
        (left / "deep" / "socket").touch()
        dead.send_signal(signal.SIGKILL)
        dead.wait(10)
        (temporary / "precious").mkdir()
        (temporary / f"{scratch.PREFIX}file").touch()
        (temporary / f"{scratch.PREFIX}link").symlink_to(temporary / "precious")
        made = scratch.create()
        assert {file.name for file in temporary.iterdir()} == {
            *(kept.name, made.root.name, "precious", f"{scratch.PREFIX}file", f"{scratch.PREFIX}link")
        }
        made.remove()
        made.remove()
        assert not made.root.exists()
    finally:
        for process in (dead, alive):
            process.kill()
            process.communicate(timeout=10)


def test_a_folder_that_is_too_long_is_told_and_a_link_to_it_serves(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    long = temporary / ("its files are many " * 3)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    told = scratch.elsewhere()
    assert told is not None
    assert "temporary files go to /tmp" in told
    link = temporary / "l"
    advised = told.rpartition("made by: ")[2].replace("/short/link", str(link))
    subprocess.run(shlex.split(advised), check=True, timeout=10)
    monkeypatch.setattr("tempfile.tempdir", str(link))
    assert scratch.elsewhere() is None
    made = scratch.create()
    assert [file.name for file in long.iterdir()] == [made.root.name]
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(scratch.emptied(made.root, "rollouter-99") / str(uuid.uuid4())))
    made.remove()
    assert list(long.iterdir()) == []


def test_the_paths_of_sockets_stay_short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for asked in ("/tmp", "/" + "t" * 29, "/" + "é" * 29, "/" + "t" * 200):
        monkeypatch.setattr("tempfile.tempdir", asked)
        parent = scratch._parents()[0]
        path = (
            parent / f"{scratch.PREFIX}abcdefgh" / "rollouter-9999" / str(uuid.uuid4())
        )  # as vLLM names them
        assert len(os.fsencode(path)) <= 107, asked


def test_where_no_folder_can_be_made_the_message_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_parents", lambda: [Path("/proc")])
    with pytest.raises(OSError, match=r"^/proc: no folder can be made there .*set TMPDIR to a folder on a "):
        scratch.create()


def test_a_folder_that_others_could_replace_is_told(temporary: Path) -> None:
    assert scratch.exposed() is None
    temporary.chmod(0o777)
    told = scratch.exposed()
    assert told is not None
    assert told.startswith(f"{temporary} (mode 0777): ")
    assert f"say chmod +t {temporary}" in told
    temporary.chmod(0o1777)
    assert scratch.exposed() is None, "the remedy"
    made = scratch.create()
    assert made.root.stat().st_mode & 0o777 == 0o700
    made.remove()
