"""Configuration of the reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from headrace.config.base import Section
from headrace.plugins.registry import Registry

if TYPE_CHECKING:
    from headrace.config.run import RunConfig

REMOTE_KINDS = ("http", "reward_model")
OWN_KINDS = ("function", *REMOTE_KINDS)
"""Kinds that locate a custom reward. All other kinds name an installed one."""
REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward",
    {
        "reasoning_gym": "headrace.rewards.reasoning_gym_score:compute_score",
        "math_verify": "headrace.rewards.math_verify_score:compute_score",
    },
    group="headrace.rewards",
)
"""Functions with verl's `compute_score` interface. They run in separate processes, as user functions do: the
shipped ones evaluate the model's output, and an answer like 9**9**9**9 can keep them busy forever."""


def _kind(kind: str) -> str:
    if kind not in OWN_KINDS and not REWARDS.knows(kind):
        raise ValueError(f"{REWARDS.unknown(kind)}; your own: {', '.join(OWN_KINDS)}")
    return kind


class CustomRewardConfig(Section):
    """The simplest reward: verl's `compute_score`, by path and name. For all others see `reward`."""

    path: str | None = None
    """A Python file or an importable module."""
    name: str = "compute_score"
    """The function's name."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest call of the function."""


class RewardSource(Section):
    """One of several rewards that are added up."""

    kind: Annotated[str, AfterValidator(_kind)]
    """`function` (your own), `http` (a service), `reward_model` (served by vLLM), or the name of a built-in
    function, `reasoning_gym` or `math_verify`, or of one from an installed package."""
    weight: float = 1.0
    """The reward is the sum of weight times score over all sources."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest call; for a service, retries included."""
    path: str | None = None
    """function: a Python file or an importable module."""
    name: str = "compute_score"
    """function: its name."""
    url: str | None = None
    """http: where to post; reward_model: the server's address, e.g. `http://judge:8000`."""
    token_env: str | None = None
    """http, reward_model: environment variable of the rollouters that holds a bearer token; the same name
    with `_FILE` appended can point to a file with it instead."""
    concurrency: int = Field(16, gt=0)
    """http, reward_model: concurrent requests per rollouter."""
    retries: int = Field(3, ge=0)
    """http, reward_model: retries after no response, 429 or 5xx, with backoff."""
    model: str | None = None
    """reward_model: name of the model; unset: the one that the server has."""
    endpoint: Literal["classify", "pooling", "score"] = "classify"
    """reward_model: which of vLLM's endpoints."""
    index: int = Field(0, ge=0)
    """reward_model: which of the model's outputs is the score."""


class OverlongBufferConfig(Section):
    """DAPO's overlong penalty, linear over the last stretch of the permitted length."""

    enable: bool = False
    """Add the penalty to the reward; the metric `reward/mean` excludes it."""
    len: int = Field(0, ge=0)
    """Length of the last stretch, in which a response is penalised, in tokens."""
    penalty_factor: float = Field(1.0, ge=0)
    """The penalty for a response of full length."""


class RewardConfig(Section):
    """Rewards from several sources, and how functions are run."""

    sources: dict[str, RewardSource] = {}
    """Rewards by a name of your choice, which their metrics carry; replaces `custom_reward_function`. See
    docs/rewards.md."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    max_processes: int = Field(4, gt=0)
    """Most processes per function and rollouter: one, and more while calls are waiting."""
    memory_limit_bytes: int = Field(4 * 1024**3, ge=64 * 1024**2)
    """Memory of one such process; allocations beyond it fail."""

    @property
    def needs_prompt(self) -> bool:
        """Whether any source needs the prompt as well as the response."""
        return any(source.kind in REMOTE_KINDS for source in self.sources.values())


_OF_KIND = {
    "path": ("function",),
    "name": ("function",),
    "url": REMOTE_KINDS,
    "token_env": REMOTE_KINDS,
    "concurrency": REMOTE_KINDS,
    "retries": REMOTE_KINDS,
    "model": ("reward_model",),
    "endpoint": ("reward_model",),
    "index": ("reward_model",),
}


def reward_problems(c: RunConfig) -> Iterator[str]:
    """Yield inconsistencies in the reward settings, each with its fix."""
    custom, sources = c.custom_reward_function.path, c.reward.sources
    if custom is None and not sources:
        yield (
            "there is no reward: set custom_reward_function.path to a Python file with a function "
            "compute_score, or name others under reward.sources"
        )
    if custom is not None and sources:
        yield (
            "custom_reward_function.path and reward.sources are both set: leave one out; a function of yours "
            f"among others is reward.sources.NAME with kind: function and path: {custom}"
        )
    for name, source in sources.items():
        yield from _source_problems(f"reward.sources.{name}", source)
        if not name or not name.replace("_", "").replace("-", "").isalnum():
            yield f"reward.sources: {name!r} names metrics: use letters, digits, '_' and '-'"
        if name == "score":
            yield "reward.sources.score: the sum of all is called score: take another name"
    buffer, longest = c.reward.overlong_buffer, c.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= longest:
        yield (
            f"reward.overlong_buffer.len = {buffer.len} must lie between 1 and data.max_response_length = "
            f"{longest}: change it, or set reward.overlong_buffer.enable to false"
        )
    if buffer.len and not buffer.enable:
        yield (
            "reward.overlong_buffer.len is set, but the penalty is off: set reward.overlong_buffer.enable to "
            "true, or leave the length out"
        )


def _source_problems(where: str, source: RewardSource) -> Iterator[str]:
    for key, kinds in _OF_KIND.items():
        # Not `model_fields_set`: services read the resolved configuration, in which every key is set.
        is_set = getattr(source, key) != RewardSource.model_fields[key].default
        if is_set and source.kind not in kinds:
            yield f"{where}.{key} is for kind {' or '.join(kinds)}, not {source.kind}: leave it out"
    if source.kind == "function" and source.path is None:
        yield f"{where}: kind function needs a path: name a Python file or a module"
    if source.kind in REMOTE_KINDS:
        if source.url is None:
            yield f"{where}: kind {source.kind} needs a url"
        elif (problem := _url_problem(source.url)) is not None:
            yield f"{where}.url {problem}"
        elif "@" in source.url.partition("://")[2].partition("/")[0]:
            yield (
                f"{where}.url holds a password: put a token into an environment variable and name that in "
                f"{where}.token_env"
            )


def _url_problem(url: str) -> str | None:
    """Return what is wrong with a URL for an HTTP client; None if nothing is."""
    if any(not character.isprintable() or character.isspace() for character in url):
        return "holds a blank or a control character: take it out"
    try:
        parts = urlsplit(url)
        port = parts.port  # parsed lazily: may raise ValueError
    except ValueError:  # its text may contain parts of a password
        port = 0
    if port == 0:
        return "is no address: write http://HOST or http://HOST:PORT, an IPv6 host in [], a port below 65536"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "must start with http:// or https:// and name a host"
    return None
