"""A rollouter's work with malformed prompts, parked work and responses: the sample fails, with the reason."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from headrace.wire.payloads import FinishReason, Prompt, Segment, Trajectory, encode_parked
from tests.fast.rollouter.test_environment_work import Ledger, until_asked, validated, worker
from tests.support.scripted_turns import PROMPT, VOCABULARY, Counting, ScriptedEngine


def beyond(**changes: Any) -> Prompt:
    return dataclasses.replace(PROMPT, **changes)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (beyond(token_ids=np.asarray([1, VOCABULARY], np.int32)), f"token id {VOCABULARY} in the prompt"),
        (beyond(token_ids=np.ones(9, np.int32)), "prompt of 9 tokens"),
        (beyond(sample_id="0000000001"), "belongs to sample '0000000001'"),
    ],
)
async def test_a_malformed_prompt_never_reaches_the_engine(prompt: Prompt, reason: str) -> None:
    ledger = Ledger(prompt=prompt)
    made = worker(ledger, Counting())
    await until_asked(made, ledger, "finish", "fail")
    assert ledger.asked["fail"][3] == "malformed"
    assert reason in ledger.asked["fail"][4]
    assert made._engine.seeds == []  # type: ignore[attr-defined]


async def test_malformed_parked_work_never_reaches_the_engine() -> None:
    """It is of a version that was never served."""
    t = Trajectory(
        np.asarray([10], np.int32),
        np.asarray([-1.0], np.float32),
        np.ones(1, np.uint8),
        [Segment(1003, 0, 1)],
        1.0,
        FinishReason.UNFINISHED,
    )
    ledger = Ledger(encode_parked([t, t]))
    made = worker(ledger, Counting())
    await until_asked(made, ledger, "finish", "fail")
    assert ledger.asked["fail"][3] == "malformed"
    assert "parked tokens of versions 1003 to 1003" in ledger.asked["fail"][4]
    assert made._engine.seeds == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("next_token", VOCABULARY, "token id 1000 in the response"), ("log_prob", math.nan, "is not finite")],
)
async def test_what_an_engine_makes_is_checked_before_it_is_finished(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, reason: str
) -> None:
    monkeypatch.setattr(ScriptedEngine, name, staticmethod(lambda _: value))
    ledger = Ledger()
    await until_asked(worker(ledger, Counting()), ledger, "finish", "fail")
    assert ledger.asked["fail"][3] == "malformed"
    assert reason in ledger.asked["fail"][4]


async def test_a_malformed_held_out_row_ends_and_counts_for_no_source() -> None:
    result = await validated(Counting(), prompt=beyond(token_ids=np.asarray([VOCABULARY], np.int32)))
    assert result is not None
    assert (result.row, result.data_source, result.reward) == (4, "", 0.0)
