"""Rewards over HTTP: your own services, and reward models behind vLLM's server.

What this module guarantees:

- At most `concurrency` requests are in flight.
- A call ends within `timeout_s` of its first request, retries included. No answer, 429 and 5xx are retried
  with growing pauses. Anything else is an error at once.
- Redirects are not followed, so the token goes to no other server. It appears in no message and no log.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from headrace.config.loading import ConfigError
from headrace.connections.variables import secret
from headrace.rewards.function import RewardError, parse_score
from headrace.rewards.source import Judged, Response

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
_SHOWN = 300
"""Most characters of a response body in an error message."""


class _Again(Exception):
    """The request may succeed later. `pause_s`: the delay that the server asked for, if any."""

    def __init__(self, why: str, pause_s: float | None = None) -> None:
        super().__init__(why)
        self.pause_s = pause_s


class Door:
    """One HTTP endpoint that takes and returns JSON."""

    def __init__(
        self, key: str, url: str, timeout_s: float, concurrency: int, retries: int, token_env: str | None
    ) -> None:
        """`key`: the configuration section, for error messages."""
        self._key, self._url = key, url
        self._timeout_s, self._retries = timeout_s, retries
        self._concurrency, self._token_env = concurrency, token_env
        self._places = asyncio.Semaphore(concurrency)
        self._client: httpx.AsyncClient | None = None

    def open(self) -> httpx.AsyncClient:
        """Create the client, once. Raises RewardError when the token is missing."""
        if self._client is None:
            headers = {}
            if self._token_env is not None:
                try:
                    token = secret(self._token_env).strip()
                except ConfigError as error:  # its file cannot be read
                    raise RewardError(f"{self._key}.token_env: {error}") from None
                if not token or not token.isascii() or not token.isprintable():
                    raise RewardError(
                        f"{self._key}.token_env: the environment variable {self._token_env} is not set to a "
                        f"token, nor {self._token_env}_FILE to a file with one: set it where the run is "
                        "started (in a cluster: for the rollouters)"
                    )
                headers["Authorization"] = f"Bearer {token}"
            self._client = httpx.AsyncClient(
                headers=headers,
                timeout=self._timeout_s,
                limits=httpx.Limits(max_connections=self._concurrency),
                follow_redirects=False,
            )
        return self._client

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def post(self, body: Any) -> Any:
        """Post `body` as JSON and return the decoded answer. Raises RewardError."""
        client = self.open()
        async with self._places:
            last = ""
            try:
                async with asyncio.timeout(self._timeout_s):
                    for attempt in range(self._retries + 1):
                        try:
                            return await self._request(client, body)
                        except _Again as again:
                            last = str(again)
                            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**attempt)
                            if attempt < self._retries:
                                jittered = pause_s * random.uniform(0.5, 1.0)
                                await asyncio.sleep(max(jittered, again.pause_s or 0.0))
            except TimeoutError:
                so_far = f" (last: {last})" if last else ""
                raise RewardError(
                    f"{self._url} gave no answer within {self._timeout_s:g} s{so_far}"
                ) from None
        raise RewardError(f"{self._url}: {last}, after {self._retries + 1} attempts")

    async def _request(self, client: httpx.AsyncClient, body: Any) -> Any:
        try:
            answer = await client.post(self._url, json=body)
        except (ValueError, TypeError, RecursionError) as error:
            raise RewardError(f"the row cannot be sent to {self._url}: {error}") from None
        except httpx.TransportError as error:  # refused, reset, time-out
            raise _Again(f"{type(error).__name__}: {error}") from None
        except Exception as error:  # InvalidURL is no HTTPError; a port out of range ends in OverflowError
            raise RewardError(f"{self._url}: {type(error).__name__}: {error}") from None
        if answer.status_code == 429 or answer.status_code >= 500:
            raise _Again(f"status {answer.status_code}: {answer.text[:_SHOWN]}", _asked_pause_s(answer))
        if answer.status_code != 200:
            hint = ""
            if answer.status_code in (401, 403):
                hint = f"; check {self._key}.token_env"
            elif answer.is_redirect:
                hint = f"; redirects are not followed: put the final address into {self._key}.url"
            raise RewardError(f"{self._url}: status {answer.status_code}: {answer.text[:_SHOWN]}{hint}")
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise RewardError(f"{self._url} answered no JSON: {answer.text[:_SHOWN]!r}") from None


def _asked_pause_s(answer: httpx.Response) -> float | None:
    """The Retry-After header in seconds. Its date form is ignored."""
    try:
        return max(0.0, float(answer.headers.get("retry-after", "")))
    except ValueError:
        return None


class HttpReward:
    """A `Source`: a service that takes `compute_score`'s arguments as JSON and answers with its result."""

    def __init__(
        self,
        key: str,
        url: str,
        timeout_s: float = 30.0,
        concurrency: int = 16,
        retries: int = 3,
        token_env: str | None = None,
    ) -> None:
        self._door = Door(key, url, timeout_s, concurrency, retries, token_env)

    async def start(self) -> None:
        self._door.open()

    async def judge(self, response: Response) -> Judged:
        found = await self._door.post(
            {
                "data_source": response.data_source,
                "solution_str": response.solution,
                "ground_truth": response.ground_truth,
                "extra_info": response.extra_info,
            }
        )
        score, parts = parse_score(found)
        pred = found.get("pred") if isinstance(found, dict) else None
        return Judged(score, parts, None if pred is None else str(pred))

    async def close(self) -> None:
        await self._door.close()


