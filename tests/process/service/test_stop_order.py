"""All services are told to stop while they train, in one order or another: no update is lost or done twice.

Services as processes, with a rollouter whose engine is scripted; clients reach Redis through a proxy that can
refuse new connections, as when `helm uninstall` has deleted its Service before the pods end.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from headrace.config.redis_url import build
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.ledger.replies import Stats
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace.records.audit import audit_run
from headrace.records.checkpoints import complete_checkpoints, read_manifest
from headrace.records.layout import RunLayout
from tests.chaos.proxy import Proxy
from tests.support.no_rollouter import Processes
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORD = "the-word"
ALL = ("coordinator", "queue", "rollouter", "trainer")
GRACE_S = 60.0
REDIS_ENDS_S = 2.0


class Release:
    """A run with its Redis, as a release has them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.valkey: ValkeyServer = start_valkey(folder / "redis", WORD)
        self.services = Processes.make(
            folder,
            self.valkey,
            async_training={"staleness_threshold": 1.0, "trigger_parameter_sync_step": 1},
            services={"stop_timeout_s": 20, "start_timeout_s": 120},
        )
        self.proxy = Proxy(self.valkey.port)
        self.services.redis_port = self.proxy.port

    def up(self) -> None:
        """Everything, and several updates, none of which is in a checkpoint."""
        if self.valkey.process.poll() is not None:
            self.valkey = start_valkey(self._folder / "redis", WORD, self.valkey.port)
        self.proxy.full(False)
        before = len(self.steps())
        for name in ALL:
            self.services.start(name, WORD)
        until(lambda: self._runs() and len(self.steps()) >= before + 3, "three updates", 120.0)

    def _runs(self) -> bool:
        for name, process in self.services.running.items():
            assert process.poll() is None, self.services.log(name)[-4000:]
        return True

    def fresh_log(self, name: str) -> str:
        """Since its last start."""
        return self.services.log(name)[self.services.started_at[name] :]

    def told(self, *names: str) -> None:
        for name in names:
            self.services.running[name].send_signal(signal.SIGTERM)

    def ended(self, *names: str) -> dict[str, int]:
        return {name: self.services.exit_code(name, GRACE_S) for name in names}

    @property
    def directory(self) -> Path:
        return self.services.folder

    def rows(self) -> list[dict[str, object]]:
        file = self.directory / "trained.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def steps(self) -> list[int]:
        """That were trained, over all lineages."""
        return [int(str(row["step"])) for row in self.rows() if "step" in row]

    def checkpoint(self) -> int:
        """The step of the newest one."""
        (*_, newest) = complete_checkpoints(self.directory / "checkpoints")
        return read_manifest(newest).step

    def stats(self) -> Stats:
        with connect(build("127.0.0.1", self.valkey.port, WORD)) as client:
            return SyncLedger(client, self.directory.name).run(ops.stats())

    def close(self) -> None:
        self.services.close()
        self.proxy.close()
        self.valkey.stop()


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    made = Release(tmp_path)
    yield made
    made.close()


def store_addresses(release: Release) -> set[str]:
    """Where torchrun's agent listens."""
    launcher = psutil.Process(release.services.running["trainer"].pid)
    (agent,) = launcher.children()
    return {c.laddr.ip for c in agent.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_no_order_of_ends_costs_an_update(release: Release) -> None:
    # `helm uninstall`: Services are gone, all are told at once, and Redis does not wait for anybody.
    release.up()
    assert store_addresses(release) == {"127.0.0.1"}
    release.proxy.full(True)
    release.told(*ALL)
    told = time.monotonic()
    until(lambda: time.monotonic() - told > REDIS_ENDS_S, "the end of Redis")
    release.valkey.kill()
    assert release.ended(*ALL) == {"coordinator": 0, "queue": 0, "rollouter": 0, "trainer": 75}
    assert release.checkpoint() == release.steps()[-1] >= 3
    assert_said_why(release)

    # Redis is away before anybody is told, and does not come back.
    release.up()
    release.valkey.kill()
    release.proxy.away(True)
    release.told("trainer", "rollouter", "queue", "coordinator")
    assert release.ended("trainer", "rollouter") == {"trainer": 75, "rollouter": 0}
    release.ended("queue", "coordinator")
    release.proxy.away(False)
    assert release.checkpoint() == release.steps()[-1] >= 6
    assert_said_why(release)

    # The coordinator and the queue service first: the trainer waits for a commit that nobody makes.
    release.up()
    release.told("coordinator", "queue")
    release.ended("coordinator", "queue")
    until(lambda: "coordinator stream broke" in release.fresh_log("trainer"), "it to be missed")
    release.told("rollouter", "trainer")
    assert release.ended("rollouter", "trainer") == {"rollouter": 0, "trainer": 75}
    assert release.checkpoint() == release.steps()[-1] >= 9

    begins = [row["from_step"] for row in release.rows() if "from_step" in row]
    assert begins == [0, *(last for last, next_ in ends_of_lineages(release))][:3]
    assert len(release.steps()) == len(set(release.steps())), "an update was done twice"
    with connect(build("127.0.0.1", release.valkey.port, WORD)) as client:
        ledger = SyncLedger(client, release.directory.name)
        done = audit_run(RunLayout(release.directory), ledger, is_on=False)
    assert done.problems == []
    assert release.stats().counts["in_flight"] == 0, "what a rollouter had begun is parked or handed back"


def ends_of_lineages(release: Release) -> list[tuple[int, int]]:
    """Step before each start of a lineage but the first, and the one after it."""
    out = []
    for before, after in pairwise(row for row in release.rows() if "ended_after" not in row):
        if "from_step" in after and "step" in before:
            out.append((int(str(before["step"])), int(str(after["from_step"]))))
    return out


def assert_said_why(release: Release) -> None:
    """An orderly stop leaves no traceback of the trainer's ranks."""
    assert '"event": "rank failed"' not in release.services.log("trainer")
