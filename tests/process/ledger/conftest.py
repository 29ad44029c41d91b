"""Fixtures of the property tests: a real Valkey server, hypothesis profiles, model and server in lock-step.

HEADRACE_HYPOTHESIS=thorough searches much longer. A failing example is printed with its blob and seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings

from headrace.local.valkey_server import start_valkey
from tests.process.ledger.lockstep import LockStep

_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", max_examples=90, stateful_step_count=40, **_COMMON)
settings.register_profile("thorough", max_examples=1500, stateful_step_count=80, **_COMMON)
settings.load_profile(os.environ.get("HEADRACE_HYPOTHESIS", "default"))


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """A client of a server that lives as long as the test session. It does not sync to disk: speed."""
    server = start_valkey(tmp_path_factory.mktemp("valkey"), "property-tests", None)
    client = redis.Redis.from_url(server.url, socket_timeout=30, socket_connect_timeout=5)
    client.config_set("appendonly", "no")
    yield client
    client.close()
    server.stop()


@pytest.fixture
def lockstep(valkey: redis.Redis) -> Callable[[], LockStep]:
    """Makes a new run on an emptied server."""

    def make() -> LockStep:
        valkey.flushall()
        return LockStep(valkey, "property")

    return make
