"""Every script with arguments that no service sends: refused without a trace, or accepted and in balance.

Each script has a call that does something to a ledger with samples in all states. The tests spoil that call:
each argument by each kind of garbage, too few and too many of them, and (hypothesis) several at once. After
an error the server has counted no write, and all keys, as DUMP gives them, are what they were. After an
answer the audit balances, and what reads the ledger for people can still read it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ledger import ArgumentRefused, LedgerError, SyncLedger, keys, ops, scripts
from headrace.ledger.audit import compare, read_op
from headrace.ledger.marks import Marks
from headrace.ledger.ops import Op

ROOT = Path(__file__).resolve().parents[3]
RUN = "property"
META = keys.meta(RUN)
READY, FLYING, MINE, PARKED, QUEUED, TRAINING, TRAINED, DEAD, DROPPED = (f"{n:010d}" for n in range(9))
Args = tuple[bytes | str | int, ...]

LEDGER, WRITES = "an-id", 27
"""Of the ledger in its first stage."""
CALLS: dict[str, tuple[str, Args]] = {
    "admit": ("idle", (1, "c", 1)),
    "adopt_rest": ("adopting", (2, FLYING, TRAINED)),
    "adopt_trained": ("adopting", (2, QUEUED, 3, TRAINED, 4)),
    "alive": ("idle", ()),
    "audit": ("idle", ()),
    "beat": ("idle", ("a", 7)),
    "beats": ("idle", ()),
    "claim": ("idle", (1, 1, 1, "new")),
    "commit": ("syncing", (1, 3, 1, 2, "d2", 1, 0, 12, "a", "b")),
    "complete": ("idle", (1,)),
    "configure": ("idle", (9, 2, 1, 1, 1000, "print")),
    "dead": ("idle", (0, 10)),
    "delete": ("idle", (LEDGER, WRITES)),
    "drop": ("idle", (1, "filter", QUEUED)),
    "expire": ("idle", ("a", "lease", "", 0)),
    "fail": ("idle", ("a", FLYING, 2, "reward", "why")),
    "fingerprint": ("idle", ()),
    "finish": ("idle", ("a", FLYING, 2, b"\x00\xff", 0, 1, 7)),
    "finish_adopt": ("settled", (2, 1, 0, 4, 3, 2, 9, "same", -1)),
    "hand_back": ("idle", ("a", FLYING, 2)),
    "hold": ("idle", (1, 3, 1)),
    "issue": ("idle", (9, 0, "new", b"prompt", b"another")),
    "open_lineage": ("idle", (1, "new")),
    "open_term": ("idle", ()),
    "park": ("idle", ("a", FLYING, 2, b"work", 0)),
    "payloads": ("idle", (QUEUED, READY)),
    "reject": ("idle", (1, TRAINING, 1, "non_finite", "why", 0)),
    "requeue_dead": ("idle", (DEAD, "new", 1)),
    "sample": ("idle", (QUEUED,)),
    "stats": ("idle", ()),
    "take": ("idle", ("b", 1, 2, "new", 0)),
    "train": ("idle", (1, 9, TRAINING)),
    "trim": ("idle", (5,)),
    "val_close": ("idle", (1,)),
    "val_finish": ("idle", ("a", 1, 0, b"result")),
    "val_forget": ("idle", (0,)),
    "val_load": ("idle", (0, b"row", 7, b"row")),
    "val_results": ("idle", (1,)),
    "val_status": ("idle", ()),
    "val_take": ("idle", ("b", 1, 1, "new")),
}
"""Script -> a stage of the ledger, and arguments that it takes there."""

READS = {"audit", "beats", "dead", "fingerprint", "payloads", "sample", "stats", "val_results", "val_status"}

GARBAGE: list[bytes | str | int] = [
    *(
        "",
        "0",
        "1",
        "-1",
        "-5",
        2**31,
        2**53,
        2**63,
        10**14 - 1,
        10**30,
        "1.0",
        "0.5",
        "1e3",
        "0x1",
        "01",
        "+1",
        "-0",
    ),
    *(
        "nan",
        "inf",
        "-inf",
        " 1",
        "1 ",
        "true",
        "nil",
        "None",
        "a",
        "b",
        "nobody",
        "a b",
        "ready",
        "dead",
        "new",
        "used",
    ),
    *(
        READY,
        FLYING,
        QUEUED,
        TRAINING,
        DEAD,
        "0000000009",
        "9999999999",
        "000000000",
        "00000000000",
        "0x00000001",
    ),
    *(
        b"\x00",
        b"\xff\xfe",
        b"0\x00",
        b"\xed\xa0\x80",
        "é".encode(),
        "headrace:{other}:s:0000000001",
        "*",
        "%s",
        "x" * 300,
    ),
    *("x" * 20_000, b"\xff" * 100_000),
]


class Ledgers:
    """The server with the ledger in one of its stages, as often as is wanted."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.stages: dict[str, dict[bytes, bytes]] = {}
        for name in scripts.names():
            client.script_load(scripts.source(name))

    def dump(self) -> dict[bytes, bytes]:
        names: list[bytes] = sorted(self.client.keys("*"))  # type: ignore[arg-type, type-var]
        with self.client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.dump(name)
            return dict(zip(names, pipe.execute(), strict=True))

    def restore(self, stage: str) -> dict[bytes, bytes]:
        kept = self.stages[stage]
        with self.client.pipeline(transaction=False) as pipe:
            pipe.flushdb()
            for name, value in kept.items():
                pipe.restore(name, 0, value)
            pipe.execute()
        return kept

    def call(self, script: str, args: Args, *names: str) -> Any:
        given_keys = names or (META,)
        return self.client.execute_command(
            "EVALSHA", scripts.sha(script), len(given_keys), *given_keys, *args
        )

    def writes(self) -> int:
        return int(self.client.info("persistence")["rdb_changes_since_last_save"])

    def refused(self, script: str, stage: str, args: Args) -> bool:
        """Whether the call is an error. Either way the ledger is as it may be, or this fails."""
        told, before = f"{script} {args!r:.300}", self.writes()
        error = None
        try:
            self.call(script, args)
        except redis.ResponseError as answer:
            error = answer
        if error is not None:
            assert self.writes() == before, f"{told}: wrote, then {error}"
            return True
        if script == "delete" and not self.client.dbsize():  # whole: nothing of it is left to be unbalanced
            self.restore(stage)
            return False
        ledger = SyncLedger(self.client, RUN, retry_s=1.0)
        report = compare(ledger.run(read_op()))
        assert report.balanced, f"{told}: {report.problems}"
        assert ledger.run(ops.stats()).balanced, told
        for reading in (ops.dead(), ops.beats(), ops.val_status(), ops.fingerprint()):
            ledger.run(reading)
        if self.writes() != before:
            self.restore(stage)
        return False


