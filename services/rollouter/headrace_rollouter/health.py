"""The rollouter's only inbound port: health, readiness, metrics. A paused engine is alive."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from headrace_rollouter.engine import Engine, EngineFailed


def build_app(engine: Engine, ready: Callable[[], str]) -> FastAPI:
    """`ready` returns what is still missing, or an empty string."""
    app = FastAPI(title="Headrace rollouter", description="Health and metrics of one rollouter.")

    @app.get("/healthz", summary="The engine answers")
    async def healthz(response: Response) -> dict[str, str]:
        try:
            await engine.check()
        except EngineFailed as error:
            response.status_code = 503
            return {"status": "failed", "reason": str(error)}
        return {"status": "ok"}

    @app.get("/readyz", summary="Loaded, version known, member, not draining")
    async def readyz(response: Response) -> dict[str, str]:
        missing = ready()
        if missing:
            response.status_code = 503
            return {"status": "not ready", "reason": missing}
        return {"status": "ok"}

    @app.get("/metrics", summary="Prometheus metrics, the engine's included")
    async def metrics() -> Response:
        return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

    return app
