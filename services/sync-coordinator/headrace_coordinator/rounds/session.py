"""One transfer session as a state machine: a sync round, or the catch-up of one late joiner.

It is pure: events in, actions out. `transfers` does the I/O. A session always ends: each phase has a
deadline, and each deadline removes a member, uses up an attempt, or ends the session.

| phase        | event                         | next                                                      |
|--------------|-------------------------------|-----------------------------------------------------------|
| PAUSING      | Paused(last one)              | FORMING, or TRANSFERRING when the group is still good     |
| PAUSING      | Left                          | go on with the others                                     |
| PAUSING      | Deadline                      | expire who did not pause, go on with the others           |
| FORMING      | Ready(all and the trainer)    | TRANSFERRING                                              |
| FORMING      | Failed, Lost, Left, Deadline  | new attempt (below)                                       |
| TRANSFERRING | Loaded(all) and Sent          | COMMITTING with those whose digest is the trainer's       |
| TRANSFERRING | Failed, Lost, Left, Deadline  | new attempt                                               |
| COMMITTING   | CommitAnswer(ok)              | DONE: resume the members                                  |
| COMMITTING   | CommitAnswer(refused)         | ABANDONED                                                 |
| any          | TrainerLost                   | ABANDONED: everybody stays paused                         |

New attempt: expire lost and silent members, then form a new group of the others and send everything
again. Reporting a failure does not make a member the culprit, since its peer's death fails it too.
After `max_attempts` tries without a culprit every member is expired, and the empty roster commits. A
catch-up that fails once expires its joiner and ends.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

TRAINER = "trainer"


class Phase(enum.StrEnum):
    PAUSING = "pausing"
    FORMING = "forming"
    TRANSFERRING = "transferring"
    COMMITTING = "committing"
    DONE = "done"
    ABANDONED = "abandoned"

    @property
    def ended(self) -> bool:
        return self in (Phase.DONE, Phase.ABANDONED)


# ---- events ----


@dataclass(frozen=True)
class Paused:
    who: str


@dataclass(frozen=True)
class Ready:
    """`who` (a member or TRAINER) has joined the group of this attempt."""

    who: str
    attempt: int


@dataclass(frozen=True)
class Loaded:
    who: str
    attempt: int
    digest: str


@dataclass(frozen=True)
class Sent:
    attempt: int
    digest: str


@dataclass(frozen=True)
class RoundFailed:
    who: str
    attempt: int
    error: str


@dataclass(frozen=True)
class Lost:
    """The member's stream ended."""

    who: str


@dataclass(frozen=True)
class Left:
    """The member is gone and already expired. Unlike one whose stream ended, it will not come back."""

    who: str


@dataclass(frozen=True)
class TrainerLost:
    """The trainer is gone, or its snapshot is now of another version. Nobody can be served or is at fault."""


@dataclass(frozen=True)
class Deadline:
    """The current phase's deadline, `after_s` seconds, has passed."""

    after_s: float = 0.0


@dataclass(frozen=True)
class CommitAnswer:
    ok: bool
    reason: str = ""


Event = Paused | Ready | Loaded | Sent | RoundFailed | Lost | Left | TrainerLost | Deadline | CommitAnswer

# ---- actions ----


@dataclass(frozen=True)
class Pause:
    who: str


@dataclass(frozen=True)
class Form:
    """Form a new group of the trainer and `members`, in rank order."""

    attempt: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Transfer:
    attempt: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class Expire:
    who: str
    reason: str


@dataclass(frozen=True)
class Commit:
    members: tuple[str, ...]
    digest: str


Action = Pause | Form | Transfer | Expire | Commit


