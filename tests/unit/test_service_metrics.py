"""What turns a service's own numbers into metrics."""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from headrace_coordinator import metrics as coordinator
from headrace_rollouter import metrics as rollouter
from headrace_trainer import heartbeat
from headrace_trainer import metrics as trainer


def value(name: str, **labels: str) -> float:
    found = REGISTRY.get_sample_value(name, labels)
    assert found is not None, name
    return found


# -- the trainer --------------------------------------------------------------------------------------


def test_a_wait_counts_while_it_lasts() -> None:
    clock = trainer.Clock()
    assert clock.read() == (0.0, 0.0)
    clock.begin_wait(time.monotonic() - 50.0)
    wait_s, step_s = clock.read()
    assert wait_s == step_s == pytest.approx(50.0, abs=5.0)


def test_a_step_counts_each_second_once() -> None:
    clock = trainer.Clock()
    clock.begin_wait(100.0)
    clock.end_wait(130.0)
    assert clock.read() == (30.0, 30.0)
    clock.step(wait_s=30.0, step_s=80.0)
    assert clock.read() == (30.0, 80.0)
    # The second step waits 5 s more at a commit than the clock saw.
    clock.begin_wait(200.0)
    clock.end_wait(210.0)
    clock.step(wait_s=15.0, step_s=40.0)
    assert clock.read() == (45.0, 120.0)


def test_an_update_whose_samples_all_went_back_waits_twice_in_one_row() -> None:
    clock = trainer.Clock()
    for began in (0.0, 20.0):
        clock.begin_wait(began)
        clock.end_wait(began + 10.0)
    clock.step(wait_s=20.0, step_s=50.0)
    assert clock.read() == (20.0, 50.0)


def test_counters_never_go_back() -> None:
    clock = trainer.Clock()
    readings = [clock.read()]
    now = time.monotonic()
    for action in (
        lambda: clock.begin_wait(now - 3.0),
        lambda: clock.end_wait(now),
        lambda: clock.step(3.0, 4.0),
        lambda: clock.begin_wait(time.monotonic()),
    ):
        action()
        readings.append(clock.read())
    assert all(
        a <= b for before, after in itertools.pairwise(readings) for a, b in zip(before, after, strict=True)
    )


def test_a_node_without_the_first_rank_shows_its_process_only() -> None:
    names = {family.name for family in trainer.process_only().collect()}
    assert "process_resident_memory_bytes" in names
    own = [name for name in names if name.startswith("headrace_")]
    assert own == ["headrace_trainer_heartbeat_age_seconds"]


def test_the_age_of_the_heartbeat_is_that_of_this_node(tmp_path: Path) -> None:
    heartbeat.Launch(tmp_path).ranks_begin(2)
    trainer.show_heartbeat(tmp_path)
    os.utime(tmp_path / "rank-1", (time.time() - 50.0,) * 2)
    (sample,) = [s for m in trainer.HEARTBEAT.collect() for s in m.samples]
    assert 50.0 <= sample.value < 80.0
    os.utime(tmp_path / "rank-1", (time.time() + 50.0,) * 2)
    os.utime(tmp_path / "launcher", (time.time() + 50.0,) * 2)
    (sample,) = [s for m in trainer.HEARTBEAT.collect() for s in m.samples]
    assert sample.value == 0.0, "dated ahead"


# -- the rollouter ------------------------------------------------------------------------------------


def test_usage_counts_on_and_closes_each_version() -> None:
    names = ("headrace_rollouter_active_seconds_total", "headrace_rollouter_window_seconds_total")
    before = [value(name) for name in names] + [value("headrace_tokens_generated_total")]
    usage = rollouter.Usage()
    usage.seen(0.0, 10.0, 0, -1)
    usage.seen(0.0, 20.0, 0, 0)  # the first weights are here
    assert value("headrace_rollouter_idle_ratio") == 1.0
    usage.seen(15.0, 40.0, 300, 0)
    assert value("headrace_rollouter_idle_ratio") == 1.0  # still the one before
    usage.seen(15.0, 40.0, 300, 1)
    assert value("headrace_rollouter_idle_ratio") == pytest.approx(0.25)
    after = [value(name) for name in names] + [value("headrace_tokens_generated_total")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [15.0, 40.0, 300.0]


# -- the coordinator ----------------------------------------------------------------------------------


def test_the_canary_is_the_worst_of_the_newest_version() -> None:
    canary = coordinator.Canary()
    shown = []
    for version, difference in ((1, 0.2), (1, 0.1), (2, 0.05), (2, math.nan), (3, 0.0)):
        canary.reported(version, difference)
        shown.append(value("headrace_sync_logprob_diff"))
    assert shown == [0.2, 0.2, 0.05, math.inf, 0.0]
