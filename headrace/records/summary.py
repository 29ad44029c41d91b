"""Build a run's `summary.json` from the run's files, and format it for people.

Numbers cover the whole run over all its starts, except `memory` (the last start). A step that was trained
again after a resume counts once in `version_gap`: the last row of a step wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headrace.config.run import RunConfig
from headrace.ledger.replies import Stats
from headrace.metrics import row_keys
from headrace.records.audit import RunAudit
from headrace.records.evaluations import eval_rows
from headrace.records.json_files import read_json, read_rows
from headrace.records.layout import RunLayout
from headrace.system.terminal import one_line

STATES = ("ready", "in_flight", "parked", "queued", "training", "trained", "dead", "dropped")


def build(
    *,
    status: str,
    reason: str | None,
    config: RunConfig,
    layout: RunLayout,
    stats: Stats | None,
    audit: RunAudit | None,
    wall_s: float,
    memory: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Build the summary. `wall_s` is this start's; the previous summary's is added to it."""
    rows = read_rows(layout.metrics)
    last = _last_values(rows)
    trained = stats.counts["trained"] if stats else None
    before = layout.read_summary() or {}
    return {
        "status": status,
        "reason": reason,
        "name": config.name,
        "mode": str(config.derived_mode),
        "engine": read_json(layout.engine),
        "policy_version": _version(stats, last),
        "optimizer_steps": last.get("optimizer_steps"),
        "wall_s": round(wall_s + float(before.get("wall_s") or 0.0), 3),
        "trained_samples": trained,
        "trained_trajectories": trained * config.rollout.n if trained is not None else None,
        "trained_tokens": last.get("trained_tokens"),
        "eval": eval_rows(layout.eval),
        "idle_ratio": idle_ratios(rows),
        "ledger": _ledger(stats),
        "balanced": audit.balanced if audit else None,
        "lengths": {state: asdict(found) for state, found in audit.ledger.lengths.items()} if audit else None,
        "sync": sync_numbers(read_rows(layout.sync)),
        "version_gap": version_gaps(rows),
        "memory": {name: quarters(values) for name, values in memory.items()},
        "final": str(layout.final) if layout.final.is_dir() else None,
    }


def _version(stats: Stats | None, last: Mapping[str, Any]) -> Any:
    """The committed policy version; None before the first commit."""
    if stats is not None:
        return stats.version if stats.version >= 0 else None
    return last.get(row_keys.FULLY_ASYNC_COUNT_CURRENT_PARAM_VERSION)


def _last_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for row in rows:
        merged.update(row)
    return merged