class RewardModel:
    """A `Source`: a model behind `vllm serve MODEL --runner pooling`.

    The model reads the prompt (`extra_info["prompt"]`) and the response. If the prompt is a chat, both are
    rendered with the reward model's own template, else they are concatenated. The endpoint `score` sends them
    as two texts instead, for models that compare. The score is the model's raw output, without an activation.
    """

    def __init__(
        self,
        key: str,
        url: str,
        timeout_s: float = 30.0,
        concurrency: int = 16,
        retries: int = 3,
        token_env: str | None = None,
        *,
        model: str | None = None,
        endpoint: str = "classify",
        index: int = 0,
    ) -> None:
        self._endpoint, self._index = endpoint, index
        self._extra: dict[str, Any] = {"use_activation": False} | ({"model": model} if model else {})
        whole = url.rstrip("/") + "/" + endpoint
        self._door = Door(key, whole, timeout_s, concurrency, retries, token_env)

    async def start(self) -> None:
        self._door.open()

    async def judge(self, response: Response) -> Judged:
        prompt = response.extra_info.get("prompt")
        if prompt is None:
            raise RewardError('a reward model needs the prompt, as extra_info["prompt"]')
        body = request_body(self._endpoint, prompt, response.solution) | self._extra
        score = read_score(self._endpoint, await self._door.post(body), self._index)
        return Judged(parse_score(score)[0], {}, None)

    async def close(self) -> None:
        await self._door.close()


def request_body(endpoint: str, prompt: Any, solution: str) -> dict[str, Any]:
    """Build a request to a vLLM pooling endpoint from the prompt (text or chat messages) and the response."""
    chat = prompt if isinstance(prompt, list) else None
    if endpoint == "score":
        text = "\n".join(str(m["content"]) for m in chat) if chat is not None else str(prompt)
        return {"queries": text, "documents": solution}
    if chat is None:
        return {"input": f"{prompt}{solution}"}
    return {"messages": [*chat, {"role": "assistant", "content": solution}], "add_generation_prompt": False}


def read_score(endpoint: str, answer: Any, index: int) -> Any:
    """Extract the number from a vLLM pooling endpoint's answer. Raises RewardError when there is none."""
    try:
        (data,) = answer["data"]
        if endpoint == "score":
            return data["score"]
        outputs = data["probs"] if endpoint == "classify" else data["data"]
        while outputs and isinstance(outputs[0], list):  # per-token outputs: the last one counts
            outputs = outputs[-1]
        return outputs[index]
    except (KeyError, TypeError, IndexError, ValueError):
        raise RewardError(
            f"the reward model's answer has no output {index}: {str(answer)[:_SHOWN]}"
        ) from None
