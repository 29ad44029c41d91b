"""The service's HTTP API.

Anyone who can reach the port may read. Requests that change something need `Authorization: Bearer <token>`.
While Redis is down, requests that need it get a 503 within two seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

import redis
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response, status
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel

from headrace import __version__
from headrace.connections.variables import token_matches
from headrace.ledger import ops
from headrace.ledger.client import AsyncLedger, LedgerError
from headrace.ledger.replies import Stats, Verdict
from headrace_queue.loops import Pulse, is_outage
from headrace_queue.metrics import Memory, QueueCollector, registry

HANG_S = 30.0
"""A loop that has not completed a step for this long hangs. Even in an outage it does every few seconds."""
ANSWER_S = 2.0
MAX_LISTED = 500
_ENDING = (
    "the run is ending, its trainer takes no more samples: requeue with `headrace dead` once it has ended, "
    "and start it again"
)

T = TypeVar("T")


@dataclass
class Service:
    """What the API reads and changes."""

    run: str
    ledger: AsyncLedger
    """A separate client, which gives up within `ANSWER_S` seconds."""
    pulses: Mapping[str, Pulse]
    collector: QueueCollector
    has_fed: Callable[[], bool]
    before_scrape: Callable[[QueueCollector], None]
    """Updates the collector's values that come from the loops."""
    memory: Callable[[], Awaitable[Memory | None]]
    """Reads the server's memory use; None if the server does not report it."""
    token: str
    """If empty, nothing can be changed over HTTP."""
    hang_s: float = HANG_S


class Health(BaseModel):
    """The result of a probe."""

    status: str
    problems: list[str]


class DeadLetter(BaseModel):
    """A sample that was given up."""

    id: str
    reason: str
    detail: str
    attempts: int
    """How often it was taken."""
    failures: int
    """Failures of the sample itself; crashes of its owners are counted apart."""
    crashes: int


class Requeued(BaseModel):
    """A dead sample that was requeued."""

    id: str
    status: str


def create_app(service: Service) -> FastAPI:
    """The API over `service`."""
    app = FastAPI(
        title="Headrace queue service",
        version=__version__,
        description="Counts, health, metrics and dead letters of one run's sample ledger.",
    )
    metrics = registry(service.collector)

    @app.exception_handler(RequestValidationError)
    async def _bad_request(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        lines = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
        return JSONResponse({"detail": "; ".join(lines)}, status.HTTP_422_UNPROCESSABLE_CONTENT)

    @app.get("/stats", summary="Counts and state of the run, from one atomic reading", tags=["run"])
    async def stats() -> Stats:
        return await _ask(service.ledger.run(ops.stats()))

    @app.get("/dead", summary="Samples that were given up, in order of issue", tags=["dead letters"])
    async def dead(limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100) -> list[DeadLetter]:
        found = await _ask(service.ledger.run(ops.dead(0, limit)))
        records = [await _ask(service.ledger.run(ops.sample(sample.sample_id))) for sample in found]
        return [
            DeadLetter(
                id=sample.sample_id,
                reason=sample.reason,
                detail=sample.detail,
                attempts=int(record["attempt"]),
                failures=int(record["failures"]),
                crashes=int(record["crashes"]),
            )
            for sample, record in zip(found, records, strict=True)
            if record is not None and record["state"] == "dead"
        ]

    @app.post(
        "/dead/{sample_id}/requeue",
        summary="Send a dead sample back to its start, with its failures forgiven",
        tags=["dead letters"],
        dependencies=[Depends(_token_check(service.token))],
        responses={401: {"description": "No token, or the wrong one"}, 404: {}, 409: {}, 503: {}},
    )
    async def requeue(sample_id: str) -> Requeued:
        verdict = await _ask(service.ledger.run(ops.requeue_dead(sample_id)))
        if verdict is not Verdict.OK:
            record = await _ask(service.ledger.run(ops.sample(sample_id)))
            if record is None:
                raise HTTPException(404, f"there is no sample {sample_id!r} in run {service.run!r}")
            if verdict is Verdict.REFUSED:
                raise HTTPException(409, _ENDING)
            raise HTTPException(409, f"sample {sample_id} is {record['state']}, not dead")
        return Requeued(id=sample_id, status="ready")

    @app.get("/healthz", summary="Whether the process works (also while Redis is away)", tags=["probes"])
    async def healthz(response: Response) -> Health:
        problems = [
            f"the {name} loop has not come round for {pulse.age_s:.0f} s"
            for name, pulse in service.pulses.items()
            if pulse.age_s > service.hang_s
        ]
        return _health(response, problems)

    @app.get("/readyz", summary="Whether Redis answers and prompts are issued", tags=["probes"])
    async def readyz(response: Response) -> Health:
        problems = []
        try:
            await _ask(service.ledger.run(ops.val_status()))
        except HTTPException as error:
            problems.append(str(error.detail))
        if not service.has_fed():
            problems.append("no prompt has been issued yet")
        return _health(response, problems)

    @app.get("/metrics", summary="Metrics in Prometheus' text format", tags=["probes"])
    async def scrape() -> Response:
        try:
            service.collector.stats = await _ask(service.ledger.run(ops.stats()))
            service.collector.memory = await _ask(service.memory())
        except HTTPException:  # redis_up shows the outage; stale counts would mislead
            service.collector.stats = service.collector.memory = None
        service.before_scrape(service.collector)
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    return app


async def _ask(answer: Awaitable[T]) -> T:
    """Await an answer from Redis; 503 if none comes in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await answer
    except (LedgerError, redis.RedisError, OSError) as error:
        if not is_outage(error):
            raise
        reason = str(error) or f"no answer within {ANSWER_S:g} s"
        raise HTTPException(503, f"Redis does not answer: {reason}") from error


def _token_check(token: str) -> Callable[[Request], None]:
    """A FastAPI dependency that answers 401 to requests without `token`."""

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if not token:
            problem = "the service was started without HEADRACE_TOKEN, so nothing can be changed over HTTP"
        elif scheme.lower() != "bearer" or not given:
            problem = "send the header Authorization: Bearer <HEADRACE_TOKEN>"
        elif not token_matches(f"Bearer {given.strip()}", token):
            problem = "the token is wrong"
        else:
            return
        raise HTTPException(401, problem, headers={"WWW-Authenticate": "Bearer"})

    return check


def _health(response: Response, problems: list[str]) -> Health:
    if problems:
        response.status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    return Health(status="failing" if problems else "ok", problems=problems)
