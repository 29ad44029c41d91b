"""The ledger's operations as values: the script, its arguments, and the parser of its answer.

An `Op` is built once and may be sent any number of times. Operations that hand something out carry a request
id, and all others are idempotent, so after a lost reply the same `Op` is simply sent again.
Counts are samples. Ids are those of `keys.sample_id`. Payloads are bytes and never inspected.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from headrace.ledger import replies as r
from headrace.ledger.keep import Keep

T_co = TypeVar("T_co", covariant=True)
Arg = bytes | str | int

MAX_DETAIL = 4000
"""Characters of an error kept with a dead sample."""


@dataclass(frozen=True)
class Op(Generic[T_co]):
    """One call of one script."""

    script: str
    args: tuple[Arg, ...]
    parse: Callable[[Any], T_co]


def new_request_id() -> str:
    return uuid.uuid4().hex


def _text(value: bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _verdict(raw: Any) -> r.Verdict:
    return r.Verdict(_text(raw[0]))


def _adopted(raw: Any) -> r.AdoptReply:
    return r.AdoptReply(r.AdoptStatus(_text(raw[0])), _text(raw[1]) if len(raw) > 1 else "")


def _rows(flat: Sequence[Any], width: int) -> Iterable[Sequence[Any]]:
    return (flat[i : i + width] for i in range(0, len(flat), width))


def _incarnation(name: str) -> str:
    if not name:
        raise ValueError("an incarnation needs a name")
    return name


def configure(
    max_required: int, claim_size: int, max_retries: int, max_crashes: int, total: int, fingerprint: str
) -> Op[r.ConfigureReply]:
    """Create the run's ledger, or check that it is the same run and update its limits.

    `max_required` is updated only until the first commit; after that, commits change it. `fingerprint` covers
    what may not change within a run (seed, data, group size, total).
    """

    def parse(raw: Any) -> r.ConfigureReply:
        return r.ConfigureReply(_text(raw[0]), _text(raw[1]), bool(int(raw[2])))

    return Op("configure", (max_required, claim_size, max_retries, max_crashes, total, fingerprint), parse)


def fingerprint() -> Op[str]:
    """Read the fingerprint with which the run was configured."""
    return Op("fingerprint", (), _text)


def alive() -> Op[r.Verdict]:
    """Heartbeat of a service that owns no samples (rollouters use `beat`). Always ok."""
    return Op("alive", (), _verdict)


def delete(ledger: str, writes: int) -> Op[r.Verdict]:
    """Delete every key of the run atomically. ok | refused.

    `ledger` and `writes` are those of `marks` some time ago. It is refused when the ledger is another one, or
    when something was written since: then some service is alive.
    """
    return Op("delete", (ledger, writes), _verdict)


def open_term() -> Op[r.Term]:
    """Open a coordinator's term. The term grows and fences everything that older coordinators send."""

    def parse(raw: Any) -> r.Term:
        term, version, round_, phase, lineage, digest = (_text(v) for v in raw)
        return r.Term(int(term), int(version), int(round_), phase, int(lineage), digest)

    return Op("open_term", (), parse)


def issue(
    expected_cursor: int, prompts: Sequence[bytes], end: bool, request_id: str | None = None
) -> Op[r.IssueReply]:
    """Issue samples `expected_cursor`, `expected_cursor + 1`, ...; `end` says that no more will come."""
    rid = request_id or new_request_id()
    return Op(
        "issue",
        (expected_cursor, int(end), rid, *prompts),
        lambda raw: r.IssueReply(_text(raw[0]), int(raw[1])),
    )


def beat(owner: str, count: int) -> Op[int]:
    """Send the heartbeat that `observer.BeatObserver` watches. `count` grows with each beat of the owner.

    Returns the count with which the current entry began. It changes when the owner was expired in between,
    and stays changed, so the owner learns of it even if the first reply is lost.
    """
    return Op("beat", (owner, count), int)


def beats() -> Op[dict[str, int]]:
    """Read the count of each owner's last beat."""
    return Op("beats", (), lambda raw: {_text(k): int(_text(v).split("/")[0]) for k, v in _rows(raw, 2)})


