"""Fifty changes of membership in a run, and what they leave behind in its processes and in Redis: nothing."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import redis

from headrace.connections.redis_client import AT_ONCE
from headrace.ledger import keys, scripts
from tests.chaos import reward
from tests.chaos.faults import LIMIT_S
from tests.chaos.world import NAME, Stuck, World

NAMED = "rollouter-comer-"
"""How the names of those who come and go begin."""
WARM = 3
"""Comers before the first measurement: pools and caches have their size by then."""
COMERS = 25
"""Each comes and goes: two changes."""
COMER_LIMIT_S = 60.0
UPDATES_EACH, SHARE = 5, 0.8
"""While one comes and goes, on average, the run may do so many updates, or so much of what it has left: else
its data would end before the last measurement. Where it is faster its reward slows down."""
THREADS, DESCRIPTORS, KEYS = 6, 8, 3
"""What a process, and the ledger, may have more of: pools grow by one or two under load."""
OF_THEIR_OWN = ("s:", "reply:")
"""Keys of samples, and of answers that end by themselves after a quarter of an hour."""
FIXED = {"meta", *re.findall(r"key\('([^']+)'\)", "".join(map(scripts.source, scripts.names())))}
"""Names that the scripts know by heart: such a key is there while it holds something. What it holds is looked
through for those who are gone."""
MEMORY_SHARE, MEMORY_BYTES = 1.2, 64 << 20


@dataclass
class Size:
    threads: int
    descriptors: int
    """Without those of Redis' connections."""
    to_redis: int
    """Connections: a pool keeps as many as were in use at once, at most AT_ONCE."""
    memory: int
    """Bytes of resident memory."""

    def __str__(self) -> str:
        return (
            f"{self.threads} threads, {self.descriptors} descriptors, {self.to_redis} connections to Redis, "
            f"{self.memory >> 20} MiB"
        )


@dataclass
class Measured:
    processes: dict[tuple[str, int], Size] = field(default_factory=dict)
    """By name and process id: one that starts anew is another."""
    keys: set[str] = field(default_factory=set)
    """Of the run, but for FIXED ones and OF_THEIR_OWN."""
    of_comers: set[str] = field(default_factory=set)
    """Keys, and entries of keys, that name a rollouter which came and went."""


def measure(world: World) -> Measured:
    found = Measured()
    named = dict(world.pids())
    for index, process in enumerate(world.trainer_ranks()):
        named[f"trainer rank {index}"] = process.pid
    for name, pid in world.pids().items():
        if name.startswith("rollouter-"):
            named[f"engine core of {name}"] = world.engine_core(pid).pid
    for name, pid in named.items():
        try:
            process = psutil.Process(pid)
            peers = [c.raddr.port for c in process.net_connections("tcp") if c.raddr]
            to_redis = peers.count(world.proxy.port)
            descriptors = process.num_fds() - to_redis
            size = Size(process.num_threads(), descriptors, to_redis, process.memory_info().rss)
        except psutil.Error:
            continue
        found.processes[name, pid] = size
    with world.redis as client:
        prefix = keys.prefix(NAME)
        names = [name.decode().removeprefix(prefix) for name in client.scan_iter(f"{prefix}*", count=1000)]
        names = [name for name in names if not name.startswith(OF_THEIR_OWN)]
        found.keys = set(names) - FIXED
        entries = {name: [name, *_entries(client, prefix + name)] for name in names}
    found.of_comers = {
        f"{name} {entry}" for name, those in entries.items() for entry in those if NAMED in entry
    }
    return found


def _entries(client: redis.Redis, key: str) -> list[str]:
    """Fields or members of a key; none of one that holds a single value, or whose entries are a stream's."""
    of: dict[bytes | str, Callable[[str], Any]] = {
        b"hash": client.hkeys,
        b"set": client.smembers,
        b"zset": lambda name: client.zrange(name, 0, -1),
    }
    read = of.get(client.type(key))
    return [entry.decode() for entry in read(key)] if read else []


def growth(before: Measured, after: Measured) -> list[str]:
    """What is larger than it may be."""
    out = []
    for (name, pid), was in before.processes.items():
        if (now := after.processes.get((name, pid))) is None:
            continue
        if now.threads > was.threads + THREADS:
            out.append(f"{name}: {was.threads} -> {now.threads} threads")
        if now.descriptors > was.descriptors + DESCRIPTORS:
            out.append(f"{name}: {was.descriptors} -> {now.descriptors} descriptors")
        if now.to_redis > was.to_redis + AT_ONCE:
            out.append(f"{name}: {was.to_redis} -> {now.to_redis} connections to Redis")
        if now.memory > was.memory * MEMORY_SHARE + MEMORY_BYTES:
            out.append(f"{name}: {was.memory >> 20} -> {now.memory >> 20} MiB")
    if len(after.keys) > len(before.keys) + KEYS:
        new = ", ".join(sorted(after.keys - before.keys))
        out.append(f"{len(before.keys)} -> {len(after.keys)} keys in Redis, of these new: {new}")
    if after.of_comers:
        out.append(f"in Redis of rollouters that are gone: {', '.join(sorted(after.of_comers))}")
    return out


def fifty_changes(world: World, rng: random.Random) -> str:
    world.wait("all to be well", world.is_well, LIMIT_S)
    pace = min(UPDATES_EACH, SHARE * (world.updates - world.steps) / (WARM + COMERS))
    _come_and_go(world, WARM, pace)
    before = measure(world)
    took = _come_and_go(world, COMERS, pace)
    after = measure(world)
    if world.ended:  # there is nothing left to measure, and nothing is not "nothing left behind"
        raise Stuck("the run was over before the last measurement")
    lines = [
        f"{name}: {was} -> {now}"
        for (name, pid), was in before.processes.items()
        if (now := after.processes.get((name, pid))) is not None
    ]
    lines.append(f"keys {sorted(before.keys)} -> {sorted(after.keys)}")
    lines.append(f"update {world.steps} of {world.updates}")
    print("\n".join(f"    {line}" for line in lines), flush=True)
    if len(lines) - 2 < len(before.processes) // 2:
        raise Stuck("most processes started anew while rollouters came and went")
    if grown := growth(before, after):
        raise Stuck(f"{2 * COMERS} changes of membership left something behind: " + "; ".join(grown))
    return f"{2 * COMERS} changes of membership in {took:.0f} s, nothing left behind"


def _come_and_go(world: World, count: int, pace: float) -> float:
    process = world.spawn("tests.chaos.comers", "--config", str(world.layout.config), "--comers", str(count))
    slow, lines, began = world.flags / reward.SLOW, len(world.lines("tests.chaos.comers")), world.steps

    def all_gone() -> bool:
        """At each look the run is kept to its pace."""
        gone = [line for line in world.lines("tests.chaos.comers")[lines:] if line.startswith("comer ")]
        if world.steps - began > pace * (len(gone) + 1):
            slow.touch()
        else:
            slow.unlink(missing_ok=True)
        return process.poll() is not None

    try:
        took = world.wait(f"{count} rollouters to come and go", all_gone, count * COMER_LIMIT_S)
    finally:
        slow.unlink(missing_ok=True)
    if process.returncode and not world.ended:
        raise Stuck(f"the rollouters that come and go ended with {process.returncode}; see their log")
    world.wait("the last of them to be gone", world.is_well, LIMIT_S)
    done = world.steps
    world.wait("updates without them", lambda: world.steps >= done + 4, LIMIT_S)  # a round regroups
    return took
