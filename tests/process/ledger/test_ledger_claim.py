"""Runs of one name that want the ledger at one server, and what a run's directory remembers of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace.config.loading import ConfigError
from headrace.config.run import RunConfig
from headrace.ledger import LedgerError, LedgerWentBack, SyncLedger, keys, ops
from headrace.ledger.marks import Marks
from headrace.ledger.record import FILE, LedgerRecord
from headrace.local import ledger_claim
from headrace.local.valkey_server import ValkeyServer, start_valkey
from tests.support.scripted_turns import config

NOBODY = Marks()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path_factory.mktemp("redis"), "secret") as running:
        yield running


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url) as found:
        found.flushall()
        yield found


def asked(server: ValkeyServer, resume: str) -> RunConfig:
    """With a lease so short that three of them last for a tenth of a second."""
    plain = config().model_dump()
    plain["redis"]["url"] = server.url
    plain["trainer"]["resume"] = resume
    plain["ledger"]["lease_s"] = 0.04
    return RunConfig.model_validate(plain)


def begin(client: redis.Redis, run: str, ledger: str) -> SyncLedger:
    found = SyncLedger(client, run, seen=Marks(ledger=ledger))
    found.run(ops.configure(4, 2, 1, 1, 100, "print"))
    found.run(ops.issue(0, [b"p"] * 3, False))
    return found


def names(client: redis.Redis, run: str) -> list[bytes]:
    return list(client.scan_iter(match=keys.prefix(run) + "*"))


def test_what_is_mine_or_nobodys_is_taken(server: ValkeyServer, client: redis.Redis, tmp_path: Path) -> None:
    c = asked(server, "auto")
    ledger_claim.claim(c, tmp_path, Marks(ledger="mine"), NOBODY)
    begin(client, c.name, "mine")
    ledger_claim.claim(c, tmp_path, Marks(ledger="mine"), NOBODY)
    assert names(client, c.name)


def test_a_ledger_of_a_run_that_was_moved_aside_needs_no_waiting(
    server: ValkeyServer, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = asked(server, "never")
    theirs = begin(client, c.name, "before").seen
    monkeypatch.setattr(ledger_claim, "LEASES", 1e9)
    ledger_claim.claim(c, tmp_path, Marks(ledger="mine"), theirs.lasting)
    assert names(client, c.name) == []


def test_of_two_runs_that_replace_a_dead_one_at_once_one_gets_the_name(
    server: ValkeyServer, client: redis.Redis, tmp_path: Path
) -> None:
    c = asked(server, "never")
    begin(client, c.name, "dead")
    begin(client, c.name + "2", "other")
    both, won, refused = threading.Barrier(2), [], []

    def start(name: str) -> None:
        with redis.Redis.from_url(server.url) as own:
            both.wait(10)
            try:
                ledger_claim.claim(c, tmp_path, Marks(ledger=name), NOBODY)
                begin(own, c.name, name)
                won.append(name)
            except (ConfigError, LedgerError) as error:
                refused.append(error)

    threads = [threading.Thread(target=start, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(won), len(refused)) == (1, 1)
    assert "another run" in str(refused[0])
    ledger = SyncLedger(client, c.name, seen=Marks(ledger=won[0]))
    assert ledger.run(ops.stats()).cursor == 3
    assert names(client, c.name + "2"), "a run whose name begins alike keeps its own"


def test_the_directory_remembers_what_grows(tmp_path: Path) -> None:
    assert LedgerRecord(None).marks == LedgerRecord(tmp_path).marks == Marks()
    LedgerRecord(None).keep(Marks("x", version=3))
    record = LedgerRecord(tmp_path)
    record.keep(Marks("x", 3, 1, 40, 2, 99))
    record.keep(Marks("x", 4, 1, 44, 2, 120))
    assert LedgerRecord(tmp_path).marks == Marks("x", 3, 1, 40, 2), "at most once a second"
    LedgerRecord(tmp_path).keep(Marks("x", 2, 2, 30, 3, 7))
    assert LedgerRecord(tmp_path).marks == Marks("x", 3, 2, 40, 3), "the larger of each"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"ledger": 1}', '{"ledger": "x", "version": "3"}', '{"more": 1}']
)
def test_a_damaged_record_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"ledger\.json: cannot be read"):
        LedgerRecord(tmp_path)


def test_a_record_of_more_than_there_is_refuses_the_ledger(client: redis.Redis, tmp_path: Path) -> None:
    begin(client, "r", "mine")
    (tmp_path / FILE).write_text(json.dumps({"ledger": "mine", "cursor": 4}))
    with pytest.raises(LedgerWentBack, match="went back: samples issued 4 -> 3"):
        SyncLedger(client, "r", seen=LedgerRecord(tmp_path).marks).run(ops.stats())
