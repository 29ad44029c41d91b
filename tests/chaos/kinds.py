"""All kinds of faults by name, and which of them strike in which order."""

from __future__ import annotations

import random

from tests.chaos.doubles import DOUBLES
from tests.chaos.faults import MOMENTS, PROCESSES, Fault
from tests.chaos.membership import fifty_changes
from tests.chaos.network import NETWORK
from tests.chaos.payloads import flip_payload
from tests.chaos.terminal import TERMINAL

FAULTS: dict[str, Fault] = {
    **PROCESSES,
    **MOMENTS,
    **NETWORK,
    **DOUBLES,
    "flipped payload": flip_payload,
    "fifty changes": fifty_changes,
}
"""Faults that a run recovers from."""

KINDS = [*FAULTS, *TERMINAL]

LONG = {"fifty changes": 10}
"""Kinds that take as long as so many others."""


def plan(count: int, rng: random.Random, kinds: list[str] | None = None) -> list[str]:
    """`count` kinds of faults: every kind as often as the others, or once more, in a random order."""
    known = kinds or KINDS
    rounds = [rng.sample(known, len(known)) for _ in range(-(-count // len(known)))]
    return [kind for one in rounds for kind in one][:count]


def rng_of(seed: int, number: int, kind: str) -> random.Random:
    """What fault `number` of a seed draws from: the same whatever became of those before it."""
    return random.Random(f"{seed}/{number}/{kind}")
