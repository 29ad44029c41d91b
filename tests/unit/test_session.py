"""The session's state machine: every row of its table, and random walks that attack its guarantees.

The walk plays the world: members that answer, fail, go silent, vanish, report late or twice. After every
event `World.absorb` checks what must always hold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace_coordinator import session as module
from headrace_coordinator.session import (
    TRAINER,
    Action,
    Commit,
    CommitAnswer,
    Deadline,
    Event,
    Expire,
    Failed,
    Form,
    Left,
    Loaded,
    Lost,
    Pause,
    Paused,
    Phase,
    Ready,
    Sent,
    Session,
    TrainerLost,
    Transfer,
)

DIGEST = "right"
NAMES = ["a", "b", "c", "d"]
rarely = st.sampled_from([False, False, False, True])


def most_attempts(session: Session, members: int) -> int:
    """Every attempt is a try without a culprit, or loses a member, or is the one with an empty roster."""
    return session.max_attempts + members + 1


class World:
    """A session, what it was told, what it asked for; asserts the invariants at every step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.first_roster = list(session.roster)
        self.expired: set[str] = set()
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
                    assert who not in self.expired, f"{who} expired twice"
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
        assert set(s.roster) == set(self.first_roster) - self.expired, "leaving the roster is an Expire"

    def living(self, members: tuple[str, ...]) -> None:
        assert not set(members) & self.expired, "an expired member takes part"
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
        self.session = Session(list(roster), max_attempts, catch_up, group_is_good=good and not catch_up)
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
        reports = {
            Paused: Paused(who),
            Ready: Ready(who, attempt),
            Loaded: Loaded(who, attempt, digest),
            Sent: Sent(attempt, DIGEST),
        }
        self.tell(reports[kind])

    @running
    @rule(who=party, back=back)
    def failed(self, who: str, back: int) -> None:
        self.tell(Failed(who, self.attempt(back), "broken pipe"))

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


def probable_event(session: Session, random: Random, history: list[Event]) -> Event:
    """Mostly what the phase waits for, so that sessions get far; now and then trouble, or an old report."""
    s, attempt = session, session.attempt
    dice = random.random()
    if dice < 0.02:
        return Deadline()
    if dice < 0.04:
        return random.choice([Lost, Left])(random.choice(NAMES))
    if dice < 0.07:
        return Failed(random.choice([*NAMES, TRAINER]), attempt, "broken pipe")
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
        world = World(Session(list(roster), random.randint(1, 3), group_is_good=random.random() < 0.3))
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


# ---- the table, row by row ----


def to_pausing(roster: str = "abc", **options: object) -> World:
    return World(Session(list(roster), 3, **options))  # type: ignore[arg-type]


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


ROWS: dict[tuple[str, str], list[tuple[list[Event], Outcome]]] = {
    ("PAUSING", "Paused(last one)"): [
        (
            [Paused("a"), Paused("b"), Paused("c")],
            lambda w, a: w.session.phase is Phase.FORMING and a == [Form(1, ("a", "b", "c"))],
        )
    ],
    ("PAUSING", "Left"): [
        (
            [Paused("a"), Paused("c"), Left("b")],
            lambda w, a: a == [Expire("b", "left"), Form(1, ("a", "c"))],
        ),
        ([Left("b")], lambda w, a: w.session.phase is Phase.PAUSING and a == [Expire("b", "left")]),
    ],
    ("PAUSING", "Deadline"): [
        (
            [Paused("a"), Paused("c"), Deadline()],
            lambda w, a: a == [Expire("b", "did not pause in time"), Form(1, ("a", "c"))],
        )
    ],
    ("FORMING", "Ready(all and the trainer)"): [
        (
            [Ready("a", 1), Ready("b", 1), Ready("c", 1), Ready(TRAINER, 1)],
            lambda w, a: w.session.phase is Phase.TRANSFERRING and a == [Transfer(1, ("a", "b", "c"))],
        )
    ],
    ("FORMING", "Failed, Lost, Deadline"): [
        ([Ready(TRAINER, 1), Ready("a", 1), Ready("b", 1), Failed("c", 1, "x")], new_attempt),
        ([Ready(TRAINER, 1), Ready("a", 1), Ready("b", 1), Lost("c")], new_attempt),
        ([Ready(TRAINER, 1), Ready("a", 1), Ready("b", 1), Left("c")], new_attempt),
        ([Ready(TRAINER, 1), Ready("a", 1), Ready("b", 1), Deadline()], new_attempt),
        ([Deadline()], new_attempt),
    ],
    ("TRANSFERRING", "Loaded(all) and Sent"): [
        (
            [Loaded("a", 1, DIGEST), Loaded("b", 1, "wrong"), Loaded("c", 1, DIGEST), Sent(1, DIGEST)],
            lambda w, a: (
                w.session.phase is Phase.COMMITTING
                and a
                == [
                    Expire("b", "received other weights than the trainer sent"),
                    Commit(("a", "c"), DIGEST),
                ]
            ),
        ),
        (
            [Sent(1, DIGEST), Loaded("a", 1, "x"), Loaded("b", 1, "y"), Loaded("c", 1, "z")],
            lambda w, a: a[-1] == Commit((), DIGEST),
        ),
    ],
    ("TRANSFERRING", "Failed, Lost, Deadline"): [
        ([Failed("a", 1, "x"), Loaded("b", 1, DIGEST), Loaded("c", 1, DIGEST), Sent(1, DIGEST)], new_attempt),
        ([Loaded("b", 1, DIGEST), Loaded("c", 1, DIGEST), Sent(1, DIGEST), Lost("a")], new_attempt),
        ([Lost("a"), Loaded("b", 1, DIGEST), Loaded("c", 1, DIGEST), Sent(1, DIGEST)], new_attempt),
        ([Loaded("b", 1, DIGEST), Loaded("a", 1, DIGEST), Lost("a"), Deadline()], new_attempt),
        ([Loaded("b", 1, DIGEST), Sent(1, DIGEST), Deadline()], new_attempt),
        ([Loaded(m, 1, DIGEST) for m in "abc"] + [Failed(TRAINER, 1, "x")], new_attempt),
    ],
    ("COMMITTING", "CommitAnswer(ok)"): [
        ([CommitAnswer(True)], lambda w, a: w.session.phase is Phase.DONE and w.session.roster == list("abc"))
    ],
    ("COMMITTING", "CommitAnswer(refused)"): [
        (
            [CommitAnswer(False, "why")],
            lambda w, a: w.session.phase is Phase.ABANDONED and w.session.why == "why",
        )
    ],
    ("any", "TrainerLost"): [
        ([TrainerLost()], lambda w, a: w.session.phase is Phase.ABANDONED and a == []),
    ],
}


