"""The canary leaves an engine room for the one token that it samples after scoring a prompt."""

from __future__ import annotations

import pytest

from headrace.config.run import RunConfig
from headrace_trainer.sync.rounds import _CANARY_TOKENS, _canary_length
from tests.fast.config.test_config import changed


@pytest.mark.parametrize(
    ("prompt", "response", "limit", "length"),
    [(16, 32, None, 47), (4, 4, None, 7), (4, 4, 40, 39), (16, 32, 96, _CANARY_TOKENS)],
)
def test_it_is_shorter_than_the_longest_sequence(
    prompt: int, response: int, limit: int | None, length: int
) -> None:
    data = {"data__max_prompt_length": prompt, "data__max_response_length": response}
    c = RunConfig.model_validate(changed(**data, model__max_model_len=limit))
    assert _canary_length(c) == length < c.longest_sequence
