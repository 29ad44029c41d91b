"""Janitor: takes work back from dead owners, and frees prompts that will not be needed again.

Guarantees:

- An owner is expired only if its heartbeat has not moved over a whole lease of successful readings. A failed
  reading restarts the observation, so a Redis outage expires nobody. A heartbeat between the reading and the
  expiry prevents it.
- Work is never taken back because of its age. Members and owners of work are watched even if they have never
  sent a heartbeat.
- A rollouter's telemetry is removed once it neither sends heartbeats nor owns anything.
- A prompt is freed only if its sample is trained in every retained checkpoint, so that no resume needs it
  again. Nothing is freed if the next trainer may start without a checkpoint.
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
"""A pause of this length between two readings (a suspended process) restarts the observation."""
TRIM_EVERY_S = 10.0
MANIFESTS = "step_*/manifest.json"
"""Matches complete checkpoints only. One that is still being written has another name."""


class Janitor:
    """The janitor's loop. `checkpoints` is the folder of the run's checkpoints; None if there is none."""

    name = "janitor"

    def __init__(self, ledger: AsyncLedger, lease_s: float, checkpoints: Path | None) -> None:
        """`ledger` must not retry by itself: this loop has to see failed readings."""
        self._ledger = ledger
        self._observer = BeatObserver(lease_s)
        self._poll_s = min(POLL_S, lease_s / 4)
        self._checkpoints = checkpoints
        self._last_reading = self._trim_due = time.monotonic()
        self._read: tuple[object, ...] = ()
        self.expired_owners = 0
        """Number of owners that this process has expired."""

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
        """Forget readings from before the outage: they say nothing about who is alive now."""
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
        """Trim up to the oldest retained checkpoint, if the set of checkpoints has changed."""
        stamp = manifest_stamp(folder)
        if stamp == self._read:
            return
        floor = await asyncio.to_thread(trim_floor, folder)
        if floor is not None:
            freed = await self._ledger.run(ops.trim(floor))
            log.info("prompts trimmed", extra={"step": floor, "freed": freed})
        self._read = stamp


@dataclass(frozen=True)
class TrainedUpTo:
    """The part of a checkpoint's manifest needed here: its step, and the samples trained up to it."""

    step: int
    trained: frozenset[str]


def manifest_stamp(folder: Path) -> tuple[object, ...]:
    """A value that changes when a manifest appears, disappears or is replaced. Reads no file."""
    found = []
    for path in sorted(folder.glob(MANIFESTS)):
        with contextlib.suppress(FileNotFoundError):  # the trainer has just removed the checkpoint
            stat = path.stat()
            found.append((path.parent.name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def trim_floor(folder: Path) -> int | None:
    """The step up to which prompts may be freed; None if nothing may be freed.

    This is the oldest checkpoint's step, provided that all others were trained on top of it. A checkpoint of
    another lineage may lack some of its samples, and would need their prompts again.
    """
    manifests = []
    for path in sorted(folder.glob(MANIFESTS)):
        manifest = _read_manifest(path)
        if manifest is None:
            return None  # it may be the oldest: wait until it is readable or gone
        manifests.append(manifest)
    return nested_floor(manifests)


def nested_floor(manifests: Sequence[TrainedUpTo]) -> int | None:
    """`trim_floor` for manifests already read."""
    if not manifests:
        return None
    oldest = min(manifests, key=lambda manifest: manifest.step)
    if not all(oldest.trained <= manifest.trained for manifest in manifests):
        return None
    return oldest.step


def _read_manifest(path: Path) -> TrainedUpTo | None:
    """Read a manifest; None (logged) if it is invalid. `trained` may be a list of ids or map ids to steps."""
    try:
        value: Any = json.loads(path.read_bytes())
        step, trained = value["step"], list(value["trained"])
        if type(step) is not int or not all(isinstance(sample_id, str) for sample_id in trained):
            raise TypeError("step must be an integer and trained name sample ids")
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("manifest unreadable, nothing is trimmed", extra={"path": path, "error": str(error)})
        return None
    return TrainedUpTo(step, frozenset(trained))
