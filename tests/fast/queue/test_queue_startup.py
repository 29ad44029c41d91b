"""By what the queue service recognises its run, over a ledger that answers as told."""

from __future__ import annotations

import json
from datetime import date
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.config.run import RunConfig
from headrace.data import dataset
from headrace.ledger.replies import ConfigureReply
from headrace_queue import startup
from headrace_queue.loops import Fatal
from tests.support import scripted_turns
from tests.support.queue_fakes import FakeLedger, source


def test_differences_name_what_changed() -> None:
    stored = json.dumps({"data": "a" * 64, "seed": 1, "same": 2})
    ours = json.dumps({"data": "b" * 64, "seed": 2, "same": 2, "new": True})
    assert startup.differences(stored, ours) == (
        "data was aaaaaaaaaaaa..., is bbbbbbbbbbbb..., new was None, is True, seed was 1, is 2"
    )
    assert startup.differences("old format", ours).startswith("it was 'old format'")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"name": "calculator", "kwargs": {"role": "tool"}}, "environment.kwargs"),
        ({"name": "Other", "path": "mine.py"}, "environment.name"),
        ({"name": "calculator", "path": "other.py"}, "environment.path"),
        ({}, "environment.name"),
    ],
)
async def test_parked_work_goes_on_with_the_environment_that_it_began_with(
    settings: dict[str, Any], told: str
) -> None:
    began = scripted_turns.config(name="calculator")
    data = cast("dataset.DataSet", SimpleNamespace(train=source(), held_out=source(1)))
    stored = startup.fingerprint(began, data)
    plain = began.model_dump()
    plain["environment"] = settings
    other = startup.fingerprint(RunConfig.model_validate(plain), data)
    ledger = FakeLedger(configure=lambda *args: ConfigureReply(told_by(args), stored, False))

    def told_by(args: tuple[Any, ...]) -> str:
        return "ok" if args[-1] == stored else "mismatch"

    await startup.configure(ledger, began, stored)  # type: ignore[arg-type]
    with pytest.raises(Fatal, match=f"{told} was "):
        await startup.configure(ledger, began, other)  # type: ignore[arg-type]


async def test_a_run_of_an_earlier_release_goes_on() -> None:
    """Its fingerprint has nothing about the environment; all else must be the same."""
    config = scripted_turns.config()
    data = cast("dataset.DataSet", SimpleNamespace(train=source(), held_out=source(1)))
    ours = startup.fingerprint(config, data)
    plain = {k: v for k, v in json.loads(ours).items() if not k.startswith("environment.")}
    for stored, status in ((plain, "ok"), (plain | {"seed": 99}, "mismatch"), ({}, "mismatch")):
        text = json.dumps(stored, sort_keys=True)
        ledger = FakeLedger(
            configure=lambda *args, text=text: ConfigureReply(
                "ok" if args[-1] == text else "mismatch", text, False
            )
        )
        if status == "ok":
            await startup.configure(ledger, config, ours)  # type: ignore[arg-type]
        else:
            with pytest.raises(Fatal):
                await startup.configure(ledger, config, ours)  # type: ignore[arg-type]


def test_arguments_that_yaml_knows_and_json_does_not_have_a_fingerprint() -> None:
    config = scripted_turns.config(kwargs={"since": date(2026, 11, 30)})
    data = cast("dataset.DataSet", SimpleNamespace(train=source(), held_out=source(1)))
    assert "2026-11-30" in startup.fingerprint(config, data)


def test_the_digest_covers_what_a_prompt_is_made_of() -> None:
    base = source(2)
    whole = startup.digest(base.rows, base.tokens)
    assert whole == startup.digest(base.rows, base.tokens)
    assert whole != startup.digest(base.rows[:1], base.tokens[:1])
    assert whole != startup.digest(base.rows, base.tokens[::-1])
    assert whole != startup.digest(source(2).rows[::-1], base.tokens)
