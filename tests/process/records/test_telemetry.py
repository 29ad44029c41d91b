"""What rollouters tell about themselves: read whatever they write, and forgotten when they are gone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import pytest
import redis
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from headrace.ledger import AsyncLedger, ops
from headrace.local.valkey_server import start_valkey
from headrace.service import telemetry
from headrace.service.telemetry import RolloutTelemetry, decode_all, idle_ratio, utilization
from headrace_queue.janitor import Janitor

FULL = RolloutTelemetry(5.0, 10.0, 3, 4, 100, 7, 2, 15.0, 20)


def read(value: bytes) -> dict[str, RolloutTelemetry]:
    return decode_all({b"one": value})


def test_what_is_written_is_read() -> None:
    assert read(telemetry.encode(FULL).encode()) == {"one": FULL}


def test_a_field_of_another_version_or_a_bad_value_is_left_out_and_the_others_stay() -> None:
    told = {**asdict(FULL), "temperature": {"of": ["the", "room"]}, "tokens": "many", "version": None}
    told |= {"target": True, "samples": 10**30, "sequence_s": float("inf"), "running": 1.5}
    (found,) = read(json.dumps(told).encode()).values()
    assert found == RolloutTelemetry(active_s=5.0, window_s=10.0, tokens_in_flight=20)
    assert read(b"{}") == {"one": RolloutTelemetry()}
    for odd in (b"", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"active_s": ' + b"9" * 5000 + b"}"):
        assert read(odd) == {}
    assert decode_all({b"\xff": b"{}"}).keys() == {"\ufffd"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
ENTRY = st.dictionaries(st.sampled_from([*asdict(FULL), "unknown"]), VALUES).map(json.dumps) | st.text()


@given(st.lists(st.dictionaries(st.sampled_from(["a", "b"]), ENTRY), min_size=2, max_size=2))
def test_ratios_are_ratios_whatever_was_written(readings: list[dict[str, str]]) -> None:
    before, after = (decode_all({k.encode(): v.encode() for k, v in r.items()}) for r in readings)
    for ratio in (idle_ratio(before, after), utilization(before, after)):
        assert ratio is None or 0.0 <= ratio <= 1.0


def test_a_counter_that_was_not_understood_once_says_nothing() -> None:
    later = RolloutTelemetry(8.0, 20.0, 3, 4, 100, 7, 2, 25.0)
    assert idle_ratio({"one": FULL}, {"one": later}) == pytest.approx(0.7)
    assert idle_ratio({"one": FULL}, read(json.dumps({**asdict(later), "active_s": "?"}).encode())) is None


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[AsyncLedger]:
    with start_valkey(tmp_path, "password", log=tmp_path / "log") as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            ledger = AsyncLedger(client, "run", retry_s=0.0)
            await ledger.run(ops.configure(8, 4, 1, 1, 1000, "print"))
            yield ledger


async def test_nothing_is_left_of_rollouters_that_are_gone(
    ledger: AsyncLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 join and leave, half of them without a word: then there is one entry for each that is there."""
    clock = [0.0]
    janitor = Janitor(ledger, 10.0, None)
    janitor._observer._clock = lambda: clock[0]
    monkeypatch.setattr("headrace_queue.janitor.HOLE_S", 100.0)
    keys = len(await ledger.redis.keys())
    for n in range(50):
        name = f"rollouter-{n}"
        for one in ("steady", name):
            await ledger.run(ops.beat(one, n))
            await telemetry.tell(ledger.redis, "run", one, FULL)
        if n % 2:
            await ledger.run(ops.expire(name, "left", left=True))
        await janitor.step()
    assert await there(ledger) == {"steady", *(f"rollouter-{n}" for n in range(0, 50, 2))}
    for n in range(50, 53):  # more than a lease passes, and only one gives a sign of life
        await ledger.run(ops.beat("steady", n))
        clock[0] += 6.0
        await janitor.step()
    assert await there(ledger) == {"steady"}
    assert 0 < await ledger.redis.ttl(telemetry.telemetry_key("run")) <= telemetry.KEPT_S
    assert len(await ledger.redis.keys()) == keys + 2, "one key for all beats, and one for telemetry"


async def there(ledger: AsyncLedger) -> set[str]:
    found = await ledger.redis.hkeys(telemetry.telemetry_key("run"))
    return {name.decode() for name in found if isinstance(name, bytes)}


async def test_telemetry_that_cannot_be_removed_holds_nobody_up(ledger: AsyncLedger) -> None:
    await ledger.redis.set(telemetry.telemetry_key("run"), "no hash")
    await Janitor(ledger, 10.0, None).step()
