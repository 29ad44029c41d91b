"""With which environment a run's services are started."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import RunConfig
from headrace.records.layout import RunLayout
from headrace.runner.services import choose_endpoints, service_table
from tests.unit.test_config import GOOD


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "lo"), ("0.0.0.0", "eth7")])
def test_nccl_keeps_to_loopback_like_everything_else(tmp_path: Path, host: str, expected: str) -> None:
    """Unless the run's services are to be reached from elsewhere: then NCCL's choice is the user's."""
    config = RunConfig.model_validate({**GOOD, "services": {"host": host}})
    ends = choose_endpoints(config, "token", "password")
    table = service_table(config, RunLayout(tmp_path), ends, {"NCCL_SOCKET_IFNAME": "eth7"})
    assert {s.name: s.env["NCCL_SOCKET_IFNAME"] for s in table} == {s.name: expected for s in table}
    assert {"trainer", "rollouter-0"} <= {s.name for s in table}
