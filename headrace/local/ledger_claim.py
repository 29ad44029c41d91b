"""Claim the ledger of a run's name on an external server.

The id in the run's directory (`ledger.json`) tells whether a ledger is the run's own. Another run's ledger is
refused. With trainer.resume=never a dead one is deleted: one without writes for several leases. A running
run writes every second, and a write just before the deletion prevents it (`ops.delete`).
"""

from __future__ import annotations

import time
from pathlib import Path

from headrace.config import redis_url
from headrace.config.loading import ConfigError
from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, LedgerUnavailable, LedgerWentBack, SyncLedger
from headrace.ledger.marks import Marks

LEASES = 3
"""Leases without writes after which a ledger counts as dead. Services take a while to restart."""
SIGNS_S = 3.0
"""Seconds within which a running run writes. Even a run known to be over is watched this long, because its
directory may have been copied."""
_POLL_S = 0.2


def claim(config: RunConfig, directory: Path, mine: Marks, dead: Marks) -> None:
    """Return once the server has no ledger of this name, or only `mine`.

    `dead` is a ledger whose run is known to be over. Raises ConfigError and LedgerError.
    """
    assert config.redis.url is not None
    shown = redis_url.masked(config.redis.url)
    with connect(config.redis.url, config.redis.connect_timeout_s) as client:
        ledger = SyncLedger(client, config.name, retry_s=config.redis.connect_timeout_s)
        theirs = _read(ledger)
        if theirs is None or theirs.ledger == mine.ledger:
            return
        if config.trainer.resume != "never":
            raise ConfigError(
                [
                    f"redis.url: {shown}: holds the ledger of another run called {config.name!r} "
                    f"(nothing of it is in {directory}); choose another name with name=..."
                ]
            )
        if not theirs.ledger:
            raise ConfigError(
                [
                    f"redis.url: {shown}: holds the ledger of a run called {config.name!r} of an earlier "
                    "release, whose services give no signs of life; choose another name with name=..."
                ]
            )
        wait_s = SIGNS_S if theirs.ledger == dead.ledger else LEASES * config.ledger.lease_s
        print(
            f"trainer.resume=never: {shown} holds the ledger of another run called {config.name!r}; "
            f"checking for {wait_s:g} s whether it is running",
            flush=True,
        )
        if not _delete_dead(ledger, theirs, wait_s):
            raise ConfigError(
                [
                    f"redis.url: {shown}: another run called {config.name!r} is running there (nothing of it "
                    f"is in {directory}); choose another name with name=..."
                ]
            )
    print(f"trainer.resume=never: deleted the earlier ledger of {config.name} at {shown}", flush=True)


def _read(ledger: SyncLedger) -> Marks | None:
    """The marks of the ledger; None if there is none."""
    try:
        ledger.run(ops.fingerprint())
    except LedgerUnavailable:
        raise
    except LedgerError as error:
        if "is not configured" in str(error):
            return None
        raise
    return ledger.seen


def _delete_dead(ledger: SyncLedger, theirs: Marks, wait_s: float) -> bool:
    """Delete the ledger unless somebody writes to it within `wait_s` seconds; return whether it is gone."""
    deadline = time.monotonic() + wait_s
    try:
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            ledger.run(ops.fingerprint())
            if ledger.seen.writes != theirs.writes:
                return False
        return ledger.run(ops.delete(theirs.ledger, theirs.writes)) == "ok"
    except LedgerWentBack:  # another start has just deleted it for its own run
        return False
