"""The queue service's HTTP API over a ledger that answers as told."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.ledger import ops
from headrace.ledger.client import LedgerUnavailable
from headrace.ledger.replies import DeadSample, Stats, ValStatus, Verdict
from headrace.ledger.states import State
from headrace.metrics.queue import DIED, DROPPED, FENCED, KEPT, REQUEUED
from headrace.metrics.rollouter import FAILURES
from headrace_queue.app import Service, create_app
from headrace_queue.loops import Pulse
from headrace_queue.metrics import Memory, QueueCollector
from headrace_queue.validation import Score
from tests.support.queue_fakes import FakeLedger, make_stats

TOKEN = "right"
DEAD = "0000000007"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


class Api:
    """The application and what is behind it."""

    def __init__(self) -> None:
        record = {"state": "dead", "attempt": "4", "failures": "3", "crashes": "1"}
        self.ledger = FakeLedger(
            stats=make_stats(),
            dead=[DeadSample(DEAD, "poison", "the trace")],
            sample=lambda sample_id: record if sample_id == DEAD else None,
            requeue_dead=lambda sample_id, *_: Verdict.OK if sample_id == DEAD else Verdict.UNKNOWN,
            val_status=ValStatus(-1, 0, 0, False),
        )
        self.pulses = {"feeder": Pulse(), "janitor": Pulse()}
        self.fed = True
        self.tells: Memory | None = Memory(used=10, limit=40, needed=30)
        self.service = Service(
            run="r",
            ledger=self.ledger,  # type: ignore[arg-type]
            pulses=self.pulses,
            collector=QueueCollector(self.pulses),
            has_fed=lambda: self.fed,
            before_scrape=self.fill,
            memory=self.memory,
            token=TOKEN,
        )
        self.http = self.client()

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(create_app(self.service))
        return httpx.AsyncClient(transport=transport, base_url="http://queue")

    def fill(self, collector: QueueCollector) -> None:
        collector.scores = [Score(3, "sums", 0.5, 8, 2), Score(3, "words", None, 0, 4)]
        collector.expired_owners = 2

    async def memory(self) -> Memory | None:
        return self.tells

    def redis_away(self) -> None:
        self.ledger.answers = dict.fromkeys(self.ledger.answers, LedgerUnavailable("not reached"))

    async def metrics(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Family -> labels -> value."""
        answer = await self.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        return {
            family.name: {tuple(s.labels.items()): s.value for s in family.samples}
            for family in text_string_to_metric_families(answer.text)
        }


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    made = Api()
    yield made
    await made.http.aclose()


async def test_stats_are_all_of_the_ledgers(api: Api) -> None:
    body = (await api.http.get("/stats")).json()
    assert body["counts"] == {state.value: place for place, state in enumerate(State)}
    assert set(body) == set(Stats.__dataclass_fields__)
    assert body["val"] == {"version": -1, "total": 0, "done": 0, "open": False}


async def test_dead_letters_are_listed_with_their_record(api: Api) -> None:
    answer = await api.http.get("/dead", params={"limit": 5})
    assert api.ledger.calls[0] == ("dead", (0, 5))
    assert answer.json() == [
        {"id": DEAD, "reason": "poison", "detail": "the trace", "attempts": 4, "failures": 3, "crashes": 1}
    ]
    refused = await api.http.get("/dead", params={"limit": 501})
    assert (refused.status_code, refused.json()["detail"]) == (
        422,
        "limit: Input should be less than or equal to 500",
    )


async def test_a_sample_requeued_meanwhile_is_not_listed(api: Api) -> None:
    api.ledger.answers["sample"] = {"state": "ready", "attempt": "4", "failures": "0", "crashes": "0"}
    assert (await api.http.get("/dead")).json() == []


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (None, "send the header Authorization: Bearer <HEADRACE_TOKEN>"),
        ("Bearer", "send the header"),
        ("Basic right", "send the header"),
        ("Bearer wrong", "the token is wrong"),
        ("Bearer r\u00ecght", "the token is wrong"),
    ],
)
async def test_requeue_needs_the_token(api: Api, header: str | None, says: str) -> None:
    headers = [] if header is None else [(b"Authorization", header.encode())]
    answer = await api.http.post(f"/dead/{DEAD}/requeue", headers=headers)
    assert answer.status_code == 401
    assert says in answer.json()["detail"]
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert api.ledger.calls == []


async def test_without_a_token_nothing_can_be_changed(api: Api) -> None:
    api.service.token = ""
    async with api.client() as http:
        answer = await http.post(f"/dead/{DEAD}/requeue", headers={"Authorization": "Bearer "})
    assert answer.status_code == 401
    assert "started without HEADRACE_TOKEN" in answer.json()["detail"]


