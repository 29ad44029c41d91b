"""Every row of the session's table, and events that must change nothing."""

from __future__ import annotations

import re

import pytest

from headrace_coordinator.rounds import session as module
from headrace_coordinator.rounds.session import (
    TRAINER,
    Commit,
    CommitAnswer,
    Deadline,
    Event,
    Expire,
    Form,
    Left,
    Loaded,
    Lost,
    Paused,
    Phase,
    Ready,
    RoundFailed,
    Sent,
    TrainerLost,
    Transfer,
)
from tests.fast.coordinator.session_world import (
    DIGEST,
    PHASES,
    Outcome,
    new_attempt,
)

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
            lambda w, a: a == [Form(1, ("a", "c"))],
        ),
        (
            [Left("b")],
            lambda w, a: w.session.phase is Phase.PAUSING and not a and "b" not in w.session.roster,
        ),
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
    ("FORMING", "Failed, Lost, Left, Deadline"): [
        ([Ready(TRAINER, 1), Ready("a", 1), Ready("b", 1), RoundFailed("c", 1, "x")], new_attempt),
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
    ("TRANSFERRING", "Failed, Lost, Left, Deadline"): [
        (
            [RoundFailed("a", 1, "x"), Loaded("b", 1, DIGEST), Loaded("c", 1, DIGEST), Sent(1, DIGEST)],
            new_attempt,
        ),
        ([Loaded("b", 1, DIGEST), Loaded("c", 1, DIGEST), Sent(1, DIGEST), Lost("a")], new_attempt),
        ([Lost("a"), Loaded("b", 1, DIGEST), Loaded("c", 1, DIGEST), Sent(1, DIGEST)], new_attempt),
        ([Loaded("b", 1, DIGEST), Loaded("a", 1, DIGEST), Lost("a"), Deadline()], new_attempt),
        ([Loaded("b", 1, DIGEST), Sent(1, DIGEST), Deadline()], new_attempt),
        ([*(Loaded(m, 1, DIGEST) for m in "abc"), RoundFailed(TRAINER, 1, "x")], new_attempt),
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
    "PAUSING": [
        Lost("a"),
        Ready("a", 0),
        Loaded("a", 0, DIGEST),
        RoundFailed("a", 0, "x"),
        CommitAnswer(True),
    ],
    "FORMING": [
        Paused("a"),
        Ready("a", 0),
        RoundFailed("a", 0, "x"),
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
        RoundFailed("a", 0, "x"),
        Lost("stranger"),
        CommitAnswer(True),
    ],
    "COMMITTING": [Lost("a"), RoundFailed("a", 1, "x"), Loaded("a", 1, "x"), Sent(1, "x"), Deadline()],
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
    assert world.tell(RoundFailed("stranger", 1, "x")) == []
    assert repr(world.session) == before
