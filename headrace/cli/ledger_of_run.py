"""Open the ledger of a run for a command: on the run's server if it is up, otherwise on the run's files.

In a cluster the server is always up; the pods' environment names it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from headrace.config import redis_url
from headrace.connections.redis_client import LOGIN_REFUSED, connect, login_refused
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.local import scratch
from headrace.local.in_cluster import NO_ADDRESS, ledger_url, name_of
from headrace.local.services import REDIS_SOCKET
from headrace.local.valkey_server import start_valkey
from headrace.records.json_files import read_json
from headrace.records.layout import RunLayout

_TIMEOUT_S = 60.0


class NoLedger(LedgerError):
    """There is no ledger, or none yet."""


class LostLedger(NoLedger):
    """The bundled server's files are missing: the run never got that far, or they are gone."""


@dataclass(frozen=True)
class RunLedger:
    ledger: SyncLedger
    is_on: bool
    """Whether the run has a runner. If not, none can start until the command ends. A run in a cluster
    always counts as running: nothing prevents its trainer from starting."""
    in_cluster: bool = False


@contextlib.contextmanager
def ledger_of(layout: RunLayout) -> Iterator[RunLedger]:
    """Open the run's ledger. For a run that has ended, start the bundled server on its files.

    Raises ConfigError, NoLedger, LedgerError, ValkeyError, RunInUseError.
    """
    run = name_of(layout)
    if layout.in_cluster:
        if (url := ledger_url()) is None:
            raise NoLedger(f"{layout.root}: {NO_ADDRESS}")
        with _at(url, run) as ledger:
            yield RunLedger(ledger, is_on=True, in_cluster=True)
        return
    ends = read_json(layout.endpoints) or {}
    if layout.in_use():
        if "redis_url" not in ends:
            raise NoLedger(f"{layout.root}: the run is still starting; try again")
        with _at(ends["redis_url"], run) as ledger:
            yield RunLedger(ledger, is_on=True)
        return
    lock = layout.lock(wait_s=1.0)
    try:
        if ends.get("external_redis"):
            with _at(ends["redis_url"], run) as ledger:
                yield RunLedger(ledger, is_on=False)
            return
        if not (layout.redis / "appendonlydir").is_dir() and not any(layout.redis.glob("*.aof")):
            raise LostLedger(f"{layout.redis}: holds no ledger; the run never got that far")
        log = layout.private / "command-valkey.log"
        with (
            _scratch() as folder,
            start_valkey(layout.redis, secrets.token_urlsafe(32), folder / REDIS_SOCKET, log=log) as server,
            _at(server.url, run) as ledger,
        ):
            yield RunLedger(ledger, is_on=False)
    finally:
        lock.release()


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder for the server's socket, like a run's."""
    made = scratch.create()
    try:
        yield made.root
    finally:
        made.remove()


@contextlib.contextmanager
def _at(url: str, run: str) -> Iterator[SyncLedger]:
    try:
        with connect(url, timeout_s=_TIMEOUT_S) as client:
            yield SyncLedger(client, run, retry_s=5.0)
    except LOGIN_REFUSED as error:
        raise LedgerError(login_refused(redis_url.parse(url).where, error)) from None
    except redis.RedisError as error:
        raise LedgerError(f"{redis_url.masked(url)} cannot be reached: {error}") from None
