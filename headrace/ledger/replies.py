"""Replies of the ledger's operations.

Fields that only the server knows (times, stream entry ids) are excluded from equality, so a reply can be
compared with the in-memory ledger's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from headrace.ledger.states import State


class Verdict(enum.StrEnum):
    """Reply of an operation that either happens or is refused."""

    OK = "ok"
    DUPLICATE = "duplicate"
    """The same owner and attempt did this before; it was not repeated."""
    FENCED = "fenced"
    """Late, or from another term, round, lineage or owner. Nothing was done; the refusal was counted."""
    UNKNOWN = "unknown"
    """A named sample does not exist or is in the wrong state; nothing was done."""
    REFUSED = "refused"
    """The condition of the compare-and-set does not hold; nothing was done."""


class TakeStatus(enum.StrEnum):
    OK = "ok"
    EMPTY = "empty"
    """Nothing is ready; more may come."""
    GATE_CLOSED = "gate_closed"
    HELD = "held"
    """A sync round, or a lineage without its first commit, holds all takes."""
    STALE_VERSION = "stale_version"
    NOT_MEMBER = "not_member"
    DONE = "done"
    """Data has ended and nothing is ready, parked or in flight."""


class FailStatus(enum.StrEnum):
    RETRIED = "retried"
    DEAD = "dead"
    FENCED = "fenced"


class ClaimStatus(enum.StrEnum):
    BATCH = "batch"
    WAIT = "wait"
    FINAL_SHORT = "final_short"
    """The last samples of all, fewer than asked for."""
    DONE = "done"
    FENCED = "fenced"


class CommitStatus(enum.StrEnum):
    OK = "ok"
    FENCED = "fenced"
    TRAINING = "training"
    """Samples of the closing window are still `training`."""


class AdoptStatus(enum.StrEnum):
    OK = "ok"
    FENCED = "fenced"
    UNKNOWN = "unknown"
    """The checkpoint names a sample that this ledger never issued."""
    TRIMMED = "trimmed"
    """A sample would have to be restarted, but its prompt was trimmed: the checkpoint is too old."""
    INCOMPLETE = "incomplete"
    """Work of the abandoned lineage is still in flight."""


@dataclass(frozen=True)
class ConfigureReply:
    status: str
    """`ok`, or `mismatch`: the run was configured with another fingerprint."""
    fingerprint: str
    """The stored one."""
    created: bool


@dataclass(frozen=True)
class Term:
    term: int
    version: int
    round: int
    phase: str
    lineage: int
    digest: str


@dataclass(frozen=True)
class IssueReply:
    status: str
    """`issued`, or `conflict`: the cursor is not the expected one, or data has ended."""
    cursor: int
    """Next number to issue."""


@dataclass(frozen=True)
class Taken:
    sample_id: str
    attempt: int
    prompt: bytes
    work: bytes | None
    """ParkedGroup to continue; None: start from the prompt."""
    failures: int


@dataclass(frozen=True)
class TakeReply:
    status: TakeStatus
    items: list[Taken]
    """Parked work first, then retries, then new prompts. A repeated request leaves out what its owner has
    lost since, so `ok` may come with fewer items, even none."""


@dataclass(frozen=True)
class ExpireReply:
    requeued: list[str]
    dead: list[str]
    expired: bool = True
    """False: its heartbeat has moved since it was observed, so it is alive."""


@dataclass(frozen=True)
class Claimed:
    """A finished sample as reported to `finish`. The trainer checks the payload against it."""

    sample_id: str
    attempt: int
    min_version: int
    max_version: int
    tokens: int
    """Prompt and response tokens of the whole group."""
    t_finished: float = field(default=0.0, compare=False)
    """Time of the finish in seconds of the server's clock; 0 in the in-memory ledger."""


@dataclass(frozen=True)
class ClaimReply:
    status: ClaimStatus
    items: list[Claimed]
    """Oldest finish first."""


@dataclass(frozen=True)
class Payload:
    """A finished sample as received, and what the ledger itself knows about it."""

    sample: bytes
    """Sample message."""
    prompt: bytes
    """Prompt message, as issued."""
    owner: str
    """The incarnation that finished it."""


@dataclass(frozen=True)
class OpenLineageReply:
    ok: bool
    """False: the expected lineage is not the current one; another trainer may have been faster."""
    lineage: int
    version: int


@dataclass(frozen=True)
class AdoptReply:
    status: AdoptStatus
    sample_id: str
    """The offending sample, or empty."""


@dataclass(frozen=True)
class CommitReply:
    status: CommitStatus
    training: int
    """Samples of the closing window that are still `training`."""


@dataclass(frozen=True)
class ValStatus:
    version: int
    """-1 before the first validation."""
    total: int
    done: int
    open: bool
    """Whether rows are handed out and results accepted."""


@dataclass(frozen=True)
class DeadSample:
    sample_id: str
    reason: str
    detail: str
    attempts: int = 0
    """How often it was taken."""
    failures: int = 0
    crashes: int = 0
    prompt: bytes = b""


@dataclass(frozen=True)
class Stats:
    """One atomic reading of the ledger. Counts are samples, times seconds."""

    counts: dict[str, int]
    """By state, all eight."""
    issued_total: int
    version: int
    digest: str
    lineage: int
    term: int
    round: int
    phase: str
    held: bool
    window: int
    trained_since_sync: int
    """Samples trained in windows that no commit has closed."""
    max_required: int
    claim_size: int
    end_of_data: bool
    final: bool
    """The last commit was the run's last."""
    completed: bool
    """The trainer has saved and exported everything."""
    cursor: int
    total: int
    fenced: int
    """Answers `fenced` so far."""
    fenced_by: dict[str, int]
    """`fenced` by operation; under `finish`, complete results that came too late."""
    requeued: dict[str, int]
    """Transitions back into `ready` so far, by reason."""
    kept: dict[str, int]
    """Work of abandoned lineages kept by new ones so far, by the state it was found in."""
    finished: int
    """Complete results accepted so far; a sample that was requeued and finished again counts each time."""
    restarted: int
    """Parked samples that were too old to continue and were restarted from their prompts."""
    died: dict[str, int]
    """Transitions into `dead` so far, by reason."""
    left: dict[str, int]
    """Transitions into `dropped` so far, by reason."""
    dead_reasons: dict[str, int]
    """Samples that are dead now, by reason."""
    dropped_reasons: dict[str, int]
    members: dict[str, int]
    in_flight_by_owner: dict[str, int]
    oldest_queued_age_s: float = field(compare=False)
    val: ValStatus

    @classmethod
    def empty(cls) -> Stats:
        """The stats of a ledger in which nothing has happened."""
        none: dict[str, int] = {}
        return cls(
            counts={state.value: 0 for state in State},
            issued_total=0,
            version=-1,
            digest="",
            lineage=0,
            term=0,
            round=0,
            phase="idle",
            held=True,
            window=0,
            trained_since_sync=0,
            max_required=0,
            claim_size=0,
            end_of_data=False,
            final=False,
            completed=False,
            cursor=0,
            total=0,
            fenced=0,
            fenced_by=none,
            requeued=none,
            kept=none,
            finished=0,
            restarted=0,
            died=none,
            left=none,
            dead_reasons=none,
            dropped_reasons=none,
            members=none,
            in_flight_by_owner=none,
            oldest_queued_age_s=0.0,
            val=ValStatus(-1, 0, 0, False),
        )

    @property
    def outstanding(self) -> int:
        return sum(self.counts[s] for s in ("in_flight", "parked", "queued", "training"))

    @property
    def balanced(self) -> bool:
        return sum(self.counts.values()) == self.issued_total
