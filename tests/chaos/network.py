"""Faults of the lines to Redis and to the coordinator, by way of the proxies."""

from __future__ import annotations

import random
import time

from tests.chaos.faults import LIMIT_S, Fault
from tests.chaos.proxy import Proxy
from tests.chaos.world import LEASE_S, World

HALF_OPEN_LIMIT_S = 15.0
"""From the last packet to all streams to the coordinator being up again."""
REDIS_LIMIT_S = 20.0
"""From the last packet to the next update but one: two deadlines of five seconds, one after the other, each
with a pause of two at most, and the updates."""
MEASURE_S = 3.0


def _line(world: World, which: str) -> Proxy:
    return world.coordinator_proxy if which == "the coordinator" else world.proxy


def delay(which: str) -> Fault:
    def fault(world: World, rng: random.Random) -> str:
        line, seconds = _line(world, which), rng.choice([0.02, 0.1, 0.3])
        done = world.steps
        line.delay(seconds)
        try:
            world.wait("an update over a slow line", lambda: world.steps > done, LIMIT_S)
        finally:
            line.delay(0.0)
        return f"{seconds:g} s more to and from {which}"

    return fault


def narrow(which: str) -> Fault:
    """Half of the bandwidth that is used."""

    def fault(world: World, rng: random.Random) -> str:
        line, before, done = _line(world, which), _line(world, which).moved, world.steps
        time.sleep(MEASURE_S)
        rate = max(2000.0, (line.moved - before) / MEASURE_S / 2)
        line.narrow(rate)
        try:
            world.wait("an update over a narrow line", lambda: world.steps > done + 1, LIMIT_S)
        finally:
            line.narrow(0.0)
        return f"{rate / 1000:.0f} KB/s on each connection to {which}, half of what all used"

    return fault


def garble(which: str) -> Fault:
    """A stream that repeats itself: what follows means nothing, or something else."""

    def fault(world: World, rng: random.Random) -> str:
        line, count = _line(world, which), rng.randint(1, 8)
        before = line.repeated
        line.repeat(count)
        try:
            world.wait("chunks to repeat", lambda: line.repeated >= before + count, LIMIT_S)
        finally:
            line.repeat(0)
        return f"{count} chunks to or from {which} come twice"

    return fault


def cut_coordinator(world: World, rng: random.Random) -> str:
    return f"cut {world.coordinator_proxy.cut()} connections to the coordinator"


def hush_coordinator(world: World, rng: random.Random) -> str:
    """Half-open: everybody has to notice by himself."""
    streams = len(world.stats().members) + 1
    line = world.coordinator_proxy
    world.wait("every stream", lambda: line.alive >= streams, LIMIT_S)
    count = line.hush()
    took = world.wait("every stream again", lambda: line.alive >= streams, HALF_OPEN_LIMIT_S)
    return f"{count} connections to the coordinator fall silent; all up again after {took:.1f} s"


def silence_coordinator(world: World, rng: random.Random) -> str:
    """New connections are taken and carry nothing, either, for a while."""
    line, seconds = world.coordinator_proxy, rng.uniform(LEASE_S, 30.0)
    streams = len(world.stats().members) + 1
    line.silent(True)
    time.sleep(seconds)
    line.silent(False)
    took = world.wait("every stream again", lambda: line.alive >= streams, HALF_OPEN_LIMIT_S)
    return f"the way to the coordinator swallows all for {seconds:.1f} s; up again {took:.1f} s later"


def hush_redis(world: World, rng: random.Random) -> str:
    done, count = world.steps, world.proxy.hush()
    took = world.wait("an update over new connections", lambda: world.steps > done + 1, REDIS_LIMIT_S)
    return f"{count} connections to Valkey fall silent; two updates after {took:.1f} s"


def silence_redis(world: World, rng: random.Random) -> str:
    seconds = rng.uniform(LEASE_S, 20.0)
    world.proxy.silent(True)
    time.sleep(seconds)
    done = world.steps
    world.proxy.silent(False)
    took = world.wait("an update", lambda: world.steps > done, REDIS_LIMIT_S)
    return f"the way to Valkey swallows all for {seconds:.1f} s; an update {took:.1f} s later"


NETWORK: dict[str, Fault] = {
    "slow line to Valkey": delay("Valkey"),
    "slow line to coordinator": delay("the coordinator"),
    "narrow line to Valkey": narrow("Valkey"),
    "narrow line to coordinator": narrow("the coordinator"),
    "garbled line to Valkey": garble("Valkey"),
    "garbled line to coordinator": garble("the coordinator"),
    "cut coordinator": cut_coordinator,
    "half-open coordinator": hush_coordinator,
    "silent coordinator": silence_coordinator,
    "half-open Valkey": hush_redis,
    "silent Valkey": silence_redis,
}
