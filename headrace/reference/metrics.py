"""Write docs/metrics.md from the table of metrics: `python -m headrace.reference.metrics`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from headrace.metrics import coordinator, queue, rollouter, row_keys, trainer
from headrace.metrics.series import Entry
from headrace.metrics.sync_and_eval import EVAL_ROW, SYNC_ROW, Keys

TARGET = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"

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


def services() -> dict[str, dict[str, Entry]]:
    """Return every service's own Prometheus metrics, by scraped name."""
    return {
        s.name: s.entries for s in (trainer.SERVICE, rollouter.SERVICE, coordinator.SERVICE, queue.SERVICE)
    }


def _run_log() -> Iterator[str]:
    """Yield a line for each meaning. Keys that share one are written in braces."""
    for (meaning, when), group in itertools.groupby(
        row_keys.TABLE.entries.values(), lambda e: (e.meaning, e.when)
    ):
        names = _braced([entry.name for entry in group]).replace("|", "\\|")
        yield f"| `{names}` | {meaning} | {when or 'always'} |\n"


def _braced(names: Sequence[str]) -> str:
    """Return `a/{b,c}/d` for `a/b/d` and `a/c/d`."""
    if len(names) == 1:
        return names[0]
    parts = [name.split("/") for name in names]
    head, tail = _common(parts), _common([part[::-1] for part in parts])
    inner = ["/".join(part[head : len(part) - tail]) for part in parts]
    return "/".join([*parts[0][:head], f"{{{','.join(inner)}}}", *parts[0][len(parts[0]) - tail :]])


def _common(parts: Sequence[Sequence[str]]) -> int:
    """Return the length of the longest common prefix."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return sum(1 for _ in columns)


def _rows(keys: Iterable[Keys]) -> str:
    return "".join(f"| `{k.name}` | {k.meaning} |\n" for k in keys)


def render() -> str:
    text = _HEAD + "".join(_run_log()) + _REWARDS + _SYNC + _rows(SYNC_ROW) + _EVAL + _rows(EVAL_ROW)
    text += _PROMETHEUS
    for service, found in services().items():
        text += "".join(
            f"| `{name}` | {e.type} | {e.documentation} | {service} |\n" for name, e in sorted(found.items())
        )
    text += "| `vllm:*` | | vLLM's own | rollouter |\n"
    return text + _READING


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}")
