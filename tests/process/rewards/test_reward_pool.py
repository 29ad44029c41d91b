"""Reward functions in processes of their own: real processes, and everything that users' code does wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headrace.config.run import RunConfig
from headrace.local.services import choose_endpoints, service_table, write_secrets
from headrace.records.layout import RunLayout
from headrace.rewards import RewardError
from headrace.rewards.pool import FunctionPool, _Process
from headrace.rewards.source import Judged, Response
from tests.fast.config.test_config import GOOD
from tests.waiting import until

LONG_S = 60.0
SHORT_S = 0.3

Make = Callable[..., FunctionPool]


def response(solution: str = "an answer", **extra: Any) -> Response:
    return Response("source", solution, "the truth", {"finish_reason": "stop", **extra})


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a pool for a file with the given text."""
    made: list[FunctionPool] = []

    def make(text: str, timeout_s: float = LONG_S, **settings: Any) -> FunctionPool:
        path = tmp_path / f"user_reward_{len(made)}.py"
        path.write_text(textwrap.dedent(text))
        made.append(FunctionPool(str(path), "compute_score", "reward.sources.x", timeout_s, **settings))
        return made[-1]

    yield make
    for one in made:
        await one.close()


def is_there(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PLAIN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "length": len(solution_str), "stopped": extra_info["finish_reason"] == "stop",
            "pred": solution_str.upper()}
"""

KINDS = {
    "plain": "def compute_score(source, solution, truth, info):",
    "coroutine": "async def compute_score(source, solution, truth, info):",
}
each_kind = pytest.mark.parametrize("head", KINDS.values(), ids=KINDS)


async def test_a_plain_function(pool: Make) -> None:
    assert await pool(PLAIN).judge(response()) == Judged(0.5, {"length": 9.0, "stopped": 1.0}, "AN ANSWER")


async def test_a_coroutine_function_with_several_calls_at_once(pool: Make) -> None:
    """Each waits until all are there: one after the other they would never pass."""
    p = pool(
        """
        import asyncio, os
        there, all_there = 0, asyncio.Event()

        async def compute_score(source, solution, truth, info):
            global there
            there += 1
            if there == 8:
                all_there.set()
            await all_there.wait()
            return os.getpid()
        """
    )
    found = await asyncio.gather(*(p.judge(response()) for _ in range(8)))
    assert {j.score for j in found} != {os.getpid()}
    assert len({j.score for j in found}) == 1


async def test_a_callable_that_returns_an_awaitable(pool: Make) -> None:
    p = pool(
        """
        async def later(value):
            return value

        def compute_score(source, solution, truth, info):
            return later(0.25)
        """
    )
    assert (await p.judge(response())).score == 0.25


async def test_answers_go_to_those_who_asked(pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes 0.1 ms by the pool's clock, which stands still in between: a loaded machine decides
    like a quiet one."""
    answers = 0
    take = _Process._answer

    def answer(self: _Process, message: list[Any]) -> None:
        nonlocal answers
        answers += 1
        take(self, message)

    p = pool("def compute_score(source, solution, truth, info):\n    return int(solution)")
    await p.start()
    monkeypatch.setattr(_Process, "_answer", answer)
    monkeypatch.setattr("headrace.rewards.pool.time", SimpleNamespace(monotonic=lambda: answers * 1e-4))
    monkeypatch.setattr("headrace.rewards.pool._GROW_S", 0.01)  # it looks often
    p._processes[0].progress = 0.0
    for n in range(50):  # the estimate of a call's time begins high
        assert (await p.judge(response(str(n)))).score == n
    found = await asyncio.gather(*(p.judge(response(str(n))) for n in range(300)))
    assert [j.score for j in found] == list(range(300))
    assert len(p._processes) == 1, "a tiny function needs one process"


async def test_slow_functions_get_more_processes(pool: Make) -> None:
    p = pool(
        """
        import os, time

        def compute_score(source, solution, truth, info):
            time.sleep(0.1)  # such as a request to somewhere
            return os.getpid()
        """,
        max_processes=3,
    )
    found = await asyncio.gather(*(p.judge(response()) for _ in range(60)))
    assert 1 < len({j.score for j in found}) <= 3


async def test_odd_texts_arrive_as_they_are(pool: Make) -> None:
    p = pool("def compute_score(source, solution, truth, info):\n    return {'score': 1, 'pred': solution}")
    for text in ("", "\n\r\x00\x1b", "é \U0001f600 \ud800", "x" * 3_000_000):
        assert (await p.judge(response(text))).answer == text


