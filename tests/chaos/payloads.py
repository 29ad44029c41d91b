"""Bits of a finished sample's payload that flip in Redis, before the trainer has read it."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.ledger import keys
from headrace.v1 import sample_pb2 as pb
from tests.chaos.faults import LIMIT_S
from tests.chaos.world import NAME, Stuck, World

QUEUE_LIMIT_S = 60.0
WHERE = ("token id", "prompt", "log-prob", "version", "anywhere")


def flip(raw: bytes, where: str, rng: random.Random) -> bytes:
    """One bit of the named place, which breaks a rule for sure, or eight bits of any."""
    if where == "anywhere":
        found = bytearray(raw)
        for bit in rng.sample(range(8 * len(found)), 8):
            found[bit // 8] ^= 1 << bit % 8
        return bytes(found)
    sample = pb.Sample.FromString(raw)
    trajectory = rng.choice(sample.trajectories)
    match where:
        case "token id":  # 2^20 more than any vocabulary here has
            at = rng.randrange(len(trajectory.loss_mask))
            trajectory.response_token_ids = _flipped(trajectory.response_token_ids, at, 20)
        case "prompt":
            at = rng.randrange(len(sample.prompt.prompt_token_ids) // 4)
            sample.prompt.prompt_token_ids = _flipped(sample.prompt.prompt_token_ids, at, 0)
        case "log-prob":  # the sign of one that is not 0
            at = int(np.frombuffer(trajectory.behaviour_log_probs, "<f4").argmin())
            trajectory.behaviour_log_probs = _flipped(trajectory.behaviour_log_probs, at, 31)
        case "version":
            rng.choice(trajectory.segments).version ^= 1 << 10
    return sample.SerializeToString()


def _flipped(packed: bytes, at: int, bit: int) -> bytes:
    """A bit of the four-byte number `at` in `packed`."""
    found = np.frombuffer(packed, "<u4").copy()
    found[at] ^= np.uint32(1 << bit)
    return found.tobytes()


def flip_payload(world: World, rng: random.Random) -> str:
    where = rng.choice(WHERE)
    ranks = world.trainer_ranks()
    for process in ranks:  # what is queued stays there meanwhile
        world.signal(process.pid, signal.SIGSTOP)
    with world.redis as client:
        try:
            world.wait("a queued sample", lambda: _queued(client), QUEUE_LIMIT_S)
            sample_id = rng.choice(_queued(client))
            record = f"{keys.prefix(NAME)}s:{sample_id}"
            attempt = _replace(client, record, lambda raw: flip(raw, where, rng))
        finally:
            for process in ranks:
                world.signal(process.pid, signal.SIGCONT)

        def state() -> tuple[str, bool]:
            found, again = client.hmget(record, "state", "attempt")
            return found.decode(), again != attempt

        world.wait(
            f"an end of sample {sample_id}",
            lambda: state()[0] in ("trained", "dead", "dropped") or state()[1],
            LIMIT_S,
        )
        found, again = state()
    if where != "anywhere" and found == "trained" and not again:
        raise Stuck(f"sample {sample_id} was trained, although a bit of its {where} had flipped")
    return f"a bit flips in a payload ({where}): the sample is {'taken again' if again else found}"


def _replace(client: Any, record: str, change: Callable[[bytes], bytes]) -> bytes:
    """Put a changed payload in the place of a queued sample's; returns the sample's attempt."""
    stream = f"{keys.prefix(NAME)}samples"
    entry, attempt = client.hmget(record, "eid", "attempt")
    ((_, fields),) = client.xrange(stream, entry, entry)
    fields = {name: change(value) if name == b"payload" else value for name, value in fields.items()}
    client.xdel(stream, entry)
    client.hset(record, "eid", client.xadd(stream, fields))
    return bytes(attempt)


def _queued(client: Any) -> list[str]:
    found = client.zrange(f"{keys.prefix(NAME)}queued", 0, -1)
    return sorted(sample_id.decode() for sample_id in found)
