"""Rewards over HTTP, against a real server on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from fastapi.responses import Response as Answer

from headrace.rewards import RewardError
from headrace.rewards.remote import HttpReward, RewardModel, read_score, request_body
from headrace.rewards.source import Judged, Response

TOKEN = "a-token-that-nobody-may-see"
RESPONSE = Response("source", "an answer", "the truth", {"finish_reason": "stop"})


class Service:
    """Whatever the test says about POST; keeps what was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answers: list[Answer | float | dict[str, Any]] = []
        """In order; the last is repeated."""
        self.running = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def handle(self, request: Request) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.bodies.append(await request.json())
            self.headers.append(dict(request.headers))
            self.paths.append(request.url.path)
            await self.gate.wait()
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return answer if isinstance(answer, Answer) else JSONResponse(answer)
        finally:
            self.running -= 1


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr("headrace.rewards.remote.FIRST_PAUSE_S", 0.001)
    found = Service()
    app = FastAPI()
    app.post("/{path:path}")(found.handle)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        server.install_signal_handlers = lambda: None
        running = asyncio.create_task(server._serve(sockets=[listener]))
        yield found
        found.gate.set()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def judge(reward: HttpReward | RewardModel, response: Response = RESPONSE) -> Judged:
    try:
        await reward.start()
        return await reward.judge(response)
    finally:
        await reward.close()


async def test_a_service_gets_what_a_function_gets(service: Service) -> None:
    service.answers = [{"score": 0.5, "style": 1, "pred": 42}]
    assert await judge(HttpReward("k", service.url + "/score")) == Judged(
        0.5, {"style": 1.0, "pred": 42.0}, "42"
    )
    assert service.paths == ["/score"]
    assert service.bodies == [
        {
            "data_source": "source",
            "solution_str": "an answer",
            "ground_truth": "the truth",
            "extra_info": {"finish_reason": "stop"},
        }
    ]
    assert "authorization" not in service.headers[0]
    service.answers = [0.25]
    assert await judge(HttpReward("k", service.url)) == Judged(0.25, {}, None)


async def test_what_may_pass_is_tried_again(service: Service) -> None:
    service.answers = [Answer(status_code=503), PlainTextResponse("slow down", 429), 1.0]
    assert (await judge(HttpReward("k", service.url, retries=2))).score == 1.0
    assert len(service.bodies) == 3


async def test_a_service_that_stays_ill(service: Service) -> None:
    service.answers = [PlainTextResponse("out of memory", 500)]
    with pytest.raises(RewardError, match="status 500: out of memory, after 3 attempts"):
        await judge(HttpReward("k", service.url, retries=2))
    assert len(service.bodies) == 3


async def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(RewardError, match=rf"{url}: ConnectError: .*, after 1 attempts"):
        await judge(HttpReward("k", url, retries=0))


async def test_the_deadline_holds_over_all_attempts(service: Service) -> None:
    service.gate.clear()
    with pytest.raises(RewardError, match=r"no answer within 0\.2 s"):
        await judge(HttpReward("k", service.url, timeout_s=0.2))
    service.gate.set()
    service.answers = [PlainTextResponse("busy", 503, {"Retry-After": "600"})]
    with pytest.raises(RewardError, match=r"no answer within 0\.2 s \(last: status 503: busy\)"):
        await judge(HttpReward("k", service.url, timeout_s=0.2))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (PlainTextResponse("bad row", 422), "status 422: bad row"),
        (PlainTextResponse("", 401), "check k.token_env"),
        (RedirectResponse("http://elsewhere/"), "redirects are not followed"),
        (PlainTextResponse("0.5 or so"), "answered no JSON: '0.5 or so'"),
        ({"acc": 1}, "without 'score'"),
        ({"score": "high"}, "no number"),
        (PlainTextResponse('{"score": NaN}'), "returned nan"),
    ],
)
async def test_what_is_an_error_at_once(service: Service, answer: Any, told: str) -> None:
    service.answers = [answer]
    with pytest.raises(RewardError) as caught:
        await judge(HttpReward("k", service.url))
    assert told in str(caught.value)
    assert len(service.bodies) == 1


