"""The HTTP server of a service: its probes, its metrics, its API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI


class HttpServer(uvicorn.Server):
    """`serve(sockets=[...])`, until `should_exit` is set. Signals are the service's own: uvicorn's handlers
    would end the process by the signal."""

    def __init__(self, app: FastAPI, drain_s: int | None = None) -> None:
        """`drain_s`: how long requests under way may take at the end; None for as long as they need."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",  # there is nothing to begin or to end, and the end of its task is a traceback
                timeout_graceful_shutdown=drain_s,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