def take(
    owner: str, version: int, count: int, request_id: str | None = None, oldest_version: int = -1
) -> Op[r.TakeReply]:
    """Take ownership of up to `count` samples: parked work, then retries in order of issue, then new prompts.

    Parked work with tokens older than `oldest_version` is handed out without its tokens, to be restarted.
    """

    def parse(raw: Any) -> r.TakeReply:
        items = [
            r.Taken(_text(i), int(a), bytes(p), bytes(w) if int(has) else None, int(f))
            for i, a, p, has, w, f in _rows(raw[1:], 6)
        ]
        return r.TakeReply(r.TakeStatus(_text(raw[0])), items)

    return Op("take", (owner, version, count, request_id or new_request_id(), oldest_version), parse)


def finish(
    owner: str, sample_id: str, attempt: int, payload: bytes, min_version: int, max_version: int, tokens: int
) -> Op[r.Verdict]:
    """Queue the complete group. ok | duplicate | fenced."""
    return Op("finish", (owner, sample_id, attempt, payload, min_version, max_version, tokens), _verdict)


def park(owner: str, sample_id: str, attempt: int, work: bytes, min_version: int) -> Op[r.Verdict]:
    """Save partial work and release the sample. ok | duplicate | fenced."""
    return Op("park", (owner, sample_id, attempt, work, min_version), _verdict)


def hand_back(owner: str, sample_id: str, attempt: int) -> Op[r.Verdict]:
    """Release a sample that was not started. ok | duplicate | fenced."""
    return Op("hand_back", (owner, sample_id, attempt), _verdict)


def fail(owner: str, sample_id: str, attempt: int, reason: str, detail: str) -> Op[r.FailStatus]:
    """Report a failure of the sample itself; the whole group is retried or dies."""
    return Op(
        "fail",
        (owner, sample_id, attempt, reason, detail[:MAX_DETAIL]),
        lambda raw: r.FailStatus(_text(raw[0])),
    )


NEVER_BEAT = -1
"""Count of an owner that has never sent a heartbeat; real counts start at 1."""


def expire(owner: str, reason: str, seen: int | None = None, left: bool = False) -> Op[r.ExpireReply]:
    """Take everything back from an incarnation that is gone. `reason` is kept as the samples' detail.

    `seen`: do so only if its last count is still this one (or NEVER_BEAT). `left`: it shut down cleanly, so
    its samples are not charged with a crash.
    """

    def parse(raw: Any) -> r.ExpireReply:
        return r.ExpireReply([_text(i) for i in raw[0]], [_text(i) for i in raw[1]], bool(int(raw[2])))

    return Op("expire", (owner, reason[:MAX_DETAIL], "" if seen is None else seen, int(left)), parse)


def claim(lineage: int, window: int, count: int, request_id: str | None = None) -> Op[r.ClaimReply]:
    """Claim `count` queued samples at once, or none; fewer only if they are the run's last."""

    def parse(raw: Any) -> r.ClaimReply:
        items = [
            r.Claimed(_text(i), int(a), int(lo), int(hi), int(n), float(t))
            for i, _entry, a, lo, hi, n, t in _rows(raw[1:], 7)
        ]
        return r.ClaimReply(r.ClaimStatus(_text(raw[0])), items)

    return Op("claim", (lineage, window, count, request_id or new_request_id()), parse)


def train(lineage: int, step: int, ids: Sequence[str]) -> Op[r.Verdict]:
    """Mark claimed samples as trained in optimizer step `step`. All or none: ok | fenced | unknown."""
    return Op("train", (lineage, step, *ids), _verdict)


def drop(lineage: int, ids: Sequence[str], reason: str) -> Op[r.Verdict]:
    """Exclude samples from training on purpose. All or none: ok | fenced | unknown."""
    return Op("drop", (lineage, reason, *ids), _verdict)


