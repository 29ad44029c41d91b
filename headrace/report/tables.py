"""The report's tables: results, differences in configuration, and lengths."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from headrace.config.run import RunConfig
from headrace.metrics import row_keys
from headrace.records.summary import duration, idle_ratios, ledger_line, percent, version_gaps
from headrace.report.chart import COLOURS
from headrace.report.collect import RunData, flat, number
from headrace.report.scale import written

NOT_SETTINGS = ("name", "runs_dir", "services.", "trainer.resume")
"""Keys that say where a run is stored, not what it does."""
_MISSING = object()


def table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """An HTML table. `head` and the cells are HTML."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, cells in rows
    )
    return f'<div class="scroll card"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def run_heads(runs: Sequence[RunData]) -> list[str]:
    """Column heads: each run's chart colour and name."""
    return ["", *(run_name(i, run) if len(runs) > 1 else escape(run.label) for i, run in enumerate(runs))]


def run_name(index: int, run: RunData) -> str:
    line = f'<path class="line c{index % COLOURS}" d="M0 5H22"/>'
    return f'<svg class="key" viewBox="0 0 22 10" aria-hidden="true">{line}</svg>{escape(run.label)}'


# -- what came out ----------------------------------------------------------------------------------------


def overview(runs: Sequence[RunData]) -> str:
    rows = [(name, [tell(run) for run in runs]) for name, tell in _FACTS]
    return table(run_heads(runs), [(name, cells) for name, cells in rows if any(cells)])


def _last(run: RunData, key: str) -> float | None:
    return next((v for row in reversed(run.updates) if (v := number(row.get(key))) is not None), None)


def _whole(value: float | None) -> str:
    return "" if value is None else f"{int(value):,}".replace(",", " ")


def _state(run: RunData) -> str:
    css = "good" if run.state == "completed" else "bad" if run.state in ("failed", "killed") else ""
    why = f" ({escape(str(run.summary['reason']))})" if run.summary.get("reason") else ""
    return f'<span class="{css}">{escape(run.state)}</span>{why}'


def _scores(run: RunData) -> str:
    out = []
    for source in run.sources:
        scored = [
            row for row in run.evals if row["data_source"] == source and number(row["reward"]) is not None
        ]
        if scored:
            first, last = scored[0], scored[-1]
            best = max(row["reward"] for row in scored)
            out.append(
                f"{escape(source)}: {first['reward']:.3f} → <b>{last['reward']:.3f}</b> "
                f"(version {last['version']}; best {best:.3f})"
            )
    return "<br>".join(out)


def _version(run: RunData) -> str:
    final = number(run.summary.get("policy_version"))
    return _whole(_last(run, row_keys.FULLY_ASYNC_COUNT_CURRENT_PARAM_VERSION) if final is None else final)


def _wall(run: RunData) -> str:
    seconds = number(run.summary.get("wall_s")) or _last(run, "wall_s")
    return "" if seconds is None else duration(seconds)


def _idle(run: RunData) -> str:
    ratios = idle_ratios(run.updates)
    if ratios["trainer"] is None:
        return ""
    return f"trainer {percent(ratios['trainer'])}, rollouters {percent(ratios['rollouter'])}"


def _gaps(run: RunData) -> str:
    gaps = version_gaps(run.updates)
    total = sum(gaps.values())
    return ", ".join(f"{gap}: {100 * n / total:.0f} %" for gap, n in gaps.items()) if total else ""


def _ledger(run: RunData) -> str:
    text = ledger_line(run.summary)
    if not text:
        return ""
    if requeued := run.summary["ledger"].get("requeued"):
        text += f"; {requeued} requeued"
    css = "bad" if run.summary.get("balanced") is False else ""
    return f'<span class="{css}">{escape(text)}</span>'


def _sync(run: RunData) -> str:
    seconds = sorted(v for row in run.syncs if (v := number(row.get("total_s"))) is not None)
    if not seconds:
        return ""
    return f"{len(seconds)} rounds, median {seconds[len(seconds) // 2]:.3g} s, longest {seconds[-1]:.3g} s"