@dataclass
class TransferSession:
    """State of one session. `roster`: participating incarnations, in rank order."""

    roster: list[str]
    max_attempts: int
    catch_up: bool = False
    group_is_good: bool = False
    """Whether the trainer and exactly this roster already share a working group."""
    phase: Phase = Phase.PAUSING
    attempt: int = 0
    waiting: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    """Members that failed this attempt, at fault or not."""
    blameless: int = 0
    """Number of failed attempts without a culprit."""
    digests: dict[str, str] = field(default_factory=dict)
    trainer_digest: str | None = None
    why: str = ""

    def start(self) -> list[Action]:
        if self.catch_up:
            return self._form()
        self.waiting = set(self.roster)
        return [Pause(m) for m in self.roster] + self._pausing_done()

    def on(self, event: Event) -> list[Action]:
        """Apply one event and return the actions to take. Late events and those of earlier attempts are
        ignored."""
        if self.phase.ended:
            return []
        if isinstance(event, TrainerLost):
            return self._abandon("the trainer is gone or has moved on")
        if isinstance(event, RoundFailed | Lost | Left) and event.who not in {TRAINER, *self.roster}:
            return []
        match self.phase:
            case Phase.PAUSING:
                return self._on_pausing(event)
            case Phase.FORMING:
                return self._on_forming(event)
            case Phase.TRANSFERRING:
                return self._on_transferring(event)
            case Phase.COMMITTING:
                return self._on_committing(event)
        raise AssertionError(self.phase)

    # -- phases ----------------------------------------------------------------------------------

    def _on_pausing(self, event: Event) -> list[Action]:
        if isinstance(event, Paused):
            self.waiting.discard(event.who)
            return self._pausing_done()
        if isinstance(event, Deadline):
            return self._expire(self.waiting, "did not pause in time") + self._pausing_done()
        if isinstance(event, Left):
            self._remove({event.who})
            return self._pausing_done()
        return []  # a lost stream may come back before the deadline

    def _pausing_done(self) -> list[Action]:
        if self.waiting:
            return []
        return self._transfer() if self.group_is_good and self.roster else self._form()

    def _on_forming(self, event: Event) -> list[Action]:
        if isinstance(event, Ready) and event.attempt == self.attempt:
            self.waiting.discard(event.who)
            if self.waiting:
                return []
            return self._settle() if self.failed else self._transfer()
        return self._on_trouble(event, "did not join the weight group")

    def _on_transferring(self, event: Event) -> list[Action]:
        if isinstance(event, Loaded) and event.attempt == self.attempt and event.who in self.roster:
            self.digests[event.who] = event.digest
            self.waiting.discard(event.who)
        elif isinstance(event, Sent) and event.attempt == self.attempt:
            self.trainer_digest = event.digest
            self.waiting.discard(TRAINER)
        else:
            return self._on_trouble(event, "did not load the weights")
        return [] if self.waiting else self._settle()

    def _on_trouble(self, event: Event, silent: str) -> list[Action]:
        """Handle a failure, a departure or silence in a phase that needs everyone."""
        if isinstance(event, RoundFailed) and event.attempt == self.attempt:
            self.failed.add(event.who)
            self.waiting.discard(event.who)
            self.why = f"{event.who}: {event.error}"
            return [] if self.waiting else self._settle()
        if isinstance(event, Lost | Left):
            self.why = f"{event.who} went away"
            self.failed.add(event.who)
            self.waiting.discard(event.who)
            gone = self._remove({event.who})
            out: list[Action] = []
            if isinstance(event, Lost):
                out += [Expire(m, "went away during a sync") for m in gone]
            return out if self.waiting else out + self._settle()
        if isinstance(event, Deadline):
            silent = f"{silent} within {event.after_s:g} s"
            self.why = f"{', '.join(sorted(self.waiting))} {silent}"
            self.failed |= self.waiting
            out = self._expire(self.waiting - {TRAINER}, silent)
            self.waiting = set()
            return out + self._settle()
        return []

    def _on_committing(self, event: Event) -> list[Action]:
        if not isinstance(event, CommitAnswer):
            return []
        if not event.ok:
            return self._abandon(event.reason)
        self.phase = Phase.DONE
        return []

    # -- transitions -----------------------------------------------------------------------------

    def _settle(self) -> list[Action]:
        """Commit or try again, now that everybody has answered in this attempt."""
        if not self.failed and self.phase is Phase.TRANSFERRING:
            assert self.trainer_digest is not None
            wrong = {m for m in self.roster if self.digests.get(m) != self.trainer_digest}
            out = self._expire(wrong, "received other weights than the trainer sent")
            if self.catch_up and not self.roster:
                return out + self._abandon("the joiner's weights differ")
            self.phase = Phase.COMMITTING
            return [*out, Commit(tuple(self.roster), self.trainer_digest)]
        if self.catch_up:
            return self._expire(set(self.roster), f"catch-up failed: {self.why}") + self._abandon(self.why)
        out = []
        if self.failed <= {TRAINER, *self.roster}:  # no one was removed for it
            self.blameless += 1
        if self.blameless >= self.max_attempts:
            if not self.roster:
                return self._abandon(f"the trainer cannot send: {self.why}")
            out = self._expire(set(self.roster), f"no transfer in {self.attempt} attempts")
        return out + self._form()

    def _form(self) -> list[Action]:
        self.attempt += 1
        self.failed = set()
        self.phase = Phase.FORMING
        self.waiting = {TRAINER, *self.roster}
        return [Form(self.attempt, tuple(self.roster))]

    def _transfer(self) -> list[Action]:
        if self.attempt == 0:
            self.attempt = 1
        self.phase = Phase.TRANSFERRING
        self.failed = set()
        self.digests = {}
        self.trainer_digest = None
        self.waiting = {TRAINER, *self.roster}
        return [Transfer(self.attempt, tuple(self.roster))]

    def _expire(self, who: Iterable[str], reason: str) -> list[Action]:
        return [Expire(m, reason) for m in self._remove(who)]

    def _remove(self, who: Iterable[str]) -> list[str]:
        """Remove `who` from the session. Returns those of them that took part."""
        gone = [m for m in self.roster if m in set(who)]
        self.roster = [m for m in self.roster if m not in gone]
        self.waiting -= set(gone)
        self.group_is_good = self.group_is_good and not gone
        return gone

    def _abandon(self, why: str) -> list[Action]:
        self.phase = Phase.ABANDONED
        self.why = why
        return []
