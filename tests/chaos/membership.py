"""Fifty changes of membership in a run, and what they leave behind in its processes and in Redis: nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import psutil

from headrace.connections.redis_client import AT_ONCE
from headrace.ledger import keys
from headrace.service.telemetry import telemetry_key
from tests.chaos.faults import LIMIT_S
from tests.chaos.world import NAME, Stuck, World

WARM = 3
"""Comers before the first measurement: pools and caches have their size by then."""
COMERS = 25
"""Each comes and goes: two changes."""
COMER_LIMIT_S = 60.0
THREADS, DESCRIPTORS, KEYS = 6, 8, 3
"""What a process, and the ledger, may have more of: pools grow by one or two under load."""
OF_THEIR_OWN = ("s:", "reply:")
"""Keys of samples, and of answers that end by themselves after a quarter of an hour."""
FIXED = ("val:rows", "val:todo", "val:taken", "val:done")
"""Names with a colon that are no part of a name that varies."""
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
    """Of the ledger, with a variable part in their names: one of a fixed name is there while it holds
    something. Without those of samples and of answers."""
    told: int = 0
    """Rollouters with an entry in the telemetry."""


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
        found.keys = {n for n in names if ":" in n and n not in FIXED and not n.startswith(OF_THEIR_OWN)}
        found.told = client.hlen(telemetry_key(NAME))
    return found


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
    if after.told > before.told + 1:
        out.append(f"telemetry of {before.told} -> {after.told} rollouters")
    return out


def fifty_changes(world: World, rng: random.Random) -> str:
    world.wait("all to be well", world.is_well, LIMIT_S)
    _come_and_go(world, WARM)
    before = measure(world)
    took = _come_and_go(world, COMERS)
    after = measure(world)
    if world.ended:  # there is nothing left to measure, and nothing is not "nothing left behind"
        raise Stuck("the run was over before the last measurement")
    lines = [
        f"{name}: {was} -> {now}"
        for (name, pid), was in before.processes.items()
        if (now := after.processes.get((name, pid))) is not None
    ]
    lines.append(f"keys {sorted(before.keys)} -> {sorted(after.keys)}")
    lines.append(f"telemetry of {before.told} -> {after.told} rollouters")
    print("\n".join(f"    {line}" for line in lines), flush=True)
    if len(lines) - 2 < len(before.processes) // 2:
        raise Stuck("most processes started anew while rollouters came and went")
    if grown := growth(before, after):
        raise Stuck(f"{2 * COMERS} changes of membership left something behind: " + "; ".join(grown))
    return f"{2 * COMERS} changes of membership in {took:.0f} s, nothing left behind"


def _come_and_go(world: World, comers: int) -> float:
    process = world.spawn("tests.chaos.comers", "--config", str(world.layout.config), "--comers", str(comers))
    took = world.wait(
        f"{comers} rollouters to come and go", lambda: process.poll() is not None, comers * COMER_LIMIT_S
    )
    if process.returncode and not world.ended:
        raise Stuck(f"the rollouters that come and go ended with {process.returncode}; see their log")
    world.wait("the last of them to be gone", world.is_well, LIMIT_S)
    done = world.steps
    world.wait("updates without them", lambda: world.steps >= done + 4, LIMIT_S)  # a round regroups
    return took
