"""Supervision, with small real processes in place of the services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.local.processes import Completed, ProcessFailed, ProcessState, SupervisedService, command
from headrace.service.exits import describe_exit, last_lines
from headrace.service.guardian import MARK, kill_marked, marked, parents
from headrace.system.endings import EX_BEYOND_REPAIR, EX_SOFTWARE, EX_STOPPED, REASON_FILE
from tests.support.supervised import DEADLINE_S, FOREVER, Bench, all_ready, count_starts, wait_until


def test_the_end_of_the_trainer_completes_the_run(bench: Bench) -> None:
    bench.supervise(bench.service("helper", FOREVER), bench.service("trainer", "pass", completes=True))
    assert bench.outcome() == Completed()


def test_a_child_that_exits_is_restarted_until_the_limit(bench: Bench) -> None:
    code = count_starts("starts") + "print('line one'); print('the reason'); raise SystemExit(3)"
    bench.supervise(bench.service("rollouter-1", code), bench.service("queue", FOREVER), max_restarts=3)
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert outcome.reason == "rollouter-1 exited with code 3 (4 times)"
    assert last_lines(outcome.log, 1) == ["the reason"]
    assert bench.path("starts").read_text() == "xxxx"
    assert [note.partition(";")[0] for note in bench.notes] == ["rollouter-1 exited with code 3"] * 3


def test_a_killed_child_comes_back(bench: Bench) -> None:
    supervisor = bench.supervise(bench.service("queue", FOREVER))
    bench.poll_until(lambda: supervisor.pids(), "queue runs")
    first = supervisor.pids()["queue"]
    os.kill(first, signal.SIGKILL)
    bench.poll_until(lambda: supervisor.pids().get("queue") not in (None, first), "queue runs again")
    assert "queue was killed by SIGKILL" in bench.notes[0]


def test_a_configuration_error_is_not_retried(bench: Bench) -> None:
    bench.supervise(bench.service("queue", count_starts("starts") + "raise SystemExit(78)"), max_restarts=9)
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert "its configuration is at fault" in outcome.reason
    assert bench.path("starts").read_text() == "x"


def test_a_program_that_is_not_there_fails_the_run(bench: Bench) -> None:
    log = bench.path("gone.log")
    bench.supervise(SupervisedService("gone", log, command(["/nonexistent/program"], log)))
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert "gone cannot be started" in outcome.reason


def says(reason: str, code: int) -> str:
    """A service that leaves a sentence and exits."""
    leave = f"import os; open(os.environ['{REASON_FILE}'], 'w').write({reason!r}); os._exit({code})"
    return count_starts("starts") + leave


def test_what_is_beyond_repair_ends_the_run_once_and_with_its_reason(bench: Bench) -> None:
    bench.supervise(
        bench.service("trainer", says("no group had\nany spread", EX_BEYOND_REPAIR)), max_restarts=9
    )
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert (outcome.reason, outcome.told) == ("trainer: no group had any spread", True)
    assert bench.path("starts").read_text() == "x"
    assert bench.notes == []


def test_what_a_service_says_is_told_at_each_restart_and_at_the_end(bench: Bench) -> None:
    bench.supervise(bench.service("rollouter-0", says("the engine died", EX_SOFTWARE)), max_restarts=1)
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert outcome.reason == "rollouter-0: the engine died (exit code 70, 2 times)"
    assert bench.notes[0].startswith("rollouter-0 exited with code 70: the engine died; restart 1 of 1")


def test_the_reason_of_an_earlier_end_is_not_that_of_the_next(bench: Bench) -> None:
    code = f"""
        import os
        if os.path.exists('second'):
            os._exit(3)
        open('second', 'w')
        open(os.environ['{REASON_FILE}'], 'w').write('the engine died')
        os._exit(70)
    """
    bench.supervise(bench.service("rollouter-0", code), max_restarts=1)
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert outcome.reason == "rollouter-0 exited with code 3 (2 times)"


def test_later_stages_wait_for_earlier_ones(bench: Bench) -> None:
    flag = bench.path("flag")
    first = bench.service("first", FOREVER, ready=flag.exists, stage=0)
    supervisor = bench.supervise(first, bench.service("second", FOREVER, stage=1))
    bench.poll_until(lambda: "first" in supervisor.pids(), "first runs")
    assert supervisor.children["second"].state is ProcessState.WAITING
    flag.touch()
    bench.poll_until(lambda: all_ready(supervisor), "both are ready")


def test_a_start_that_takes_too_long_fails_the_run(bench: Bench) -> None:
    bench.supervise(bench.service("queue", FOREVER, ready=lambda: False), start_timeout_s=0.3)
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert outcome.reason.startswith("queue was not ready within")


def test_what_a_child_left_behind_is_gone_before_it_starts_again(bench: Bench) -> None:
    code = """
        import os, subprocess, sys
        if os.path.exists('orphan'):
            pid = int(open('orphan').read())
            try:
                os.kill(pid, 0)
                open('verdict', 'w').write('alive')
            except ProcessLookupError:
                open('verdict', 'w').write('gone')
            import time
            while True: time.sleep(1)
        sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(600)']
        child = subprocess.Popen(sleep, start_new_session=True)
        open('orphan', 'w').write(str(child.pid))
        os._exit(1)
    """
    bench.supervise(bench.service("trainer", code))
    verdict = bench.path("verdict")
    bench.poll_until(lambda: verdict.exists() and verdict.read_text(), "the second start looked")
    orphan = int(bench.path("orphan").read_text())
    # In a container without an init the orphan may stay as a zombie: dead, but its number is taken.
    assert verdict.read_text() == "gone" or _is_zombie(orphan)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


STOPS_ORDERLY = """
import signal, sys, time
def stop(*_):
    open('order', 'a').write(sys.argv[1] + ' ')
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, stop)
open('up-' + sys.argv[1], 'w')
while True: time.sleep(1)
"""


def orderly(bench: Bench, name: str, code: int = 0) -> SupervisedService:
    log = bench.path(f"{name}.log")
    argv = [sys.executable, "-S", "-c", STOPS_ORDERLY, name, str(code)]
    return SupervisedService(name, log, command(argv, log, bench.directory))


def test_stop_is_in_the_order_asked_for(bench: Bench) -> None:
    names = ["valkey", "queue", "trainer"]
    supervisor = bench.supervise(*(orderly(bench, name, 75 if name == "trainer" else 0) for name in names))
    bench.poll_until(lambda: all(bench.path(f"up-{name}").exists() for name in names), "all are up")
    for name in reversed(names):
        assert supervisor.stop([name], grace_s=10.0) == []
    assert bench.path("order").read_text().split() == ["trainer", "queue", "valkey"]
    assert supervisor.children["trainer"].exit_code == EX_STOPPED


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open('deaf', 'w')
while True: time.sleep(1)
"""


