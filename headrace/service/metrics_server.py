"""The metrics endpoint of a service that has no other HTTP server."""

from __future__ import annotations

import logging

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server

log = logging.getLogger("headrace.service")


def serve_metrics(host: str, port: int, registry: CollectorRegistry = REGISTRY) -> None:
    """Serve metrics from a thread until the process ends; `port` 0 serves none.

    If the port is taken the service logs that and runs without metrics. Another user may have taken the port
    since a crash, and nothing depends on it.
    """
    if not port:
        return
    try:
        start_http_server(port, host, registry=registry)
    except OSError as error:
        log.error("metrics are not served", extra={"port": port, "error": str(error)})