async def test_what_it_prints_is_no_answer(pool: Make, capfd: pytest.CaptureFixture[str]) -> None:
    p = pool(
        """
        import os, sys
        print("loading")
        os.write(1, b"[1, 99.0, {}, null]")

        def compute_score(source, solution, truth, info):
            print("scoring", flush=True)
            os.write(1, b"\\x00\\x00\\x00\\x02[]")
            return float(sys.stdin.read() == "")
        """
    )
    assert (await p.judge(response())).score == 1.0
    assert "scoring" in capfd.readouterr().err


async def test_it_sees_no_secret_of_the_run(pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "hunter2")
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://:hunter2@localhost")
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", "hunter2")
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", "/run/hunter2")
    monkeypatch.setenv("JUDGE_KEY", "the user's own")
    p = pool(
        """
        import os

        def compute_score(source, solution, truth, info):
            return float("hunter2" not in str(dict(os.environ)) and "JUDGE_KEY" in os.environ)
        """
    )
    assert (await p.judge(response())).score == 1.0


async def test_nor_does_any_process_above_it_show_one(tmp_path: Path) -> None:
    """A rollouter as `headrace run` starts it: its environment, and those of all above it, are read from
    within the reward's process."""
    layout = RunLayout(tmp_path / "run")
    layout.create()
    config = RunConfig.model_validate(GOOD)
    ends = choose_endpoints(config, tmp_path, "hunter2-token", "hunter2-password")
    write_secrets(layout, ends)
    shell = {**os.environ, "HEADRACE_TOKEN": "hunter2-of-another-run", "HEADRACE_REDIS_PASSWORD": "hunter2"}
    (service,) = [s for s in service_table(config, layout, ends, shell) if s.name == "rollouter-0"]
    (tmp_path / "user.py").write_text(
        """
import os, pathlib

def compute_score(source, solution, truth, info):
    above, seen = os.getpid(), []
    while above:
        for file in ("environ", "cmdline"):
            try:
                text = pathlib.Path(f"/proc/{above}/{file}").read_bytes()
            except PermissionError:  # process 1 is not ours
                continue
            assert b"hunter2" not in text, f"{file} of process {above} of {seen}"
        seen.append(above)
        status = pathlib.Path(f"/proc/{above}/status").read_text()
        above = int(status.split("PPid:")[1].split()[0])
    assert int(solution) in seen[1:], "a rollouter is above it"
    return len(seen)
"""
    )
    program = tmp_path / "rollouter.py"  # not an argument, which would show the words looked for
    program.write_text(
        f"""
import asyncio, os
from headrace.connections import variables
from headrace.rewards.pool import FunctionPool
from headrace.rewards.source import Response
assert variables.token() == "hunter2-token"
assert ":hunter2-password@" in variables.redis_url()
async def main():
    pool = FunctionPool({str(tmp_path / "user.py")!r}, "compute_score", "x", 60.0)
    print((await pool.judge(Response("", str(os.getpid()), "", {{}}))).score)
    await pool.close()
asyncio.run(main())
"""
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(program)),
        env=service.env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    assert float(said) >= 3
    for file in layout.private.iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file


# -- what goes wrong ------------------------------------------------------------------------------


async def test_a_function_that_cannot_be_loaded(pool: Make) -> None:
    with pytest.raises(
        RewardError, match=r"reward\.sources\.x\.path: .* does not import: ModuleNotFoundError"
    ):
        await pool("import nothing_of_this_name").start()
    with pytest.raises(RewardError, match="its import ended with SIGABRT"):
        await pool("import os; os.abort()").start()
    p = pool("raise SystemExit(0)")
    calls = await asyncio.gather(*(p.judge(response()) for _ in range(3)), return_exceptions=True)
    assert all("SystemExit(0)" in str(error) for error in calls)


@each_kind
async def test_a_function_that_raises_tells_where(pool: Make, head: str) -> None:
    p = pool(f"{head}\n    raise eval(solution)")
    for what in ("KeyError('missing field')", "TimeoutError('missing field')", "SystemExit()"):
        with pytest.raises(RewardError) as caught:
            await p.judge(response(what))
        assert f"the reward raised {what}" in str(caught.value)
        assert "line 2, in compute_score\n    raise eval(solution)" in caught.value.detail
    assert len(p._processes) == 1, "it goes on"


@each_kind
async def test_a_result_that_is_no_number(pool: Make, head: str) -> None:
    p = pool(f"{head}\n    return eval(solution)")
    for result in ("float('nan')", "'high'", "None", "{'reward': 1}", "10 ** 400"):
        with pytest.raises(RewardError, match="the reward returned"):
            await p.judge(response(result))


