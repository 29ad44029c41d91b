"""Writes docs/metrics.md from the definitions: `python -m headrace.metrics_doc`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.run_log_keys import DEFINITIONS, EVAL_ROW, SYNC_ROW, Keys

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

_HEAD = """# Metrics

Made from the definitions by `make docs`. `metrics.jsonl` has one row per local update, under the names that
users of verl know, `sync.jsonl` one per sync round, `eval.jsonl` one per validated version and data source.
Prometheus has base units and the usual suffixes; each service serves its own at `/metrics`.

## Run log

| key | meaning | when |
|---|---|---|
"""

_REWARDS = """
The seconds of a single sample's reward are `reward_s` in its record (`headrace samples RUN --json`), those of
every call of the reward in `headrace_reward_call_seconds`.
"""

_SYNC = """
## Sync log

`sync.jsonl` has one row per committed round, written when the next one commits or the trainer ends, so that
the reports of the engines are in.

| key | meaning |
|---|---|
"""

_EVAL = """
## Validation log

`eval.jsonl` has one row per validated version and data source. Trackers show its scores as
`val/SOURCE/reward/mean@k`, `best@k` and `maj@k`, Prometheus has the same names as `statistic` of
`headrace_validation_score`.

| key | meaning |
|---|---|
"""

_PROMETHEUS = """
## Prometheus

| metric | type | meaning | service |
|---|---|---|---|
"""

_READING = """
## How to read them

- Rollouter idle high, trainer idle low: the trainer is the bottleneck. Give it more, or raise η a little.
- Trainer idle high, rollouter idle low: add rollouters.
- Both high: the sync or the reward takes the time; look at `sync/total_s` and `timing_s/reward`.
- High wait with a long tail of lengths: partial rollout and stop criteria help, more rollouters do not.
- `staleness/length_order_corr` far above 0: long answers are always trained late, so they are the stale ones.
- Whether async training is sound shows in several together: reward against wall clock, version gap, ESS, KL,
  clip fraction, entropy. Speed alone proves nothing.
"""


def services() -> dict[str, dict[str, Metric]]:
    """Every service's own Prometheus metrics by sample name, as its module defines them."""
    from headrace_coordinator import metrics as coordinator
    from headrace_queue.metrics import QueueCollector
    from headrace_rollouter import metrics as rollouter
    from headrace_trainer import metrics as trainer

    out: dict[str, dict[str, Metric]] = {}
    for name, module in (("trainer", trainer), ("rollouter", rollouter), ("coordinator", coordinator)):
        collectors = {id(c): c for c in _collectors(vars(module).values())}
        out[name] = _by_name(m for c in collectors.values() for m in c.collect())
    out["queue"] = _by_name(QueueCollector.described())
    return out


def _collectors(values: Iterable[Any]) -> Iterable[Collector]:
    for value in values:
        if isinstance(value, dict):
            yield from _collectors(value.values())
        elif hasattr(type(value), "collect"):
            yield value


def _by_name(found: Iterable[Metric]) -> dict[str, Metric]:
    return {m.name + ("_total" if m.type == "counter" else ""): m for m in found}


def _rows(definitions: Iterable[Keys]) -> str:
    return "".join(f"| `{d.names}` | {d.meaning} |\n" for d in definitions)


def render() -> str:
    lines = []
    for d in DEFINITIONS:
        names = d.names.replace("|", "\\|")
        lines.append(f"| `{names}` | {d.meaning} | {d.when or 'always'} |")
    text = _HEAD + "\n".join(lines) + "\n" + _REWARDS + _SYNC + _rows(SYNC_ROW) + _EVAL + _rows(EVAL_ROW)
    text += _PROMETHEUS
    for service, found in services().items():
        text += "".join(
            f"| `{name}` | {m.type} | {m.documentation} | {service} |\n" for name, m in sorted(found.items())
        )
    text += "| `vllm:*` | | vLLM's own | rollouter |\n"
    return text + _READING


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
