"""Run ledger operations against the server, from threads or from asyncio.

Both clients send `EVALSHA`, and the script's text once if the server does not know it. While the server
cannot be reached they retry the operation with back-off. Retrying is safe even if only the reply was lost
(see `ops`). After `retry_s` seconds they raise `LedgerUnavailable`, which names the server by host and port
and never shows a password. A rejected password is not retried: `LoginRefused`. A ledger that is behind what
this client has already seen is never written to: `LedgerWentBack`. The deadline of one attempt is the Redis
client's own socket timeout.

The two clients share everything but the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.connections.redis_client import LOGIN_REFUSED, is_silence, login_refused
from headrace.ledger import keys, marks, ops, replies, scripts
from headrace.ledger.keep import Keep
from headrace.ledger.marks import Marks
from headrace.ledger.ops import Op

T = TypeVar("T")
log = logging.getLogger("headrace.ledger")

RETRYABLE = (RedisConnectionError, RedisTimeoutError)
PASSING = ("BUSY", "MISCONF")
"""Prefixes of errors about the server's state, not the request, that redis-py has no class for: a
long-running script, a full disk."""
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0
MEMORY_DELAY_S = 0.5
STOPPING_S = 5.0
"""How long a stopping client retries. Its checkpoint also holds whatever it still had to report."""
CHUNK = 1000
"""Ids per call while adopting a checkpoint."""


def passes(error: ResponseError) -> bool:
    """Whether the error is temporary: the same request may succeed later."""
    return isinstance(error, ReadOnlyError | MasterDownError) or str(error).startswith(PASSING)


class LedgerError(Exception):
    """The server refused the operation: a run that is not configured, no memory left, a wrong call."""


class ArgumentRefused(LedgerError):
    """An argument that no caller of this release sends. The sender is at fault; nothing was done."""


class LedgerUnavailable(LedgerError):
    """The server stayed out of reach for the whole retry time."""


class LedgerWentBack(LedgerError):
    """The server lost acknowledged writes, or holds another ledger under the run's name. Final."""


_WENT_BACK = "HEADRACE the ledger went back: "


def _address(kwargs: Mapping[str, Any]) -> str:
    if "path" in kwargs:
        return str(kwargs["path"])
    return f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"


class LoginRefused(LedgerError):
    """The server rejects our password. Waiting does not help; a restart with the right one does."""


def _remedy(error: ResponseError) -> str:
    """What to do about an error that stems from the server's state."""
    if isinstance(error, OutOfMemoryError):
        return "; give the server more memory (redis.max_memory_bytes, or maxmemory of a server of your own)"
    if str(error).startswith("MISCONF"):
        return "; free some space on the server's disk; the server then recovers by itself"
    return ""


