"""Services that come and go while the supervisor runs, and the number of rollouters asked for."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from headrace.local import processes
from headrace.local.processes import Completed, ProcessFailed, ProcessState
from headrace.local.scaling import LARGEST, ask, asked
from headrace.records.layout import RunLayout
from tests.support.cli_desk import Desk, wait_until
from tests.support.supervised import FOREVER, Bench, count_starts

LEAVES_IN_ORDER = """
import signal, sys, time
def stop(*_):
    open('goodbye', 'w').write('said')
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open('up', 'w')
while True: time.sleep(0.05)
"""


def test_one_is_added_and_leaves_in_order(bench: Bench) -> None:
    supervisor = bench.supervise(bench.service("queue", FOREVER))
    supervisor.add(bench.service("rollouter-7", LEAVES_IN_ORDER))
    with pytest.raises(ValueError, match="rollouter-7"):
        supervisor.add(bench.service("rollouter-7", FOREVER))
    bench.poll_until(lambda: bench.path("up").exists(), "the new one is up")
    supervisor.retire("rollouter-7", 10.0)
    assert supervisor.children["rollouter-7"].state is ProcessState.LEAVING
    bench.poll_until(lambda: "rollouter-7" not in supervisor.children, "it has left")
    assert bench.path("goodbye").read_text() == "said"
    assert bench.notes == ["rollouter-7 has left"]


def test_one_that_does_not_leave_is_killed_and_not_started_again(bench: Bench) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up', 'w')\n" + FOREVER
    supervisor = bench.supervise(bench.service("queue", FOREVER), bench.service("rollouter-0", deaf))
    bench.poll_until(lambda: bench.path("up").exists(), "it is up")
    supervisor.retire("rollouter-0", 0.2)
    bench.poll_until(lambda: "rollouter-0" not in supervisor.children, "it is gone")
    assert bench.notes[0].startswith("rollouter-0 did not leave in time")


def test_a_frozen_one_hears_that_it_is_to_leave(bench: Bench) -> None:
    supervisor = bench.supervise(bench.service("rollouter-0", LEAVES_IN_ORDER))
    bench.poll_until(lambda: bench.path("up").exists(), "it is up")
    process = supervisor.children["rollouter-0"].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    supervisor.retire("rollouter-0", 10.0)
    bench.poll_until(lambda: "rollouter-0" not in supervisor.children, "it has left")
    assert bench.path("goodbye").exists()


def test_one_that_waits_for_its_restart_is_forgotten_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "BACKOFF_FIRST_S", 60.0)
    supervisor = bench.supervise(bench.service("rollouter-0", "raise SystemExit(1)"))
    bench.poll_until(
        lambda: supervisor.children["rollouter-0"].state is ProcessState.BACKOFF, "it has failed"
    )
    supervisor.retire("rollouter-0", 10.0)
    assert supervisor.children == {}


def test_one_that_is_not_essential_is_given_up_and_the_run_goes_on(bench: Bench) -> None:
    code = count_starts("starts") + "raise SystemExit(3)"
    supervisor = bench.supervise(bench.service("rollouter-1", code, essential=False), max_restarts=1)
    child = supervisor.children["rollouter-1"]
    bench.poll_until(lambda: child.state is ProcessState.ENDED, "it is given up")
    assert "the run goes on without it" in bench.notes[-1]
    supervisor.add(bench.service("trainer", "pass", completes=True))
    assert bench.outcome() == Completed()
    assert bench.path("starts").read_text() == "xx"


def test_exits_long_ago_do_not_count(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FORGIVEN_AFTER_S", 0.05)
    code = count_starts("starts") + "import time; time.sleep(0.3); raise SystemExit(1)"
    bench.supervise(bench.service("queue", code), max_restarts=1)
    bench.poll_until(lambda: bench.path("starts").exists(), "the first start")
    bench.poll_until(lambda: len(bench.path("starts").read_text()) >= 4, "starts beyond the limit")


# -- what is asked for ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["{", "{}", "[]", '{"rollouter": -1}', '{"rollouter": "2"}', '{"rollouter": true}']
)
def test_a_wish_that_says_nothing(tmp_path: Path, text: str) -> None:
    layout = RunLayout(tmp_path)
    layout.create()
    assert asked(layout) is None
    layout.scale.write_text(text)
    with pytest.raises(ValueError, match=r"scale\.json"):
        asked(layout)
    layout.scale.write_text(json.dumps({"rollouter": LARGEST + 1}))
    with pytest.raises(ValueError, match="0 to"):
        asked(layout)
    ask(layout, 0)
    assert asked(layout) == 0


def rollouters(desk: Desk) -> list[str]:
    return [name for name in desk.pids() if name.startswith("rollouter-")]


def test_scaled_while_it_is_on(desk: Desk) -> None:
    """The runner's part, with stand-ins for the services."""
    desk.start("run", str(desk.config), standin="wait")
    desk.wait_for_training()
    first = desk.pids()
    code, said = desk.headrace("scale", "x", "rollouter=4")
    assert code == 0, said
    wait_until(lambda: {"rollouter-2", "rollouter-3"} <= desk.pids().keys(), "four rollouters")
    assert {n: desk.pids()[n] for n in first} == first, "the others go on"
    code, said = desk.headrace("scale", "x", "rollouter=1")
    assert code == 0, said
    wait_until(
        lambda: [n for n in desk.pids() if n.startswith("rollouter")] == ["rollouter-0"], "one is left"
    )
    left = (desk.directory / "order").read_text().split()
    assert sorted(left) == ["rollouter-1", "rollouter-2", "rollouter-3"], "each was told, none was killed"
    code, said = desk.headrace("scale", "x", "rollouter=2")
    wait_until(lambda: "rollouter-1" in desk.pids(), "the lowest number that is free is used again")


def test_scaling_what_is_not_on(desk: Desk) -> None:
    code, said = desk.headrace("scale", "nothing", "rollouter=1")
    assert code == 2
    assert "no run 'nothing'" in said


def test_exits_without_progress_count_however_long_it_was_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that fails in the same way hours after each start must not go on for ever."""
    monkeypatch.setattr(processes, "FORGIVEN_AFTER_S", 0.05)
    code = count_starts("starts") + "import time; time.sleep(0.3); raise SystemExit(1)"
    bench.supervise(bench.service("trainer", code, progress=lambda: "step_00000007"), max_restarts=2)
    outcome = bench.outcome()
    assert isinstance(outcome, ProcessFailed)
    assert bench.path("starts").read_text() == "xxx"
