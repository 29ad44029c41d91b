"""The run log: `metrics.jsonl`, one row per local update, and `sync.jsonl`, one row per committed round."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.ledger.replies import Claimed
from headrace.metrics import row_keys
from headrace.metrics.row_keys import PART
from headrace.records.row_file import RowFile
from headrace.service.telemetry import RolloutTelemetry
from headrace.v1 import sync_pb2 as pb


class RunLog:
    """Rank 0's files. A row is on disk when the call returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._metrics = RowFile(directory / "metrics.jsonl")
        self._sync = RowFile(directory / "sync.jsonl", durable=True)
        self._open_round: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._canaries: dict[int, float] = {}  # version -> largest difference that members reported
        self._reported = (-1, 0.0)  # the newest of them
        self._shown = self._reported

    def update(self, row: dict[str, Any]) -> None:
        self._metrics.write(row)

    def committed(
        self,
        c: pb.Committed,
        nbytes: int,
        interval_s: float,
        rollouters: Mapping[str, RolloutTelemetry] | None = None,
    ) -> dict[str, float]:
        """Begin the row of a round. It is written with the next one, when the canaries have arrived. Returns
        its metrics. `rollouters`: their readings so far."""
        self.flush_round()
        row = {
            row_keys.SYNC_PAUSE_S: c.pause_s,
            row_keys.SYNC_TRANSFER_S: c.transfer_s,
            row_keys.SYNC_COMMIT_S: c.commit_s,
            row_keys.SYNC_TOTAL_S: c.total_s,
            row_keys.SYNC_INTERVAL_S: interval_s,
            row_keys.SYNC_BYTES: nbytes,
        }
        self._open_round = {
            "version": c.version,
            "round": c.round,
            "members": c.members,
            "attempts": c.attempts,
            **{k.removeprefix("sync/"): v for k, v in row.items()},
            "rollouters": {
                name: {"active_s": t.active_s, "window_s": t.window_s}
                for name, t in (rollouters or {}).items()
            },
        }
        return row

    def canary(self, version: int, difference: float) -> None:
        """Take a member's report on `version`. Called by another thread."""
        with self._lock:
            largest = max(difference, self._canaries.get(version, 0.0))
            self._canaries[version] = largest
            self._reported = max(self._reported, (version, largest))

    def canary_metrics(self) -> dict[str, float]:
        """The largest difference under the newest version, returned once per report that changed it."""
        with self._lock:
            if self._reported == self._shown:
                return {}
            self._shown = self._reported
            return {row_keys.SYNC_LOGPROB_MAX_ABS_DIFF: self._shown[1]}

    def flush_round(self) -> None:
        row, self._open_round = self._open_round, None
        if row is not None:
            with self._lock:
                row["logprob_max_abs_diff"] = self._canaries.get(row["version"])
                self._canaries = {v: d for v, d in self._canaries.items() if v > row["version"]}
            self._sync.write(row)

    def close(self) -> None:
        self.flush_round()
        self._metrics.close()
        self._sync.close()


def staleness_metrics(
    items: Sequence[Claimed], window: int, step_of_version: dict[str, int], optimizer_steps: int
) -> dict[str, Any]:
    """Version gap and update gap over the samples of one update."""
    gaps = [window - i.min_version for i in items]
    updates = update_gaps(items, step_of_version, optimizer_steps)
    stale = sum(g > 0 for g in gaps)
    return {
        row_keys.STALENESS_VERSION_GAP_MEAN: sum(gaps) / len(gaps),
        row_keys.STALENESS_VERSION_GAP_MAX: max(gaps),
        row_keys.STALENESS_VERSION_GAP_HIST: {str(k): v for k, v in sorted(Counter(gaps).items())},
        row_keys.STALENESS_UPDATE_GAP_MEAN: sum(updates) / len(updates),
        row_keys.STALENESS_UPDATE_GAP_MAX: max(updates),
        row_keys.STALENESS_STALE_SAMPLE_RATIO: stale / len(gaps),
        row_keys.STALENESS_LENGTH_ORDER_CORR: rank_correlation([i.tokens for i in items]),
    }


def update_gaps(items: Sequence[Claimed], step_of_version: dict[str, int], optimizer_steps: int) -> list[int]:
    """Optimizer steps between the oldest weights that sampled each item and `optimizer_steps`."""
    return [optimizer_steps - step_of_version.get(str(i.min_version), 0) for i in items]


def rank_correlation(values: Sequence[float]) -> float:
    """Spearman correlation of values with their positions; ties share a mean rank. 0 without spread."""
    n = len(values)
    order = sorted(range(n), key=lambda i: values[i])
    ranks = [0.0] * n
    at = 0
    while at < n:
        end = at
        while end < n and values[order[end]] == values[order[at]]:
            end += 1
        for i in order[at:end]:
            ranks[i] = (at + end - 1) / 2
        at = end
    middle = (n - 1) / 2
    over = sum((r - middle) * (i - middle) for i, r in enumerate(ranks))
    spread = math.sqrt(sum((r - middle) ** 2 for r in ranks) * sum((i - middle) ** 2 for i in range(n)))
    return over / spread if spread else 0.0


PartSums = dict[str, tuple[float, int]]
"""Part of the reward -> (sum, number of trajectories that have it)."""

MOST_PARTS = 64


def part_sums(parts: Sequence[Mapping[str, float]]) -> PartSums:
    """Sum reward parts. `parts`: those of each trajectory."""
    out: PartSums = {}
    for one in parts:
        for name, value in one.items():
            total, count = out.get(name, (0.0, 0))
            out[name] = total + value, count + 1
    return out


def part_means(sums: Sequence[PartSums]) -> dict[str, float]:
    """Run log key -> mean over the trajectories that have the part. `sums`: those of each rank.

    Only the first `MOST_PARTS` are kept: a reward that invents names as it goes would fill the log.
    """
    whole: PartSums = {}
    for rank in sums:
        for name, (total, count) in rank.items():
            before, counted = whole.get(name, (0.0, 0))
            whole[name] = before + total, counted + count
    kept = sorted(whole.items())[:MOST_PARTS]
    return {f"{PART}{name}": total / count for name, (total, count) in kept}


def environment_metrics(turns: Sequence[int], counted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Statistics of turns, and the mean of each environment count over the trajectories that have it.

    Only the first `MOST_PARTS` counts are kept.
    """
    out = {row_keys.ENV_TURNS_MEAN: sum(turns) / len(turns), row_keys.ENV_TURNS_MAX: float(max(turns))}
    for name in sorted({name for counts in counted for name in counts})[:MOST_PARTS]:
        found = [counts[name] for counts in counted if name in counts]
        out[f"env/{name}/mean"] = sum(found) / len(found)
    return out


def spread(values: Sequence[float], prefix: str) -> dict[str, float]:
    """mean, std (population), min, max of `values`."""
    mean = sum(values) / len(values)
    return {
        f"{prefix}/mean": mean,
        f"{prefix}/std": (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5,
        f"{prefix}/min": min(values),
        f"{prefix}/max": max(values),
    }
