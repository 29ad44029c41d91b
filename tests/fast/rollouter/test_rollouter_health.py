"""When a rollouter is ready, and when it only takes part."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from headrace_rollouter.membership.health import build_app, missing


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, ""),
        ({"version": 4}, ""),
        ({"version": 3}, ""),  # a sync is under way: it goes on serving
        ({"version": -1}, "waits for the weights of version 4"),
        ({"version": -1, "committed": 0}, "waits for the weights of version 0"),
        ({"version": -1, "committed": -1}, ""),  # before the trainer's first sync there are none to wait for
        ({"connected": False}, "not connected to the coordinator"),
        ({"draining": True}, "draining"),
    ],
)
def test_ready_means_that_it_can_generate(state: dict[str, Any], reason: str) -> None:
    of = {"draining": False, "connected": True, "version": 4, "committed": 4} | state
    assert missing(**of) == reason
    engine: Any = None
    http = TestClient(build_app(engine, lambda: of["connected"], lambda: missing(**of)))
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json().get("reason", "")) == (503 if reason else 200, reason)
    assert http.get("/connectedz").status_code == (200 if of["connected"] else 503)
