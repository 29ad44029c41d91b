"""Read a run's records of samples and versions: `trained.jsonl`, `sync.jsonl`, the checkpoints' manifests.

This module checks each of them, and compares them with each other. `headrace.records.audit` compares the
ledger with them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config.loading import ConfigError
from headrace.ledger.marks import Marks
from headrace.ledger.record import LedgerRecord
from headrace.records import trained_log
from headrace.records.checkpoints import CHECKPOINT_MANIFEST, complete_checkpoints
from headrace.records.layout import RunLayout
from headrace.records.row_file import read_lines
from headrace.records.trained_log import LineageStart, TrainedPath

SYNC = "sync.jsonl"


@dataclass(frozen=True)
class CheckpointRecord:
    """The contents of a complete checkpoint's manifest."""

    name: str
    """`checkpoints/step_N/manifest.json`."""
    step: int
    lineage: int
    version: int
    trained: dict[str, int]
    """Sample id -> step that trained it."""


@dataclass
class RunRecords:
    """A run's records, read once."""

    path: TrainedPath
    versions: dict[int, int] = field(default_factory=dict)
    """Committed version -> line of `sync.jsonl`."""
    manifests: list[CheckpointRecord] = field(default_factory=list)
    """Complete checkpoints, oldest first."""
    ledger: Marks = field(default_factory=Marks)
    """How far the ledger had got, according to `ledger.json`."""
    problems: list[str] = field(default_factory=list)

    @property
    def newest(self) -> CheckpointRecord | None:
        return self.manifests[-1] if self.manifests else None

    @property
    def is_empty(self) -> bool:
        """Whether the records show no training and no commit at all."""
        found = self.path.starts or self.path.steps or self.versions or self.manifests
        return not found and not self.ledger.begun


def read(layout: RunLayout) -> RunRecords:
    """Read the files as they are now. Checkpoints come first: the other files are written before them."""
    manifests, broken = _manifests(layout.checkpoints)
    records = RunRecords(trained_log.follow(read_lines(layout.trained)), manifests=manifests)
    records.problems = records.path.problems + broken
    try:
        records.ledger = LedgerRecord(layout.root).marks
    except (ConfigError, OSError) as error:
        records.problems.append(str(error))
    _read_sync(layout.sync, records)
    _compare_manifests(records)
    return records


def _manifests(directory: Path) -> tuple[list[CheckpointRecord], list[str]]:
    found, problems = [], []
    for checkpoint in complete_checkpoints(directory):
        name = f"{directory.name}/{checkpoint.name}/{CHECKPOINT_MANIFEST}"
        try:
            found.append(_manifest(name, json.loads((checkpoint / CHECKPOINT_MANIFEST).read_text())))
        except FileNotFoundError:
            continue  # just removed, because a newer one exists
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            problems.append(f"{name}: cannot be read: {error!r}")
    return found, problems


def _manifest(name: str, plain: dict[str, Any]) -> CheckpointRecord:
    """Parse a manifest, ignoring unknown fields. Raises KeyError, TypeError, ValueError or AttributeError."""
    trained = {str(sample_id): int(step) for sample_id, step in plain["trained"].items()}
    return CheckpointRecord(name, int(plain["step"]), int(plain["lineage"]), int(plain["version"]), trained)


def _read_sync(file: Path, records: RunRecords) -> None:
    newest = -1
    for line in read_lines(file):
        version = line.row.get("version") if line.row is not None else None
        if not isinstance(version, int) or isinstance(version, bool):
            if line.whole:  # a cut-off row does not count as written: its version is missing
                records.problems.append(f"{SYNC} line {line.number}: is no row of it: {line.text[:200]}")
            continue
        if version in records.versions:
            first = records.versions[version]
            records.problems.append(
                f"{SYNC} line {line.number}: version {version} is there twice (line {first})"
            )
            continue
        if version < newest:
            records.problems.append(f"{SYNC} line {line.number}: version {version} follows version {newest}")
        newest = max(newest, version)
        records.versions[version] = line.number


def _compare_manifests(records: RunRecords) -> None:
    """Check that each manifest holds exactly what the path has trained up to its step."""
    path, step_of = records.path, records.path.step_of
    unknown: dict[str, list[str]] = defaultdict(list)
    lineages = {start.lineage for start in path.starts}
    for m in records.manifests:
        for sample_id, step in m.trained.items():
            known = step_of.get(sample_id)
            if known != step:
                says = f"in step {known}" if known is not None else "in no step"
                unknown[f"{sample_id}: trained in step {step} by NAMES, {says} by {trained_log.FILE}"].append(
                    m.name
                )
        for sample_id, step in step_of.items():
            if step <= m.step and sample_id not in m.trained:
                unknown[f"{sample_id}: trained in step {step} by {trained_log.FILE}, not in NAMES"].append(
                    m.name
                )
        if m.step > path.last_step:
            records.problems.append(
                f"{m.name}: is of step {m.step}, {trained_log.FILE} ends at {path.last_step}"
            )
        if m.lineage not in lineages:
            records.problems.append(
                f"{m.name}: is lineage {m.lineage}'s, {trained_log.FILE} has no start of it"
            )
    records.problems += [text.replace("NAMES", ", ".join(names)) for text, names in unknown.items()]


# -- versions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The versions `first`..`last` that one lineage committed, and which of them must have a row."""

    start: LineageStart
    first: int
    last: int
    flushed: int
    """The last version that must have a row. A row is written when the next version commits, or when the
    trainer ends cleanly."""


def spans(records: RunRecords, committed: int) -> list[Span]:
    """The versions that each lineage committed, up to `committed`; empty if the file does not say."""
    starts = records.path.starts
    if any(start.version is None for start in starts):
        return []
    out = []
    for number, start in enumerate(starts):
        before = start.version if start.version is not None else -1
        later = starts[number + 1].version if number + 1 < len(starts) else None
        last = committed if later is None else later
        if start.ended:
            flushed = min(last, start.heard if start.heard is not None else last)
        else:
            heard = [last - 1, before]  # it must have heard of all but the last, to request the next
            if start.newest_window is not None:
                heard.append(start.newest_window - 1)
            heard += [m.version for m in records.manifests if m.lineage == start.lineage]
            flushed = max([max(heard) - 1, *(v for v in records.versions if before < v <= last)])
        out.append(Span(start, before + 1, last, min(flushed, last)))
    return out