async def test_no_more_requests_at_once_than_allowed(service: Service) -> None:
    service.answers = [1.0]
    service.gate.clear()
    reward = HttpReward("k", service.url, concurrency=3)
    calls = [asyncio.create_task(reward.judge(RESPONSE)) for _ in range(12)]
    async with asyncio.timeout(60):
        while service.running < 3:
            await asyncio.sleep(0.01)
    service.gate.set()
    await asyncio.gather(*calls)
    await reward.close()
    assert service.most == 3
    assert len(service.bodies) == 12


async def test_the_token_is_sent_and_never_shown(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_TOKEN", TOKEN + "\n")
    service.answers = [Answer(status_code=500), Answer(status_code=403)]
    with pytest.raises(RewardError) as caught:
        await judge(HttpReward("k", service.url, token_env="JUDGE_TOKEN"))
    assert service.headers[0]["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in str(caught.value)
    assert TOKEN not in repr(caught.value.__context__)
    assert TOKEN not in caplog.text
    monkeypatch.delenv("JUDGE_TOKEN")
    (tmp_path / "token").write_text(f"{TOKEN}-2\n")
    monkeypatch.setenv("JUDGE_TOKEN_FILE", str(tmp_path / "token"))
    service.answers = [0.5]
    await judge(HttpReward("k", service.url, token_env="JUDGE_TOKEN"))
    assert service.headers[-1]["authorization"] == f"Bearer {TOKEN}-2"


async def test_a_token_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    monkeypatch.setenv("JUDGE_TOKEN_FILE", "/nowhere/token")
    with pytest.raises(RewardError, match=r"judge\.token_env: JUDGE_TOKEN_FILE: /nowhere/token cannot"):
        await HttpReward("reward.sources.judge", "http://x", token_env="JUDGE_TOKEN").start()
    monkeypatch.delenv("JUDGE_TOKEN_FILE")
    with pytest.raises(RewardError, match=r"reward\.sources\.judge\.token_env: .* JUDGE_TOKEN is not set"):
        await HttpReward("reward.sources.judge", "http://localhost", token_env="JUDGE_TOKEN").start()


@pytest.mark.parametrize("url", ["http://[::1", "http://localhost:999999", "http://\u2603..a", "nowhere"])
async def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(RewardError):
        await judge(HttpReward("k", url, retries=0))


# -- reward models --------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "17 + 25 = ?"}]


async def test_a_reward_model_reads_prompt_and_response(service: Service) -> None:
    service.answers = [{"data": [{"index": 0, "label": "LABEL_0", "probs": [-1.5, 2.5], "num_classes": 2}]}]
    reward = RewardModel("k", service.url + "/", model="judge-7b", index=1)
    found = await judge(reward, Response("s", "42", "42", {"prompt": CHAT}))
    assert found == Judged(2.5, {}, None)
    assert service.paths == ["/classify"]
    assert service.bodies[0] == {
        "messages": [*CHAT, {"role": "assistant", "content": "42"}],
        "add_generation_prompt": False,
        "use_activation": False,
        "model": "judge-7b",
    }
    with pytest.raises(RewardError, match="needs the prompt"):
        await judge(reward)


def test_requests_of_each_endpoint() -> None:
    assert request_body("classify", "17 + 25 = ", "42") == {"input": "17 + 25 = 42"}
    assert request_body("pooling", "17 + 25 = ", "42") == {"input": "17 + 25 = 42"}
    assert request_body("score", CHAT, "42") == {"queries": "17 + 25 = ?", "documents": "42"}


@pytest.mark.parametrize(
    ("endpoint", "item", "score"),
    [
        ("classify", {"probs": [0.5]}, 0.5),
        ("score", {"score": -3.0}, -3.0),
        ("pooling", {"data": [0.25]}, 0.25),
        ("pooling", {"data": [[0.1], [0.2], [0.75]]}, 0.75),
    ],
)
def test_answers_of_each_endpoint(endpoint: str, item: dict[str, Any], score: float) -> None:
    assert read_score(endpoint, {"data": [item]}, 0) == score


@pytest.mark.parametrize("answer", [None, [], {}, {"data": []}, {"data": [{}]}, {"data": [{"probs": []}]}])
def test_an_answer_without_a_score(answer: Any) -> None:
    with pytest.raises(RewardError, match="has no output 0"):
        read_score("classify", answer, 0)