async def test_requeue_tells_unknown_from_not_dead(api: Api) -> None:
    done = await api.http.post(f"/dead/{DEAD}/requeue", headers=HEADERS)
    assert (done.status_code, done.json()) == (200, {"id": DEAD, "status": "ready"})
    unknown = await api.http.post("/dead/nobody/requeue", headers=HEADERS)
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "there is no sample 'nobody' in run 'r'")
    api.ledger.answers["sample"] = {"state": "trained"}
    other = await api.http.post("/dead/0000000001/requeue", headers=HEADERS)
    assert (other.status_code, other.json()["detail"]) == (409, "sample 0000000001 is trained, not dead")
    api.ledger.answers["requeue_dead"] = Verdict.REFUSED
    late = await api.http.post(f"/dead/{DEAD}/requeue", headers=HEADERS)
    assert late.status_code == 409
    assert "the run is ending" in late.json()["detail"]


async def test_probes(api: Api) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await api.http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "problems": []})
    api.fed = False
    answer = await api.http.get("/readyz")
    assert (answer.status_code, answer.json()["problems"]) == (503, ["no prompt has been issued yet"])
    api.pulses["janitor"].stepped = time.monotonic() - 100
    answer = await api.http.get("/healthz")
    assert answer.status_code == 503
    assert answer.json()["problems"] == ["the janitor loop has not come round for 100 s"]


async def test_while_redis_is_away_only_the_process_is_well(api: Api) -> None:
    assert "headrace_queue_depth" in await api.metrics()
    api.redis_away()
    paths = ("/healthz", "/readyz", "/stats", "/dead")
    codes = {path: (await api.http.get(path)).status_code for path in paths}
    assert codes == {"/healthz": 200, "/readyz": 503, "/stats": 503, "/dead": 503}
    assert "not reached" in (await api.http.get("/stats")).json()["detail"]
    metrics = await api.metrics()
    assert metrics["headrace_queue_redis_up"] == {(): 0.0}
    assert "headrace_queue_depth" not in metrics


async def test_a_mistake_of_ours_is_no_outage(api: Api) -> None:
    api.ledger.answers["stats"] = KeyError("version")
    with pytest.raises(KeyError):
        await api.http.get("/stats")


def by(label: str, value: str) -> tuple[tuple[str, str], ...]:
    return ((label, value),)


async def test_metrics_come_from_one_reading(api: Api) -> None:
    metrics = await api.metrics()
    assert [script for script, _ in api.ledger.calls] == ["stats"]
    assert metrics["headrace_queue_redis_up"] == {(): 1.0}
    assert metrics["headrace_queue_depth"] == {(): make_stats().counts["queued"]}
    assert metrics["headrace_queue_in_flight"] == {(): 1.0}
    assert metrics["headrace_queue_oldest_age_seconds"] == {(): 1.5}
    for name, label, known, (value, count) in (
        ("headrace_queue_requeued", "reason", REQUEUED, ("expired", 5.0)),
        ("headrace_queue_kept", "state", KEPT, ("queued", 2.0)),
        ("headrace_queue_dead_letters", "reason", DIED, ("poison", 2.0)),
        ("headrace_queue_fenced", "operation", FENCED, ("finish", 1.0)),
        ("headrace_samples_dropped", "reason", DROPPED, ("drop_last", 0.0)),
    ):
        # Those that did not happen yet are there too, at 0.
        assert metrics[name] == {by(label, k): 0.0 for k in known} | {by(label, value): count}
    assert set(FAILURES) <= set(DIED), "a sample dies by whatever a rollouter fails it with"
    assert metrics["headrace_queue_loop_errors"] == {by("loop", "feeder"): 0.0, by("loop", "janitor"): 0.0}
    assert metrics["headrace_queue_expired_owners"] == {(): 2.0}
    score = (("data_source", "sums"), ("statistic", "reward/mean@1"))
    assert metrics["headrace_validation_score"] == {score: 0.5}
    assert metrics["headrace_validation_unfinished"][by("data_source", "words")] == 4.0


async def test_memory_of_the_server(api: Api) -> None:
    metrics = await api.metrics()
    shown = {name: metrics[f"headrace_redis_{name}_memory_bytes"][()] for name in ("used", "max", "needed")}
    assert shown == {"used": 10.0, "max": 40.0, "needed": 30.0}
    api.tells = None
    assert not [name for name in await api.metrics() if name.startswith("headrace_redis_")]


def test_every_way_to_be_refused_is_known() -> None:
    """The labels that are shown at 0 from the start are those that the scripts count by."""
    scripts = (Path(ops.__file__).parent / "lua").glob("*.lua")
    found = {name for script in scripts for name in re.findall(r"fenced\('(\w+)'\)", script.read_text())}
    assert sorted(found) == sorted(FENCED)


@pytest.mark.parametrize("check", [lambda o: o["summary"], lambda o: o["tags"]])
async def test_every_route_is_described(api: Api, check: Callable[[dict[str, Any]], Any]) -> None:
    paths = (await api.http.get("/openapi.json")).json()["paths"]
    assert set(paths) == {"/stats", "/dead", "/dead/{sample_id}/requeue", "/healthz", "/readyz", "/metrics"}
    assert all(check(operation) for route in paths.values() for operation in route.values())