HANGS = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def compute_score(source, solution, truth, info):
    if solution == "hang":
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        with open(info["pids"] + ".partial", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.rename(info["pids"] + ".partial", info["pids"])
        while True:
            time.sleep(1)
    return float(solution)
"""


async def test_a_call_that_hangs_is_killed_with_its_children_and_nobody_else_suffers(
    pool: Make, tmp_path: Path
) -> None:
    p = pool(HANGS, SHORT_S, max_processes=1)
    pids = tmp_path / "pids"
    await p.start()
    answers = [p.judge(response("hang", pids=str(pids)))]
    answers += [p.judge(response(str(n))) for n in range(20)]
    first, *others = await asyncio.gather(*answers, return_exceptions=True)
    assert isinstance(first, RewardError)
    assert str(first) == "the reward took longer than 0.3 s"
    assert [j.score for j in others if isinstance(j, Judged)] == list(range(20))
    for pid in map(int, pids.read_text().split()):
        await asyncio.to_thread(until, lambda pid=pid: not is_there(pid), f"the end of process {pid}")


OF_ITS_OWN = """
import os, subprocess, sys, time

NAP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

def of_its_own(tell):
    # As a sandbox starts a program, without a variable by which it could be found.
    child = subprocess.Popen(NAP, start_new_session=True, stdout=subprocess.PIPE, env={})
    tell(child.pid)
    child.communicate(timeout=60)

def daemon(tell):
    # Its parent is gone before the call is: nothing of it leads to the reward's process.
    if os.fork() == 0:
        os.setsid()
        if (child := os.fork()) == 0:
            time.sleep(600)
        tell(child)
        os._exit(0)
    os.wait()

def compute_score(source, solution, truth, info):
    if solution == "fine":
        return 1.0
    def tell(pid):
        with open(info["pid"] + ".partial", "w") as file:
            file.write(str(pid))
        os.rename(info["pid"] + ".partial", info["pid"])
    start, then = solution.split()
    globals()[start](tell)
    if then == "exit":
        os._exit(17)
    if then == "crash":
        os.abort()
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("solution", "message"),
    [
        ("of_its_own hang", "the reward took longer than 0.3 s"),
        ("daemon hang", "the reward took longer than 0.3 s"),
        ("daemon exit", "the reward ended its process (ended with exit code 17)"),
        ("daemon crash", "the reward ended its process (ended with SIGABRT)"),
    ],
)
async def test_what_a_call_started_in_a_session_of_its_own_ends_with_its_process(
    pool: Make, tmp_path: Path, solution: str, message: str
) -> None:
    p = pool(OF_ITS_OWN, SHORT_S if solution.endswith("hang") else LONG_S)
    pid = tmp_path / "pid"
    await p.start()
    async with asyncio.timeout(20):
        with pytest.raises(RewardError) as caught:
            await p.judge(response(solution, pid=str(pid)))
        assert str(caught.value) == message
        await asyncio.to_thread(until, lambda: not is_there(int(pid.read_text())), "the program's end")
        assert (await p.judge(response("fine"))).score == 1.0
        await p.close()


@pytest.mark.parametrize("start", ["of_its_own", "daemon"])
async def test_and_with_the_program(tmp_path: Path, start: str) -> None:
    """A rollouter that is killed has no last word: the kernel gives the keeper the sign."""
    async with killed_in_a_call(tmp_path, OF_ITS_OWN, f"{start} hang") as pids:
        for pid in pids:
            await asyncio.to_thread(until, lambda pid=pid: not is_there(pid), f"the end of process {pid}")


@pytest.mark.parametrize("start", ["of_its_own", "daemon"])
@pytest.mark.parametrize("keeper", ["upper", "lower"])
async def test_and_when_a_keeper_is_killed(pool: Make, tmp_path: Path, start: str, keeper: str) -> None:
    p = pool(OF_ITS_OWN)
    pid = tmp_path / "pid"
    await p.start()
    call = asyncio.create_task(p.judge(response(f"{start} hang", pid=str(pid))))
    program = int(await asyncio.to_thread(until, lambda: pid.exists() and pid.read_text(), "the program"))
    upper = p._processes[0]._popen.pid
    (lower,) = psutil.Process(upper).children()
    assert is_there(program)
    os.kill(upper if keeper == "upper" else lower.pid, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: not is_there(program), "the program's end")
    with pytest.raises(RewardError, match="ended its process"):
        await call
    assert (await p.judge(response("fine"))).score == 1.0


async def test_calls_behind_a_slow_one_go_to_another_process(pool: Make, tmp_path: Path) -> None:
    p = pool(HANGS, LONG_S, max_processes=2)
    slow = asyncio.create_task(p.judge(response("hang", pids=str(tmp_path / "pids"))))
    async with asyncio.timeout(LONG_S):
        # Two may have been sent ahead to the process that hangs; the others must not wait for it.
        ahead = [asyncio.create_task(p.judge(response("1"))) for _ in range(40)]
        done, _ = await asyncio.wait(ahead, return_when=asyncio.FIRST_COMPLETED)
    assert done
    assert not slow.done()
    await p.close()
    await asyncio.gather(*ahead, return_exceptions=True)
    with pytest.raises(RewardError, match="closed"):
        await slow


