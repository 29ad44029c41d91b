"""Random walks of the session's state machine attack its guarantees."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace_coordinator.rounds.session import (
    TRAINER,
    CommitAnswer,
    Deadline,
    Event,
    Left,
    Loaded,
    Lost,
    Paused,
    Phase,
    Ready,
    RoundFailed,
    Sent,
    TrainerLost,
    TransferSession,
)
from tests.fast.coordinator.session_world import (
    DIGEST,
    NAMES,
    World,
    most_attempts,
    rarely,
    running,
)


class Walk(RuleBasedStateMachine):
    """Members and trainer do anything at any time."""

    @initialize(
        size=st.integers(0, len(NAMES)),
        max_attempts=st.integers(1, 3),
        catch_up=rarely,
        good=st.booleans(),
    )
    def start(self, size: int, max_attempts: int, catch_up: bool, good: bool) -> None:
        roster = NAMES[:1] if catch_up else NAMES[:size]
        self.session = TransferSession(
            list(roster), max_attempts, catch_up, group_is_good=good and not catch_up
        )
        self.world = World(self.session)
        self.deadlines = 0
        self.most_deadlines = 1 + most_attempts(self.session, len(roster))  # one in PAUSING, one per attempt
        self.history: list[Event] = []

    def tell(self, event: Event) -> None:
        self.history.append(event)
        self.world.tell(event)

    def attempt(self, back: int) -> int:
        return max(0, self.session.attempt - back)

    who = st.sampled_from([*NAMES, "stranger"])
    party = st.sampled_from([*NAMES, TRAINER])
    back = st.sampled_from([0, 0, 0, 0, 1, 2])
    digest = st.sampled_from([DIGEST, DIGEST, DIGEST, "wrong"])

    @precondition(lambda self: self.session.phase in (Phase.PAUSING, Phase.FORMING, Phase.TRANSFERRING))
    @rule(who=party, back=back, digest=digest)
    def report(self, who: str, back: int, digest: str) -> None:
        """What this phase is about, by one party, perhaps late."""
        match self.session.phase:
            case Phase.PAUSING:
                self.tell(Paused(who))
            case Phase.FORMING:
                self.tell(Ready(who, self.attempt(back)))
            case Phase.TRANSFERRING if who == TRAINER:
                self.tell(Sent(self.attempt(back), DIGEST))
            case Phase.TRANSFERRING:
                self.tell(Loaded(who, self.attempt(back), digest))

    @rule(who=who, back=back, digest=digest, kind=st.sampled_from([Paused, Ready, Loaded, Sent]))
    def noise(self, who: str, back: int, digest: str, kind: type) -> None:
        """Anything in any phase."""
        attempt = self.attempt(back)
        reports: dict[type, Event] = {
            Paused: Paused(who),
            Ready: Ready(who, attempt),
            Loaded: Loaded(who, attempt, digest),
            Sent: Sent(attempt, DIGEST),
        }
        self.tell(reports[kind])

    @running
    @rule(who=party, back=back)
    def failed(self, who: str, back: int) -> None:
        self.tell(RoundFailed(who, self.attempt(back), "broken pipe"))

    @running
    @rule(who=who, orderly=st.booleans())
    def lost(self, who: str, orderly: bool) -> None:
        self.tell(Left(who) if orderly else Lost(who))

    @precondition(lambda self: self.session.phase is Phase.COMMITTING)
    @rule(ok=st.booleans())
    def commit_answer(self, ok: bool) -> None:
        """Only the ledger answers, and only what it was asked."""
        self.tell(CommitAnswer(ok, "" if ok else "stale lineage"))

    @running
    @rule()
    def deadline(self) -> None:
        if self.session.phase is not Phase.COMMITTING:
            self.deadlines += 1
        self.tell(Deadline())
        assert self.deadlines <= self.most_deadlines

    @precondition(lambda self: len(self.history) > 6)
    @rule(sure=st.sampled_from([False] * 9 + [True]))
    def trainer_lost(self, sure: bool) -> None:
        if sure:
            self.tell(TrainerLost())

    @precondition(lambda self: bool(self.history))
    @rule(index=st.integers(0, 1000))
    def once_more(self, index: int) -> None:
        """A report that comes twice, perhaps much later."""
        again = self.history[index % len(self.history)]
        if not isinstance(again, Deadline | TrainerLost | CommitAnswer):
            self.tell(again)

    @precondition(lambda self: self.session.phase.ended)
    @rule(
        size=st.integers(0, len(NAMES)), max_attempts=st.integers(1, 3), catch_up=rarely, good=st.booleans()
    )
    def again(self, size: int, max_attempts: int, catch_up: bool, good: bool) -> None:
        self.teardown()
        self.start(size, max_attempts, catch_up, good)

    @running
    @rule(but=st.none() | party)
    def everybody_answers(self, but: str | None) -> None:
        """What the phase waits for comes at once, perhaps with one exception: so walks get far."""
        s = self.session
        phase, attempt = s.phase, s.attempt
        for who in sorted(s.waiting - {but}):
            match phase:
                case Phase.PAUSING:
                    self.tell(Paused(who))
                case Phase.FORMING:
                    self.tell(Ready(who, attempt))
                case Phase.TRANSFERRING:
                    self.tell(Sent(attempt, DIGEST) if who == TRAINER else Loaded(who, attempt, DIGEST))

    def teardown(self) -> None:
        if hasattr(self, "world"):
            assert self.deadlines + self.world.settle() <= self.most_deadlines
            if self.session.catch_up and self.session.phase is Phase.DONE:
                assert self.session.roster == NAMES[:1], "a catch-up without its joiner commits nothing"


def test_random_walks() -> None:
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


def probable_event(session: TransferSession, random: Random, history: list[Event]) -> Event:
    """Mostly what the phase waits for, so that sessions get far; now and then trouble, or an old report."""
    s, attempt = session, session.attempt
    dice = random.random()
    if dice < 0.02:
        return Deadline()
    if dice < 0.04:
        gone: list[type[Lost] | type[Left]] = [Lost, Left]
        return random.choice(gone)(random.choice(NAMES))
    if dice < 0.07:
        return RoundFailed(random.choice([*NAMES, TRAINER]), attempt, "broken pipe")
    if dice < 0.073:
        return TrainerLost()
    if dice < 0.25 and history:
        return random.choice(history)
    if s.phase is Phase.COMMITTING:
        return CommitAnswer(random.random() < 0.8)
    who = random.choice(sorted(s.waiting) or NAMES)
    match s.phase:
        case Phase.PAUSING:
            return Paused(who)
        case Phase.FORMING:
            return Ready(who, attempt)
        case _:
            digest = "wrong" if random.random() < 0.1 else DIGEST
            return Sent(attempt, DIGEST) if who == TRAINER else Loaded(who, attempt, digest)


def test_deep_walks() -> None:
    """Many sessions of the likely kind: late reports of earlier attempts, several attempts, commits."""
    ends: Counter[str] = Counter()
    for seed in range(3000):
        random = Random(seed)
        roster = NAMES[: random.choice([0, 1, 2, 3, 4, 4, 4])]
        world = World(
            TransferSession(list(roster), random.randint(1, 3), group_is_good=random.random() < 0.3)
        )
        history: list[Event] = []
        try:
            for _ in range(80):
                if world.session.phase.ended:
                    break
                event = probable_event(world.session, random, history)
                if not isinstance(event, Deadline | CommitAnswer | TrainerLost):
                    history.append(event)
                world.tell(event)
            world.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {world.log}") from error
        ends[f"{world.session.phase} after {min(world.session.attempt, 2)} attempts"] += 1
        ends["expired"] += bool(world.expired)
        ends["several committed"] += bool(world.commits and len(world.commits[0].members) > 1)
    assert min(ends[f"{phase} after {n} attempts"] for phase in ("done", "abandoned") for n in (1, 2)) > 50, (
        ends
    )
    assert ends["several committed"] > 1000, ends
