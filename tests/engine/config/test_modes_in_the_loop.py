"""Every mode to the end of its data on real parts: bounded gaps, every sample accounted for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.cli.trace import merge, validate
from headrace.config.loading import load
from headrace.config.run import RunConfig
from headrace.config.staleness import Mode
from headrace.metrics.row_keys import TIMING_S_REWARD
from headrace.records.summary import idle_ratios
from headrace.traces.reading import read
from tests.engine.algorithms.test_algorithms_in_the_loop import COMMON, ROOT, demo_config, merged
from tests.single_rank import single_rank
from tests.support import recomputed
from tests.support.shared_stack import Finished, SharedStack, shared_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

__all__ = ["demo_config"]

MINI = 4
LIMIT_2: dict[str, Any] = {"async_training": {"max_version_gap": 2}}
PARTIAL = Mode.ASYNC_PARTIAL
CASES: dict[str, tuple[Mode, dict[str, Any]]] = {
    **{str(mode): (mode, {}) for mode in Mode},
    "partial rollout with a limit": (PARTIAL, LIMIT_2),
    "two batches per update": (PARTIAL, {"async_training": {"require_batches": 2}}),
    "recomputed log-probs": (Mode.STREAM_OFF_POLICY, {"async_training": {"use_rollout_log_probs": False}}),
}


@pytest.fixture(scope="module")
def stack(demo_config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedStack]:
    config = RunConfig.model_validate(demo_config)
    with single_rank() as ranks, shared_stack(config, tmp_path_factory.mktemp("stack"), ranks) as found:
        yield found


def configured(base: dict[str, Any], mode: Mode, name: str, *changes: dict[str, Any]) -> RunConfig:
    """The preset on top of the demo, with few and small windows."""
    preset = load(ROOT / "configs" / "demo.yaml", [f"configs/modes/{mode}.yaml"])
    parameters = {"mode": preset.mode, "async_training": preset.async_training.model_dump()}
    few = {"async_training": {"trigger_parameter_sync_step": min(2, preset.rule.sync_steps)}}
    return RunConfig.model_validate(merged(base, COMMON, parameters, few, {"name": name}, *changes))


def gaps(finished: Finished) -> list[int]:
    """Of every sample trained, as the run recorded them."""
    return [
        int(gap)
        for row in finished.rows
        for gap, count in row["staleness/version_gap/hist"].items()
        for _ in range(count)
    ]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_mode_comes_to_its_end(
    case: str, drop_last: bool, stack: SharedStack, demo_config: dict[str, Any]
) -> None:
    """30 samples fill neither the last update nor the last window."""
    mode, change = CASES[case]
    total = 30
    name = "".join(c if c.isalnum() else "-" for c in f"{case}-{drop_last}")
    config = configured(
        demo_config,
        mode,
        name,
        {
            "rollout": {"total_rollout_steps": total},
            "data": {"drop_last": drop_last},
            "trace": {"enable": True},
            "dump": {"enable": True, "samples_per_update": 10_000, "max_bytes": 256 << 20},
        },
        change,
    )
    finished = stack.run(config)
    assert finished.code == 0
    assert finished.balanced
    whole = total // config.samples_per_update
    left = total - whole * config.samples_per_update
    counts = finished.stats.counts
    assert left
    assert (counts["trained"], counts["dropped"]) == ((total - left, left) if drop_last else (total, 0))
    assert finished.stats.dropped_reasons == ({"drop_last": left} if drop_last else {})
    rows = finished.rows
    assert len(rows) == whole + (not drop_last)
    bound = config.rule.largest_gap
    found = gaps(finished)
    assert len(found) == counts["trained"]
    assert min(found) >= 0
    assert bound is None or max(found) <= bound
    assert rows[-1]["optimizer_steps"] == -(-counts["trained"] // MINI)
    if config.rule.crosses is not None:
        assert all(row["fully_async/partial/max_partial_span"] < config.rule.crosses for row in rows)
    for row in rows:
        assert ("timing_s/wait_prev_gen" in row) == (config.mode is not None)
    generated = [row["fully_async/count/total_generated_samples"] for row in rows]
    assert generated == sorted(generated)
    assert generated[whole - 1] >= whole * config.samples_per_update
    assert generated[-1] <= finished.stats.finished
    assert rows[-1]["fully_async/count/dropped_stale_samples"] <= finished.stats.restarted
    assert all(row[TIMING_S_REWARD] > 0.0 for row in rows)
    # One sync before anything, one behind every window, one for what is left of the last.
    assert finished.stats.version == -(-len(rows) // config.rule.sync_steps)
    assert finished.audit.problems == finished.audit.explained == []
    check_timeline(finished, config)
    check_run_log(finished, config)


def check_run_log(finished: Finished, config: RunConfig) -> None:
    """Every number of the run log that raw records have is what they say."""
    records = recomputed.Records(
        finished.directory, config.rollout.n, MINI, config.waits_for_commit, finished.records
    )
    assert recomputed.check(records) == []
    whole = recomputed.whole_run(records)
    told = idle_ratios(finished.rows)
    assert told == {name: ratio and pytest.approx(ratio, abs=1e-6) for name, ratio in whole.items()}


def check_timeline(finished: Finished, config: RunConfig) -> None:
    """The recorded timeline is sound, shows every part, and agrees with the run log's idle ratio."""
    trace = read(finished.directory)
    events = merge(trace)
    assert validate(events) == []
    slices = [e for e in events if e["ph"] == "X"]
    seconds = Counter[str]()
    for e in slices:
        seconds[e["name"]] += e["dur"] / 1e6
    assert {"sample", "paused", "load", "round", "transfer", "update_actor"} <= set(seconds)
    finishes = [e for e in slices if e["name"] == "sample"]
    assert len(finishes) >= finished.stats.counts["trained"]
    waits = sum(row["timing_s/gen_wait"] for row in finished.rows)
    assert seconds["gen_wait"] == pytest.approx(waits, rel=0.02, abs=0.02)
    updates = sum(row["timing_s/update_actor"] for row in finished.rows)
    assert seconds["update_actor"] == pytest.approx(updates, rel=0.02, abs=0.02)
    assert ("let_finish" in seconds) == (config.rule.crosses is not None)


def test_sampled_validation_reports_mean_best_and_majority(
    stack: SharedStack, demo_config: dict[str, Any]
) -> None:
    config = configured(
        demo_config,
        Mode.ASYNC_PARTIAL,
        "sampled-validation",
        {"rollout": {"total_rollout_steps": 16, "test_freq": 1}, "val": {"n": 4, "temperature": 1.0}},
    )
    finished = stack.run(config)
    assert finished.code == 0
    rows = [json.loads(line) for line in (finished.directory / "eval.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == list(range(finished.stats.version + 1))
    for row in rows:
        assert (row["k"], row["n"], row["unfinished"]) == (4, 200, 0)
        assert 0 < row["reward"] < row["best"] <= 1
        assert row["reward"] <= row["majority"] <= row["best"], "an answer that comes often is the better one"