async def test_a_coroutine_that_hangs_is_cancelled_and_the_others_go_on(pool: Make) -> None:
    p = pool(
        """
        import asyncio
        cancelled = 0

        async def compute_score(source, solution, truth, info):
            global cancelled
            if solution != "hang":
                return cancelled
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1
                raise
        """,
        SHORT_S,
    )
    with pytest.raises(RewardError, match=r"took longer than 0\.3 s"):
        await p.judge(response("hang"))
    assert (await p.judge(response())).score == 1.0


async def test_a_coroutine_that_blocks_its_loop_is_killed(
    pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.rewards.pool._GRACE_S", 0.1)
    p = pool(
        """
        import time

        async def compute_score(source, solution, truth, info):
            if solution == "block":
                time.sleep(600)
            return 1
        """,
        SHORT_S,
    )
    with pytest.raises(RewardError, match="took longer"):
        await p.judge(response("block"))
    assert (await p.judge(response())).score == 1.0


@each_kind
async def test_a_call_that_ends_its_process_is_told_and_the_others_are_answered(
    pool: Make, head: str
) -> None:
    p = pool(f"import os\n{head}\n    return os._exit(17) if solution == 'exit' else float(solution)")
    answers = [p.judge(response("exit" if n == 5 else str(n))) for n in range(12)]
    found = await asyncio.gather(*answers, return_exceptions=True)
    assert str(found.pop(5)) == "the reward ended its process (ended with exit code 17)"
    assert [j.score for j in found if isinstance(j, Judged)] == [*range(5), *range(6, 12)]


@each_kind
async def test_memory_beyond_the_limit_is_refused_and_what_is_kept_is_freed(pool: Make, head: str) -> None:
    p = pool(
        f"""
        import os
        kept = []

        {head}
            if solution == "keep":
                kept.append(bytearray(150 << 20))
            return {{"score": len(kept), "pid": os.getpid()}}
        """,
        memory_limit_bytes=400 << 20,
    )
    assert (first := await p.judge(response("keep"))).score == 1
    assert (await p.judge(response("keep"))).score == 2
    with pytest.raises(RewardError, match="the reward raised MemoryError"):
        await p.judge(response("keep"))
    after = await p.judge(response())
    assert after.score == 0
    assert after.parts["pid"] != first.parts["pid"]


async def test_torch_fits_into_the_default_limit(pool: Make) -> None:
    p = pool("import torch\ndef compute_score(*_):\n    return torch.ones(2, 2).sum()")
    assert (await p.judge(response())).score == 4.0


async def test_a_caller_that_gives_up_holds_nobody_up(pool: Make, tmp_path: Path) -> None:
    p = pool("def compute_score(source, solution, truth, info):\n    return float(solution)")
    await p.start()
    given_up = [asyncio.create_task(p.judge(response("1"))) for _ in range(10)]
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    assert (await p.judge(response("2"))).score == 2.0
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*given_up)


async def test_a_row_that_json_cannot_hold(pool: Make) -> None:
    with pytest.raises(RewardError, match="cannot be given to the reward"):
        await pool(PLAIN).judge(response(odd=object()))


async def test_its_processes_end_with_the_program(tmp_path: Path) -> None:
    """Also while a function hangs: the program is killed, nobody asks the process to end."""
    async with killed_in_a_call(tmp_path, HANGS, "hang") as pids:
        assert len(pids) == 2
        for pid in pids:
            await asyncio.to_thread(until, lambda pid=pid: not is_there(pid), f"the end of process {pid}")


@contextlib.asynccontextmanager
async def killed_in_a_call(tmp_path: Path, text: str, solution: str) -> AsyncIterator[list[int]]:
    """Process ids that the call has told, of a program that is killed in it."""
    (tmp_path / "user.py").write_text(text)
    file = tmp_path / "pids"
    program = f"""
import asyncio, sys
from headrace.rewards.pool import FunctionPool, _Process
from headrace.rewards.source import Response
pool = FunctionPool({str(tmp_path / "user.py")!r}, "compute_score", "x", 60.0)
asyncio.run(pool.judge(Response("", {solution!r}, "", {{"pids": {str(file)!r}, "pid": {str(file)!r}}})))
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    try:
        await asyncio.to_thread(until, lambda: file.exists() and file.read_text().split(), "the call")
    finally:
        process.kill()
        await process.wait()
    yield [int(pid) for pid in file.read_text().split()]
