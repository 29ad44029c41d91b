"""A ledger that went back does nothing for whoever has seen more of it, and a live one is not deleted.

The server is put back to what it was by restoring every key, as an older append-only file would.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from headrace.ledger import LedgerError, LedgerWentBack, SyncLedger, adopt, audit, keys, ops, scripts
from headrace.ledger.marks import Marks, read, why_refused
from headrace.local.valkey_server import start_valkey
from tests.waiting import until

RUN = "marks"
State = dict[bytes, bytes]


def dump(client: redis.Redis, run: str = RUN) -> State:
    return {name: client.dump(name) for name in client.scan_iter(match=keys.prefix(run) + "*")}  # type: ignore[misc]


def put_back(client: redis.Redis, state: State) -> None:
    client.flushall()
    for name, value in state.items():
        client.restore(name, 0, value)


def there(client: redis.Redis) -> Marks:
    found = client.hmget(keys.meta(RUN), "ledger", "version", "lineage", "cursor", "term", "writes")
    return read("/".join((value or b"").decode() for value in found))  # type: ignore[union-attr]


def configured(client: redis.Redis, run: str = RUN, seen: Marks | None = None) -> SyncLedger:
    ledger = SyncLedger(client, run, retry_s=2.0, seen=seen)
    ledger.run(ops.configure(64, 2, 1, 1, 1000, "print"))
    return ledger


def act(ledger: SyncLedger, what: str) -> None:
    """What one of the services does next."""
    s = ledger.run(ops.stats())
    match what:
        case "issue":
            ledger.run(ops.issue(s.cursor, [b"p", b"p"], False))
        case "term":
            ledger.run(ops.open_term())
        case "lineage":
            ledger.run(ops.open_lineage(s.lineage))
            ledger.run(ops.finish_adopt(s.lineage + 1))
        case "commit":
            ledger.run(ops.hold(s.term, s.round + 1, s.lineage))
            ledger.run(ops.commit(s.term, s.round + 1, s.lineage, s.version + 1, "d", ["a"], False))
        case "take":
            ledger.run(ops.take("a", s.version, 1))
        case "beat":
            ledger.run(ops.beat("a", s.finished + 1))
        case "look":
            pass


ACTIONS = ("issue", "term", "lineage", "commit", "take", "beat", "look")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("act"), st.integers(0, 2), st.sampled_from(ACTIONS)),
        st.tuples(st.just("snapshot"), st.just(0), st.just("")),
        st.tuples(st.just("put back"), st.integers(0, 9), st.just("")),
        st.tuples(st.just("flush"), st.just(0), st.just("")),
        st.tuples(st.just("begin anew"), st.just(0), st.just("")),
    ),
    max_size=25,
)


def is_behind(found: Marks, seen: Marks) -> bool:
    """The rule, written down once more."""
    if not found.ledger:
        return True
    other = seen.ledger not in ("", found.ledger)
    return other or any(a < b for a, b in zip(found.growing, seen.growing, strict=True))


@given(steps=STEPS)
def test_who_has_seen_more_is_refused_and_changes_nothing(valkey: redis.Redis, steps: Any) -> None:
    valkey.flushall()
    first = configured(valkey)
    clients = [first, SyncLedger(valkey, RUN, retry_s=2.0), SyncLedger(valkey, RUN, retry_s=2.0)]
    states = [dump(valkey)]
    for kind, number, what in steps:
        match kind:
            case "snapshot":
                states.append(dump(valkey))
            case "put back":
                put_back(valkey, states[number % len(states)])
            case "flush":
                valkey.flushall()
            case "begin anew":
                if not valkey.exists(keys.meta(RUN)):
                    configured(valkey)
            case "act":
                client, before, found = clients[number], dump(valkey), there(valkey)
                seen = client.seen
                if not is_behind(found, seen):
                    act(client, what)
                    assert client.seen == there(valkey), "an answer shows how far the ledger is"
                    continue
                with pytest.raises(LedgerError) as caught:
                    act(client, what)
                assert isinstance(caught.value, LedgerWentBack) == seen.begun, caught.value
                assert dump(valkey) == before
                assert client.seen == seen


def test_only_what_changes_something_counts_as_a_write(valkey: redis.Redis) -> None:
    valkey.flushall()
    ledger = configured(valkey)
    for op in (
        ops.stats(),
        ops.fingerprint(),
        ops.beats(),
        ops.claim(0, 0, 4),
        ops.take("a", 0, 1),
        ops.val_status(),
    ):
        before = ledger.seen.writes
        answer = ledger.run(op)
        assert ledger.seen.writes - before == (
            answer == "fenced" or getattr(answer, "status", "") == "fenced"
        ), op.script
    ledger.run(ops.alive())
    assert ledger.seen.writes == before + 1


def test_the_scripts_know_which_commands_write(valkey: redis.Redis) -> None:
    """As the server itself has it: a reading that counted would be a sign of life."""
    text = "\n".join(scripts.source(name) for name in scripts.names())
    used = set(re.findall(r"\bcall\('([A-Z]+)'", text))
    (reads,) = set(re.findall(r"local READS = {([^}]*)}", text))
    listed = set(re.findall(r"([A-Z]+) = 1", reads))
    for name in used | listed:
        flags = valkey.execute_command("COMMAND", "INFO", name)[name.lower()]["flags"]
        assert ("write" in flags) == (name not in listed), name
    assert listed <= used


def test_a_run_is_begun_once(valkey: redis.Redis) -> None:
    """The queue service, started again, makes no second ledger in place of one that is gone."""
    valkey.flushall()
    mine = Marks(ledger="mine")
    ledger = configured(valkey, seen=mine)
    assert ledger.seen.ledger == "mine"
    ledger.run(ops.issue(0, [b"p"], False))
    valkey.flushall()
    for seen in (ledger.seen, ledger.seen.lasting):
        with pytest.raises(LedgerWentBack, match="it no longer exists"):
            configured(valkey, seen=seen)
        assert dump(valkey) == {}

    theirs = configured(valkey)
    with pytest.raises(LedgerWentBack, match=f"its id was mine and is {theirs.seen.ledger}"):
        configured(valkey, seen=ledger.seen)
    with pytest.raises(LedgerWentBack, match="belongs to another run of that name"):
        configured(valkey, seen=Marks(ledger="a third"))


def test_a_ledger_of_an_earlier_release_gets_an_id(valkey: redis.Redis) -> None:
    valkey.flushall()
    configured(valkey)
    valkey.hdel(keys.meta(RUN), "ledger", "writes")
    assert SyncLedger(valkey, RUN).run(ops.stats()).version == -1
    ledger = configured(valkey)
    assert ledger.seen.ledger
    assert configured(valkey).seen.ledger == ledger.seen.ledger


def test_the_sentence_says_what_went_back_and_what_to_do() -> None:
    seen = Marks("one", version=7, lineage=2, cursor=120, term=3, writes=900)
    older = why_refused("r", "h:1", seen, replace(seen, version=5, cursor=96, writes=700))
    assert "policy version 7 -> 5, samples issued 120 -> 96, writes 900 -> 700" in older
    assert "Put the newer append-only file back" in older
    last = why_refused("r", "h:1", seen, replace(seen, writes=899))
    assert "went back: writes 900 -> 899" in last
    assert "Give the same command again" in last


def test_a_new_lineage_mends_the_loss_of_the_last_writes(valkey: redis.Redis) -> None:
    """As of a server that syncs once a second: those who live end, and the next start goes on."""
    valkey.flushall()
    ledger = fill(valkey, RUN, 8)
    before = dump(valkey)
    taken = [*range(8)]
    for number in taken[:3]:
        assert ledger.run(ops.finish("a", keys.sample_id(number), 1, b"payload", 0, 0, 1)) == "ok"
    put_back(valkey, before)
    with pytest.raises(LedgerWentBack, match=r"went back: writes \d+ -> \d+\. .*Give the same command again"):
        ledger.run(ops.stats())
    again = SyncLedger(valkey, RUN, seen=ledger.seen.lasting)
    assert again.run(ops.open_lineage(1)).ok
    assert adopt(again, 2, {}).restarted == len(taken)
    assert audit(valkey, RUN).balanced


# -- deletion -------------------------------------------------------------------------------------


def fill(client: redis.Redis, run: str, samples: int) -> SyncLedger:
    ledger = configured(client, run)
    for start in range(0, samples, 1000):
        ledger.run(ops.issue(start, [b"p"] * min(1000, samples - start), False))
    ledger.run(ops.open_term())
    ledger.run(ops.open_lineage(0))
    ledger.run(ops.finish_adopt(1))
    ledger.run(ops.hold(1, 1, 1))
    ledger.run(ops.commit(1, 1, 1, 0, "d", ["a"], False))
    ledger.run(ops.take("a", 0, 8))
    ledger.run(ops.val_load([(0, b"row")]))
    ledger.run(ops.beat("a", 1))
    client.hset(keys.prefix(run) + "telemetry", "a", "{}")
    return ledger


def test_a_ledger_goes_whole_and_no_other_with_it(valkey: redis.Redis) -> None:
    valkey.flushall()
    fill(valkey, "marks-2", 50)
    other = dump(valkey, "marks-2")
    ledger = fill(valkey, RUN, 50)
    here = ledger.seen
    for args in ((here.ledger, here.writes - 1), (here.ledger, here.writes + 1), ("another", here.writes)):
        before = dump(valkey)
        assert ledger.run(ops.delete(*args)) == "refused"
        assert dump(valkey) == before
    for bad in ((), (here.ledger,), (here.ledger, "x"), (here.ledger, "-1"), (here.ledger, 1, 2)):
        with pytest.raises(LedgerError, match="refused"):
            ledger.run(ops.Op("delete", bad, lambda raw: raw))
    assert ledger.run(ops.delete(here.ledger, here.writes)) == "ok"
    assert dump(valkey) == {}
    assert dump(valkey, "marks-2") == other
    assert configured(valkey).seen.ledger != here.ledger


def test_a_sign_of_life_saves_it_and_one_of_two_deletes_it(valkey: redis.Redis) -> None:
    valkey.flushall()
    one, two = fill(valkey, RUN, 5), SyncLedger(valkey, RUN)
    two.run(ops.stats())
    seen = two.seen
    one.run(ops.alive())
    assert two.run(ops.delete(seen.ledger, seen.writes)) == "refused"
    seen = two.seen
    assert one.run(ops.delete(seen.ledger, seen.writes)) == "ok"
    with pytest.raises(LedgerWentBack):
        two.run(ops.delete(seen.ledger, seen.writes))


class Server:
    """One that is killed and started again on its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.start()

    def start(self) -> None:
        self.running = start_valkey(self._folder, "secret", None)
        self.client = redis.Redis.from_url(self.running.url)
        until(self._has_loaded, "the server to have loaded its file")

    def _has_loaded(self) -> bool:
        with contextlib.suppress(redis.BusyLoadingError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        self.running.process.send_signal(signal.SIGKILL)
        self.running.process.wait(10)


def test_a_server_that_dies_in_the_middle_keeps_all_or_nothing(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    server = Server(tmp_path)
    left = whole = 0
    for _ in range(4):
        if not left:
            fill(server.client, RUN, 20_000)
            whole = len(list(server.client.scan_iter(match=keys.prefix(RUN) + "*", count=10_000)))
        ledger = SyncLedger(server.client, RUN, retry_s=0.0)
        ledger.run(ops.fingerprint())
        seen = ledger.seen

        def delete(ledger: SyncLedger = ledger, seen: Marks = seen) -> None:
            with contextlib.suppress(LedgerError):
                ledger.run(ops.delete(seen.ledger, seen.writes))

        thread = threading.Thread(target=delete)
        thread.start()
        time.sleep(rng.uniform(0.0, 0.03))  # the moment of the fault
        server.kill()
        thread.join()
        server.start()
        left = len(list(server.client.scan_iter(match=keys.prefix(RUN) + "*", count=10_000)))
        print(f"{left} of {whole} keys")
        assert left in (0, whole), "half a ledger is left"
    server.running.stop()
