"""Janitor: takes work back from owners that are gone, and frees prompts that nothing can ask for again.

What this module guarantees:

- An owner is expired only when its beat stood still over a whole lease of successful readings. A failed
  reading starts the observation anew, so an outage of Redis expires nobody. A beat between the reading and
  the expiry saves it.
- Work is never taken back because it is old. An owner that has work, or a member, that never gave a sign of
  life is watched like the others.
- What a rollouter has told about itself is removed once it neither beats nor has anything (telemetry).
- A prompt is freed only when its sample is trained in every retained checkpoint, and never when the next
  trainer may start without one: whichever of them is resumed, nothing asks for that prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.ledger.observer import BeatObserver
from headrace.service import telemetry

log = logging.getLogger(__name__)

POLL_S = 1.0
HOLE_S = 5.0
"""A pause between two readings that is this long (the process was stopped) starts the observation anew."""
TRIM_EVERY_S = 10.0
MANIFESTS = "step_*/manifest.json"
"""Complete checkpoints only: one that is still being written has another name, and may never be completed."""


class Janitor:
    """The loop. `checkpoints` is the folder of the run's checkpoints, None where this service has none."""

    name = "janitor"

    def __init__(self, ledger: AsyncLedger, lease_s: float, checkpoints: Path | None) -> None:
        """`ledger` must not repeat calls by itself: a reading that failed has to be seen here."""
        self._ledger = ledger
        self._observer = BeatObserver(lease_s)
        self._poll_s = min(POLL_S, lease_s / 4)
        self._checkpoints = checkpoints
        self._last_reading = self._trim_due = time.monotonic()
        self._read: tuple[object, ...] = ()
        self.expired_owners = 0
        """Owners that this process has expired."""

    async def step(self) -> float:
        beats = await self._ledger.run(ops.beats())
        before, self._last_reading = self._last_reading, time.monotonic()
        if self._last_reading - before > HOLE_S:
            self._observer.reset()
        stats = await self._ledger.run(ops.stats())
        seen = {**dict.fromkeys([*stats.in_flight_by_owner, *stats.members], ops.NEVER_BEAT), **beats}
        for owner in self._observer.observe(seen):
            await self._expire(owner, seen[owner])
            seen.pop(owner)
        with contextlib.suppress(redis.RedisError):  # nothing depends on it
            await telemetry.forget_all_but(self._ledger.redis, self._ledger.run_name, seen)
        if self._checkpoints is not None and time.monotonic() >= self._trim_due:
            await self._trim(self._checkpoints)
            self._trim_due = time.monotonic() + TRIM_EVERY_S
        return self._poll_s

    def interrupted(self) -> None:
        """What was seen before the outage says nothing about who lives now."""
        self._observer.reset()

    async def _expire(self, owner: str, seen: int) -> None:
        reply = await self._ledger.run(ops.expire(owner, f"owner {owner} gave no sign of life", seen))
        if not reply.expired:
            return
        self.expired_owners += 1
        log.warning(
            "owner expired", extra={"owner": owner, "requeued": len(reply.requeued), "dead": len(reply.dead)}
        )

    async def _trim(self, folder: Path) -> None:
        """Trim up to the oldest retained checkpoint, if the set of them has changed since the last time."""
        stamp = manifest_stamp(folder)
        if stamp == self._read:
            return
        floor = await asyncio.to_thread(trim_floor, folder)
        if floor is not None:
            freed = await self._ledger.run(ops.trim(floor))
            log.info("prompts trimmed", extra={"step": floor, "freed": freed})
        self._read = stamp


@dataclass(frozen=True)
class Manifest:
    """What is read of a checkpoint: the optimizer step, and the samples trained up to it."""

    step: int
    trained: frozenset[str]


def manifest_stamp(folder: Path) -> tuple[object, ...]:
    """Something that changes when a manifest comes, goes or is replaced; costs no reading."""
    found = []
    for path in sorted(folder.glob(MANIFESTS)):
        with contextlib.suppress(FileNotFoundError):  # the trainer has just removed the checkpoint
            stat = path.stat()
            found.append((path.parent.name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def trim_floor(folder: Path) -> int | None:
    """The step up to which prompts may be freed, None when nothing may be.

    That is the oldest checkpoint's step, provided that all others were trained on top of it: a checkpoint of
    another lineage may lack samples that this one has, and would ask for their prompts again.
    """
    manifests = []
    for path in sorted(folder.glob(MANIFESTS)):
        manifest = _read_manifest(path)
        if manifest is None:
            return None  # it may be the oldest; wait until it can be read or is gone
        manifests.append(manifest)
    return nested_floor(manifests)


def nested_floor(manifests: Sequence[Manifest]) -> int | None:
    """`trim_floor` of manifests already read."""
    if not manifests:
        return None
    oldest = min(manifests, key=lambda manifest: manifest.step)
    if not all(oldest.trained <= manifest.trained for manifest in manifests):
        return None
    return oldest.step


def _read_manifest(path: Path) -> Manifest | None:
    """The manifest, or None (logged) when it is none. `trained` is a list of ids, or maps ids to steps."""
    try:
        value: Any = json.loads(path.read_bytes())
        step, trained = value["step"], list(value["trained"])
        if type(step) is not int or not all(isinstance(sample_id, str) for sample_id in trained):
            raise TypeError("step must be an integer and trained name sample ids")
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("manifest unreadable, nothing is trimmed", extra={"path": path, "error": str(error)})
        return None
    return Manifest(step, frozenset(trained))
