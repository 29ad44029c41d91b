"""What the runner shows, from rows of metrics alone."""

import io
import json

import pytest

from headrace.local.progress import PlainLines, RunProgress
from headrace.records.json_files import MetricsTail


def rows(*steps: int, **values: float) -> list[dict]:
    return [{"step": step, **values} for step in steps]


def cells(progress: RunProgress) -> dict[str, str]:
    return dict(progress.cells())


def test_the_time_left_follows_the_pace_of_the_last_steps():
    progress = RunProgress(total_steps=10)
    assert cells(progress)["left"] == "-"
    progress.add_rows(rows(1), now=100.0)
    assert progress.eta_s is None  # one step has no pace
    progress.add_rows(rows(2), now=103.0)
    progress.add_rows(rows(3), now=106.0)
    assert progress.eta_s == pytest.approx(21.0)
    progress.add_rows(rows(2), now=110.0)  # a restart took step 3 back
    assert progress.eta_s is None
    assert cells(progress)["step"] == "2/10"


def test_updates_beyond_the_plan_do_not_count_past_it():
    """Samples that went back by hand make short updates of their own."""
    progress = RunProgress(total_steps=2)
    for step in (1, 2, 3):
        progress.add_rows(rows(step), now=float(step))
    assert cells(progress)["step"] == "3/3"
    assert progress.eta_s == 0.0


def test_lines_come_with_a_step_and_leave_out_what_is_unknown(tmp_path):
    out = io.StringIO()
    lines = PlainLines(out)
    progress = RunProgress(total_steps=4)
    lines.update(progress)
    assert out.getvalue() == ""
    progress.add_rows([{"step": 1, "reward/mean": 0.25, "trainer/idle_ratio": 0.5}], now=0.0)
    progress.scores = [(v, "letters", v / 10) for v in range(6)]
    lines.update(progress)
    lines.update(progress)  # the same step: nothing new to say
    assert out.getvalue() == (
        "step 1/4  reward 0.250  trainer idle 50 %  "
        "held-out 0.000 (v0) … 0.200 (v2), 0.300 (v3), 0.400 (v4), 0.500 (v5)\n"
    )


def test_a_row_that_is_half_written_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.new_rows() == []
    whole = json.dumps({"step": 1}) + "\n"
    path.write_text(whole + '{"step"')
    assert tail.new_rows() == [{"step": 1}]
    path.write_text(whole + '{"step": 2}\n')
    assert tail.new_rows() == [{"step": 2}]