def table() -> list[tuple[str, str]]:
    """(phase, event) of every row in the docstring."""
    rows = re.findall(r"^\| (\w+) +\| (.+?) +\| .+\|$", module.__doc__ or "", re.MULTILINE)
    return [row for row in rows if row[0] != "phase"]


def test_the_docstrings_table_is_the_one_that_is_tested() -> None:
    assert sorted(table()) == sorted(ROWS)


@pytest.mark.parametrize(
    ("phase", "events", "outcome"),
    [
        pytest.param(start, events, outcome, id=f"{start}-{event}-{number}")
        for (row_phase, event), cases in ROWS.items()
        for number, (events, outcome) in enumerate(cases)
        for start in (PHASES if row_phase == "any" else [row_phase])
    ],
)
def test_row_of_the_table(phase: str, events: list[Event], outcome: Outcome) -> None:
    world = PHASES[phase]()
    assert world.session.phase is Phase[phase]
    *earlier, last = events
    for event in earlier:
        world.tell(event)
        assert world.session.phase is Phase[phase], f"{event} alone moves it on"
    assert outcome(world, world.tell(last)), world.log


IGNORED: dict[str, list[Event]] = {
    "PAUSING": [Lost("a"), Ready("a", 0), Loaded("a", 0, DIGEST), Failed("a", 0, "x"), CommitAnswer(True)],
    "FORMING": [
        Paused("a"),
        Ready("a", 0),
        Failed("a", 0, "x"),
        Lost("stranger"),
        Left("stranger"),
        CommitAnswer(True),
    ],
    "TRANSFERRING": [
        Paused("a"),
        Ready("a", 1),
        Loaded("a", 0, "x"),
        Loaded("stranger", 1, "x"),
        Sent(0, "x"),
        Failed("a", 0, "x"),
        Lost("stranger"),
        CommitAnswer(True),
    ],
    "COMMITTING": [Lost("a"), Failed("a", 1, "x"), Loaded("a", 1, "x"), Sent(1, "x"), Deadline()],
}


@pytest.mark.parametrize(("phase", "event"), [(p, e) for p, events in IGNORED.items() for e in events])
def test_late_early_and_foreign_events_change_nothing(phase: str, event: Event) -> None:
    world = PHASES[phase]()
    before = repr(world.session)
    assert world.tell(event) == []
    assert repr(world.session) == before


@pytest.mark.parametrize("phase", ["FORMING", "TRANSFERRING"])
def test_the_failure_of_a_stranger_changes_nothing(phase: str) -> None:
    """It would be taken for a culprit that is gone already, so attempts would not be counted: no end."""
    world = PHASES[phase]()
    before = repr(world.session)
    assert world.tell(Failed("stranger", 1, "x")) == []
    assert repr(world.session) == before


# ---- directed stories ----


def test_a_failure_in_forming_is_not_forgotten_when_others_are_ready_later() -> None:
    """The reports of one attempt may come in any order."""
    world = to_forming()
    for event in (Failed("c", 1, "x"), Ready("a", 1), Ready("b", 1)):
        world.tell(event)
    assert new_attempt(world, world.tell(Ready(TRAINER, 1)))


def test_a_member_lost_in_forming_takes_no_group_with_it() -> None:
    """The group that the others just met in has a dead rank: it must not be used."""
    world = to_forming()
    for event in (Ready("c", 1), Lost("c"), Ready("a", 1), Ready("b", 1)):
        world.tell(event)
    assert new_attempt(world, world.tell(Ready(TRAINER, 1)))


