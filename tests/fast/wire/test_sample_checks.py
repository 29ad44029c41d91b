"""The one door for payloads: each rule refuses what breaks it alone, and mutations find no way around."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.ledger.replies import Claimed, Payload
from headrace.models.files import vocabulary_size
from headrace.v1 import sample_pb2 as pb
from headrace.wire.payloads import (
    FinishReason,
    Prompt,
    Sample,
    Segment,
    Trajectory,
    WireError,
    encode_parked,
    encode_prompt,
    encode_sample,
)
from headrace.wire.sample_checks import SampleReader, Window, validation_result
from tests.fuzz_samples import config, fuzz, valid_ones_pass

REPOSITORY = Path(__file__).parents[3]
PROMPT = Prompt("0000000007", 7, 1, 3, np.asarray([5, 6, 7], np.int32), "source", "truth", {"k": [1]})
ISSUED = encode_prompt(PROMPT)
VOCABULARY = 200
DECODES = re.compile(
    r"decode_(sample|parked|prompt)|ParseFromString"
    r"|\b(Sample|ParkedGroup|Prompt|Trajectory|ValidationResult)\.FromString"
)


def reader(turns: bool = False, baseline: bool = False, parts: bool = False) -> SampleReader:
    return SampleReader(config(turns, baseline, parts), VOCABULARY)


def trajectory(**changes: Any) -> Trajectory:
    """Four tokens of versions 3 and 4."""
    return dataclasses.replace(
        Trajectory(
            np.asarray([9, 10, 11, 2], np.int32),
            np.asarray([-0.5, -1.0, -2.0, 0.0], np.float32),
            np.ones(4, np.uint8),
            [Segment(3, 0, 2), Segment(4, 2, 4)],
            1.0,
            FinishReason.STOP,
        ),
        **changes,
    )


def sample(prompt: Prompt = PROMPT, first: Trajectory | None = None, **changes: Any) -> Sample:
    plain = Sample(prompt, [first or trajectory(), trajectory()], "rollouter-0-a", 2, 1.0, 0.5)
    return dataclasses.replace(plain, **changes)


TOLD = Claimed("0000000007", 2, 3, 4, 14)
WINDOW = Window(5, lambda oldest: 2)


def read(
    s: Sample,
    told: Claimed = TOLD,
    window: Window | None = WINDOW,
    by: SampleReader | None = None,
    issued: bytes = ISSUED,
) -> Sample:
    return (by or reader()).sample(Payload(encode_sample(s), issued, "rollouter-0-a"), told, window)


def test_what_is_right_is_read() -> None:
    found = read(sample())
    assert [t.token_ids.tolist() for t in found.trajectories] == [[9, 10, 11, 2]] * 2
    assert (found.attempt, found.owner, found.prompt.extra_info) == (2, "rollouter-0-a", {"k": [1]})


def prompt(**changes: Any) -> Prompt:
    return dataclasses.replace(PROMPT, **changes)


def ids(*of: int) -> Any:
    return np.asarray(of, np.int32)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (sample(prompt(sample_id="0000000008")), "payload belongs to sample '0000000008'"),
        (sample(attempt=1), "payload of attempt 1, the ledger has attempt 2"),
        (sample(owner="rollouter-1-b"), "payload of owner 'rollouter-1-b', it was finished by rollouter-0-a"),
        (sample(prompt(token_ids=ids(5, 6, 8))), "not the issued one: token_ids differs"),
        (sample(prompt(token_ids=ids(5, 6))), "not the issued one: token_ids differs"),
        (sample(prompt(issue=8)), "issue differs"),
        (sample(prompt(epoch=0)), "epoch differs"),
        (sample(prompt(row=4)), "row differs"),
        (sample(prompt(data_source="other")), "data_source differs"),
        (sample(prompt(ground_truth="easier")), "ground_truth differs"),
        (sample(prompt(extra_info={"k": [True]})), "extra_info differs"),
        (sample(trajectories=[trajectory()]), "1 trajectories, rollout.n is 2"),
        (sample(trajectories=[trajectory()] * 3), "3 trajectories, rollout.n is 2"),
        (
            sample(first=trajectory(token_ids=ids(9, 200, 11, 2))),
            "token id 200 in the response, the vocabulary has 200",
        ),
        (
            sample(first=trajectory(log_probs=np.asarray([-1, -1, -201, -1], np.float32))),
            "log-prob -201 is below -200",
        ),
        (
            sample(first=trajectory(log_probs=np.asarray([-1, -1, -1, 0.1], np.float32))),
            "not finite or above 0",
        ),
        (sample(first=trajectory(loss_mask=np.asarray([1, 0, 1, 1], np.uint8))), "loss mask of 0 without"),
        (sample(first=trajectory(turn_ends=[4])), "turns of an environment without"),
        (sample(first=trajectory(environment_metrics={"calls": 1.0})), "turns of an environment without"),
        (sample(first=trajectory(finish_reason=FinishReason.TURN_LIMIT)), "turns of an environment without"),
        (sample(generate_s=-1.0), "generate_s is -1"),
        (sample(reward_s=float("nan")), "reward_s is nan"),
        (sample(first=trajectory(segments=[Segment(3, 0, 2), Segment(1004, 2, 4)])), "versions 3 to 1004"),
        (sample(first=trajectory(segments=[Segment(2, 0, 2), Segment(4, 2, 4)])), "versions 2 to 4"),
        (
            sample(trajectories=[trajectory(segments=[Segment(4, 0, 4)])] * 2),
            "versions 4 to 4, the ledger was told 3 to 4",
        ),
    ],
)
def test_each_rule_alone(changed: Sample, reason: str) -> None:
    with pytest.raises(WireError, match=re.escape(reason)):
        read(changed)


@pytest.mark.parametrize(
    ("told", "window", "reason"),
    [
        ({"tokens": 15}, WINDOW, "14 tokens, the ledger was told 15"),
        ({}, Window(3, lambda oldest: None), "a token of version 4 in window 3"),
        ({}, Window(6, lambda oldest: 2), "version gap 3 in window 6, the bound is 2"),
    ],
)
def test_what_the_ledger_knows_counts(told: dict[str, Any], window: Window, reason: str) -> None:
    with pytest.raises(WireError, match=re.escape(reason)):
        read(sample(), dataclasses.replace(TOLD, **told), window)


def test_a_prompt_that_was_issued_beyond_the_vocabulary_or_the_limit_is_refused() -> None:
    for tokens, reason in ((ids(5, 200), "token id 200 in the prompt"), (ids(*range(7)), "7 tokens is over")):
        issued = prompt(token_ids=tokens)
        with pytest.raises(WireError, match=reason):
            reader().prompt(encode_prompt(issued), "0000000007")
        with pytest.raises(WireError, match=reason):
            read(sample(issued), issued=encode_prompt(issued))
    with pytest.raises(WireError, match="prompt has no tokens"):
        read(sample(), issued=b"")
    with pytest.raises(WireError, match="belongs to sample '0000000007'"):
        reader().prompt(ISSUED, "0000000008")
    assert reader().prompt(ISSUED).row == 3


def test_a_response_over_the_limit_is_refused() -> None:
    ones = np.ones(11)
    long = trajectory(
        token_ids=ones.astype(np.int32),
        log_probs=-ones.astype(np.float32),
        loss_mask=ones.astype(np.uint8),
        segments=[Segment(3, 0, 11)],
    )
    with pytest.raises(WireError, match="11 tokens is over the limit of 10"):
        read(sample(first=long))


def test_rewards_that_the_estimator_needs_are_there() -> None:
    with pytest.raises(WireError, match="no reward of a greedy response"):
        read(sample(), by=reader(baseline=True))
    assert read(sample(baseline_reward=0.5), by=reader(baseline=True)).baseline_reward == 0.5
    with pytest.raises(WireError, match="no part 'style'"):
        read(sample(), by=reader(parts=True))


@pytest.mark.parametrize(
    ("mask", "log_probs", "ends", "reason"),
    [
        ([1, 0, 0, 1], [-1, 0, 0, -1], [1, 4], None),
        ([0, 0, 0, 1], [0, 0, 0, -1], [4], "begins with a token that is not the model's"),
        ([1, 0, 0, 1], [-1, 0, 0, -1], [4], "turns end at [4], by the loss mask at [1, 4]"),
        ([1, 0, 0, 1], [-1, 0, 0, -1], [], "turns end at []"),
        ([1, 0, 0, 1], [-1, 0, -1, -1], [1, 4], "did not choose is not 0"),
    ],
)
def test_turns_agree_with_the_mask(
    mask: list[int], log_probs: list[float], ends: list[int], reason: str | None
) -> None:
    t = trajectory(
        loss_mask=np.asarray(mask, np.uint8), log_probs=np.asarray(log_probs, np.float32), turn_ends=ends
    )
    s = sample(trajectories=[t, t])
    if reason is None:
        assert read(s, by=reader(turns=True)).trajectories[0].turns == 2
        return
    with pytest.raises(WireError, match=re.escape(reason)):
        read(s, by=reader(turns=True))


def unfinished(**changes: Any) -> Trajectory:
    return trajectory(finish_reason=FinishReason.UNFINISHED, **changes)


@pytest.mark.parametrize(
    ("group", "turns", "reason"),
    [
        ([unfinished(), trajectory()], False, None),
        ([unfinished()], False, "parked group of 1, 2 are asked for"),
        ([unfinished(token_ids=ids(1, 2, 3, 200)), trajectory()], False, "token id 200 in the response"),
        ([unfinished(segments=[Segment(2, 0, 4)]), trajectory()], False, "versions 2 to 2, only 3 to 4 may"),
        ([unfinished(segments=[Segment(3, 0, 3), Segment(1004, 3, 4)])] * 2, False, "versions 3 to 1004"),
        ([unfinished(environment_state={}), trajectory()], False, "state without an environment"),
        ([unfinished(turn_ends=[4], environment_state={})] * 2, True, None),
    ],
)
def test_parked_work_is_checked_before_the_engine_sees_it(
    group: list[Trajectory], turns: bool, reason: str | None
) -> None:
    raw = encode_parked(group)
    if reason is None:
        assert len(reader(turns).parked(raw, 3, 4)) == 2
        return
    with pytest.raises(WireError, match=re.escape(reason)):
        reader(turns).parked(raw, 3, 4)


def test_parked_work_without_room_is_refused() -> None:
    full = unfinished(
        token_ids=np.ones(10, np.int32),
        log_probs=-np.ones(10, np.float32),
        loss_mask=np.ones(10, np.uint8),
        segments=[Segment(3, 0, 10)],
    )
    with pytest.raises(WireError, match="no room to go on"):
        reader().parked(encode_parked([full, full]), 3, 4)
    empty = unfinished(token_ids=ids(), log_probs=ids(), loss_mask=ids(), segments=[])
    assert len(reader().parked(encode_parked([empty, empty]), 3, 4)) == 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"version": 4}, "result of version 4, version 3 was asked for"),
        ({"row": 10}, "result of row 10, there are 10"),
        ({"reward": float("nan")}, "reward is not finite"),
    ],
)
def test_validation_results(fields: dict[str, Any], reason: str | None) -> None:
    raw = pb.ValidationResult(**{"version": 3, "row": 9, "reward": 0.5, **fields}).SerializeToString()
    if reason is None:
        assert validation_result(raw, 3, 10).row == 9
        return
    with pytest.raises(WireError, match=reason):
        validation_result(raw, 3, 10)
    with pytest.raises(WireError, match="not a valid message"):
        validation_result(b"\xff\xff", 3, 10)


def test_mutated_payloads_are_refused_with_a_reason_or_keep_every_rule() -> None:
    """A million of them: `make fuzz`."""
    seed = 20
    valid_ones_pass(seed)
    told = fuzz(4000, str(seed))
    assert told[""] > 400, told
    assert len(told) > 30, told


def test_nobody_decodes_a_payload_on_his_own() -> None:
    """`headrace dead` shows the prompts of what died, malformed ones too."""
    found = {
        str(file.relative_to(REPOSITORY))
        for where in ("headrace", "services")
        for file in (REPOSITORY / where).rglob("*.py")
        if "_pb2" not in file.name and DECODES.search(file.read_text())
    }
    assert found == {"headrace/wire/sample_checks.py", "headrace/wire/payloads.py", "headrace/cli/dead.py"}


@pytest.mark.parametrize("said", ["{}", '{"vocab_size": null}', '{"vocab_size": 0}', '{"vocab_size": true}'])
def test_a_model_without_a_vocabulary_is_told_what_to_do(tmp_path: Path, said: str) -> None:
    (tmp_path / "config.json").write_text(said)
    with pytest.raises(ValueError, match="make it the number of rows of the model's embedding"):
        vocabulary_size(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 96}')
    assert vocabulary_size(tmp_path) == 96
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 97}}')
    assert vocabulary_size(tmp_path) == 97


def test_reading_takes_microseconds() -> None:
    """Processor time of a group of 8 with 512 tokens each. It is a quarter of a millisecond; the bound leaves
    room for any machine."""
    plain = config(False, False, False).model_copy(deep=True)
    plain.data.max_response_length, plain.rollout.n = 512, 8
    by = SampleReader(plain, VOCABULARY)
    ones = np.ones(512)
    t = trajectory(
        token_ids=ones.astype(np.int32),
        log_probs=-ones.astype(np.float32),
        loss_mask=ones.astype(np.uint8),
        segments=[Segment(3, 0, 256), Segment(4, 256, 512)],
    )
    raw = Payload(encode_sample(sample(trajectories=[t] * 8)), ISSUED, "rollouter-0-a")
    told = dataclasses.replace(TOLD, tokens=8 * (512 + 3))
    by.sample(raw, told, WINDOW)
    began = time.process_time()
    for _ in range(100):
        by.sample(raw, told, WINDOW)
    assert (time.process_time() - began) / 100 < 5e-3
