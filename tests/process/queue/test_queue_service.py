"""The real service as a process, over a real Valkey server and a real tokenizer."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from headrace.data.feed_order import prompt_at
from headrace.ledger import audit, ops
from headrace.ledger.record import LedgerRecord
from headrace.ledger.replies import TakeStatus, Verdict
from headrace.local.valkey_server import ValkeyServer, start_valkey
from headrace.system.endings import EX_BEYOND_REPAIR
from headrace.v1.sample_pb2 import ValidationResult
from headrace.wire.payloads import decode_prompt
from tests.support.queue_process import HELD_OUT, ROWS, TOKEN, Queue, templated, write_tokenizer
from tests.waiting import until


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with start_valkey(tmp_path_factory.mktemp("valkey"), "secret", None) as server:
        yield server


@pytest.fixture
def make_queue(tmp_path: Path, valkey: ValkeyServer, model_dir: Path) -> Iterator[Callable[..., Queue]]:
    made: list[Queue] = []

    def make(name: str, server: ValkeyServer = valkey, **settings: Any) -> Queue:
        made.append(Queue(tmp_path / name, server, model_dir, settings))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def test_feeds_to_the_bound_and_looks_after_the_ledger(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue("story").up()
    with queue.beating("alive"):
        story(queue)
    assert queue.end(signal.SIGTERM, 5.0) == 0


def story(queue: Queue) -> None:
    until(lambda: queue.stats()["counts"]["ready"] == 6, "the feeder to reach its bound")
    assert queue.http.get("/healthz").json() == {"status": "ok", "problems": []}

    # Whoever takes is refilled, to the bound and no further; the prompts are the published ones.
    version = queue.commit(["alive", "gone"])
    items = queue.take("alive", version, 9)
    until(lambda: queue.stats()["cursor"] == 15, "the feeder to refill")
    assert queue.stats()["counts"]["ready"] == 6
    for issue, item in enumerate(items):
        prompt = decode_prompt(item.prompt)
        epoch, index = prompt_at(issue, ROWS, 5, True)
        assert (prompt.issue, prompt.epoch, prompt.row) == (issue, epoch, index)
        assert prompt.sample_id == item.sample_id == f"{issue:010d}"
        assert (prompt.ground_truth, prompt.extra_info) == (str(index), {"index": index})
        assert prompt.token_ids.tolist() == [1, *(ord(c) - 29 for c in templated(index))]

    # Dead letters: the first failure is the last, as max_retries is 0.
    dead = items[0]
    queue.ledger.run(ops.fail("alive", dead.sample_id, dead.attempt, "reward_error", "it raised"))
    letter = {"id": dead.sample_id, "reason": "reward_error", "detail": "it raised", "attempts": 1}
    assert queue.http.get("/dead").json() == [{**letter, "failures": 1, "crashes": 0}]
    assert queue.http.get("/dead?limit=0").status_code == 422
    path, right = f"/dead/{dead.sample_id}/requeue", {"Authorization": f"Bearer {TOKEN}"}
    assert queue.http.post(path).status_code == 401
    assert queue.http.post(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert queue.http.post("/dead/0000009999/requeue", headers=right).status_code == 404
    conflict = queue.http.post(f"/dead/{items[1].sample_id}/requeue", headers=right)
    assert (conflict.status_code, "is in_flight" in conflict.text) == (409, True)
    assert queue.http.post(path, headers=right).json() == {"id": dead.sample_id, "status": "ready"}
    assert queue.http.get("/dead").json() == []

    # An owner that stopped beating loses its work; one that beats keeps it, however old it is.
    queue.ledger.run(ops.beat("gone", 1))
    lost = {item.sample_id for item in queue.take("gone", version, 3)}

    until(lambda: "gone" not in queue.stats()["members"], "the janitor to expire the silent owner")
    stats = queue.stats()
    assert stats["in_flight_by_owner"] == {"alive": 8}
    assert stats["requeued"] == {"operator": 1, "expired": 3}
    for sample_id in lost:
        assert (queue.ledger.run(ops.sample(sample_id)) or {})["state"] == "ready"

    # Metrics show the same counts, and labels carry no ids.
    families = {f.name: f for f in text_string_to_metric_families(queue.http.get("/metrics").text)}
    assert families["headrace_queue_redis_up"].samples[0].value == 1
    assert families["headrace_queue_in_flight"].samples[0].value == 8
    assert families["headrace_queue_expired_owners"].samples[0].value == 1
    assert all(f.documentation for f in families.values())

    # Prompts of samples that every retained checkpoint has trained are freed.
    for item in items[1:5]:
        queue.ledger.run(ops.finish("alive", item.sample_id, item.attempt, b"payload", 0, 0, 1))
    claimed = queue.ledger.run(ops.claim(1, 0, 4)).items
    ids = [sample.sample_id for sample in claimed]
    assert queue.ledger.run(ops.train(1, 1, ids)) is Verdict.OK
    checkpoint = queue.folder / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 1, "trained": dict.fromkeys(ids, 1)}))
    prompts = [f"headrace:{{story}}:s:{sample_id}" for sample_id in ids]
    redis_ = queue.ledger.redis
    until(lambda: not any(redis_.hexists(key, "prompt") for key in prompts), "prompts to be trimmed")

    assert audit(queue.ledger.redis, "story").balanced


def answer_validation(queue: Queue, owner: str, version: int, rows: int) -> None:
    """Answer `rows` held-out prompts; prompt i gets reward i."""
    taken = queue.ledger.run(ops.val_take(owner, version, rows))
    assert len(taken) == rows
    for index, raw in taken:
        prompt = decode_prompt(raw)
        result = ValidationResult(
            version=version, row=index, data_source=prompt.data_source, reward=float(prompt.ground_truth)
        )
        verdict = queue.ledger.run(ops.val_finish(owner, version, index, result.SerializeToString()))
        assert verdict is Verdict.OK


def test_validation_is_reported_once(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue("validated").up()
    report = queue.folder / "eval.jsonl"

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []

    answer_validation(queue, "one", queue.commit(["one"], validate=True), HELD_OUT)
    until(rows, "the report of version 0")
    single = {"k": 1, "best": None, "majority": None}
    complete = [
        {"version": 0, "data_source": "source0", "reward": 1.0, "n": 2, "unfinished": 0, **single},
        {"version": 0, "data_source": "source1", "reward": 1.0, "n": 1, "unfinished": 0, **single},
    ]
    assert rows() == complete

    # Killed with version 1 half done; closed and overtaken by version 2 before it is back.
    answer_validation(queue, "one", queue.commit(["one"], validate=True), 1)
    queue.end(signal.SIGKILL)
    queue.ledger.run(ops.val_close(1))
    answer_validation(queue, "one", queue.commit(["one"], validate=True), HELD_OUT)
    queue.up()
    until(lambda: len(rows()) == 6, "the reports of versions 1 and 2")
    assert rows()[:4] == [
        *complete,
        {"version": 1, "data_source": "source0", "reward": 0.0, "n": 1, "unfinished": 1, **single},
        {"version": 1, "data_source": "source1", "reward": None, "n": 0, "unfinished": 1, **single},
    ]
    score = 'headrace_validation_score{data_source="source0",statistic="reward/mean@1"} 1.0'
    assert score in queue.http.get("/metrics").text


def test_killed_and_started_again_every_prompt_is_issued_once(make_queue: Callable[..., Queue]) -> None:
    total = 80
    queue = make_queue("killed", rollout={"n": 2, "total_rollout_steps": total}).up()
    version = queue.commit(["one"])
    seen: list[int] = []

    def take_some() -> bool:
        """Take what is there; true at the end of the data."""
        reply = queue.ledger.run(ops.take("one", version, 2))
        seen.extend(decode_prompt(item.prompt).issue for item in reply.items)
        for item in reply.items:
            queue.ledger.run(ops.finish("one", item.sample_id, item.attempt, b"payload", 0, 0, 1))
        return reply.status is TakeStatus.DONE

    with queue.beating("one"):
        for threshold in (20, 50):
            until(lambda: take_some() or len(seen) >= threshold, "prompts to flow")  # noqa: B023
            queue.end(signal.SIGKILL)
            assert queue.ledger.run(ops.stats()).cursor < total
            queue.up()
        until(take_some, "the end of the data")
    assert seen == list(range(total))
    assert audit(queue.ledger.redis, "killed").balanced
    assert queue.stats()["end_of_data"]
    assert queue.stats()["cursor"] == total


def test_an_outage_of_redis_is_lived_through_and_an_older_file_is_not(
    make_queue: Callable[..., Queue], tmp_path: Path
) -> None:
    files, older, newer = (tmp_path / name for name in ("own", "before", "after"))
    server = start_valkey(files, "secret")
    try:
        queue = make_queue("outage", server).up()
        with queue.beating("alive"):
            version = queue.commit(["alive"])
            queue.take("alive", version, 4)
            server.kill()
            until(lambda: queue.http.get("/readyz").status_code == 503, "the service to notice")
            assert queue.http.get("/healthz").status_code == 200
            assert queue.http.get("/stats").status_code == 503
            assert "headrace_queue_redis_up 0.0" in queue.http.get("/metrics").text
            until(lambda: queue.log().count("loop interrupted") == 4, "all loops to notice, each once")
            shutil.copytree(files, older)

            server = start_valkey(files, "secret", server.port)
            until(lambda: queue.log().count("loop goes on") == 4, "all loops to go on")
            until(lambda: queue.http.get("/readyz").status_code == 200, "the service to be ready again")
            queue.take("alive", version, 16)
            until(lambda: queue.stats()["counts"]["ready"] == 6, "the feeder to refill")
            assert queue.stats()["members"] == {"alive": version}
            assert queue.stats()["in_flight_by_owner"] == {"alive": 20}
            assert audit(queue.ledger.redis, "outage").balanced

        # An older append-only file, under the run and between two starts of it.
        until(lambda: LedgerRecord(queue.folder).marks.cursor == 26, "the run's directory to know of it")
        assert queue.process is not None
        server.stop()
        files.rename(newer)
        older.rename(files)
        server = start_valkey(files, "secret", server.port)
        for code in (queue.process.wait(60), queue.exit_code()):
            assert code == EX_BEYOND_REPAIR
            assert "went back: samples issued 26 -> " in queue.log().splitlines()[-1]

        # What the sentence advises.
        server.stop()
        shutil.rmtree(files)
        newer.rename(files)
        server = start_valkey(files, "secret", server.port)
        queue.up()
        assert queue.end(signal.SIGTERM, 5.0) == 0
    finally:
        server.stop()


def test_it_ends_in_order_while_redis_is_away(make_queue: Callable[..., Queue], tmp_path: Path) -> None:
    with start_valkey(tmp_path / "own", "secret", None) as server:
        queue = make_queue("away", server).up()
        server.kill()
        until(lambda: "loop interrupted" in queue.log(), "the service to notice")
        assert queue.end(signal.SIGTERM, 5.0) == 0


def test_what_cannot_work_is_said_at_the_start(
    make_queue: Callable[..., Queue], valkey: ValkeyServer, tmp_path: Path
) -> None:
    unreachable = make_queue(
        "unreachable", redis={"connect_timeout_s": 0.3}, services={"start_timeout_s": 0.5}
    )
    unreachable.url = "redis://:secret@127.0.0.1:1/0"
    assert unreachable.exit_code() == 69
    assert "Redis at 127.0.0.1:1 did not answer within 0.5 s" in unreachable.log()
    assert "secret" not in unreachable.log()

    refused = make_queue("refused")
    refused.url = valkey.url.replace("secret", "wrong")
    assert refused.exit_code() == 78
    assert "refuses the login" in refused.log()

    bad = make_queue("bad")
    with (bad.folder / "train.jsonl").open("a") as file:
        file.write('{"prompt": "x", "data_source": "s", "reward_model": {}}\n')
    assert bad.exit_code() == 78
    assert "train.jsonl:8: reward_model.ground_truth: is missing" in bad.log()

    with start_valkey(tmp_path / "evicting", "secret", None) as server:
        evicting = make_queue("evicting", server)
        client = redis.Redis.from_url(server.url)
        client.config_set("maxmemory-policy", "allkeys-lru")
        assert evicting.exit_code() == 78
        assert "maxmemory-policy allkeys-lru" in evicting.log()
        client.execute_command("ACL SETUSER guest on >guest ~* +@all -config")
        evicting.url = server.url.replace(":secret@", "guest:guest@")  # managed servers forbid CONFIG
        assert evicting.exit_code() == 78
        assert "does not permit CONFIG GET" in evicting.log()
        assert "maxmemory-policy allkeys-lru" in evicting.log()
        evicting.url = server.url
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendfsync", "everysec")
        assert evicting.exit_code() == 78
        assert "appendonly yes, appendfsync everysec" in evicting.log()

        client.config_set("appendonly", "no")
        volatile = make_queue("volatile", server, redis={"url": server.url})
        assert volatile.exit_code() == 78
        assert "redis.allow_volatile=true" in volatile.log()
        make_queue("accepted", server, redis={"url": server.url, "allow_volatile": True}).up()

        client.config_set("maxmemory", 20 * 2**20)
        small = make_queue("small", server, data={"max_response_length": 4000})
        assert small.exit_code() == 78
        assert "cannot hold what the gate lets in: 256 samples" in small.log()
        client.close()


def test_another_data_set_under_the_same_name_is_refused(make_queue: Callable[..., Queue]) -> None:
    queue = make_queue("changed").up()
    assert queue.end(signal.SIGTERM, 5.0) == 0
    queue.write_rows("train", ROWS + 1)
    assert queue.exit_code() == 78
    assert "run 'changed' was started with other settings: data was " in queue.log()


def test_two_services_on_one_run_do_no_harm(make_queue: Callable[..., Queue]) -> None:
    """During a rolling update there are two for a while."""
    total = 40
    settings = {"rollout": {"n": 2, "total_rollout_steps": total}}
    first, second = make_queue("twice", **settings).up(), make_queue("twice", **settings).up()
    version = first.commit(["one", "gone"])
    first.ledger.run(ops.beat("gone", 1))
    lost = {item.sample_id for item in first.take("gone", version, 2)}
    seen: list[str] = []

    def take_some() -> bool:
        reply = first.ledger.run(ops.take("one", version, 3))
        seen.extend(item.sample_id for item in reply.items)
        for item in reply.items:
            assert first.ledger.run(ops.finish("one", item.sample_id, item.attempt, b"x", 0, 0, 1)) == "ok"
        return reply.status is TakeStatus.DONE

    with first.beating("one"):
        until(take_some, "the end of the data")
    assert sorted(seen) == [f"{issue:010d}" for issue in range(total)], (
        "a prompt was issued or handed out twice"
    )
    stats = second.stats()
    assert stats["requeued"] == {"expired": len(lost)}, "both took the same work back"
    assert audit(first.ledger.redis, "twice").balanced
    assert first.end(signal.SIGTERM, 10.0) == 0
    assert second.http.get("/readyz").status_code == 200
