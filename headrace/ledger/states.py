"""The life cycle of a sample: eight states and the one table of transitions between them.

The Lua scripts, the in-memory ledger, the audit and `docs/ledger.md` are checked against this table.
Invariants of the ledger:

* At every instant a sample is in exactly one state, and in exactly the place of that state.
* The eight counts add up to the number of issued samples.
* `in_flight + parked + queued + training + trained_since_sync <= max_required`. Only a start (`take`
  from `ready`) raises the left side, and only while it is below the limit. `trained_since_sync` counts
  every window that no commit has closed, so the bound also holds between the snapshot of a version and
  its commit. A rejected sample uses up its place in the window as if it were trained, unless the window
  claims another instead. A requeued dead sample is `ready` and holds no credit. If `max_required` is
  lowered, the left side may exceed it, but does not grow until it is below the limit again.
* Finished and parked work survives the trainer: a new lineage keeps what will be trained within the bound on
  the version gap (`docs/staleness.md`), with its credit, and counts it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.StrEnum):
    READY = "ready"
    """Waiting for an owner: new, or to be restarted from its prompt."""
    IN_FLIGHT = "in_flight"
    """Owned by one incarnation, under one attempt number."""
    PARKED = "parked"
    """Saved partial work without an owner; keeps its credit at the gate."""
    QUEUED = "queued"
    """Finished; its payload is in the samples stream."""
    TRAINING = "training"
    """Claimed by the trainer for a window."""
    TRAINED = "trained"
    """Part of an optimizer step. The checkpoint, not this state, is the commit point."""
    DEAD = "dead"
    """Given up for a recorded reason. An operator can requeue it."""
    DROPPED = "dropped"
    """Left out of training on purpose, for a recorded reason."""


OUTSTANDING = (State.IN_FLIGHT, State.PARKED, State.QUEUED, State.TRAINING)
"""States that hold credit at the gate."""


class Event(enum.StrEnum):
    ISSUE = "issue"
    TAKE = "take"
    FINISH = "finish"
    PARK = "park"
    HAND_BACK = "hand_back"
    FAIL = "fail"
    EXPIRE = "expire"
    CLAIM = "claim"
    TRAIN = "train"
    DROP = "drop"
    REJECT = "reject"
    REQUEUE_DEAD = "requeue_dead"
    ADOPT_TRAINED = "adopt_trained"
    ADOPT_REST = "adopt_rest"
    FINISH_ADOPT = "finish_adopt"


@dataclass(frozen=True)
class Transition:
    event: Event
    source: State | None
    """None: the sample did not exist."""
    target: State
    guard: str


_S, _E = State, Event
_HOLDS = "the caller is its owner and names its attempt"
_LINEAGE = "the caller's lineage is the current one"
_ADOPTING = "the caller's lineage is the current one and is adopting"
_FITS = "it will be trained within the bound on the version gap, and only one trainer ended over it"

TRANSITIONS: tuple[Transition, ...] = (
    Transition(_E.ISSUE, None, _S.READY, "the feeder's cursor is the ledger's; data has not ended"),
    Transition(
        _E.TAKE,
        _S.READY,
        _S.IN_FLIGHT,
        "not held; the owner is a member at the committed version; the gate is open; if two or more owners "
        "have expired over it, the owner holds no other such sample; attempt + 1",
    ),
    Transition(
        _E.TAKE,
        _S.PARKED,
        _S.IN_FLIGHT,
        "not held; the owner is a member at the committed version; the gate does not apply; attempt + 1",
    ),
    Transition(
        _E.FINISH,
        _S.IN_FLIGHT,
        _S.QUEUED,
        f"{_HOLDS}, is a member, and no token is newer than the committed version",
    ),
    Transition(
        _E.PARK, _S.IN_FLIGHT, _S.PARKED, f"{_HOLDS}, and no token is newer than the committed version"
    ),
    Transition(_E.HAND_BACK, _S.IN_FLIGHT, _S.READY, f"{_HOLDS}: requeued(handback)"),
    Transition(_E.FAIL, _S.IN_FLIGHT, _S.READY, f"{_HOLDS}; failures <= max_retries: requeued(failed)"),
    Transition(_E.FAIL, _S.IN_FLIGHT, _S.DEAD, f"{_HOLDS}; failures > max_retries: dead(reason)"),
    Transition(
        _E.EXPIRE,
        _S.IN_FLIGHT,
        _S.READY,
        "its owner expired; crashes <= max_crashes: requeued(expired). The owner left cleanly: "
        "requeued(handback)",
    ),
    Transition(_E.EXPIRE, _S.IN_FLIGHT, _S.DEAD, "its owner expired; crashes > max_crashes: dead(poison)"),
    Transition(
        _E.CLAIM,
        _S.QUEUED,
        _S.TRAINING,
        f"{_LINEAGE}; the window is the committed version's or the next; the whole batch is there, or it is "
        "the last one; oldest finish first",
    ),
    Transition(_E.TRAIN, _S.TRAINING, _S.TRAINED, f"{_LINEAGE} and claimed it"),
    Transition(_E.DROP, _S.QUEUED, _S.DROPPED, _LINEAGE),
    Transition(_E.DROP, _S.TRAINING, _S.DROPPED, f"{_LINEAGE} and claimed it"),
    Transition(
        _E.REJECT,
        _S.TRAINING,
        _S.READY,
        f"{_LINEAGE} and claimed this attempt; failures <= max_retries: requeued(rejected)",
    ),
    Transition(
        _E.REJECT,
        _S.TRAINING,
        _S.DEAD,
        f"{_LINEAGE} and claimed this attempt; failures > max_retries: dead(reason)",
    ),
    Transition(
        _E.REQUEUE_DEAD,
        _S.DEAD,
        _S.READY,
        "no claim of this lineage was told that these are the last samples, or no trainer is running; "
        "requeued(operator); failures and crashes are reset to 0",
    ),
    *(
        Transition(_E.ADOPT_TRAINED, source, _S.TRAINED, f"{_ADOPTING}; the checkpoint has trained it")
        for source in State
        if source is not State.TRAINED
    ),
    *(
        Transition(_E.ADOPT_REST, source, _S.READY, f"{_ADOPTING}; not in the checkpoint: requeued({reason})")
        for source, reason in (
            (_S.TRAINED, "rollback"),
            (_S.IN_FLIGHT, "lineage"),
        )
    ),
    Transition(_E.FINISH_ADOPT, _S.TRAINING, _S.QUEUED, f"{_ADOPTING}; {_FITS}: kept, at its old place"),
    *(
        Transition(_E.FINISH_ADOPT, source, _S.READY, f"{_ADOPTING}; does not fit: requeued({reason})")
        for source, reason in ((_S.TRAINING, "rollback"), (_S.PARKED, "lineage"), (_S.QUEUED, "lineage"))
    ),
)

ALLOWED: frozenset[tuple[str, str | None, str]] = frozenset(
    (t.event, t.source, t.target) for t in TRANSITIONS
)
