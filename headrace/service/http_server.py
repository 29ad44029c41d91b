"""The HTTP server of a service, for its probes, metrics and API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the service: uvicorn's handlers would end the process.

    Use `serve(sockets=[...])`, which returns once `should_exit` is set.
    """

    def __init__(self, app: FastAPI, drain_s: int | None = None) -> None:
        """`drain_s`: how long open requests may take at shutdown, in seconds; None: no limit."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",  # not used, and cancelling its task would log a traceback
                timeout_graceful_shutdown=drain_s,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
