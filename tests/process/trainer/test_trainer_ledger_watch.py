"""The trainer's eye on its ledger, while rank 0 asks Redis nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace.ledger import LedgerWentBack, SyncLedger, ops
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace_trainer import ledger_watch
from headrace_trainer.ledger_watch import LedgerWatch
from tests.waiting import until


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ValkeyServer]:
    monkeypatch.setattr(ledger_watch, "PERIOD_S", 0.02)
    with start_valkey(tmp_path, "secret") as running:
        yield running


def test_it_shows_that_the_trainer_lives_and_that_the_ledger_went_back(
    server: ValkeyServer, tmp_path: Path
) -> None:
    ledger = SyncLedger(redis.Redis.from_url(server.url), "x")
    ledger.run(ops.configure(4, 2, 1, 1, 100, "print"))
    watch = LedgerWatch(server.url, "x", ledger.seen)
    try:
        seen = ledger.seen.writes

        def lives() -> bool:
            ledger.run(ops.stats())
            return ledger.seen.writes > seen + 2

        until(lives, "signs of life")
        server.kill()
        watch.check()  # an outage is no fault of the ledger
        with start_valkey(tmp_path, "secret", server.port):
            ledger.redis.connection_pool.disconnect()
            seen = ledger.seen.writes
            until(lives, "signs of life after the outage")
            watch.check()
            ledger.redis.flushall()

            def went_back() -> bool:
                try:
                    watch.check()
                except LedgerWentBack as error:
                    return "it no longer exists" in str(error)
                return False

            until(went_back, "the watch to see it")
    finally:
        watch.close()
