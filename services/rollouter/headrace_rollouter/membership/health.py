"""The rollouter's only inbound port: health, readiness and metrics. A paused engine counts as healthy."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from headrace_rollouter.inference.engine import Engine, EngineFailed


def missing(draining: bool, connected: bool, version: int, committed: int) -> str:
    """What keeps a rollouter from being ready, or "".

    `version`: the one that it serves. `committed`: the run's. Both are -1 if there is none. Before the
    trainer's first sync, a connected rollouter is ready. Later, one without weights is not: it generates
    nothing, and a rolling update must wait for it before replacing the next one.
    """
    if draining:
        return "draining"
    if not connected:
        return "not connected to the coordinator"
    return f"waits for the weights of version {committed}" if version < 0 <= committed else ""


def build_app(engine: Engine, connected: Callable[[], bool], lacks: Callable[[], str]) -> FastAPI:
    """Build the HTTP app. `lacks` returns what keeps the rollouter from being ready, as `missing` does."""
    app = FastAPI(title="Headrace rollouter", description="Health and metrics of one rollouter.")

    @app.get("/healthz", summary="The engine answers")
    async def healthz(response: Response) -> dict[str, str]:
        try:
            await engine.check()
        except EngineFailed as error:
            response.status_code = 503
            return {"status": "failed", "reason": str(error)}
        return {"status": "ok"}

    @app.get("/connectedz", summary="Loaded, and takes part in the next sync")
    async def connectedz(response: Response) -> dict[str, str]:
        if not connected():
            response.status_code = 503
            return {"status": "not connected to the coordinator"}
        return {"status": "ok"}

    @app.get("/readyz", summary="Loaded, connected, has weights where there are any, not draining")
    async def readyz(response: Response) -> dict[str, str]:
        if reason := lacks():
            response.status_code = 503
            return {"status": "not ready", "reason": reason}
        return {"status": "ok"}

    @app.get("/metrics", summary="Prometheus metrics, the engine's included")
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return app
