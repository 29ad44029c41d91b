"""The parts of the chaos set that decide whether something is wrong: they must be able to say so."""

from __future__ import annotations

import contextlib
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis

from headrace.ledger import keys
from headrace.wire import payloads
from tests.chaos import membership, reward
from tests.chaos.kinds import FAULTS, KINDS, LONG, rng_of
from tests.chaos.membership import Measured, Size, growth
from tests.chaos.payloads import WHERE, flip
from tests.chaos.proxy import Proxy
from tests.chaos.terminal import TERMINAL
from tests.chaos.world import NAME, Stuck

MIB = 1 << 20


def measured(
    threads: int = 30,
    descriptors: int = 60,
    to_redis: int = 20,
    mib: int = 500,
    keys: int = 12,
    of_comers: frozenset[str] = frozenset(),
) -> Measured:
    size = Size(threads, descriptors, to_redis, mib * MIB)
    names = {f"owned:rollouter-{number}" for number in range(keys)}
    return Measured({("coordinator", 1): size, ("engine core", 2): size}, names, set(of_comers))


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (measured(), ""),
        (measured(threads=34, descriptors=66, mib=560, keys=14), ""),
        (measured(threads=55), "30 -> 55 threads"),
        (measured(descriptors=110), "60 -> 110 descriptors"),
        (measured(to_redis=29), "20 -> 29 connections to Redis"),
        (measured(mib=700), "500 -> 700 MiB"),
        (measured(keys=17), "12 -> 17 keys in Redis, of these new: owned:rollouter-12, owned:rollouter-13"),
        (measured(of_comers=frozenset({"beats rollouter-comer-1"})), "are gone: beats rollouter-comer-1"),
    ],
)
def test_what_fifty_changes_leave_behind_is_told(after: Measured, said: str) -> None:
    assert said in "; ".join(growth(measured(), after))
    assert bool(said) == bool(growth(measured(), after))


def test_a_run_that_is_over_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are gone, and so is whatever they had left behind."""
    found = iter([measured(), Measured()])
    monkeypatch.setattr(membership, "_come_and_go", lambda world, comers, pace: 1.0)
    monkeypatch.setattr(membership, "measure", lambda world: next(found))
    over: Any = SimpleNamespace(ended=True, steps=1, updates=300, wait=lambda *_: 0.0, is_well=lambda: True)
    with pytest.raises(Stuck, match="over before the last measurement"):
        membership.fifty_changes(over, random.Random(0))


def sample() -> payloads.Sample:
    prompt = payloads.Prompt("0000000001", 1, 0, 1, np.array([3, 4, 5], np.int32), "d", "g")
    trajectory = payloads.Trajectory(
        np.array([3, 4, 5, 6], np.int32),
        np.array([-0.1, -0.2, 0.0, -3.0], np.float32),
        np.ones(4, np.uint8),
        [payloads.Segment(0, 0, 2), payloads.Segment(1, 2, 4)],
        1.0,
        payloads.FinishReason.STOP,
    )
    return payloads.Sample(prompt, [trajectory, trajectory], "o", 1)


@pytest.mark.parametrize("where", WHERE)
def test_a_flipped_payload_breaks_the_rule_that_it_names(where: str) -> None:
    raw = payloads.encode_sample(sample())
    for seed in range(50):
        changed = flip(raw, where, random.Random(seed))
        assert changed != raw
        assert changed == flip(raw, where, random.Random(seed))
        try:
            found = payloads.decode_sample(changed)
        except payloads.WireError:
            continue
        ids = np.concatenate([t.token_ids for t in found.trajectories])
        newest = max(s.version for t in found.trajectories for s in t.segments)
        match where:
            case "token id":
                assert ids.max() >= 1 << 20
            case "prompt":
                assert list(found.prompt.token_ids) != [3, 4, 5]
            case "version":
                assert newest >= 1 << 10
            case "log-prob":
                raise AssertionError("a log-prob above 0 passed")


def test_kinds_and_what_they_draw() -> None:
    assert len(KINDS) == len(set(KINDS))
    assert not FAULTS.keys() & TERMINAL.keys()
    assert LONG.keys() <= FAULTS.keys()
    assert rng_of(1, 2, "a").random() == rng_of(1, 2, "a").random() != rng_of(1, 3, "a").random()


@pytest.fixture
def echo() -> Iterator[tuple[Proxy, socket.socket]]:
    """A connection through a proxy to a server that sends back what comes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        link, _ = server.accept()
        while data := link.recv(65536):
            link.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    proxy = Proxy(server.getsockname()[1])
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=10.0)
    yield proxy, client
    client.close()
    proxy.close()
    server.close()


