"""What the end of a run says about memory and the canary."""

from __future__ import annotations

from pathlib import Path

from headrace.records.layout import RunLayout
from headrace.records.summary import lines, quarters


def test_memory_is_told_by_quarters_and_peak() -> None:
    assert quarters([1.0, 3.0, 9.0, 2.0]) == {
        "first_quarter_mb": 1.0,
        "last_quarter_mb": 2.0,
        "peak_mb": 9.0,
    }
    assert quarters([5.0])["peak_mb"] == 5.0
    assert set(quarters([]).values()) == {None}


def test_lines_of_a_run(tmp_path: Path) -> None:
    memory = {"trainer": quarters([7000.0, 7662.0]), "rollouter-0": quarters([2002.0]), "queue": quarters([])}
    summary = {
        "name": "x",
        "status": "completed",
        "wall_s": 61.0,
        "sync": {"count": 7, "p50_s": 3.76, "logprob_max_abs_diff": 0.4022},
        "memory": memory,
        "ledger": {"kept": {"queued": 12, "parked": 3}},
    }
    told = lines(summary, RunLayout(tmp_path))
    assert "syncs: 7, median 3.76 s; engines score like the trainer to 4.0e-01 (log-prob, largest)" in told
    assert "memory at each part's peak: 9.7 GB (trainer 7.7, rollouter-0 2.0)" in told
    assert "kept over starts of the trainer: 3 parked, 12 queued" in told
    del summary["sync"], summary["memory"]
    assert not any("syncs" in line or "memory" in line for line in lines(summary, RunLayout(tmp_path)))
