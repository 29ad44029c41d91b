"""`python -m headrace.reachable` against real services: what `helm test` runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from headrace import reachable
from headrace.valkey_server import ValkeyServer, start_valkey
from tests.integration.coordinator_process import PASSWORD, TOKEN, Coordinator
from tests.integration.queue_process import Queue, write_tokenizer


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path_factory.mktemp("valkey"), PASSWORD) as server:
        yield server


@pytest.fixture
async def coordinator(tmp_path: Path, valkey: ValkeyServer) -> AsyncIterator[Coordinator]:
    made = await Coordinator(tmp_path / "coordinated", valkey, {}).up()
    yield made
    await made.close()


@pytest.fixture
def queue(tmp_path: Path, valkey: ValkeyServer) -> Iterator[Queue]:
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    made = Queue(tmp_path / "queued", valkey, tmp_path / "model", {}).up()
    yield made
    made.close()


async def test_each_answers_who_may_ask_and_nobody_else(
    valkey: ValkeyServer,
    coordinator: Coordinator,
    queue: Queue,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = str(queue.http.base_url)

    def run(**environ: str) -> tuple[object, str]:
        given = {
            "HEADRACE_REDIS_URL": f"redis://127.0.0.1:{valkey.port}/0",
            "HEADRACE_REDIS_PASSWORD": PASSWORD,
            "HEADRACE_COORDINATOR": coordinator.address,
            "HEADRACE_TOKEN": TOKEN,
        }
        for name, value in (given | environ).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            reachable.main(["--queue", url, "--timeout-s", "0"])
        return ended.value.code, capsys.readouterr().out

    code, text = run()
    assert code == 0, text
    assert text.count("ok  ") == 3
    assert text.count("refuses who has no") == 2
    code, text = run(HEADRACE_TOKEN="wrong")
    assert code == 1
    assert "failed  coordinator: " in text
    assert "refuses our token: UNAUTHENTICATED" in text
    code, text = run(HEADRACE_REDIS_PASSWORD="wrong")
    assert code == 1
    assert "failed  redis: no answer" in text
    assert PASSWORD not in text
    queue.process.kill()  # type: ignore[union-attr]
    coordinator.kill()
    code, text = run()
    assert code == 1
    assert "failed  queue: no answer from" in text
    assert "failed  coordinator: " in text
