"""Startup checks: configuration, server and data errors are found before the first prompt is issued.

Every step is idempotent, so a restart after a crash runs the same startup as the first one. Exit codes:
`EX_CONFIG` for unusable configuration, data or server settings, `EX_UNAVAILABLE` for a Redis that does not
answer.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import redis
import redis.asyncio

from headrace.config import identity, redis_url
from headrace.config.redis_memory import too_small
from headrace.config.run import RunConfig
from headrace.connections.redis_client import LOGIN_REFUSED, VOLATILE, connect_async, login_refused
from headrace.connections.redis_settings import memory_limit, server_settings
from headrace.data import dataset
from headrace.data.rows import DataRow
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger
from headrace.system.endings import EX_CONFIG, EX_UNAVAILABLE
from headrace.wire.payloads import Int32Array, encode_prompt
from headrace_queue.feeder import make_prompt
from headrace_queue.loops import Fatal

log = logging.getLogger(__name__)

VAL_CHUNK = 256
_PROGRESS_EVERY_S = 5.0


def config_problem(message: str) -> Fatal:
    return Fatal(message, EX_CONFIG)


# -- Redis --------------------------------------------------------------------------------------------


async def connect(url: str, timeout_s: float, patience_s: float = 0.0) -> redis.asyncio.Redis:
    """Connect to the Redis at `url` and wait until it answers. Raises Fatal.

    It retries for `patience_s` seconds, because services start in any order. Each attempt times out after
    `timeout_s` seconds.
    """
    try:
        where = redis_url.parse(url).where
        client = connect_async(url, timeout_s)
    except ValueError as error:
        raise config_problem(f"the Redis URL {redis_url.masked(url)} cannot be used: {error}") from None
    patience_s = max(patience_s, timeout_s)
    deadline = time.monotonic() + patience_s
    logged = False
    while True:
        try:
            async with asyncio.timeout(max(0.05, min(timeout_s, deadline - time.monotonic()))):
                await cast(Any, client).ping()
            return client
        except LOGIN_REFUSED as error:
            await client.aclose()
            raise config_problem(login_refused(where, error)) from None
        except (redis.RedisError, OSError) as error:  # TimeoutError is an OSError
            if time.monotonic() >= deadline:
                await client.aclose()
                raise Fatal(
                    f"Redis at {where} did not answer within {patience_s:g} s ({error or 'no answer'}). "
                    "Start it, or correct redis.url or HEADRACE_REDIS_URL.",
                    EX_UNAVAILABLE,
                ) from None
            if not logged:
                logged = True
                log.info("waiting", extra={"for": f"an answer of Redis at {where}", "at_most_s": patience_s})
        await asyncio.sleep(0.1)


async def check_server(client: redis.asyncio.Redis, config: RunConfig) -> None:
    """Refuse a server that may lose samples, or cannot hold what the gate admits.

    The bundled server must be durable. An external one that is not gets a warning, or is refused if it keeps
    nothing on disk and `redis.allow_volatile` is not set.
    """
    embedded = config.redis.url is None
    settings = await server_settings(client)
    limit = memory_limit(settings)
    if (why := too_small(config, limit)) is not None:
        raise config_problem(f"Redis has maxmemory {limit}: {why}")
    policy = settings.get("maxmemory-policy")
    if policy is None:
        log.warning("Redis does not report its maxmemory-policy; it must be noeviction")
    elif policy != "noeviction":
        raise config_problem(
            f"Redis has maxmemory-policy {policy}: it would drop parts of the ledger when memory runs short. "
            "Set it to noeviction (CONFIG SET maxmemory-policy noeviction, and in its configuration file)."
        )
    durability = {name: settings.get(name) for name in ("appendonly", "appendfsync")}
    if durability == {"appendonly": "yes", "appendfsync": "always"}:
        return
    shown = ", ".join(f"{name} {value or 'unknown'}" for name, value in durability.items())
    if embedded and None not in durability.values():
        raise config_problem(
            f"the bundled server has {shown}; a crash of it would lose acknowledged samples. "
            "Start it with appendonly yes and appendfsync always."
        )
    if durability["appendonly"] == "no" and not config.redis.allow_volatile:
        raise config_problem(f"Redis: {VOLATILE}")
    log.warning(
        "Redis may lose acknowledged samples in a crash; appendonly yes and appendfsync always prevent it",
        extra=durability,
    )


# -- data ---------------------------------------------------------------------------------------------


def read_data(config: RunConfig) -> dataset.DataSet:
    """Read, check and tokenise the data. Logs what is left out or cut. Raises DataError."""
    logged_at = time.monotonic()

    def progress(what: str, done: int, total: int | None) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at > _PROGRESS_EVERY_S:
            logged_at = time.monotonic()
            log.info(what, extra={"done": done, "total": total})

    found = dataset.prepare(config, progress)
    for line in found.remarks(config.data):
        log.warning(line)
    return found


# -- the run ------------------------------------------------------------------------------------------


def digest(rows: Sequence[DataRow], tokens: Sequence[Int32Array]) -> str:
    """SHA-256 over everything that prompts are made from, in hexadecimal."""
    sha = hashlib.sha256()
    for row, ids in zip(rows, tokens, strict=True):
        parts = [row.data_source, row.ground_truth, row.extra_info]
        content = json.dumps(parts, sort_keys=True).encode() + ids.astype("<i4").tobytes()
        sha.update(len(content).to_bytes(8, "little"))
        sha.update(content)
    return sha.hexdigest()


def fingerprint(config: RunConfig, data: dataset.DataSet) -> str:
    """Everything that must not change during a run, as readable JSON with sorted keys."""
    kept: dict[str, object] = {
        **identity.of(config),
        "data": digest(data.train.rows, data.train.tokens),
        "data.val": digest(data.held_out.rows, data.held_out.tokens),
    }
    if config.data.train_weights is not None:
        kept["data.mixture"] = [data.train.sizes, config.data.train_weights]
    return json.dumps(kept, sort_keys=True)


def continues(stored: str, ours: str) -> bool:
    """Whether `stored` is what an earlier release would have written for the same run."""
    try:
        before, now = json.loads(stored), json.loads(ours)
        return bool(before == {k: v for k, v in now.items() if k in before or k not in identity.LATER})
    except (ValueError, AttributeError, TypeError):
        return False


_DIGESTS = ("data", "data.val")


def differences(stored: str, ours: str) -> str:
    """The keys in which two fingerprints differ, with both values."""
    try:
        before, now = json.loads(stored), json.loads(ours)
        compared = before.keys() | (now.keys() - identity.LATER)
        keys = sorted(key for key in compared if before.get(key) != now.get(key))
        return ", ".join(f"{k} was {_short(k, before.get(k))}, is {_short(k, now.get(k))}" for k in keys)
    except (ValueError, AttributeError):
        return f"it was {stored!r}, is {ours!r}"


def _short(key: str, value: object) -> str:
    """`value` as text. Digests are shortened: the rest tells people nothing."""
    text = str(value)
    return f"{text[:12]}..." if key in _DIGESTS and len(text) > 16 else text


async def configure(ledger: AsyncLedger, config: RunConfig, print_: str) -> None:
    """Create the run in the ledger, or check that it is the same run. Raises Fatal if it is another one."""
    op = functools.partial(
        ops.configure,
        max_required=config.rule.max_required,
        claim_size=config.samples_per_update,
        max_retries=config.ledger.max_retries,
        max_crashes=config.ledger.max_crashes,
        total=config.rollout.total_rollout_steps,
    )
    reply = await ledger.run(op(fingerprint=print_))
    if reply.status != "ok" and continues(reply.fingerprint, print_):
        reply = await ledger.run(op(fingerprint=reply.fingerprint))
    if reply.status != "ok":
        raise config_problem(
            f"run {config.name!r} was started with other settings: {differences(reply.fingerprint, print_)}. "
            "Set them back to resume it, or choose another name to start a new run."
        )


async def load_validation(
    ledger: AsyncLedger,
    rows: Sequence[DataRow],
    tokens: Sequence[Int32Array],
    responses: int = 1,
    with_text: bool = False,
) -> None:
    """Load the held-out prompts into the ledger, each `responses` times. Existing ones are overwritten with
    the same content."""
    packed = []
    for row, ids in zip(rows, tokens, strict=True):
        prompt = encode_prompt(make_prompt(row, ids, f"val-{row.index:010d}", row.index, 0, with_text))
        packed += [(row.index * responses + number, prompt) for number in range(responses)]
    for start in range(0, len(packed), VAL_CHUNK):
        await ledger.run(ops.val_load(packed[start : start + VAL_CHUNK]))
