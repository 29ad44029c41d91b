"""A service recognises its run by what the ledger remembers of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headrace.config import identity, lifetime
from headrace.config.loading import ConfigError, known_keys
from headrace.config.run import RunConfig
from headrace.ledger.client import LedgerError, LedgerUnavailable, LoginRefused
from headrace.service import startup
from tests.support.scripted_turns import config


class Ledger:
    """Of which the queue service has set up as much as `answers` says, the last for ever."""

    address = "h:1"

    def __init__(self, *answers: str | LedgerError) -> None:
        self._answers = list(answers)

    def run(self, op: Any) -> str:
        assert op.script == "fingerprint"
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(found, LedgerError):
            raise found
        return found


class Later(Ledger):
    async def run(self, op: Any) -> str:  # type: ignore[override]
        return super().run(op)


def begun(**other: Any) -> str:
    return json.dumps(identity.of(config()) | other)


def recognise(c: RunConfig, *answers: str | LedgerError) -> None:
    """Both ways to start."""
    asyncio.run(startup.until_configured(Later(*answers), c))  # type: ignore[arg-type]
    startup.wait_until_configured(Ledger(*answers), c)  # type: ignore[arg-type]


def test_it_waits_for_the_queue_service_and_goes_on_with_its_run() -> None:
    early = LedgerError("HEADRACE the run x is not configured in this server")
    recognise(config(), early, early, begun(data="digests are the queue service's"))


def test_it_waits_for_redis_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace.startup")
    away = LedgerUnavailable("not reached")
    early = LedgerError("HEADRACE the run x is not configured in this server")
    startup.wait_until_configured(Ledger(away, away, early, away, early, begun()), config())  # type: ignore[arg-type]
    told = [vars(record)["for"] for record in caplog.records]
    assert told == ["an answer of Redis at h:1", "the queue service to set up the run"]


def test_a_start_that_waits_in_vain_says_for_whom() -> None:
    c = config()
    c.services.start_timeout_s = 0.01
    for error, whom in (
        (LedgerUnavailable("not reached"), "an answer of Redis at h:1"),
        (LedgerError("HEADRACE the run x is not configured in this server"), "the queue service"),
    ):
        with pytest.raises(LedgerUnavailable, match=f"has waited 0.01 s for {whom}"):
            recognise(c, error)


def test_a_refused_login_is_not_waited_for() -> None:
    with pytest.raises(LoginRefused):
        recognise(config(), LoginRefused("Redis refuses the login"))


@pytest.mark.parametrize("key", ["model.path", "rollout.n", "data.max_response_length", "environment.kwargs"])
def test_another_run_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: was 'another' when the run .* set it back"):
        recognise(config(), begun(**{key: "another"}))


def test_a_model_may_lie_elsewhere_but_not_be_another() -> None:
    plain = config().model_dump()
    plain["model"]["path"] = f"/elsewhere/{identity.of(config())['model.path']}"
    recognise(RunConfig.model_validate(plain), begun())
    plain["model"]["path"] += "-base"
    with pytest.raises(ConfigError, match=r"model\.path: was "):
        recognise(RunConfig.model_validate(plain), begun())


@pytest.mark.parametrize("fingerprint", ["", "print", "[1]", json.dumps({"seed": config().seed})])
def test_what_an_earlier_release_did_not_note_is_not_compared(fingerprint: str) -> None:
    recognise(config(), fingerprint)


def test_it_does_not_wait_for_what_will_not_pass() -> None:
    with pytest.raises(LedgerError, match="wrong kind"):
        recognise(config(), LedgerError("wrong kind of value"))


def test_it_covers_what_a_run_must_keep() -> None:
    """What is missing is in the digests of the data, or leads to the ledger itself."""
    kept, covered = set(lifetime.keys("run")), set(identity.of(config()))
    assert covered < kept < set(known_keys())
    assert all(key.startswith("data.") or key in ("name", "redis.url") for key in kept - covered)


def test_what_makes_finished_samples_unlike_new_ones() -> None:
    def scoring(**sections: Any) -> str:
        plain = config().model_dump()
        for section, values in sections.items():
            plain[section] |= values
        return identity.scoring(RunConfig.model_validate(plain))

    same = scoring()
    assert scoring(custom_reward_function={"timeout_s": 99.0}, actor={"clip_ratio_low": 0.1}) == same
    assert scoring(custom_reward_function={"name": "another"}) != same
    assert scoring(algorithm={"adv_estimator": "remax"}) != same
