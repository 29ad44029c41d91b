"""What turns a service's own numbers into metrics."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from headrace.metrics.trainer import GAUGES, HEARTBEAT
from headrace.v1 import sync_pb2 as pb
from headrace_coordinator import metrics as coordinator
from headrace_rollouter import metrics as rollouter
from headrace_trainer.distributed import heartbeat
from headrace_trainer.records import metrics as trainer
from tests.fast.rollouter.test_rollouter_parts import config as run_config


def value(name: str, **labels: str) -> float:
    found = REGISTRY.get_sample_value(name, labels)
    assert found is not None, name
    return found


# -- the trainer --------------------------------------------------------------------------------------


def test_a_wait_counts_while_it_lasts() -> None:
    clock = trainer.Clock()
    assert clock.read() == (0.0, 0.0)
    clock.begin_wait(100.0)
    assert clock.read(150.0) == (50.0, 50.0)


def test_so_does_an_update() -> None:
    clock = trainer.Clock()
    clock.begin_wait(100.0)
    clock.end_wait(130.0)
    assert clock.read(130.0) == (30.0, 30.0)
    assert clock.read(175.0) == (30.0, 75.0)
    clock.step_ended(wait_s=30.0)
    assert clock.read(180.0) == (30.0, 80.0)
    # The second step has waited 5 s more than the clock saw.
    clock.begin_wait(180.0)
    clock.end_wait(190.0)
    clock.step_ended(wait_s=15.0)
    assert clock.read(220.0) == (45.0, 120.0)


def test_the_idle_ratio_of_a_quarter_of_an_hour_is_true_though_updates_take_longer() -> None:
    """Five minutes of waiting, then twenty-five of an update, over and over; a scrape a minute."""
    clock = trainer.Clock()
    seen = [clock.read()]
    for minute in range(180):
        if minute % 30 == 0:
            if minute:
                clock.step_ended(300.0)
            clock.begin_wait(60.0 * minute)
        if minute % 30 == 5:
            clock.end_wait(60.0 * minute)
        seen.append(clock.read(60.0 * (minute + 1)))
    for before, after in zip(seen, seen[15:], strict=False):
        wait_s, step_s = after[0] - before[0], after[1] - before[1]
        assert step_s == 900.0
        assert wait_s <= 300.0
    assert seen[-1] == (1800.0, 10800.0)


def test_an_update_whose_samples_all_went_back_waits_twice_in_one_row() -> None:
    clock = trainer.Clock()
    for began in (0.0, 20.0):
        clock.begin_wait(began)
        clock.end_wait(began + 10.0)
    clock.step_ended(wait_s=20.0)
    assert clock.read(50.0) == (20.0, 50.0)


def test_a_round_that_is_waited_for_waits_until_its_transfer_begins() -> None:
    clock = trainer.Clock()
    clock.begin_wait(0.0)
    clock.transfer_begins(4.0)  # of a round beside the wait for samples
    clock.end_wait(10.0)
    clock.begin_wait(30.0, until_transfer=True)
    assert clock.read(35.0) == (15.0, 35.0)
    clock.transfer_begins(36.0)
    clock.transfer_begins(37.0)  # the second attempt's
    clock.end_wait(40.0)
    clock.step_ended(wait_s=16.0)
    assert clock.read(40.0) == (16.0, 40.0)


def test_counters_never_go_back() -> None:
    clock = trainer.Clock()
    readings = [clock.read()]
    now = time.monotonic()
    for action in (
        lambda: clock.begin_wait(now - 3.0),
        lambda: clock.end_wait(now - 1.0),  # told late: a scrape has seen more
        lambda: clock.step_ended(2.0),
        lambda: clock.begin_wait(time.monotonic()),
    ):
        action()
        readings.append(clock.read())
    assert all(
        a <= b for before, after in itertools.pairwise(readings) for a, b in zip(before, after, strict=True)
    )


ROW = {
    **dict.fromkeys(GAUGES, 0.5),
    "trainer/idle_ratio": 0.25,
    "timing_s/step": 2.0,
    "perf/tokens_per_s": 10.0,
    "actor/skipped_steps": 0,
    "staleness/version_gap/max": 2,
    "staleness/version_gap/hist": {"0": 1, "2": 3},
    "staleness/length_order_corr": 0.1,
}


def observe(gap: int, bound: float) -> None:
    nothing = trainer.Observed((), (), (), (), (), 0)
    trainer.observe({**ROW, "staleness/version_gap/max": gap}, {}, 4, 8, nothing, bound)


def test_an_update_is_counted_under_the_right_names() -> None:
    names = {
        "headrace_update_gap_steps_sum": 3.0 + 5.0 + 5.0 + 4.0,
        "headrace_partial_span_versions_sum": 0.0 + 1.0 + 2.0 + 0.0,
        "headrace_partial_samples_trained_total": 2.0,
        "headrace_queue_message_latency_seconds_sum": 0.5 + 0.25,
        "headrace_reward_count": 2.0,
        "headrace_trained_response_length_tokens_sum": 70.0,
        "headrace_version_gap_versions_sum": 6.0,
        "headrace_samples_trained_total": 4.0,
        "headrace_trajectories_trained_total": 32.0,
        "headrace_stale_samples_trained_total": 3.0,
        "headrace_stale_trajectories_trained_total": 7.0,
        "headrace_tokens_trained_total": 20.0,
        "headrace_local_updates_total": 1.0,
    }
    before = {name: value(name) for name in names}
    seen = trainer.Observed((0, 1, 2, 0), (3, 5, 5, 4), (0.5, 0.25), (1.0, 0.5), (30, 40), 7)
    trainer.observe(ROW, {}, 4, 8, seen, 2.0)
    assert {name: value(name) - before[name] for name in names} == pytest.approx(names)


def test_what_no_update_has_told_yet_is_not_shown() -> None:
    """In a process of its own: an update that another test has shown stays."""
    code = (
        "from prometheus_client import generate_latest; from headrace_trainer.records import metrics; "
        "from headrace_rollouter import metrics; print(generate_latest().decode())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "headrace_trainer_step_seconds_total 0.0" in told
    for absent in ("NaN", "\nheadrace_trainer_idle_ratio", "\nheadrace_rollouter_idle_ratio",
                   "\nheadrace_actor_entropy", "\nheadrace_version_gap_largest_versions"):  # fmt: skip
        assert absent not in told
    observe(0, 0.0)
    assert value("headrace_trainer_idle_ratio") == 0.25
    assert value("headrace_actor_entropy") == 0.5


def test_the_largest_gap_is_shown_with_the_bound_of_its_own_update() -> None:
    """After eta was lowered the update before must not stand beside the bound of the one that is claimed."""
    trainer.configure(run_config())
    names = ("headrace_version_gap_largest_versions", "headrace_version_gap_bound_versions")
    for gap, bound in ((2, 2.0), (1, 1.0), (0, math.inf)):
        observe(gap, bound)
        assert tuple(value(name) for name in names) == (gap, bound)


def test_a_node_without_the_first_rank_shows_its_process_only() -> None:
    names = {family.name for family in trainer.process_only().collect()}
    assert "process_resident_memory_bytes" in names
    own = [name for name in names if name.startswith("headrace_")]
    assert own == ["headrace_trainer_heartbeat_age_seconds"]


def test_the_age_of_the_heartbeat_is_that_of_this_node(tmp_path: Path) -> None:
    heartbeat.Launch(tmp_path).ranks_begin(2)
    trainer.show_heartbeat(tmp_path)
    os.utime(tmp_path / "rank-1", (time.time() - 50.0,) * 2)
    (sample,) = [s for m in HEARTBEAT.collect() for s in m.samples]
    assert 50.0 <= sample.value < 80.0
    os.utime(tmp_path / "rank-1", (time.time() + 50.0,) * 2)
    os.utime(tmp_path / "launcher", (time.time() + 50.0,) * 2)
    (sample,) = [s for m in HEARTBEAT.collect() for s in m.samples]
    assert sample.value == 0.0, "dated ahead"


# -- the rollouter ------------------------------------------------------------------------------------


def test_usage_counts_on_and_closes_each_version() -> None:
    names = ("headrace_rollouter_active_seconds_total", "headrace_rollouter_window_seconds_total")
    before = [value(name) for name in names] + [value("headrace_tokens_generated_total")]
    usage = rollouter.Usage()
    usage.seen(0.0, 10.0, 0, -1)
    usage.seen(0.0, 20.0, 0, 0)  # the first weights are here
    usage.seen(15.0, 40.0, 300, 0)
    assert REGISTRY.get_sample_value("headrace_rollouter_idle_ratio") is None  # no version has ended
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


def test_a_round_is_shown() -> None:
    names = ("headrace_sync_bytes_total", "headrace_sync_failures_total")
    before = value(names[0]), value(names[1], reason="attempt")
    coordinator.observe_round(pb.Committed(version=7, members=5, attempts=3, total_s=2.0), 100)
    assert value("headrace_policy_version") == 7
    assert value("headrace_sync_group_size") == 5
    assert value(names[0]) - before[0] == 100
    assert value(names[1], reason="attempt") - before[1] == 2
