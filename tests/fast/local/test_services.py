"""With which environment and addresses a run's services are started."""

from __future__ import annotations

import re
import socket
import tempfile
from pathlib import Path

import pytest

from headrace.config.run import RunConfig
from headrace.connections.tls import VARIABLES
from headrace.local.services import accepts, choose_endpoints, service_table
from headrace.records.layout import RunLayout
from tests.fast.config.test_config import GOOD

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "lo"), ("0.0.0.0", "eth7")])
def test_nccl_keeps_to_loopback_like_everything_else(tmp_path: Path, host: str, expected: str) -> None:
    """Unless the run's services are to be reached from elsewhere: then NCCL's choice is the user's."""
    config = RunConfig.model_validate({**GOOD, "services": {"host": host}})
    ends = choose_endpoints(config, tmp_path, "token", "password")
    table = service_table(config, RunLayout(tmp_path), ends, {"NCCL_SOCKET_IFNAME": "eth7"})
    assert {s.name: s.env["NCCL_SOCKET_IFNAME"] for s in table} == {s.name: expected for s in table}
    assert {"trainer", "rollouter-0"} <= {s.name for s in table}


@pytest.mark.parametrize(
    ("services", "tls", "address"),
    [
        ({}, False, "unix:/tmp/a/coordinator.sock"),
        ({"host": "0.0.0.0"}, False, "unix:/tmp/a/coordinator.sock"),
        ({"coordinator_port": 50051}, False, "127.0.0.1:50051"),
        ({}, True, "127.0.0.1:"),
    ],
)
def test_what_is_sent_a_secret_has_no_port_that_another_user_could_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, services: dict[str, object], tls: bool, address: str
) -> None:
    """Unless a port is asked for; under TLS a certificate tells who is there."""
    for name in VARIABLES if tls else ():
        monkeypatch.setenv(name, str(tmp_path))
    config = RunConfig.model_validate({**GOOD, "services": services})
    ends = choose_endpoints(config, Path("/tmp/a"), "token", "p@ss/word")
    assert ends.coordinator.startswith(address)
    assert ends.redis_url == "unix://:p%40ss%2Fword@/tmp/a/valkey.sock?db=0"


def test_accepts() -> None:
    """A file that a crash has left behind accepts nothing."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "a.sock"
        assert not accepts(path)
        listener.bind(str(path))
        assert not accepts(path)
        listener.listen()
        assert accepts(path)
        listener.close()
        assert path.exists()
        assert not accepts(path)


def test_no_part_of_a_run_sends_a_secret_by_http() -> None:
    """Another user may have taken the port. Who speaks HTTP is on this list; our own send no header."""
    client = re.compile(
        r"^ *(?:import|from) (urllib\.request|http\.client|httpx|aiohttp|requests|urllib3)\b", re.M
    )
    code = [file for part in ("headrace", "services") for file in (ROOT / part).rglob("*.py")]
    ours = {
        "services.py": "the runner's readiness checks",
        "reachable.py": "a test of a release in a cluster",
    }
    theirs = {
        "remote.py": "a reward of the user's, elsewhere, with a key of its own",
        "api.py": "the Kubernetes API",
    }
    found = {file.name: file for file in code if client.search(file.read_text())}
    assert found.keys() == {*ours, *theirs}
    for name in ours:
        text = found[name].read_text()
        assert re.search(r"urllib\.request\.\w+", text)
        assert not re.search("header|authorization", text, re.IGNORECASE), name
