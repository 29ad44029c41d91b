"""The world around a session: members that answer, fail, go silent or vanish, and a trainer.

After every event `World.absorb` checks what must always hold.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
)

from headrace_coordinator.rounds.session import (
    TRAINER,
    Action,
    Commit,
    CommitAnswer,
    Deadline,
    Event,
    Expire,
    Form,
    Left,
    Loaded,
    Pause,
    Paused,
    Phase,
    Ready,
    Sent,
    TrainerLost,
    Transfer,
    TransferSession,
)

DIGEST = "right"
NAMES = ["a", "b", "c", "d"]
rarely = st.sampled_from([False, False, False, True])


def most_attempts(session: TransferSession, members: int) -> int:
    """Every attempt is a try without a culprit, or loses a member, or is the one with an empty roster."""
    return session.max_attempts + members + 1


class World:
    """A session, what it was told, what it asked for; asserts the invariants at every step."""

    def __init__(self, session: TransferSession) -> None:
        self.session = session
        self.first_roster = list(session.roster)
        self.expired: set[str] = set()
        self.left: set[str] = set()
        self.trainer_lost = False
        self.group: tuple[str, ...] | None = tuple(session.roster) if session.group_is_good else None
        self.ready = {TRAINER, *session.roster} if session.group_is_good else set()
        """Who has joined the latest group."""
        self.loaded: dict[str, str] = {}
        """Member -> digest reported to the latest attempt since its last Form or Transfer."""
        self.sent: str | None = None
        self.attempts: list[int] = []
        self.commits: list[Commit] = []
        self.log: list[Event | Action] = []
        self.absorb(session.start())

    def tell(self, event: Event) -> list[Action]:
        s = self.session
        phase, before = s.phase, s.attempt
        if isinstance(event, TrainerLost):
            self.trainer_lost = True
        if isinstance(event, Left) and not phase.ended and phase is not Phase.COMMITTING:
            self.left |= {event.who} & set(s.roster)  # expired by whoever has told
        if phase is Phase.FORMING and isinstance(event, Ready) and event.attempt == before:
            self.ready.add(event.who)
        if phase is Phase.TRANSFERRING:
            if isinstance(event, Loaded) and event.attempt == before:
                self.loaded[event.who] = event.digest
            if isinstance(event, Sent) and event.attempt == before:
                self.sent = event.digest
        self.log.append(event)
        actions = s.on(event)
        if phase.ended:
            assert actions == []
            assert s.phase is phase, "an ended session does not start again"
        self.absorb(actions)
        return actions

    def absorb(self, actions: list[Action]) -> None:
        self.log += actions
        for action in actions:
            assert not self.trainer_lost, f"{action} after the trainer was lost"
            match action:
                case Pause(who):
                    assert who in self.first_roster
                case Expire(who):
                    assert who in self.first_roster
                    assert who not in self.expired | self.left, f"{who} expired twice"
                    self.expired.add(who)
                case Form(attempt, members):
                    self.living(members)
                    assert not self.attempts or attempt > self.attempts[-1], "attempts only rise"
                    self.attempts.append(attempt)
                    self.group, self.ready, self.loaded, self.sent = members, set(), {}, None
                case Transfer(_, members):
                    self.living(members)
                    assert members == self.group, "weights go to exactly the group that was formed"
                    assert {TRAINER, *members} <= self.ready, "not everybody has joined the group"
                    self.loaded, self.sent = {}, None
                case Commit(members, digest):
                    self.living(members)
                    assert digest == self.sent, "the digest is the one that the trainer sent in this attempt"
                    assert all(self.loaded.get(m) == digest for m in members)
                    self.commits.append(action)
        s = self.session
        assert len(self.commits) <= 1
        assert s.attempt <= most_attempts(s, len(self.first_roster))
        if self.trainer_lost and not (self.commits and s.phase is Phase.DONE):
            assert s.phase is Phase.ABANDONED
        if s.phase is Phase.DONE:
            assert self.commits, "done without a commit"
            assert tuple(s.roster) == self.commits[0].members, "who is resumed has committed"
        if not s.phase.ended and s.phase is not Phase.COMMITTING:
            assert s.waiting, "it waits for nobody: only a deadline would wake it"
            assert s.waiting <= {TRAINER, *s.roster}
        assert set(s.roster) == set(self.first_roster) - self.expired - self.left, (
            "nobody else leaves the roster"
        )

    def living(self, members: tuple[str, ...]) -> None:
        assert not set(members) & (self.expired | self.left), "an expired member takes part"
        assert list(members) == self.session.roster
        assert list(members) == [m for m in self.first_roster if m in members], "the order of ranks is kept"

    def settle(self) -> int:
        """Nobody says anything any more; how many deadlines it takes to the end."""
        for count in range(100):
            if self.session.phase is Phase.COMMITTING:
                self.tell(CommitAnswer(True))  # the ledger's answer, which has no deadline of the session's
            if self.session.phase.ended:
                return count
            self.tell(Deadline())
        raise AssertionError("the session does not end")


running = precondition(lambda self: not self.session.phase.ended)


def to_pausing(roster: str = "abc", **options: object) -> World:
    return World(TransferSession(list(roster), 3, **options))  # type: ignore[arg-type]


def to_forming(roster: str = "abc") -> World:
    world = to_pausing(roster)
    for who in roster:
        world.tell(Paused(who))
    return world


def to_transferring(roster: str = "abc") -> World:
    world = to_forming(roster)
    for who in (*roster, TRAINER):
        world.tell(Ready(who, world.session.attempt))
    return world


def to_committing(roster: str = "abc") -> World:
    world = to_transferring(roster)
    for who in roster:
        world.tell(Loaded(who, world.session.attempt, DIGEST))
    world.tell(Sent(world.session.attempt, DIGEST))
    return world


PHASES: dict[str, Callable[[], World]] = {
    "PAUSING": to_pausing,
    "FORMING": to_forming,
    "TRANSFERRING": to_transferring,
    "COMMITTING": to_committing,
}

Outcome = Callable[[World, list[Action]], bool]


def new_attempt(world: World, actions: list[Action]) -> bool:
    form = actions[-1]
    return world.session.phase is Phase.FORMING and isinstance(form, Form) and form.attempt == 2