def test_an_empty_roster_commits() -> None:
    world = World(Session([], 3))
    assert world.log == [Form(1, ())]
    assert world.tell(Ready(TRAINER, 1)) == [Transfer(1, ())]
    assert world.tell(Sent(1, DIGEST)) == [Commit((), DIGEST)]
    world.tell(CommitAnswer(True))
    assert world.session.phase is Phase.DONE


def test_everybody_silent_ends_in_an_empty_commit() -> None:
    world = to_pausing()
    assert [type(a) for a in world.tell(Deadline())] == [Expire, Expire, Expire, Form]
    world.tell(Ready(TRAINER, 1))
    assert world.tell(Sent(1, DIGEST)) == [Commit((), DIGEST)]


def test_a_good_group_is_used_again() -> None:
    world = to_pausing("ab", group_is_good=True)
    world.tell(Paused("a"))
    assert world.tell(Paused("b")) == [Transfer(1, ("a", "b"))]


def test_a_good_group_is_not_used_without_one_of_its_members() -> None:
    world = to_pausing("ab", group_is_good=True)
    world.tell(Paused("a"))
    assert world.tell(Deadline())[-1] == Form(1, ("a",))


def test_tries_without_a_culprit_end_with_everybody_expired() -> None:
    """Each time the members report a failure and nobody is silent: no one is at fault."""
    world = to_forming("ab")
    for attempt in (1, 2, 3):
        assert not world.expired
        for who in ("a", "b", TRAINER):
            actions = world.tell(Failed(who, attempt, "peer closed"))
    assert actions[-1] == Form(4, ())
    assert world.expired == {"a", "b"}
    world.tell(Ready(TRAINER, 4))
    assert world.tell(Sent(4, DIGEST)) == [Commit((), DIGEST)]


def test_tries_with_a_culprit_expire_nobody_else() -> None:
    """`max_attempts` counts tries without a culprit; each of these has one, and loses it."""
    world = to_forming("abcd")
    for attempt, gone in ((1, "a"), (2, "b"), (3, "c")):
        for who in sorted(world.session.roster):
            if who != gone:
                world.tell(Ready(who, attempt))
        world.tell(Ready(TRAINER, attempt))
        world.tell(Deadline())
    assert world.expired == {"a", "b", "c"}
    assert world.session.roster == ["d"]


def test_a_trainer_that_cannot_send_to_nobody_ends_the_session() -> None:
    world = World(Session([], 2))
    world.tell(Failed(TRAINER, 1, "no store"))
    world.tell(Deadline())
    assert world.session.phase is Phase.ABANDONED
    assert "the trainer cannot send" in world.session.why


def catch_up() -> World:
    world = World(Session(["a"], 1, catch_up=True))
    assert world.log == [Form(1, ("a",))], "a joiner has nothing to pause"
    return world


def test_catch_up() -> None:
    world = catch_up()
    world.tell(Ready("a", 1))
    world.tell(Ready(TRAINER, 1))
    world.tell(Sent(1, DIGEST))
    assert world.tell(Loaded("a", 1, DIGEST)) == [Commit(("a",), DIGEST)]


FAILING_JOINERS: dict[str, list[Event]] = {
    "silent": [Ready(TRAINER, 1), Deadline()],
    "lost": [Lost("a"), Ready(TRAINER, 1)],
    "lost after the trainer": [Ready(TRAINER, 1), Lost("a")],
    "fails": [Ready(TRAINER, 1), Failed("a", 1, "x")],
    "fails first": [Failed("a", 1, "x"), Ready(TRAINER, 1)],
    "silent in transfer": [Ready(TRAINER, 1), Ready("a", 1), Sent(1, DIGEST), Deadline()],
    "lost in transfer": [Ready(TRAINER, 1), Ready("a", 1), Lost("a"), Sent(1, DIGEST)],
    "fails in transfer": [Ready(TRAINER, 1), Ready("a", 1), Failed("a", 1, "x"), Sent(1, DIGEST)],
    "other weights": [Ready(TRAINER, 1), Ready("a", 1), Sent(1, DIGEST), Loaded("a", 1, "wrong")],
}


@pytest.mark.parametrize("events", FAILING_JOINERS.values(), ids=FAILING_JOINERS)
def test_a_failing_joiner_is_expired_and_the_catch_up_ends(events: list[Event]) -> None:
    world = catch_up()
    for event in events:
        world.tell(event)
    assert world.session.phase is Phase.ABANDONED
    assert world.expired == {"a"}
    assert not world.commits


@given(
    st.permutations([Loaded("a", 1, DIGEST), Loaded("b", 1, DIGEST), Sent(1, DIGEST), Failed("c", 1, "x")])
)
def test_reports_of_a_transfer_commute(events: list[Event]) -> None:
    world = to_transferring()
    for event in events:
        world.tell(event)
    assert world.session.phase is Phase.FORMING
    assert world.session.roster == list("abc")
    assert world.session.attempt == 2