class _Common:
    """What both clients share: the command, the run's key, the retry schedule, the errors."""

    def __init__(
        self, pool: Any, run: str, retry_s: float, clock: Callable[[], float], seen: Marks | None
    ) -> None:
        if pool.connection_kwargs.get("decode_responses"):
            raise ValueError("the ledger needs a client with decode_responses=False: payloads are bytes")
        self.run_name = run
        self.address = _address(pool.connection_kwargs)
        self.retry_s = retry_s
        self._meta = keys.meta(run)
        self._clock = clock
        self.seen = seen or Marks()
        """How far the ledger was at its last answer."""

    def _call(self, op: Op[Any], full: bool) -> tuple[Any, ...]:
        head = ("EVAL", scripts.source(op.script)) if full else ("EVALSHA", scripts.sha(op.script))
        return (*head, 2, self._meta, keys.seen(self.run_name, self.seen.text()), *op.args)

    def _heard(self, op: Op[T], raw: Any) -> T:
        found, answer = raw
        self.seen = self.seen.with_(marks.read(found.decode()))
        return op.parse(answer)

    def _delay(self, op: Op[Any], attempt: int, started: float, error: Exception) -> float:
        """Seconds until the next attempt. Raises LedgerUnavailable when the time is up."""
        patience = self._patience()
        left = started + patience - self._clock()
        if left <= 0 and isinstance(error, ResponseError):
            raise LedgerUnavailable(
                f"the ledger at {self.address} refused {op.script} for {patience:g} s: "
                f"{error}{_remedy(error)}"
            ) from None
        if left <= 0:
            raise LedgerUnavailable(
                f"the ledger at {self.address} was not reached for {patience:g} s ({attempt} attempts of "
                f"{op.script}, last: {type(error).__name__}); check that the server runs"
            ) from None
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempt - 1, 10))
        return min(left, delay * random.uniform(0.5, 1.0))

    def _patience(self) -> float:
        """Seconds for which an operation is retried."""
        return self.retry_s

    def _login_refused(self, error: Exception) -> LoginRefused:
        return LoginRefused(login_refused(self.address, error))

    def _refused(self, op: Op[Any], error: ResponseError) -> LedgerError:
        said = str(error).partition(" script: ")[0]  # the server adds where in the script
        _, went_back, found = said.partition(_WENT_BACK)
        if went_back or ("is not configured" in said and self.seen.begun):
            there = marks.read(found) if found.strip("/") else None
            return LedgerWentBack(marks.why_refused(self.run_name, self.address, self.seen, there))
        if said.startswith(scripts.REFUSED):
            return ArgumentRefused(
                f"the ledger at {self.address} refused {op.script}: {said[len(scripts.REFUSED) :]}"
            )
        return LedgerError(f"{op.script} at {self.address}: {said}{_remedy(error)}")


class SyncLedger(_Common):
    """Synchronous client for the ledger of one run."""

    def __init__(
        self,
        client: redis.Redis,
        run: str,
        retry_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        stopping: Callable[[], bool] = lambda: False,
        seen: Marks | None = None,
    ) -> None:
        """`stopping`: whether the process is stopping; an outage is then retried for STOPPING_S only.
        `seen`: what is already known of the ledger."""
        super().__init__(client.connection_pool, run, retry_s, clock, seen)
        self.redis = client
        self._sleep = sleep
        self._stopping = stopping
        self._went_first = False
        """While stopping, an operation failed because the server was gone. Further ones are not retried."""

    def _patience(self) -> float:
        if not self._stopping():
            return self.retry_s
        return 0.0 if self._went_first else min(self.retry_s, STOPPING_S)

    @contextlib.contextmanager
    def unless_stopping(self) -> Iterator[None]:
        """Wrap operations that a stopping process can do without: an unreachable server is then logged, not
        raised."""
        try:
            yield
        except LedgerUnavailable as error:
            if not self._stopping():
                raise
            self._went_first = True
            log.warning("stopping without the ledger, which cannot be reached", extra={"reason": str(error)})

    def run(self, op: Op[T]) -> T:
        started, attempt = self._clock(), 0
        while True:
            attempt += 1
            try:
                return self._heard(op, self._send(op))
            except LOGIN_REFUSED as error:
                raise self._login_refused(error) from None
            except RETRYABLE as error:
                self._sleep(self._delay(op, attempt, started, error))
            except ResponseError as error:
                if not passes(error):
                    raise self._refused(op, error) from None
                self._sleep(self._delay(op, attempt, started, error))

    def _send(self, op: Op[Any]) -> Any:
        try:
            return self.redis.execute_command(*self._call(op, full=False))
        except NoScriptError:
            return self.redis.execute_command(*self._call(op, full=True))

    def close(self) -> None:
        self.redis.close()


