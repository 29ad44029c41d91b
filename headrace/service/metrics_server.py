"""Where Prometheus reads a service that has no HTTP server of its own."""

from __future__ import annotations

import logging

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

log = logging.getLogger("headrace.service")


def serve_metrics(host: str, port: int, registry: CollectorRegistry = REGISTRY) -> None:
    """From a thread, until the process ends; `port` 0 for none. A port that is taken is logged, and the
    service goes on without: it may be another user's since a crash, and nothing depends on it."""
    if not port:
        return
    try:
        start_http_server(port, host, registry=registry)
    except OSError as error:
        log.error("metrics are not served", extra={"port": port, "error": str(error)})