def _updates(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One row per local update: the last one of each step."""
    by_step = {row["step"]: row for row in rows if isinstance(row.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return sum(_number(row.get(key)) or 0.0 for row in rows)


def idle_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Time-weighted shares of idle time over all rows; a repeated step took its time again, so it counts.

    The first update of each trainer start is excluded, because it waits for the engines to load.
    """
    starts = [None, *(row.get("lineage") for row in rows)]
    steps = [
        row
        for row, before in zip(rows, starts, strict=False)
        if _number(row.get(row_keys.TIMING_S_STEP)) and row.get("lineage") == before
    ]
    total = _sum(steps, row_keys.TIMING_S_STEP)
    waited = _sum(steps, row_keys.TIMING_S_GEN_WAIT) + _sum(steps, row_keys.TIMING_S_WAIT_PREV_GEN)
    weighted = [
        (ratio, row[row_keys.TIMING_S_STEP])
        for row in steps
        if (ratio := _number(row.get(row_keys.ROLLOUTER_IDLE_RATIO))) is not None
    ]
    weight = sum(w for _, w in weighted)
    return {
        "trainer": round(waited / total, 6) if total else None,
        "rollouter": round(sum(r * w for r, w in weighted) / weight, 6) if weight else None,
    }


def _ledger(stats: Stats | None) -> dict[str, Any] | None:
    if stats is None:
        return None
    return {
        "issued_total": stats.issued_total,
        **{state: stats.counts[state] for state in STATES},
        "requeued": sum(stats.requeued.values()),
        "requeued_by_reason": dict(stats.requeued),
        "kept": dict(stats.kept),
        "dead_by_reason": dict(stats.dead_reasons),
        "dropped_by_reason": dict(stats.dropped_reasons),
        "fenced": stats.fenced,
    }


def sync_numbers(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of the committed rounds: seconds, `bytes` of the largest round, and the worst canary."""
    rounds = {row.get("version"): row for row in rows if _number(row.get("total_s")) is not None}

    def values(key: str) -> list[float]:
        found = (_number(row.get(key)) for row in rounds.values())
        return [value for value in found if value is not None]

    totals, sizes, differences = values("total_s"), values("bytes"), values("logprob_max_abs_diff")
    return {
        "count": len(rounds),
        "p50_s": statistics.median(totals) if totals else None,
        "max_s": max(totals, default=None),
        "bytes": int(max(sizes)) if sizes else None,
        "logprob_max_abs_diff": max(differences, default=None),
    }


def version_gaps(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Version gap -> number of trained samples."""
    counts: dict[int, int] = {}
    for row in _updates(rows):
        histogram = row.get(row_keys.STALENESS_VERSION_GAP_HIST)
        if isinstance(histogram, Mapping):
            for gap, n in histogram.items():
                counts[int(gap)] = counts.get(int(gap), 0) + int(n)
    return {str(gap): counts[gap] for gap in sorted(counts)}


def quarters(samples_mb: Sequence[float]) -> dict[str, float | None]:
    """The peak, and the means of the first and the last quarter, between which a leak shows. In MB."""
    n = len(samples_mb) // 4
    peak = round(max(samples_mb), 1) if samples_mb else None
    if not n:
        return {"first_quarter_mb": None, "last_quarter_mb": None, "peak_mb": peak}
    return {
        "peak_mb": peak,
        "first_quarter_mb": round(statistics.fmean(samples_mb[:n]), 1),
        "last_quarter_mb": round(statistics.fmean(samples_mb[-n:]), 1),
    }


# -- for people ---------------------------------------------------------------------------------------


def lines(summary: Mapping[str, Any], layout: RunLayout) -> list[str]:
    """The final lines on the screen: the results and where to find them."""
    out = [f"run {summary['name']}: {summary['status']}"]
    if summary.get("reason"):
        out[0] += f" ({summary['reason']})"
    out += _score_lines(summary.get("eval") or [])
    out.append(
        f"policy version {_shown(summary.get('policy_version'))}, "
        f"{_shown(summary.get('optimizer_steps'))} optimizer steps, "
        f"{_shown(summary.get('trained_samples'))} samples trained, wall time {duration(summary['wall_s'])}"
    )
    idle = summary.get("idle_ratio") or {}
    out.append(f"idle: trainer {percent(idle.get('trainer'))}, rollouters {percent(idle.get('rollouter'))}")
    out += _sync_lines(summary.get("sync") or {}) + _memory_lines(summary.get("memory") or {})
    if line := ledger_line(summary):
        out.append(line)
    out += kept_lines((summary.get("ledger") or {}).get("kept") or {})
    if summary.get("final"):
        out.append(f"model: {summary['final']}")
    out.append(f"details: {layout.summary}")
    return [one_line(line) for line in out]


def ledger_line(summary: Mapping[str, Any]) -> str:
    """The `balance_line` of a summary; empty if counts are missing."""
    ledger = summary.get("ledger")
    if not isinstance(ledger, Mapping) or not all(
        isinstance(ledger.get(k), int) for k in ("issued_total", *STATES)
    ):
        return ""
    return balance_line(ledger["issued_total"], ledger, summary.get("balanced"))


def balance_line(issued: int, counts: Mapping[str, int], balanced: bool | None) -> str:
    """`ledger balanced: 480 issued = 470 trained + 10 dead`."""
    order = ("trained", "dead", "dropped", "training", "queued", "parked", "in_flight", "ready")
    parts = [f"{counts[state]} {state}" for state in order if counts[state]] or ["0 trained"]
    sign = "=" if sum(counts[state] for state in STATES) == issued else "≠"
    verdict = {True: "ledger balanced", False: "LEDGER NOT BALANCED", None: "ledger (not audited)"}[balanced]
    return f"{verdict}: {issued} issued {sign} {' + '.join(parts)}"


def kept_lines(kept: Mapping[str, int]) -> list[str]:
    """`kept over starts of the trainer: 2 parked, 12 queued`; no line if nothing was kept."""
    shown = ", ".join(f"{count} {state}" for state, count in sorted(kept.items()))
    return [f"kept over starts of the trainer: {shown}"] if shown else []


def _score_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    out = []
    for source in dict.fromkeys(row["data_source"] for row in rows):
        scored = [r for r in rows if r["data_source"] == source and r["reward"] is not None]
        if not scored:
            continue
        first, final = scored[0], scored[-1]
        line = (
            f"held-out {source}: {first['reward']:.3f} (version {first['version']}) -> "
            f"{final['reward']:.3f} (version {final['version']}), {final['n']} prompts"
        )
        if final.get("best") is not None:
            k = final["k"]
            line += f", best@{k} {final['best']:.3f}, maj@{k} {final['majority']:.3f}"
        out.append(line)
    return out


def _sync_lines(sync: Mapping[str, Any]) -> list[str]:
    """Sync rounds and the canary, whose expected value depends on `model.dtype`."""
    if not sync.get("count"):
        return []
    line = f"syncs: {sync['count']}, median {sync['p50_s']:.2f} s"
    if sync.get("logprob_max_abs_diff") is not None:
        line += f"; engines score like the trainer to {sync['logprob_max_abs_diff']:.1e} (log-prob, largest)"
    return [line]


def _memory_lines(memory: Mapping[str, Mapping[str, Any]]) -> list[str]:
    peaks = {name: m["peak_mb"] for name, m in memory.items() if m.get("peak_mb") is not None}
    if not peaks:
        return []
    largest = sorted(peaks, key=lambda name: -peaks[name])[:3]
    shown = ", ".join(f"{name} {peaks[name] / 1e3:.1f}" for name in largest)
    return [f"memory at each part's peak: {sum(peaks.values()) / 1e3:.1f} GB ({shown})"]


def _shown(value: Any) -> str:
    return "unknown" if value is None else f"{int(value)}"


def percent(ratio: Any) -> str:
    value = _number(ratio)
    return "unknown" if value is None else f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    """`1 h 02 min`, `3 min 05 s` or `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