class AsyncLedger(_Common):
    """Asyncio client for the ledger of one run."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        run: str,
        retry_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        waits_when_full: bool = False,
        seen: Marks | None = None,
    ) -> None:
        """`waits_when_full`: wait for a server that is out of memory, however long it takes.
        `seen`: what is already known of the ledger."""
        super().__init__(client.connection_pool, run, retry_s, clock, seen)
        self.redis = client
        self._waits_when_full = waits_when_full
        self._waiting = 0

    @property
    def waits_for_memory(self) -> bool:
        """Whether the server is out of memory and refuses new bytes. Operations retry until training frees
        some."""
        return self._waiting > 0

    async def run(self, op: Op[T]) -> T:
        started, attempt = self._clock(), 0
        while True:
            attempt += 1
            try:
                return self._heard(op, await self._send(op))
            except LOGIN_REFUSED as error:
                raise self._login_refused(error) from None
            except RETRYABLE as error:
                if is_silence(error):  # each idle connection in the pool would cost its own timeout
                    await self._drop_idle()
                await asyncio.sleep(self._delay(op, attempt, started, error))
            except OutOfMemoryError as error:
                if not self._waits_when_full:
                    raise self._refused(op, error) from None
                await self._wait_for_memory(op)
                started, attempt = self._clock(), 0
            except ResponseError as error:
                if not passes(error):
                    raise self._refused(op, error) from None
                await asyncio.sleep(self._delay(op, attempt, started, error))

    async def _drop_idle(self) -> None:
        with contextlib.suppress(redis.RedisError):  # a dead connection cannot always be closed cleanly
            await self.redis.connection_pool.disconnect(inuse_connections=False)

    async def _wait_for_memory(self, op: Op[Any]) -> None:
        if not self._waiting:
            log.warning("the server's memory is used up, waiting", extra={"op": op.script})
        self._waiting += 1
        try:
            await asyncio.sleep(MEMORY_DELAY_S)
        finally:
            self._waiting -= 1

    async def _send(self, op: Op[Any]) -> Any:
        try:
            return await self.redis.execute_command(*self._call(op, full=False))
        except NoScriptError:
            return await self.redis.execute_command(*self._call(op, full=True))

    async def close(self) -> None:
        await self.redis.aclose()


class AdoptError(LedgerError):
    """The checkpoint and the ledger do not match."""


_ADOPT_HELP = {
    replies.AdoptStatus.FENCED: "another trainer has opened a newer lineage",
    replies.AdoptStatus.UNKNOWN: "this ledger never issued it: the checkpoint belongs to another run, or the "
    "server lost its data",
    replies.AdoptStatus.TRIMMED: "its prompt was trimmed because newer checkpoints covered it: resume from "
    "a newer one",
    replies.AdoptStatus.INCOMPLETE: "work of the abandoned lineage is still in flight",
}


@dataclass(frozen=True)
class Adopted:
    """What became of the work that the checkpoint has not trained. Counts are samples."""

    kept: int
    """Finished or parked, and kept so."""
    restarted: int
    """Restarted from their prompts."""


def adopt(ledger: SyncLedger, lineage: int, manifest: Mapping[str, int], keep: Keep | None = None) -> Adopted:
    """Make the ledger agree with a checkpoint.

    `manifest` maps the id of every sample trained up to the checkpoint to its step. `keep` says which of the
    other finished and parked samples are kept; None keeps none. Raises AdoptError.

    Goes through all issued ids in chunks. It may be interrupted anywhere and run again, by the same lineage
    or by a newer one with any checkpoint.
    """
    before = ledger.run(ops.stats())
    issued = before.issued_total  # later samples stay ready, since takes are held: nothing to adopt

    def check(reply: replies.AdoptReply) -> None:
        if reply.status is not replies.AdoptStatus.OK:
            name = f"sample {reply.sample_id}: " if reply.sample_id else ""
            raise AdoptError(f"cannot adopt the checkpoint: {name}{_ADOPT_HELP[reply.status]}")

    pairs = sorted(manifest.items())
    for i in range(0, len(pairs), CHUNK):
        check(ledger.run(ops.adopt_trained(lineage, pairs[i : i + CHUNK])))
    for i in range(0, issued, CHUNK):
        ids = [keys.sample_id(n) for n in range(i, min(issued, i + CHUNK))]
        check(ledger.run(ops.adopt_rest(lineage, [s for s in ids if s not in manifest])))
    check(ledger.run(ops.finish_adopt(lineage, keep)))
    after = ledger.run(ops.stats())
    back = sum(after.requeued.get(why, 0) - before.requeued.get(why, 0) for why in ("rollback", "lineage"))
    return Adopted(after.outstanding, back)
