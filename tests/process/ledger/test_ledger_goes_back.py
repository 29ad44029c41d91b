"""Redis loses the ledger of a run that is on: every service ends, for good, and says why.

Real processes: queue, coordinator, trainer under torchrun, and a rollouter around a scripted engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.config.redis_url import build
from headrace.connections.redis_client import connect
from headrace.ledger import SyncLedger, keys, ops
from headrace.local.valkey_server import start_valkey
from headrace.system.endings import EX_BEYOND_REPAIR, FINAL
from tests.support.no_rollouter import Processes
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PASSWORD = "a-word"
ALL = ("queue", "coordinator", "trainer", "rollouter")


def ledger_of(run: Processes) -> SyncLedger:
    """A client that has seen nothing yet, and waits for a server that is started again."""
    return SyncLedger(connect(build("127.0.0.1", run.redis_port, PASSWORD)), run.folder.name)


def assert_ended_for_good(run: Processes, names: Sequence[str], because: str) -> None:
    for name in names:
        code = run.exit_code(name)
        last = run.log(name).rstrip().splitlines()[-1]
        assert code == EX_BEYOND_REPAIR, f"{name} ended with {code}: {run.log(name)[-3000:]}"
        assert code in FINAL, "the local runner starts nobody again and fails the run"
        assert last.startswith(f"headrace-{name}: the ledger of the run 'run' in Redis at 127.0.0.1:"), last
        assert because in last


def test_a_ledger_that_is_flushed_under_a_run_is_not_begun_again(tmp_path: Path) -> None:
    with start_valkey(tmp_path / "redis", PASSWORD) as server:
        run = Processes.make(tmp_path, server, ledger={"lease_s": 60})
        try:
            run.up(PASSWORD, *ALL)
            ledger = ledger_of(run)
            until(lambda: ledger.run(ops.stats()).in_flight_by_owner, "a rollouter that works")
            was = ledger.seen.ledger
            ledger.redis.flushall()
            assert_ended_for_good(run, ALL, "went back: it no longer exists")
            assert not ledger.redis.exists(keys.meta("run")), "nobody has begun it again"

            # As containers are started again. In a cluster the queue service may have no directory, and
            # begins anew: that the trainer refuses.
            run.start("queue", PASSWORD, front=["env", "--unset=HEADRACE_RUN_DIR"])
            until(lambda: ledger.redis.exists(keys.meta("run")), "a ledger that was begun anew")
            run.start("trainer", PASSWORD)
            assert_ended_for_good(run, ["trainer"], f"its id was {was} and is ")
            assert ledger_of(run).run(ops.stats()).lineage == 0
        finally:
            run.close()
