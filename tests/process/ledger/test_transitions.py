"""The table of transitions, and the guards of lineages, rounds and validation, on server and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from headrace.ledger import (
    AdoptError,
    ArgumentRefused,
    audit,
    ops,
)
from headrace.ledger import adopt as adopt_checkpoint
from headrace.ledger.client import Adopted
from headrace.ledger.states import ALLOWED, Event, State
from tests.process.ledger.lockstep import ID, KEEP_ALL, LockStep, bring_to

Make = Callable[[], LockStep]


def attempts_of(event: Event) -> list[Callable[[LockStep], object]]:
    """Every way in which this event could move sample 0, right or wrong."""
    stale = [("b", 1), ("a", 0), ("a", 1), ("a", 2)]

    def adopting(name: str, argument: Any) -> Callable[[LockStep], object]:
        def run(pair: LockStep) -> object:
            pair("open_lineage", 1, pair.request())
            return pair(name, 2, argument)

        return run

    def calling(name: str, *args: Any) -> Callable[[LockStep], object]:
        return lambda pair: pair(name, *args)

    def at_limit_zero(name: str, *args: Any) -> Callable[[LockStep], object]:
        def run(pair: LockStep) -> object:
            pair("configure", 4, 1, 0, 0, 1000, "print")
            return pair(name, *args)

        return run

    table: dict[Event, list[Callable[[LockStep], object]]] = {
        Event.ISSUE: [lambda p: p.issue(1), lambda p: p("issue", 0, [b"x"], False, p.request())],
        Event.TAKE: [lambda p: p.take("a", 9), lambda p: p.take("x", 9), lambda p: p("take", "a", 7, 9, "q")],
        Event.FINISH: [lambda p, o=o, a=a: p.finish(o, ID, a) for o, a in stale]
        + [lambda p: p("finish", "a", ID, 1, b"x", 0, 1, 1)],
        Event.PARK: [calling("park", o, ID, a, b"w", 0) for o, a in stale],
        Event.HAND_BACK: [calling("hand_back", o, ID, a) for o, a in stale],
        Event.FAIL: [calling("fail", o, ID, a, "r", "d") for o, a in stale]
        + [at_limit_zero("fail", "a", ID, 1, "r", "d")],
        Event.EXPIRE: [
            lambda p: p("expire", "a", "lease"),
            lambda p: p("expire", "b", "lease"),
            at_limit_zero("expire", "a", "lease"),
        ],
        Event.CLAIM: [lambda p: p.claim(0, 1), lambda p: p("claim", 0, 0, 1, "q"), lambda p: p.claim(5, 1)],
        Event.TRAIN: [lambda p: p("train", 1, 2, [ID]), lambda p: p("train", 0, 2, [ID])],
        Event.DROP: [lambda p: p("drop", 1, [ID], "x"), lambda p: p("drop", 0, [ID], "x")],
        Event.REJECT: [calling("reject", n, ID, a, "r", "d") for n, a in [(0, 1), (1, 2), (1, 1)]]
        + [at_limit_zero("reject", 1, ID, 1, "r", "d")],
        Event.REQUEUE_DEAD: [
            lambda p: p("requeue_dead", ID, p.request(), False),
            lambda p: p("requeue_dead", "nobody", p.request(), False),
        ],
        Event.ADOPT_TRAINED: [
            adopting("adopt_trained", [(ID, 3)]),
            lambda p: p("adopt_trained", 1, [(ID, 3)]),
        ],
        Event.ADOPT_REST: [adopting("adopt_rest", [ID]), lambda p: p("adopt_rest", 1, [ID])],
        Event.FINISH_ADOPT: [
            *(adopting("finish_adopt", keep) for keep in (None, KEEP_ALL, replace(KEEP_ALL, limit=0))),
            lambda p: p("finish_adopt", 0, None),
        ],
    }
    return table[event]


def test_every_event_on_every_state_takes_exactly_the_transitions_of_the_table(lockstep: Make) -> None:
    server: set[tuple[str, str | None, str]] = set()
    model: set[tuple[str, str | None, str]] = set()
    for state in State:
        for event in Event:
            for attempt in attempts_of(event):
                pair = lockstep()
                bring_to(pair, state)
                attempt(pair)
                attempt_again = pair.history[-1]
                pair(attempt_again[0], *attempt_again[1])  # the reply was lost: the same request once more
                server |= pair.seen
                model |= set(pair.model.log)
    assert server == ALLOWED
    assert model == ALLOWED


def test_payloads_are_there_from_finish_to_train(lockstep: Make) -> None:
    for state in State:
        pair = lockstep()
        bring_to(pair, state)
        (found,) = pair("payloads", [ID])
        assert (found is not None) == (state in (State.QUEUED, State.TRAINING)), state


def test_unknown_ids_get_a_clean_answer(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.IN_FLIGHT)
    for name in ("", "nobody", "0" * 200):
        assert pair("requeue_dead", name, "q", True) == "unknown"
        assert pair.ledger.run(ops.sample(name)) is None
        assert pair.ledger.run(ops.payloads([name])) == [None]
        with pytest.raises(ArgumentRefused, match=r"refused hand_back: the argument id is '.*ten digits$"):
            pair.ledger.run(ops.hand_back("a", name, 1))
    name = "0000000009"
    assert pair.finish("a", name, 1) == "fenced"
    assert pair("park", "a", name, 1, b"w", 0) == "fenced"
    assert pair("hand_back", "a", name, 1) == "fenced"
    assert pair("fail", "a", name, 1, "r", "d") == "fenced"
    assert pair("train", 1, 1, [name]) == "unknown"
    assert pair("drop", 1, [name], "r") == "unknown"
    assert pair("requeue_dead", name, "q", True) == "unknown"
    assert pair.ledger.run(ops.sample(name)) is None
    assert pair.ledger.run(ops.payloads([name])) == [None]
    assert pair("expire", "nobody", "").requeued == []
    assert pair.model.stats().fenced == 4


def test_late_results_are_refused_counted_and_named(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.IN_FLIGHT)
    pair("expire", "a", "lease")
    assert pair.finish("a", ID, 1) == "fenced"
    assert pair.take("b", 1).items[0].attempt == 2
    assert pair.finish("a", ID, 1) == "fenced"
    assert pair.finish("b", ID, 2) == "ok"
    assert pair.ledger.run(ops.stats()).fenced_by == {"finish": 2}


def test_old_parked_work_starts_again_from_its_prompt(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.PARKED)
    pair.sync(["b"])
    assert pair.take("b", 1, 0).items[0].work == b"work"
    pair("park", "b", ID, 2, b"more", 0)
    assert pair.take("b", 1, 1).items[0].work is None
    assert pair.ledger.run(ops.stats()).restarted == 1


# -- lineages -------------------------------------------------------------------------------------


def test_a_checkpoint_is_adopted_whatever_the_ledger_says(lockstep: Make, valkey: redis.Redis) -> None:
    pair = lockstep()
    pair.start(64, 4)
    pair.issue(20)
    pair.sync(["a"])
    for item in pair.take("a", 12).items[:10]:
        pair.finish("a", item.sample_id, item.attempt)
    for step in (1, 2):
        pair("train", 1, step, [c.sample_id for c in pair.claim(0, 4).items])
    manifest = {f"{n:010d}": 1 for n in range(4)}
    assert pair("open_lineage", 1, "open") == pair("open_lineage", 1, "open")
    assert not pair("open_lineage", 1, "other").ok
    ledger = pair.ledger
    ledger.run(ops.adopt_rest(2, [f"{n:010d}" for n in range(4, 9)]))  # cut off, and begun again
    adopted = adopt_checkpoint(ledger, 2, manifest)
    assert adopted == Adopted(kept=0, restarted=4), "beside those that went back before the cut"
    stats = ledger.run(ops.stats())
    assert stats.counts["trained"] == 4
    assert stats.counts["ready"] == 16
    assert stats.requeued == {"rollback": 4, "lineage": 4}
    assert stats.held
    assert stats.outstanding == stats.trained_since_sync == 0
    assert audit(valkey, "property").balanced
    with pytest.raises(AdoptError, match="newer lineage"):
        adopt_checkpoint(ledger, 1, manifest)


def test_what_was_claimed_goes_back_to_the_head_of_the_queue_once(lockstep: Make) -> None:
    """It may be what the trainer dies of: the second time it starts again from its prompt."""
    pair = lockstep()
    pair.start(max_required=8, claim_size=2)
    pair.issue(4)
    pair.sync(["a"])
    for item in reversed(pair.take("a", 3).items):
        pair.finish("a", item.sample_id, item.attempt)
    first = [c.sample_id for c in pair.claim(0, 2).items]
    pair("finish_adopt", open_lineage(pair), KEEP_ALL)
    pair.sync(["a"])
    again = pair.claim(1, 2).items
    assert [(c.sample_id, c.attempt) for c in again] == [(i, 1) for i in first]
    pair("finish_adopt", open_lineage(pair), KEEP_ALL)
    stats = pair.ledger.run(ops.stats())
    assert stats.kept == {"training": 2, "queued": 2}
    assert stats.requeued == {"rollback": 2}


def open_lineage(pair: LockStep) -> int:
    return int(pair("open_lineage", pair.model.lineage, pair.request()).lineage)


def test_a_checkpoint_of_another_run_is_refused(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.TRAINED)
    pair("open_lineage", 1, "q")
    with pytest.raises(AdoptError, match="never issued"):
        adopt_checkpoint(pair.ledger, 2, {"0000000005": 1})


def test_a_trimmed_prompt_cannot_be_rolled_back(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.TRAINED)
    assert pair("trim", 1) == 1
    pair("open_lineage", 1, "q")
    assert pair("adopt_rest", 2, [ID]).status == "trimmed"
    with pytest.raises(AdoptError, match="trimmed"):
        adopt_checkpoint(pair.ledger, 2, {})
    adopt_checkpoint(pair.ledger, 2, {ID: 1})


def test_the_commit_waits_for_the_closing_window_and_the_bound_holds_in_between(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(max_required=4, claim_size=2)
    pair.issue(12)
    pair.sync(["a"])
    for item in pair.take("a", 4).items:
        pair.finish("a", item.sample_id, item.attempt)
    first = [c.sample_id for c in pair.claim(0, 2).items]
    second = [c.sample_id for c in pair.claim(1, 2).items]  # the snapshot of version 1 is written
    m = pair.model
    pair("hold", m.term, m.round + 1, m.lineage)
    args = (m.term, m.round, m.lineage, 1, "d1", ["a"], False, False)
    assert pair("commit", *args).training == 2
    pair("train", 1, 1, first)
    pair("train", 1, 2, second)
    assert pair("commit", *args).status == "ok"
    assert pair("commit", *args).status == "ok"  # the reply was lost
    assert pair.ledger.run(ops.stats()).trained_since_sync == 2
    assert len(pair.take("a", 4).items) == 2


def test_what_the_old_lineage_claimed_the_new_one_cannot_train(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.TRAINING)
    pair("open_lineage", 1, "q")
    assert pair("train", 2, 1, [ID]) == "unknown"
    assert pair("drop", 2, [ID], "bad") == "unknown"


def test_claims_never_go_back_to_a_closed_window(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(max_required=4, claim_size=1)
    pair.issue(4)
    pair.sync(["a"])
    for item in pair.take("a", 4).items:
        pair.finish("a", item.sample_id, item.attempt)
    assert pair.claim(1, 1).status == "batch"
    assert pair.claim(0, 1).status == "fenced"
    assert pair.claim(2, 1).status == "fenced"
    assert pair.claim(1, 1).status == "batch"


@pytest.mark.parametrize("left", ["ready", "in_flight", "parked"])
def test_the_end_of_data_waits_for_everything_that_may_still_come(lockstep: Make, left: str) -> None:
    pair = lockstep()
    pair.start(max_required=8, claim_size=4)
    pair.issue(2, end=True)
    pair.sync(["a", "b"])
    first = pair.take("a", 1).items[0]
    pair.finish("a", first.sample_id, 1)
    if left != "ready":
        last = pair.take("a", 1).items[0]
    if left == "parked":
        pair("park", "a", last.sample_id, 1, b"work", 0)
    if left == "in_flight":
        assert pair.take("b", 1).status == "empty"
    assert pair.claim(0, 4).status == "wait"
    if left != "in_flight":
        last = pair.take("b", 1).items[0]
    pair.finish("a" if left == "in_flight" else "b", last.sample_id, last.attempt)
    assert pair.take("b", 1).status == "done"
    assert len(pair.claim(0, 4).items) == 2
    assert pair.claim(0, 4).status == "done"


def test_a_dead_sample_is_requeued_while_it_will_still_be_claimed(lockstep: Make) -> None:
    """Three samples, claimed two at once. The trainer ends at a claim that says these are the last: after
    that nothing may become ready, or it would be left over.
    """
    pair = lockstep()
    pair.start(max_required=8, claim_size=2, max_retries=0)
    pair.issue(3, end=True)
    pair.sync(["a"])
    items = pair.take("a", 3).items
    dead = items[0].sample_id
    for item in items[1:]:
        pair.finish("a", item.sample_id, 1)
    pair("fail", "a", dead, 1, "reward_error", "no score")
    assert len(pair.claim(0, 2).items) == 2
    assert pair("requeue_dead", dead, "first", False) == "ok"
    assert pair("requeue_dead", dead, "first", False) == "ok"  # the reply was lost
    assert pair("requeue_dead", dead, "second", False) == "unknown"
    assert pair.claim(0, 2).status == "wait"
    (again,) = pair.take("a", 3).items
    assert (again.sample_id, again.attempt, again.failures) == (dead, 2, 0)
    pair("fail", "a", dead, 2, "reward_error", "no score")
    assert pair("requeue_dead", dead, "first", False) == "ok"  # very late: it does nothing again
    assert pair.ledger.run(ops.stats()).counts["dead"] == 1
    assert pair.claim(0, 2).status == "done"
    assert pair("requeue_dead", dead, "third", False) == "refused"
    assert pair("requeue_dead", dead, "third", True) == "ok"
    pair("train", 1, 1, [item.sample_id for item in items[1:]])
    pair("open_lineage", 1, "open")  # the run is started again, from its last checkpoint
    pair("adopt_trained", 2, [(item.sample_id, 1) for item in items[1:]])
    pair("adopt_rest", 2, [dead])
    pair("finish_adopt", 2)
    pair.sync(["a"])
    (last,) = pair.take("a", 3).items
    pair.finish("a", dead, last.attempt)
    reply = pair.claim(1, 2)
    assert (reply.status, [c.sample_id for c in reply.items]) == ("final_short", [dead])
    pair("train", 2, 2, [dead])
    assert pair.ledger.run(ops.stats()).counts["trained"] == 3


def test_the_last_short_batch_is_the_end_too(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(max_required=8, claim_size=2, max_retries=0)
    pair.issue(2, end=True)
    pair.sync(["a"])
    first, second = pair.take("a", 2).items
    pair("fail", "a", first.sample_id, 1, "reward_error", "")
    pair.finish("a", second.sample_id, 1)
    assert pair.claim(0, 2).status == "final_short"
    assert pair("requeue_dead", first.sample_id, "q", False) == "refused"


def test_dead_samples_tell_all_about_themselves(lockstep: Make) -> None:
    pair = lockstep()
    bring_to(pair, State.DEAD)
    prompt = pair.model.records[0].prompt
    assert prompt is not None
    assert pair.ledger.run(ops.dead()) == [ops.r.DeadSample(ID, "reward", "no score", 2, 2, 0, prompt)]  # type: ignore[attr-defined]


def test_stale_rounds_terms_and_lineages_are_fenced(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(4, 2)
    assert pair.ledger.run(ops.stats()).held  # no commit yet: nothing to go back to
    pair.sync(["a"])
    assert pair("hold", 1, 1, 1) == "fenced"  # round 1 has committed
    assert pair("hold", 0, 2, 1) == "fenced"
    assert pair("hold", 1, 2, 0) == "fenced"
    assert pair("hold", 1, 2, 1) == pair("hold", 1, 2, 1) == "ok"
    assert pair("admit", 1, "b", 0) == "refused"
    assert pair("commit", 1, 1, 1, 1, "d", [], False, False).status == "fenced"
    assert pair("commit", 1, 2, 1, 2, "d", [], False, False).status == "fenced"
    assert pair("commit", 1, 2, 1, 1, "d", [], False, False).status == "ok"
    assert not pair.ledger.run(ops.stats()).held
    assert pair("commit", 1, 2, 1, 2, "d", [], False, False).status == "fenced"
    assert pair("admit", 1, "b", 0) == "refused"  # it has older weights by now
    assert pair("admit", 1, "b", 1) == "ok"


def test_validation_gives_each_row_once_and_never_mixes_versions(lockstep: Make) -> None:
    pair = lockstep()
    pair.start(4, 2)
    assert pair("val_load", [(n, b"row %d" % n) for n in range(12)]) == 12
    pair.sync(["a", "b"], validate=True)
    rows = pair("val_take", "a", 0, 5, "v1")
    assert rows == pair("val_take", "a", 0, 5, "v1")
    assert [row for row, _ in rows] == [0, 1, 2, 3, 4]
    assert pair("val_take", "x", 0, 5, "v2") == []
    assert pair("val_finish", "a", 0, 0, b"r0") == pair("val_finish", "a", 0, 0, b"r0") == "ok"
    assert pair("val_finish", "b", 0, 1, b"no") == "refused"
    pair("expire", "a", "lease")
    rest = pair("val_take", "b", 0, 99, "v3")
    assert len(rest) == 11
    for row, _ in rest[:-1]:
        pair("val_finish", "b", 0, row, b"r%d" % row)
    assert pair("val_status").open
    pair("val_finish", "b", 0, rest[-1][0], b"last")
    assert pair("val_status") == ops.r.ValStatus(0, 12, 12, False)  # type: ignore[attr-defined]
    assert pair("val_results", 0)[:2] == [b"r0", b"r1"]
    pair.sync(["b"], validate=True)
    assert len(pair("val_take", "b", 1, 2, "v4")) == 2
    pair.sync(["b"])
    assert pair("val_finish", "b", 1, 0, b"late") == "refused"
    assert pair("val_close", 1) == "ok"
    assert pair("val_results", 1) == []
    assert pair("val_forget", 1) == "refused", "a status may still ask for it"
    assert pair("val_forget", 0) == pair("val_forget", 0) == "ok"
    assert pair("val_results", 0) == []
