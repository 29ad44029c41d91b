"""What can go wrong with the processes and their rewards.

Each fault does its harm, undoes it where it does not pass by itself, and says what.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable

from tests.chaos import reward
from tests.chaos.world import LEASE_S, ROLLOUTERS, Stuck, World, is_alive

Fault = Callable[[World, random.Random], str]
LIMIT_S = 180.0
OUTAGE_LIMIT_S = 40.0
ENGINE_DEATH_S = 20.0
"""What a rollouter has to end in once its engine core has died, on a loaded machine."""


def a_rollouter(world: World, rng: random.Random) -> tuple[str, int]:
    there = sorted((name, pid) for name, pid in world.pids().items() if name.startswith("rollouter-"))
    return rng.choice(there)


def _kill(world: World, name: str) -> None:
    pid, before = world.pids()[name], world.members_of(name)
    world.signal(pid, signal.SIGKILL)
    world.replaced(name, pid)
    if before:  # its work has to come back, and its successor has to be let in
        world.wait(f"the end of the lease of {name}", lambda: not before & world.members_of(name), LIMIT_S)


def kill_service(name: str) -> Fault:
    def fault(world: World, rng: random.Random) -> str:
        _kill(world, name)
        return f"kill -9 {name}"

    return fault


def kill_rollouter(world: World, rng: random.Random) -> str:
    name, _ = a_rollouter(world, rng)
    _kill(world, name)
    return f"kill -9 {name}"


def kill_engine_core(world: World, rng: random.Random) -> str:
    """The process that holds it must not live on: nobody else can give its work back."""
    name, pid = a_rollouter(world, rng)
    world.signal(world.engine_core(pid).pid, signal.SIGKILL)
    world.wait(f"the end of {name} after its engine core", lambda: not is_alive(pid), ENGINE_DEATH_S)
    world.replaced(name, pid)
    return f"kill -9 engine core of {name}"


def kill_trainer_rank(world: World, rng: random.Random) -> str:
    launcher, ranks = world.pids()["trainer"], world.trainer_processes()
    index = rng.randrange(len(ranks))
    world.signal(ranks[index].pid, signal.SIGKILL)
    world.replaced("trainer", launcher)
    return f"kill -9 trainer process {index + 1} of {len(ranks)}"


def freeze_rollouter(world: World, rng: random.Random) -> str:
    """Past its lease: it wakes up as somebody whose work belongs to others."""
    name, pid = a_rollouter(world, rng)
    world.signal(pid, signal.SIGSTOP)
    try:
        world.wait(
            f"the end of the lease of {name}",
            lambda: not world.members_of(name),
            LIMIT_S,
        )
    finally:
        world.signal(pid, signal.SIGCONT)
    return f"SIGSTOP {name} past its lease, SIGCONT"


def freeze(name: str) -> Fault:
    def fault(world: World, rng: random.Random) -> str:
        pid, seconds = world.pids()[name], rng.uniform(1.0, 3 * LEASE_S)
        world.signal(pid, signal.SIGSTOP)
        time.sleep(seconds)
        world.signal(pid, signal.SIGCONT)
        return f"SIGSTOP {name} for {seconds:.1f} s, SIGCONT"

    return fault


def freeze_trainer(world: World, rng: random.Random) -> str:
    seconds, ranks = rng.uniform(1.0, 3 * LEASE_S), world.trainer_ranks()
    for process in ranks:
        world.signal(process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    for process in ranks:
        world.signal(process.pid, signal.SIGCONT)
    return f"SIGSTOP every trainer rank for {seconds:.1f} s, SIGCONT"


def freeze_briefly(world: World, rng: random.Random) -> str:
    """Shorter than its lease: nobody may take its work."""
    name, pid = a_rollouter(world, rng)
    members, seconds = world.members_of(name), rng.uniform(0.2, 0.6) * LEASE_S
    world.signal(pid, signal.SIGSTOP)
    time.sleep(seconds)
    world.signal(pid, signal.SIGCONT)
    if members and not members & world.members_of(name):
        raise Stuck(f"{name} was frozen for {seconds:.1f} s of a lease of {LEASE_S:g} s, and was expired")
    return f"SIGSTOP {name} for {seconds:.1f} s, within its lease, SIGCONT"


def freeze_engine_core(world: World, rng: random.Random) -> str:
    name, pid = a_rollouter(world, rng)
    core, seconds = world.engine_core(pid), rng.uniform(1.0, 3 * LEASE_S)
    world.signal(core.pid, signal.SIGSTOP)
    time.sleep(seconds)
    world.signal(core.pid, signal.SIGCONT)
    return f"SIGSTOP engine core of {name} for {seconds:.1f} s, SIGCONT"


def freeze_valkey(world: World, rng: random.Random) -> str:
    seconds = rng.uniform(1.0, 3 * LEASE_S)
    world.signal(world.valkey.pid, signal.SIGSTOP)
    time.sleep(seconds)
    world.signal(world.valkey.pid, signal.SIGCONT)
    return f"SIGSTOP the Valkey server for {seconds:.1f} s, SIGCONT"


def restart_valkey(world: World, rng: random.Random) -> str:
    world.restart_valkey()
    return "kill -9 the Valkey server, start it on the same files"


def cut_connections(world: World, rng: random.Random) -> str:
    return f"cut {world.proxy.cut()} connections to Valkey"


def lose_replies(world: World, rng: random.Random) -> str:
    count, before = rng.randint(3, 20), world.proxy.lost
    world.proxy.lose_replies(count)
    world.wait("the replies to lose", lambda: world.proxy.lost >= before + count, LIMIT_S)
    return f"lose {count} replies of Valkey"


def outage(world: World, rng: random.Random) -> str:
    seconds = rng.uniform(2 * LEASE_S, OUTAGE_LIMIT_S)
    world.proxy.away(True)
    time.sleep(seconds)
    world.proxy.away(False)
    return f"Valkey out of reach for {seconds:.1f} s, over twice the lease"


def _flagged(world: World, flag: str, updates: int) -> None:
    path = world.flags / flag
    path.touch()
    try:
        done = world.steps
        world.wait(f"{updates} updates with a {flag} reward", lambda: world.steps >= done + updates, LIMIT_S)
    finally:
        path.unlink()


def slow_reward(world: World, rng: random.Random) -> str:
    _flagged(world, reward.SLOW, 2)
    return f"a reward that takes {reward.SLOW_S} s"


def raising_reward(world: World, rng: random.Random) -> str:
    _flagged(world, reward.RAISES, 3)
    return f"a reward that raises for {reward.RAISE_SHARE:.0%} of the responses"


def poison(world: World, rng: random.Random) -> str:
    """A prompt that kills whoever scores it, until the ledger gives it up."""
    dead = world.stats().dead_reasons.get("poison", 0)
    (world.flags / reward.POISON).touch()
    try:
        world.wait(
            "the death of the poison prompt",
            lambda: world.stats().dead_reasons.get("poison", 0) > dead,
            LIMIT_S,
        )
    finally:
        (world.flags / reward.POISON).unlink()
    return "a prompt that kills every rollouter that scores it"


def scale_up(world: World, rng: random.Random) -> str:
    world.scale(ROLLOUTERS + 1)
    return f"scale to {ROLLOUTERS + 1} rollouters"


def scale_down(world: World, rng: random.Random) -> str:
    world.scale(1)
    return "scale to 1 rollouter"


def scale_to_none(world: World, rng: random.Random) -> str:
    world.scale(0)
    world.wait("the last rollouter to leave", lambda: not world.stats().members, LIMIT_S)
    world.scale(ROLLOUTERS)
    return f"scale to 0 rollouters and back to {ROLLOUTERS}"


REGROUP = ("member-joins", "trainer-forms")
"""Moments of a new weight group only: it takes another roster."""


def at(moment: str, what: str = "kill") -> Fault:
    """At a named moment of a sync round or of a step; see `inject/sitecustomize.py`."""

    def fault(world: World, rng: random.Random) -> str:
        struck, before = world.flags / f"struck-{moment}", world.pids()
        members = set(world.stats().members)
        struck.unlink(missing_ok=True)
        (world.flags / f"at-{moment}").write_text(what)
        if moment in REGROUP:
            world.signal(a_rollouter(world, rng)[1], signal.SIGKILL)
        world.wait(f"the moment {moment}", struck.exists, LIMIT_S)
        if what == "kill":
            world.wait("the runner to replace it", lambda: world.pids() not in (before, {}), LIMIT_S)
            if moment.startswith("member-"):  # else it would pass for well while its place is still held
                world.wait("its place to be free", lambda: members - set(world.stats().members), LIMIT_S)
            return f"kill -9 at the moment {moment}"
        if world.ended:
            return f"the run was over before the moment {moment}"
        pid = int(struck.read_text())
        known = len(world.stats().members)
        try:
            world.wait("the round to go on without it", lambda: len(world.stats().members) < known, LIMIT_S)
        finally:
            world.signal(pid, signal.SIGCONT)
        return f"SIGSTOP at the moment {moment} until the round has gone on, SIGCONT"

    return fault


PROCESSES: dict[str, Fault] = {
    "kill rollouter": kill_rollouter,
    "kill trainer rank": kill_trainer_rank,
    "kill engine core": kill_engine_core,
    "lost replies": lose_replies,
    "kill coordinator": kill_service("coordinator"),
    "Valkey restart": restart_valkey,
    "freeze rollouter": freeze_rollouter,
    "scale down": scale_down,
    "kill queue": kill_service("queue"),
    "raising reward": raising_reward,
    "scale up": scale_up,
    "cut connections": cut_connections,
    "kill trainer": kill_service("trainer"),
    "outage of Valkey": outage,
    "slow reward": slow_reward,
    "freeze coordinator": freeze("coordinator"),
    "freeze trainer": freeze_trainer,
    "freeze queue": freeze("queue"),
    "freeze briefly": freeze_briefly,
    "freeze engine core": freeze_engine_core,
    "freeze Valkey": freeze_valkey,
    "scale to none": scale_to_none,
    "poison prompt": poison,
}

MOMENTS: dict[str, Fault] = {
    **{
        moment.replace("-", " "): at(moment)
        for moment in (
            "member-pauses",
            "member-joins",
            "member-receives",
            "member-has-loaded",
            "member-resumes",
            "trainer-writes-snapshot",
            "trainer-forms",
            "trainer-sends",
            "trainer-has-sent",
            "trainer-acknowledges",
            "trainer-saves",
            "coordinator-holds",
            "coordinator-commits",
            "coordinator-has-committed",
        )
    },
    "member hangs in a pause": at("member-pauses", "stop"),
    "member hangs in a transfer": at("member-receives", "stop"),
}
"""The failures of a sync round, each at its moment."""
