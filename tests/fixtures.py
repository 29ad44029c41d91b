"""What unit tests share; torch is imported where it is used, since most of them need none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from headrace.local import processes
from headrace.local.valkey_server import start_valkey
from headrace.service.guardian import marked
from tests.support.cli_desk import Desk, wait_until
from tests.support.supervised import Bench

if TYPE_CHECKING:
    from headrace.wire.payloads import Sample
    from headrace_trainer.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A process group of one."""
    from tests.single_rank import single_rank

    with single_rank() as found:
        yield found


@pytest.fixture(scope="module")
def quick_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """A client of a server of its own that keeps nothing on disk: speed."""
    with (
        start_valkey(tmp_path_factory.mktemp("valkey"), "quick", None) as server,
        redis.Redis.from_url(server.url, socket_timeout=30) as found,
    ):
        found.config_set("appendonly", "no")
        yield found


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Four groups of four: unequal lengths, temperatures and masks."""
    from tests.process.trainer import test_gradient_equivalence as equivalence

    return equivalence.samples("llama-tied")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama on disk, the one that sampled `samples`."""
    from tests.support import tiny_models

    directory = tmp_path_factory.mktemp("model")
    tiny_models.save("llama-tied", directory)
    return str(directory)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(processes, "BACKOFF_FIRST_S", 0.02)
    made = Bench(tmp_path)
    yield made
    if made.supervisor is not None:
        made.supervisor.close()
        assert marked(made.supervisor.instance) == []


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    wait_until(lambda: not made.leftovers(), "no process is left")