@pytest.fixture(scope="module")
def ledgers(valkey: redis.Redis) -> Ledgers:
    """One sample in each state, some of it another owner's, and the stages that follow."""
    valkey.flushall()
    found = Ledgers(valkey)
    ledger = SyncLedger(valkey, RUN, retry_s=5.0, seen=Marks(ledger=LEDGER))

    def do(*calls: Op[Any]) -> None:
        for op in calls:
            ledger.run(op)

    def finish(sample: str) -> Op[Any]:
        return ops.finish("b", sample, 1, b"payload", 0, 0, 7)

    do(ops.configure(20, 1, 0, 1, 1000, "print"), ops.open_term(), ops.open_lineage(0, "l1"))
    do(
        ops.finish_adopt(1),
        ops.val_load([(0, b"row 0"), (1, b"row 1")]),
        ops.issue(0, [b"p"] * 9, False, "used"),
    )
    do(ops.hold(1, 1, 1), ops.commit(1, 1, 1, 0, "d", ["a", "b"], False), ops.take("b", 0, 9, "t"))
    do(ops.hand_back("b", FLYING, 1), ops.take("a", 0, 1, "t2"), ops.hand_back("b", READY, 1))
    do(ops.park("b", PARKED, 1, b"work", 0), ops.fail("b", DEAD, 1, "reward", "no score"))
    do(finish(TRAINED), ops.claim(1, 0, 1, "c"), ops.train(1, 1, [TRAINED]))
    do(finish(DROPPED), ops.drop(1, [DROPPED], "filter"))
    do(ops.hold(1, 2, 1), ops.commit(1, 2, 1, 1, "d1", ["a", "b"], True))
    do(finish(TRAINING), ops.claim(1, 1, 1, "c2"), finish(QUEUED), ops.val_take("a", 1, 1, "v"))
    do(ops.beat("a", 3), ops.beat("b", 3))
    counts = ledger.run(ops.stats()).counts
    assert {**counts, "in_flight": counts["in_flight"] - 1} == dict.fromkeys(counts, 1), counts
    assert ledger.seen.writes == WRITES
    found.stages["idle"] = found.dump()
    do(ops.train(1, 2, [TRAINING]), ops.hold(1, 3, 1))
    found.stages["syncing"] = found.dump()
    found.restore("idle")
    ledger.seen = Marks()  # of a later stage
    do(ops.open_lineage(1, "l2"))
    found.stages["adopting"] = found.dump()
    do(ops.adopt_trained(2, [(TRAINED, 1)]), ops.adopt_rest(2, [FLYING, MINE]))
    found.stages["settled"] = found.dump()
    return found


