"""Audit a run's ledger against the run's files, sample by sample.

The audit compares three accounts of the same facts: the ledger, what the trainer wrote while training
(`trained.jsonl`, `sync.jsonl`), and what its checkpoints hold. Damage to one of them, or a server that lost
writes, makes two of them differ.

They may differ legitimately where a process was killed or is still running. The list of such cases is closed,
each has conditions on the step, the lineage or the version, and each is reported as *explained*. Any other
difference is a problem. The cases:

- The trainer is between the acknowledgement of a step and its row: the ledger is one step ahead.
- The run was being stopped and the server went first: the row says that the ledger has not heard of the step,
  and the ledger still holds its samples as claimed by that lineage.
- A lineage was opened whose start is not in the file: its trainer is making the ledger agree with the newest
  checkpoint, or was killed after doing so.
- The last version that a lineage committed has no row in `sync.jsonl`: the row is written when the next one
  commits or the trainer ends cleanly. If the trainer never heard of that commit, the version before it has no
  row either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.ledger import keys
from headrace.ledger.audit import AuditedSample, AuditReport, LedgerReading, compare, read_op, reading
from headrace.ledger.client import SyncLedger
from headrace.ledger.states import State
from headrace.records import run_records, trained_log
from headrace.records.layout import RunLayout
from headrace.records.run_records import SYNC, RunRecords
from headrace.records.trained_log import TrainedPath

LEDGER = "ledger.json"
NOTHING: tuple[Any, ...] = (0, 0, (), (), (), ())
"""What `read_op` returns from a server that does not know the run."""
_TRIES = 20
"""Attempts to read the files and the ledger of a run in progress with no trainer start in between."""
_NAMED = 8
"""Most ids listed in one message."""


@dataclass
class RunAudit:
    """What the audit found."""

    ledger: AuditReport
    records: RunRecords
    reading: LedgerReading
    problems: list[str] = field(default_factory=list)
    """One sentence each, on the ledger, the files, or their differences. Empty: all is in order."""
    explained: list[str] = field(default_factory=list)
    """Differences with a legitimate reason."""

    @property
    def balanced(self) -> bool:
        return not self.problems

    @property
    def path(self) -> TrainedPath:
        return self.records.path


def audit_run(layout: RunLayout, ledger: SyncLedger, *, is_on: bool) -> RunAudit:
    """Read the files and the ledger and compare them. `is_on`: the run may be writing meanwhile.

    Raises LedgerError.
    """
    for _ in range(_TRIES if is_on else 1):
        before = run_records.read(layout)
        raw = ledger.run(read_op())
        after = run_records.read(layout) if is_on else before
        if before.path.lineages == after.path.lineages:
            break  # otherwise a start took steps back in between
    return compare_run(raw, before, after)


def compare_run(raw: Any, before: RunRecords, after: RunRecords | None = None) -> RunAudit:
    """Compare the ledger with the files.

    `raw`: what `read_op` returned. `before`, `after`: the files as read before and after it; None for `after`
    if the run is not in progress.
    """
    found = reading(raw)
    out = RunAudit(compare(raw), after or before, found)
    out.problems += out.ledger.problems + out.records.problems
    if found.meta:
        _compare_marks(out, before)
        _compare_lineages(out)
        _compare_samples(out, before)
        _compare_versions(out, before)
        _compare_end(out)
    elif ids := {*out.path.ids, *(i for m in out.records.manifests for i in m.trained)}:
        out.problems += [f"{i}: trained, the ledger has no record of it" for i in sorted(ids)]
    else:
        out.problems += _lost(0, before.ledger.cursor)
    return out


def _compare_marks(out: RunAudit, before: RunRecords) -> None:
    """Check that the ledger is not behind `ledger.json`: every service would refuse it."""
    seen, found = before.ledger, out.reading
    if seen.ledger and (there := found.meta.get("ledger") or "one without an id") != seen.ledger:
        out.problems.append(
            f"{LEDGER}: the run's ledger is {seen.ledger}, the one there is another's: {there}"
        )
        return
    if seen.ledger and not found.meta.get("writes"):
        out.problems.append(f"{LEDGER}: the ledger {seen.ledger} has lost its number of writes")
    for name in ("version", "lineage", "term"):
        if found.number(name) < getattr(seen, name):
            out.problems.append(
                f"{LEDGER}: {name} {getattr(seen, name)} was seen, the ledger is at {found.number(name)}: it "
                "has lost writes"
            )
    out.problems += _lost(max(0, found.number("cursor")), seen.cursor)


def _lost(first: int, end: int) -> list[str]:
    ids = map(keys.sample_id, range(first, end))
    return [f"{i}: issued by {LEDGER}, the ledger has no record of it" for i in ids]


def _compare_lineages(out: RunAudit) -> None:
    last = out.path.last
    if last is not None and last.lineage > out.reading.number("lineage"):
        out.problems.append(
            f"lineage {last.lineage} began, the ledger is at lineage {out.reading.number('lineage')}: it has "
            "lost writes"
        )


# -- samples ------------------------------------------------------------------------------------------


def _compare_samples(out: RunAudit, before: RunRecords) -> None:
    """Check that the ledger has trained the same samples as the files, in the same steps, and no others."""
    found, last = out.reading, out.path.last
    lineage = found.number("lineage")
    if last is None or last.lineage < lineage:
        if lineage > 0:
            _compare_with_checkpoint(out, lineage)
        return
    must = {step.number: step for step in before.path.steps}
    unheard: list[str] = []
    for sample_id, number in before.path.step_of.items():
        step, record = must[number], found.records.get(sample_id)
        if record is not None and record.state == State.TRAINED:
            continue  # the loop below checks the step
        if (
            not step.acknowledged
            and step.lineage == lineage
            and record is not None
            and (record.state, record.lineage) == (State.TRAINING, str(lineage))
        ):
            unheard.append(sample_id)
            continue
        out.problems.append(
            f"{sample_id}: trained in step {number} by {trained_log.FILE}, {_ledger_says(record)}"
        )
    known: Mapping[str, int | None] = out.path.step_of
    ahead: dict[str, list[str]] = defaultdict(list)
    newest = max((int(record.step) for record in _trained(found) if record.step.isdigit()), default=0)
    between = newest == out.path.last_step + 1 and not last.ended
    for record in _trained(found):
        at = known.get(record.id)
        if at is None and record.step == str(newest) and between:
            ahead[record.lineage].append(record.id)
        elif str(at) != record.step:
            out.problems.append(_not_on_path(record, at))
    for of, ids in ahead.items():
        if of == str(lineage):
            out.explained.append(
                f"step {out.path.last_step + 1} of lineage {of} ({_some(ids)}): the ledger has heard of it, "
                f"{trained_log.FILE} has no row of it yet. The trainer is between the two, or was killed "
                "there; the next start takes the step back, unless a checkpoint holds it"
            )
        else:
            out.problems += [_not_on_path(found.records[i], None) for i in ids]
    if unheard:
        out.explained.append(
            f"{_some(unheard)}: trained, still claimed by lineage {lineage} in the ledger. The run was "
            "being stopped and the server went first; the next start tells the ledger what a checkpoint holds"
        )
    _known_to_the_ledger(out, known)


def _compare_with_checkpoint(out: RunAudit, lineage: int) -> None:
    """Check a lineage whose start is not in the file yet against the newest checkpoint, which it adopts."""
    found, newest = out.reading, out.records.newest
    wanted = newest.trained if newest is not None else {}
    name = newest.name if newest is not None else "no checkpoint"
    adopting = found.meta.get("phase") == "adopting"
    half: list[str] = []
    for sample_id, step in wanted.items():
        record = found.records.get(sample_id)
        if record is not None and record.state == State.TRAINED and record.step == str(step):
            continue
        if adopting and record is not None:
            half.append(sample_id)
        else:
            out.problems.append(f"{sample_id}: trained in step {step} by {name}, {_ledger_says(record)}")
    known = out.path.step_of
    for record in _trained(found):
        if record.id in wanted:
            continue
        if adopting and str(known.get(record.id, out.path.last_step + 1)) == record.step:
            half.append(record.id)
        else:
            out.problems.append(f"{record.id}: trained in step {record.step} by the ledger, not in {name}")
    left = f": {_some(half)} still stand as they were before" if half else ""
    out.explained.append(
        f"lineage {lineage} was opened and {trained_log.FILE} has no start of it: its trainer is making the "
        f"ledger agree with {name}, or was killed after that{left}. The next start does it again"
    )
    _known_to_the_ledger(out, {**known, **wanted})


def _known_to_the_ledger(out: RunAudit, told: Mapping[str, object]) -> None:
    """Check samples that only a checkpoint names (`told`: those already checked) against the ledger."""
    for m in out.records.manifests:
        for sample_id in m.trained:
            if sample_id not in told and sample_id not in out.reading.records:
                out.problems.append(f"{sample_id}: trained by {m.name}, the ledger never issued it")


def _trained(found: LedgerReading) -> Iterable[AuditedSample]:
    return (record for record in found.records.values() if record.state == State.TRAINED)


def _ledger_says(record: AuditedSample | None) -> str:
    if record is None:
        return "the ledger never issued it"
    if record.state == State.TRAINED:
        return f"the ledger says step {record.step}"
    return f"the ledger says {record.state or 'nothing of it'}"


def _not_on_path(record: AuditedSample, number: int | None) -> str:
    says = "in no step" if number is None else f"in step {number}"
    return f"{record.id}: trained in step {record.step} by the ledger, {says} by {trained_log.FILE}"


def _some(ids: Sequence[str]) -> str:
    """`16 samples: 0000000003, 0000000004, ...`"""
    shown = ", ".join(ids[:_NAMED]) + (", ..." if len(ids) > _NAMED else "")
    return f"{len(ids)} sample{'s' if len(ids) != 1 else ''}: {shown}"


# -- versions -----------------------------------------------------------------------------------------


def _compare_versions(out: RunAudit, before: RunRecords) -> None:
    committed = out.reading.number("version")
    for where, version in _claims(before):
        if version > committed:
            out.problems.append(
                f"{where}: version {version} was committed, the ledger is at version {committed}: it has "
                "lost writes"
            )
    spans = run_records.spans(out.records, committed)
    if spans and spans[0].first != 0:
        out.problems.append(
            f"{trained_log.FILE} line {spans[0].start.line}: the first start comes after version "
            f"{spans[0].first - 1}: the rows before it are missing"
        )
    if not spans and out.records.versions and out.path.starts:
        out.explained.append(
            f"{trained_log.FILE} was written by a release that did not say which versions it held"
        )
    for span in spans:
        lineage, heard = span.start.lineage, span.start.heard
        since = span.start is out.path.last and before.path.last is not None and not before.path.last.ended
        if heard is not None and not since and not heard <= span.last <= heard + 1:
            out.problems.append(
                f"lineage {lineage} ended at version {heard}, what came after it begins at version "
                f"{span.last}"
            )
        missing = [v for v in range(span.first, span.last + 1) if v not in out.records.versions]
        out.problems += [
            f"{SYNC}: version {v}, committed by lineage {lineage}, is missing"
            for v in missing
            if v <= span.flushed
        ]
        if open_ := [v for v in missing if v > span.flushed]:
            out.explained.append(
                f"{SYNC} has no row of version {' and '.join(map(str, open_))}: it is written when the next "
                f"version commits or the trainer ends cleanly, and lineage {lineage} "
                + ("is running or was cut off" if span.start is out.path.last else "was cut off before")
            )


def _claims(records: RunRecords) -> Iterable[tuple[str, int]]:
    """Every (source, version) that states that the version was committed."""
    for version, line in records.versions.items():
        yield f"{SYNC} line {line}", version
    for m in records.manifests:
        yield m.name, m.version
    for start in records.path.starts:
        known = [version for version in (start.version, start.heard) if version is not None]
        yield from ((f"{trained_log.FILE}, lineage {start.lineage}", version) for version in known)


# -- the end ------------------------------------------------------------------------------------------


def _compare_end(out: RunAudit) -> None:
    """Check that a completed run has no sample left to train, and that its trainer's end is on file."""
    found, last = out.reading, out.path.last
    if found.meta.get("completed") != "1":
        return
    if last is None or (last.version is not None and not last.ended):
        of = f"lineage {last.lineage}" if last else "any trainer"
        out.problems.append(
            f"the ledger says that the run has completed, {trained_log.FILE} has no end of {of}"
        )
    ends = (State.TRAINED, State.DEAD, State.DROPPED)
    for record in found.records.values():
        if record.state in ends or (record.state == State.READY and record.reason == "operator"):
            continue  # requeued by an operator, for the next start
        out.problems.append(f"{record.id}: {record.state or 'gone'}, and the run has completed")
