"""A second process of a service, as after a mistake or a split cluster, and clocks that are wrong."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess

from tests.chaos.faults import LIMIT_S, Fault, a_rollouter
from tests.chaos.world import Stuck, World

ENDS_S = 180.0
"""What a second one that is fenced has until it ends."""
LEAVES_S = 60.0


def fenced(name: str) -> Fault:
    """Of two one has to end by itself. (Of two trainers: see `terminal`.)"""

    def fault(world: World, rng: random.Random) -> str:
        second = world.double(name)
        try:
            world.wait(f"the end of the second {name}", lambda: second.poll() is not None, ENDS_S)
        finally:
            if second.poll() is None:
                second.kill()
        if second.returncode == 0 and not world.ended:
            raise Stuck(f"the second {name} ended with 0, as if its work were done")
        return f"a second {name}, which was fenced (exit code {second.returncode})"

    return fault


def _leaves(world: World, second: subprocess.Popen[bytes], name: str) -> None:
    second.send_signal(signal.SIGTERM)
    world.wait(f"the second {name} to leave", lambda: second.poll() is not None, LEAVES_S)
    if second.returncode not in (0, None):
        raise Stuck(f"the second {name} ended with {second.returncode}")


def second_queue(world: World, rng: random.Random) -> str:
    """Two feeders and two janitors: each of their steps is one that the ledger checks."""
    second, done = world.double("queue"), world.steps
    world.wait("updates with two queue services", lambda: world.steps >= done + 4, LIMIT_S)
    if second.poll() is not None and not world.ended:
        raise Stuck(f"the second queue service ended with {second.returncode}")
    _leaves(world, second, "queue service")
    return "a second queue service for four updates"


def second_rollouter(world: World, rng: random.Random) -> str:
    """Of the same replica name: they are two incarnations."""
    name, _ = a_rollouter(world, rng)
    second = world.double(name)
    world.wait(
        f"the second {name} to take part",
        lambda: len(world.members_of(name)) > 1 or second.poll() is not None,
        LIMIT_S,
    )
    done = world.steps
    world.wait("an update with it", lambda: world.steps > done, LIMIT_S)
    if second.poll() is not None and not world.ended:
        raise Stuck(f"the second {name} ended with {second.returncode}")
    _leaves(world, second, name)
    return f"a second {name} under the same name"


def _set_clock(world: World, name: str, seconds: float) -> None:
    """In place: the service has mapped the file."""
    descriptor = os.open(world.flags / f"clock-{name}", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(descriptor, struct.pack("<d", seconds), 0)
    os.close(descriptor)


def clock_step(world: World, rng: random.Random) -> str:
    """The wall clock of one service, or of all, is set, and set back after some updates."""
    services = sorted(world.pids())
    chosen = rng.choice([*([name] for name in services), services])
    seconds = rng.choice([-1, 1]) * rng.choice([2.0, 60.0, 3600.0, 86400.0 * 400])
    done = world.steps
    for name in chosen:
        _set_clock(world, name, seconds)
    try:
        world.wait("updates by a wrong clock", lambda: world.steps >= done + 3, LIMIT_S)
    finally:
        for name in chosen:
            _set_clock(world, name, 0.0)
    whose = "all services" if len(chosen) > 1 else chosen[0]
    return f"the clock of {whose} jumps by {seconds:+.0f} s, and back"


DOUBLES: dict[str, Fault] = {
    "second coordinator": fenced("coordinator"),
    "second queue": second_queue,
    "second rollouter": second_rollouter,
    "clock step": clock_step,
}