def _throughput(run: RunData) -> str:
    rows = run.updates[1:] or run.updates
    seconds = sum(number(row.get(row_keys.TIMING_S_STEP)) or 0.0 for row in rows)
    per = [
        (number(row.get(row_keys.PERF_TOKENS_PER_S)) or 0.0)
        * (number(row.get(row_keys.TIMING_S_STEP)) or 0.0)
        for row in rows
    ]
    return f"{written(sum(per) / seconds)} response tokens/s" if seconds else ""


_FACTS: tuple[tuple[str, Callable[[RunData], str]], ...] = (
    ("state", _state),
    ("held-out score", _scores),
    ("mode", lambda run: escape(str(run.summary.get("mode") or ""))),
    ("local updates", lambda run: _whole(_last(run, "step"))),
    ("optimizer steps", lambda run: _whole(_last(run, "optimizer_steps"))),
    ("policy version", _version),
    ("response tokens trained", lambda run: _whole(_last(run, "trained_tokens"))),
    ("wall time", _wall),
    ("idle, without the first updates", _idle),
    ("training throughput", _throughput),
    ("version gap of samples", _gaps),
    ("sync", _sync),
    ("ledger", _ledger),
    ("engine", lambda run: escape(" ".join(map(str, (run.summary.get("engine") or {}).values())))),
    ("directory", lambda run: f'<span class="mono">{escape(str(run.root))}</span>'),
)


# -- what was configured ----------------------------------------------------------------------------------


def differences(runs: Sequence[RunData]) -> list[tuple[str, list[Any]]]:
    """Keys whose values differ between runs, with each run's value (`_MISSING` if it has none)."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    out = []
    for key in keys:
        values = [run.config.get(key, _MISSING) for run in runs]
        if not key.startswith(NOT_SETTINGS) and any(value != values[0] for value in values[1:]):
            out.append((key, values))
    return out


def unlike_default(run: RunData) -> list[tuple[str, Any]]:
    """Keys of one run that are required or differ from their default."""
    defaults = _defaults(RunConfig)
    return [
        (key, value)
        for key, value in run.config.items()
        if not key.startswith(NOT_SETTINGS) and defaults.get(key, _MISSING) != value
    ]


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Default values by dotted key, as in a configuration file. Required keys are left out."""
    out: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(info.default, BaseModel):
            out |= flat(info.default.model_dump(mode="json"), f"{name}.")
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            out |= {f"{name}.{key}": value for key, value in _defaults(inner).items()}
        elif info.default is not PydanticUndefined:
            out[name] = json.loads(json.dumps(info.default, default=str))
    return out


def settings(runs: Sequence[RunData]) -> str:
    """The differences between several runs, or one run's differences from the defaults."""
    if len(runs) == 1:
        rows = [(_key(key), [_value(value)]) for key, value in unlike_default(runs[0])]
    else:
        rows = [(_key(key), [_value(v) for v in values]) for key, values in differences(runs)]
    return table(run_heads(runs), rows) or "<p>No key differs.</p>"


def _key(key: str) -> str:
    return f"<code>{escape(key)}</code>"


def _value(value: Any) -> str:
    if value is _MISSING:
        return "–"
    return f"<code>{escape(value if isinstance(value, str) else json.dumps(value, default=str))}</code>"


# -- lengths ----------------------------------------------------------------------------------------------


def lengths(runs: Sequence[RunData]) -> str:
    """Tokens of samples by outcome. A difference means that training is biased by length."""
    outcomes = dict.fromkeys(outcome for run in runs for outcome in run.lengths)
    rows = []
    for outcome in outcomes:
        cells = []
        for run in runs:
            count, mean, largest = run.lengths.get(outcome, (0, 0.0, 0))
            cells.append(f"{mean:.1f} on average, {largest} at most ({count} samples)" if count else "–")
        rows.append((escape(outcome), cells))
    return table(run_heads(runs), rows)
