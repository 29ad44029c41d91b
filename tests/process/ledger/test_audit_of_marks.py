"""What `ledger.json` has seen and the ledger lacks is told: every service refuses such a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from headrace.ledger.client import SyncLedger
from headrace.ledger.marks import Marks
from headrace.ledger.record import LedgerRecord
from headrace.local.valkey_server import start_valkey
from headrace.records.audit import audit_run
from headrace.records.layout import RunLayout
from tests.support import four_samples


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[RunLayout, SyncLedger]]:
    layout = RunLayout(tmp_path / "runs" / "x")
    layout.create()
    with start_valkey(tmp_path / "redis", "secret") as server, redis.Redis.from_url(server.url) as client:
        ledger = SyncLedger(client, "x")
        four_samples.begin(ledger)
        yield layout, ledger


def problems(begun: tuple[RunLayout, SyncLedger], seen: Marks) -> list[str]:
    layout, ledger = begun
    (layout.root / "ledger.json").unlink(missing_ok=True)
    LedgerRecord(layout.root).keep(seen)
    return audit_run(layout, ledger, is_on=False).problems


def test_what_was_seen_and_is_gone_is_named(begun: tuple[RunLayout, SyncLedger]) -> None:
    now = begun[1].seen
    assert problems(begun, now) == []
    ahead = replace(now, cursor=now.cursor + 2)
    told = "issued by ledger.json, the ledger has no record of it"
    assert problems(begun, ahead) == [f"{now.cursor + n:010d}: {told}" for n in (0, 1)]
    for name in ("version", "lineage", "term"):
        (told,) = problems(begun, replace(now, **{name: getattr(now, name) + 1}))
        assert f"{name} {getattr(now, name) + 1} was seen" in told
    (told,) = problems(begun, replace(now, ledger="another"))
    assert "the one there is another's" in told


def test_a_flushed_ledger_has_lost_what_was_issued(begun: tuple[RunLayout, SyncLedger]) -> None:
    layout, ledger = begun
    LedgerRecord(layout.root).keep(ledger.seen)
    ledger.redis.flushall()
    fresh = SyncLedger(ledger.redis, "x")
    _, *named = audit_run(layout, fresh, is_on=False).problems
    assert [text[:10] for text in named] == [f"{n:010d}" for n in range(4)]
