"""The trainer's heartbeat: a probe from outside tells a trainer that waits from one that stands still."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.config.run import RunConfig
from headrace.connections.net import free_port
from headrace_trainer.checkpoints import checkpoint
from headrace_trainer.checkpoints.checkpoint import Checkpoints
from headrace_trainer.distributed import heartbeat
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.sync import rounds
from headrace_trainer.sync.rounds import Rounds
from headrace_trainer.sync.sync_client import SyncClient, SyncFailed
from tests.fast.config.test_config import GOOD
from tests.support.learners import config
from tests.waiting import until


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """With a launcher's beat, and no heartbeat of this process afterwards."""
    yield heartbeat.Launch(tmp_path / "heartbeat").directory
    heartbeat._file = None


def probe(directory: Path, limit_s: float = 60.0) -> tuple[int, str]:
    """Exit code and message of the program."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace_trainer.distributed.heartbeat",
            directory,
            "--stale-seconds",
            str(limit_s),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.strip()


def stands_still(file: Path, seconds: float = 100.0) -> None:
    os.utime(file, (time.time(), time.time() - seconds))


def test_whoever_stands_still_is_named(directory: Path) -> None:
    assert probe(directory) == (0, "")
    launch = heartbeat.Launch(directory)
    launch.ranks_begin(3)
    assert probe(directory) == (0, "")
    stands_still(directory / "rank-1")
    assert probe(directory) == (1, "no beat within 60 s: rank-1 (100 s)")
    assert probe(directory, 200.0) == (0, "")
    heartbeat.begin(directory / "rank-1")
    heartbeat.beat()
    assert probe(directory) == (0, "")
    stands_still(directory / "launcher")
    assert probe(directory) == (1, "no beat within 60 s: launcher (100 s)")


def test_ranks_that_are_gone_need_not_beat(directory: Path) -> None:
    launch = heartbeat.Launch(directory)
    launch.ranks_begin(2)
    heartbeat.begin(directory / "rank-0")
    stands_still(directory / "rank-0")
    launch.ranks_ended()
    heartbeat.beat()  # of a rank that is late to die
    assert not (directory / "rank-0").exists()
    assert probe(directory) == (0, "")


def test_before_a_launcher_is_there(tmp_path: Path) -> None:
    code, said = probe(tmp_path / "nothing")
    assert (code, said.startswith("no heartbeat yet: ")) == (1, True)


def test_what_an_earlier_container_left_counts_no_more(directory: Path) -> None:
    """The volume outlives the container that the probe has killed."""
    heartbeat.Launch(directory).ranks_begin(1)
    stands_still(directory / "rank-0")
    stands_still(directory / "launcher")
    assert probe(directory)[0] == 1
    (directory / "of somebody else").touch()
    heartbeat.Launch(directory)
    assert probe(directory) == (0, "")
    assert (directory / "of somebody else").exists()


def test_a_long_stretch_is_allowed_for(directory: Path) -> None:
    """Starting, loading a model, exporting one: until the next beat, and no longer."""
    heartbeat.Launch(directory).ranks_begin(1)
    assert heartbeat.age_s(directory) < 1.0, "the oldest counts: the launcher's"
    assert time.time() - (directory / "rank-0").stat().st_mtime < -heartbeat.START_S + 60
    heartbeat.begin(directory / "rank-0")
    heartbeat.beat(heartbeat.LONG_S)
    assert time.time() - (directory / "rank-0").stat().st_mtime < -heartbeat.LONG_S + 60
    heartbeat.beat()
    assert (directory / "rank-0").stat().st_mtime <= time.time()


def test_a_disk_that_cannot_be_written_ends_nothing(directory: Path) -> None:
    heartbeat.begin(directory / "no" / "such" / "file")
    heartbeat.beat()


def test_the_probe_imports_nothing_heavy() -> None:
    """It starts twice a minute beside the training."""
    listed = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "headrace_trainer.distributed.heartbeat", "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    names = {line.rpartition("|")[2].strip().split(".")[0] for line in listed.splitlines()}
    assert "argparse" in names
    assert not names & {"torch", "numpy", "grpc", "pydantic", "yaml", "headrace"}


# -- waits ------------------------------------------------------------------------------------------


def test_who_waits_for_a_commit_beats(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_COORDINATOR", "h:1")
    heartbeat.begin(directory / "launcher")
    waiting = Rounds.__new__(Rounds)  # without a model
    waiting.config = RunConfig.model_validate(GOOD)
    waiting._stopping = (directory / "stop").exists
    waiting._check_ledger = lambda: None
    client = SyncClient.__new__(SyncClient)  # without its stream
    client._committed, client._failure, client._state = None, None, threading.Condition()
    monkeypatch.setattr(rounds, "_TURN_S", 0.01)
    waiting.client = client
    stands_still(directory / "launcher")
    assert waiting._commit(time.monotonic() + 60.0) is None
    assert heartbeat.age_s(directory) < 50.0
    with pytest.raises(SyncFailed, match="h:1 committed nothing in"):
        waiting._commit(time.monotonic() - 1.0)
    client._failure = SyncFailed("no more")
    with pytest.raises(SyncFailed, match="no more"):
        waiting._commit(time.monotonic() + 60.0)
    (directory / "stop").touch()
    assert waiting._commit(time.monotonic() + 60.0) is None, "who is told to stop has no use for it"


def test_who_waits_for_a_checkpoint_beats(
    directory: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_TURN_S", 0.01)
    heartbeat.begin(directory / "launcher")
    written = threading.Event()
    checkpoints = Checkpoints(tmp_path / "checkpoints", config(trainer={"save_timeout_s": 60.0}), {}, ranks)
    checkpoints._writer = threading.Thread(target=written.wait, args=(60.0,))
    checkpoints._writer.start()

    def watch() -> None:
        for _ in range(2):
            stands_still(directory / "launcher")
            until(lambda: heartbeat.age_s(directory) < 50.0, "a turn of the wait")
        written.set()

    watching = threading.Thread(target=watch)
    watching.start()
    checkpoints.wait()
    watching.join(10.0)
    assert written.is_set()


_RANK = """
    import sys
    from datetime import timedelta
    from pathlib import Path

    from headrace_trainer.distributed import heartbeat, ranks

    ranks._TURN = timedelta(seconds=0.05)
    directory, number = Path(sys.argv[1]), int(sys.argv[2])
    heartbeat.begin(heartbeat.rank_file(directory, number))
    both = ranks.Ranks("cpu", 300.0)
    both.meet()
    if number == 0:
        print("here", flush=True)
        sys.stdin.readline()
    print(both.share(["from rank 0"]), both.gather_all(number), both.sums([1.0, number]), flush=True)
    if number == 0:
        sys.stdin.readline()
    both.meet()
    both.close()
"""


def start_rank(number: int, directory: Path, port: int) -> subprocess.Popen[str]:
    env = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_RANK), str(directory), str(number)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_of_two_ranks_the_one_that_hangs_is_found(directory: Path) -> None:
    """The other one waits for it in a collective, and is alive."""
    launch = heartbeat.Launch(directory)
    launch.ranks_begin(2)
    port = free_port()
    processes = [start_rank(number, directory, port) for number in (0, 1)]
    hangs, waits = (heartbeat.rank_file(directory, number) for number in (0, 1))
    try:
        for expected in ("here", "['from rank 0'] [0, 1] [2.0, 1.0]"):
            assert processes[0].stdout is not None
            assert processes[0].stdout.readline().strip() == expected  # from here on it reads its stdin
            for file in (hangs, waits):
                stands_still(file)
            until(lambda: time.time() - waits.stat().st_mtime < 50.0, "the other rank's turn")
            code, said = probe(directory)
            assert code == 1
            assert "rank-0 (" in said
            assert "rank-1" not in said
            assert processes[0].stdin is not None
            print(file=processes[0].stdin, flush=True)
            until(lambda: probe(directory) == (0, ""), "rank 0 to go on")
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
