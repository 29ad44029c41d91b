"""Stories of the session's state machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_coordinator.rounds.session import (
    TRAINER,
    Commit,
    CommitAnswer,
    Deadline,
    Event,
    Expire,
    Form,
    Loaded,
    Lost,
    Paused,
    Phase,
    Ready,
    RoundFailed,
    Sent,
    Transfer,
    TransferSession,
)
from tests.fast.coordinator.session_world import (
    DIGEST,
    World,
    new_attempt,
    to_forming,
    to_pausing,
    to_transferring,
)


def test_a_failure_in_forming_is_not_forgotten_when_others_are_ready_later() -> None:
    """The reports of one attempt may come in any order."""
    world = to_forming()
    for event in (RoundFailed("c", 1, "x"), Ready("a", 1), Ready("b", 1)):
        world.tell(event)
    assert new_attempt(world, world.tell(Ready(TRAINER, 1)))


def test_a_member_lost_in_forming_takes_no_group_with_it() -> None:
    """The group that the others just met in has a dead rank: it must not be used."""
    world = to_forming()
    for event in (Ready("c", 1), Lost("c"), Ready("a", 1), Ready("b", 1)):
        world.tell(event)
    assert new_attempt(world, world.tell(Ready(TRAINER, 1)))


def test_an_empty_roster_commits() -> None:
    world = World(TransferSession([], 3))
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
            actions = world.tell(RoundFailed(who, attempt, "peer closed"))
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
    world = World(TransferSession([], 2))
    world.tell(RoundFailed(TRAINER, 1, "no store"))
    world.tell(Deadline())
    assert world.session.phase is Phase.ABANDONED
    assert "the trainer cannot send" in world.session.why


def catch_up() -> World:
    world = World(TransferSession(["a"], 1, catch_up=True))
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
    "fails": [Ready(TRAINER, 1), RoundFailed("a", 1, "x")],
    "fails first": [RoundFailed("a", 1, "x"), Ready(TRAINER, 1)],
    "silent in transfer": [Ready(TRAINER, 1), Ready("a", 1), Sent(1, DIGEST), Deadline()],
    "lost in transfer": [Ready(TRAINER, 1), Ready("a", 1), Lost("a"), Sent(1, DIGEST)],
    "fails in transfer": [Ready(TRAINER, 1), Ready("a", 1), RoundFailed("a", 1, "x"), Sent(1, DIGEST)],
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
    st.permutations(
        [Loaded("a", 1, DIGEST), Loaded("b", 1, DIGEST), Sent(1, DIGEST), RoundFailed("c", 1, "x")]
    )
)
def test_reports_of_a_transfer_commute(events: list[Event]) -> None:
    world = to_transferring()
    for event in events:
        world.tell(event)
    assert world.session.phase is Phase.FORMING
    assert world.session.roster == list("abc")
    assert world.session.attempt == 2