@pytest.mark.parametrize("in_a_hurry", [False, True])
def test_who_does_not_stop_is_killed(bench: Bench, in_a_hurry: bool) -> None:
    supervisor = bench.supervise(bench.service("deaf", DEAF))
    bench.poll_until(bench.path("deaf").exists, "it ignores SIGTERM")
    began = time.monotonic()
    killed = supervisor.stop(["deaf"], grace_s=600.0 if in_a_hurry else 0.1, hurry=lambda: in_a_hurry)
    assert killed == ["deaf"]
    assert supervisor.children["deaf"].exit_code == -signal.SIGKILL
    assert time.monotonic() - began < DEADLINE_S


def test_children_lead_sessions_of_their_own(bench: Bench) -> None:
    supervisor = bench.supervise(bench.service("queue", FOREVER))
    bench.poll_until(lambda: supervisor.pids(), "queue runs")
    pid = supervisor.pids()["queue"]
    assert os.getsid(pid) == pid != os.getsid(0)


RUNNER = """
import os, sys, time
from pathlib import Path
from headrace.local.processes import SupervisedService, Supervisor, command
child = '''
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w")
time.sleep(600)
'''
def service(name):
    log = Path(name + ".log")
    return SupervisedService(name, log, command([sys.executable, "-S", "-c", child, name + ".up"], log))
services = [service("a"), service("b")]
supervisor = Supervisor(services, max_restarts=0, start_timeout_s=60)
Path("instance").write_text(supervisor.instance)
while True:
    supervisor.poll()
    time.sleep(0.01)
"""


def test_nothing_survives_a_kill_of_the_runner(tmp_path: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", RUNNER], cwd=tmp_path)
    try:
        wait_until(
            lambda: all((tmp_path / f"{n}.up").exists() for n in "ab"), "children and grandchildren run"
        )
        instance = (tmp_path / "instance").read_text()
        assert len(marked(instance)) == 4
    finally:
        runner.kill()
        runner.wait()
    wait_until(lambda: marked(instance) == [], "everything is gone")


def test_only_the_mark_itself_or_below_it_matches() -> None:
    code = "print(flush=True); import time; time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**os.environ, MARK: "abc12/x/1"}, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert marked("abc1") == []
        assert marked("abc12") == [child.pid] == marked("abc12/x/1")
        assert marked("abc12/x/10") == []
    finally:
        child.kill()
        child.communicate()


def test_exits_are_described() -> None:
    assert describe_exit("a", 3) == "a exited with code 3"
    assert describe_exit("a", -9) == "a was killed by SIGKILL"
    assert describe_exit("a", -99) == "a was killed by signal 99"


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == []
    log.write_bytes(b"\xff\n" + b"".join(b"%d\n" % i for i in range(100_000)))
    assert last_lines(log, 2) == ["99998", "99999"]


def test_what_lost_the_mark_goes_with_what_started_it(tmp_path: Path) -> None:
    """As a sandbox does: a session of its own, and no variable of ours."""
    code = f"""
import subprocess, sys, time
nap = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(nap, env={{}}, start_new_session=True)
with open({str(tmp_path / "partial")!r}, "w") as file:
    file.write(str(child.pid))
import os
os.rename({str(tmp_path / "partial")!r}, {str(tmp_path / "pid")!r})
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: "abc13/x/1"})
    try:
        wait_until((tmp_path / "pid").exists, "the child")
        child = int((tmp_path / "pid").read_text())
        assert child in parents()
        assert kill_marked("abc13/x")
        wait_until(lambda: child not in parents(), "the child's end")
        assert parent.wait(DEADLINE_S) == -signal.SIGKILL
    finally:
        parent.kill()
        parent.wait()