def reject(
    lineage: int, sample_id: str, attempt: int, reason: str, detail: str, replaced: bool = False
) -> Op[r.FailStatus]:
    """Reject what was generated for a sample: it is restarted, or dies after too many failures.

    `replaced`: the window claims another sample in its place; otherwise the place counts as used up.
    """
    return Op(
        "reject",
        (lineage, sample_id, attempt, reason, detail[:MAX_DETAIL], int(replaced)),
        lambda raw: r.FailStatus(_text(raw[0])),
    )


def requeue_dead(sample_id: str, request_id: str | None = None, ended: bool = False) -> Op[r.Verdict]:
    """Restart a dead sample on an operator's request. ok | unknown | refused.

    It is refused when the trainer may already have heard that no more samples come. `ended`: no trainer is
    running; the next one will train it.
    """
    return Op("requeue_dead", (sample_id, request_id or new_request_id(), int(ended)), _verdict)


def open_lineage(expected_lineage: int, request_id: str | None = None) -> Op[r.OpenLineageReply]:
    """Open a trainer's lineage (compare-and-set). Holds takes and clears the members."""

    def parse(raw: Any) -> r.OpenLineageReply:
        return r.OpenLineageReply(_text(raw[0]) == "ok", int(raw[1]), int(raw[2]))

    return Op("open_lineage", (expected_lineage, request_id or new_request_id()), parse)


def adopt_trained(lineage: int, pairs: Sequence[tuple[str, int]]) -> Op[r.AdoptReply]:
    """Mark the samples that the checkpoint has trained, as (id, step). Part of `client.adopt`."""
    return Op("adopt_trained", (lineage, *(v for pair in pairs for v in pair)), _adopted)


def adopt_rest(lineage: int, ids: Sequence[str]) -> Op[r.AdoptReply]:
    """Take back the samples that the checkpoint has not trained. Part of `client.adopt`."""
    return Op("adopt_rest", (lineage, *ids), _adopted)


def finish_adopt(lineage: int, keep: Keep | None = None) -> Op[r.AdoptReply]:
    """Decide on finished and parked work; None keeps nothing. Last part of `client.adopt`.

    Afterwards the ledger agrees with the checkpoint. Takes stay held until the first commit.
    """
    return Op("finish_adopt", (lineage, *(keep.args() if keep else ())), _adopted)


def hold(term: int, round_: int, lineage: int) -> Op[r.Verdict]:
    """Begin sync round `round_` (counted from 1) and hold takes. ok | fenced."""
    return Op("hold", (term, round_, lineage), _verdict)


def commit(
    term: int,
    round_: int,
    lineage: int,
    version: int,
    digest: str,
    members: Sequence[str],
    validate: bool,
    final: bool = False,
    max_required: int = 0,
) -> Op[r.CommitReply]:
    """End the round: `members`, and only they, have `version`. Closes the windows of earlier versions.

    `max_required` applies from now on; 0 leaves it unchanged.
    """

    def parse(raw: Any) -> r.CommitReply:
        return r.CommitReply(r.CommitStatus(_text(raw[0])), int(raw[1]) if len(raw) > 1 else 0)

    return Op(
        "commit",
        (
            *(term, round_, lineage, version, digest, int(validate), int(final), max_required),
            *map(_incarnation, members),
        ),
        parse,
    )


def complete(lineage: int) -> Op[r.Verdict]:
    """Mark the run as completed: the trainer has saved and exported everything. ok | fenced."""
    return Op("complete", (lineage,), _verdict)


def admit(term: int, incarnation: str, version: int) -> Op[r.Verdict]:
    """Make a late joiner that has caught up a member. ok | refused (a round runs, the version moved on)."""
    return Op("admit", (term, _incarnation(incarnation), version), _verdict)


def trim(floor_step: int) -> Op[int]:
    """Free the prompts of samples trained at step <= `floor_step`, the oldest retained checkpoint's.

    States do not change. Returns how many prompts were freed.
    """
    return Op("trim", (floor_step,), int)


def sample(sample_id: str) -> Op[dict[str, str] | None]:
    """Read the record of one sample as text, without its blobs; None for an unknown id."""
    return Op("sample", (sample_id,), lambda raw: {_text(k): _text(v) for k, v in _rows(raw, 2)} or None)