def said(client: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += client.recv(count - len(found))
    return found


def test_a_line_to_a_socket_whose_path_comes_with_the_server() -> None:
    """The coordinator of a run under faults."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder) / "server.sock"
        proxy = Proxy(lambda: path if path.exists() else None)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10.0) as early:
            with contextlib.suppress(ConnectionResetError):
                assert early.recv(1) == b"", "as where nobody listens"
        server.bind(str(path))
        server.listen()
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=10.0) as client:
            link, _ = server.accept()
            link.sendall(b"hello")
            assert said(client, 5) == b"hello"
            link.close()
        proxy.close()


def test_lines_are_as_bad_as_they_are_told_to_be(echo: tuple[Proxy, socket.socket]) -> None:
    proxy, client = echo
    client.sendall(b"plain")
    assert said(client, 5) == b"plain"

    proxy.delay(0.1)
    began = time.monotonic()
    client.sendall(b"slow")
    assert said(client, 4) == b"slow"
    assert time.monotonic() - began >= 0.2, "each way"
    proxy.delay(0.0)

    proxy.narrow(20_000.0)
    began = time.monotonic()
    client.sendall(bytes(16384))
    said(client, 16384)
    assert time.monotonic() - began >= 0.5
    proxy.narrow(0.0)

    proxy.repeat(1)
    client.sendall(b"ab")
    assert said(client, 4) == b"abab"
    assert proxy.repeated == 1

    assert (proxy.alive, proxy.hush(), proxy.alive) == (1, 1, 0)
    client.sendall(b"nobody hears this")
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)


def test_what_names_a_rollouter_that_is_gone_is_found(quick_valkey: redis.Redis) -> None:
    """In the name of a key or in an entry, of a sort that the ledger has or of a new one."""
    quick_valkey.flushall()
    prefix, gone = keys.prefix(NAME), f"{membership.NAMED}1"
    quick_valkey.hset(f"{prefix}beats", mapping={gone: "3/1", "rollouter-0-abc": "9/1"})
    quick_valkey.sadd(f"{prefix}group-17", gone)
    quick_valkey.zadd(f"{prefix}retries", {"0000000001": 1})
    quick_valkey.sadd(f"{prefix}owned:{gone}", "0000000002")
    quick_valkey.hset(f"{prefix}s:0000000002", "owner", gone)
    quick_valkey.set(f"{prefix}reply:{gone}", "{}")
    world: Any = SimpleNamespace(
        pids=dict,
        trainer_ranks=list,
        redis=contextlib.nullcontext(quick_valkey),
        proxy=SimpleNamespace(port=1),
    )
    found = membership.measure(world)
    assert found.keys == {"group-17", f"owned:{gone}"}
    assert found.of_comers == {f"beats {gone}", f"group-17 {gone}", f"owned:{gone} owned:{gone}"}
    assert {"meta", "beats", "val:rows", "retries"} <= membership.FIXED


@pytest.mark.parametrize(("gone", "slowed"), [(0, True), (3, False)])
def test_a_run_that_gets_ahead_of_the_comers_is_slowed_down(tmp_path: Path, gone: int, slowed: bool) -> None:
    seen, printed, steps = [], ["comer 1"], 10
    flag = tmp_path / reward.SLOW

    def wait(what: str, condition: Any, limit_s: float) -> float:
        nonlocal steps
        if "come and go" in what:
            printed.extend(f"comer {number + 1}" for number in range(gone))
            steps += 12
            world.steps = steps
            condition()
            seen.append(flag.exists())
        return 1.0

    world: Any = SimpleNamespace(
        steps=steps,
        flags=tmp_path,
        layout=SimpleNamespace(config="config.yaml"),
        spawn=lambda *_: SimpleNamespace(poll=lambda: 0, returncode=0),
        lines=lambda _: list(printed),
        wait=wait,
        is_well=lambda: True,
    )
    membership._come_and_go(world, 3, 5)
    assert seen == [slowed]
    assert not flag.exists()