def test_every_script_declares_its_arguments_and_has_a_call_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(CALLS) == set(scripts.names())
    monkeypatch.setattr(scripts, "_file", lambda name: "return { 'ok' }")
    with pytest.raises(ValueError, match=r"take\.lua does not begin with accept"):
        scripts.source.__wrapped__("take")


def test_every_operation_has_a_caller() -> None:
    """One that only tests call is a rule of the ledger that nothing needs."""
    text = "\n".join(f.read_text() for top in ("headrace", "services") for f in (ROOT / top).rglob("*.py"))
    made = re.findall(r"^def (\w+)\(", Path(ops.__file__).read_text(), re.MULTILINE)
    public = [name for name in made if not name.startswith("_") and name != "new_request_id"]
    assert len(public) > 30
    assert [name for name in public if not re.search(rf"\bops\.{name}\b", text)] == []


@pytest.mark.parametrize("script", CALLS)
def test_one_spoilt_argument(ledgers: Ledgers, script: str) -> None:
    stage, args = CALLS[script]
    ledgers.restore(stage)
    ledgers.call(script, args)
    assert (ledgers.dump() != ledgers.stages[stage]) == (script not in READS), "the call does what it is for"
    ledgers.restore(stage)
    for at in range(len(args)):
        answers = [ledgers.refused(script, stage, (*args[:at], bad, *args[at + 1 :])) for bad in GARBAGE]
        assert any(answers) or (script, at) == ("val_finish", 3), f"argument {at} of {script} may be anything"
        assert ledgers.dump() == ledgers.stages[stage]
    for some in [args[:n] for n in range(len(args))] + [(*args, bad) for bad in GARBAGE] + [args * 300]:
        ledgers.refused(script, stage, some)
    assert ledgers.dump() == ledgers.stages[stage]


words = (
    st.sampled_from(GARBAGE) | st.binary(max_size=30) | st.integers(-(2**64), 2**64) | st.floats().map(str)
)


@settings(max_examples=settings().max_examples * 4)
@given(script=st.sampled_from(sorted(CALLS)), data=st.data())
def test_several_spoilt_arguments(ledgers: Ledgers, script: str, data: st.DataObject) -> None:
    stage, args = CALLS[script]
    ledgers.restore(stage)
    mixed = data.draw(st.tuples(*(st.just(good) | words for good in args)))
    more = data.draw(st.lists(words | st.sampled_from(args or ("",)), max_size=4))
    ledgers.refused(script, stage, (*mixed, *more))
    assert ledgers.dump() == ledgers.stages[stage]


def test_a_key_that_is_no_runs_is_refused(ledgers: Ledgers) -> None:
    ledgers.restore("idle")
    before = ledgers.dump()
    for names in (
        ("meta",),
        ("headrace:{}:meta",),
        (META, META),
        (META, META, META),
        (META[:-1],),
        ("headrace:{a:b}:meta",),
    ):
        for script, (_, args) in CALLS.items():
            with pytest.raises(redis.ResponseError, match="the one key of a script"):
                ledgers.call(script, args, *names)
    assert ledgers.dump() == before


def test_a_service_does_not_begin_where_something_else_lies(ledgers: Ledgers) -> None:
    ledgers.restore("idle")
    place = keys.prefix(RUN) + "trained"
    ledgers.client.delete(place)
    ledgers.client.set(place, "somebody's")
    before = ledgers.dump()
    ledger = SyncLedger(ledgers.client, RUN)
    for op in (ops.open_term(), ops.open_lineage(1), ops.configure(9, 2, 1, 1, 1000, "print")):
        with pytest.raises(
            LedgerError, match=f"the key {place} holds a string and must hold a zset".replace("{", r"\{")
        ):
            ledger.run(op)
    assert ledgers.dump() == before
    ledgers.client.delete(place)  # as the message advises
    assert ledger.run(ops.open_term()).term == 2


def test_the_coordinators_door_takes_the_names_that_the_ledger_takes(ledgers: Ledgers) -> None:
    ledgers.restore("idle")
    for name in (bad if isinstance(bad, str) else str(bad) for bad in GARBAGE if not isinstance(bad, bytes)):
        assert ledgers.refused("admit", "idle", (1, name, 1)) == (not keys.is_name(name)), name


def test_the_sender_hears_which_argument_is_wrong(ledgers: Ledgers) -> None:
    ledgers.restore("idle")
    ledger = SyncLedger(ledgers.client, RUN)
    told = "refused train: the argument step is '1.5', and must be a whole number from 0 to 99999999999999"
    with pytest.raises(ArgumentRefused, match=rf"127\.0\.0\.1:\d+ {re.escape(told)}$"):
        ledger.run(ops.train(1, "1.5", [TRAINING]))  # type: ignore[arg-type]
    with pytest.raises(ArgumentRefused, match=r"refused finish: min_version 1 is above max_version 0$"):
        ledger.run(ops.finish("a", FLYING, 2, b"payload", 1, 0, 7))