def payloads(ids: Sequence[str]) -> Op[list[r.Payload | None]]:
    """Read the payloads of queued or training samples; None for any other."""

    def parse(raw: Any) -> list[r.Payload | None]:
        found = (r.Payload(bytes(data), bytes(prompt), _text(owner)) for data, prompt, owner in _rows(raw, 3))
        return [payload if payload.sample else None for payload in found]

    return Op("payloads", tuple(ids), parse)


def dead(offset: int = 0, count: int = 1000) -> Op[list[r.DeadSample]]:
    """List dead samples in order of issue."""
    return Op(
        "dead",
        (offset, count),
        lambda raw: [
            r.DeadSample(_text(i), _text(w), _text(d), int(a), int(f), int(c), bytes(p))
            for i, w, d, a, f, c, p in _rows(raw, 7)
        ],
    )


def val_load(rows: Sequence[tuple[int, bytes]]) -> Op[int]:
    """Add held-out rows, or replace them; returns how many there are."""
    return Op("val_load", tuple(v for row in rows for v in row), int)


def val_take(
    owner: str, version: int, count: int, request_id: str | None = None
) -> Op[list[tuple[int, bytes]]]:
    """Take held-out rows to answer with `version`; empty when there is nothing to do."""
    return Op(
        "val_take",
        (owner, version, count, request_id or new_request_id()),
        lambda raw: [(int(row), bytes(data)) for row, data in _rows(raw, 2)],
    )


def val_finish(owner: str, version: int, row: int, result: bytes) -> Op[r.Verdict]:
    """Store the result of one held-out row. ok | refused."""
    return Op("val_finish", (owner, version, row, result), _verdict)


def val_status() -> Op[r.ValStatus]:
    def parse(raw: Any) -> r.ValStatus:
        return r.ValStatus(int(raw[0]), int(raw[1]), int(raw[2]), _text(raw[3]) == "1")

    return Op("val_status", (), parse)


def val_close(version: int) -> Op[r.Verdict]:
    """Close the validation; unfinished rows stay unfinished. ok | refused."""
    return Op("val_close", (version,), _verdict)


def val_results(version: int) -> Op[list[bytes]]:
    """Read the results so far, in order of row."""
    return Op("val_results", (version,), lambda raw: [bytes(v) for v in raw])


def val_forget(version: int) -> Op[r.Verdict]:
    """Delete a version's results once they are reported. ok | refused (no later validation has begun)."""
    return Op("val_forget", (version,), _verdict)


def stats() -> Op[r.Stats]:
    return Op("stats", (), _stats)


def _stats(raw: Any) -> r.Stats:
    data = json.loads(raw)
    meta = data["meta"]
    return r.Stats(
        counts=data["counts"],
        issued_total=int(meta["issued_total"]),
        version=int(meta["version"]),
        digest=meta["digest"],
        lineage=int(meta["lineage"]),
        term=int(meta["term"]),
        round=int(meta["round"]),
        phase=meta["phase"],
        held=meta["held"] == "1",
        window=int(meta["window"]),
        trained_since_sync=data["trained_since_sync"],
        max_required=int(meta["max_required"]),
        claim_size=int(meta["claim_size"]),
        end_of_data=meta["end_of_data"] == "1",
        final=meta["final"] == "1",
        completed=meta.get("completed", "0") == "1",
        cursor=int(meta["cursor"]),
        total=int(meta["total"]),
        fenced=int(meta["fenced"]),
        fenced_by=data["fenced_by"],
        requeued=data["requeued"],
        kept=data["kept"],
        finished=int(meta["seq"]),
        restarted=int(meta.get("restarted", 0)),
        died=data["died"],
        left=data["left"],
        dead_reasons=data["dead_reasons"],
        dropped_reasons=data["dropped_reasons"],
        members=data["members"],
        in_flight_by_owner=data["in_flight_by_owner"],
        oldest_queued_age_s=float(data["oldest_queued_age_s"]),
        val=r.ValStatus(
            int(meta["val:version"]), data["val_total"], data["val_done"], meta["val:open"] == "1"
        ),
    )
