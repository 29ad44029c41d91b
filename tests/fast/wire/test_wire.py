"""The codec: what goes in comes out, and no bytes make anything but a valid value or a WireError."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.v1 import sample_pb2 as pb
from headrace.wire import payloads
from headrace.wire.payloads import FinishReason, Prompt, Sample, Segment, Trajectory, WireError

# ---- strategies ----

int32s = st.integers(0, 2**31 - 1)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def array(values: list[Any], dtype: str) -> np.ndarray[Any, Any]:
    return np.asarray(values, dtype)


@st.composite
def segments(draw: st.DrawFn, tokens: int, oldest: int = 0) -> list[Segment]:
    """A valid cover of [0, tokens) whose first version is at least `oldest`."""
    inner = draw(st.sets(st.integers(1, tokens - 1), max_size=3)) if tokens > 1 else set()
    cuts = [0, *sorted(inner), tokens] if tokens else []
    versions = sorted(draw(st.lists(st.integers(oldest, 2**63), min_size=len(cuts), max_size=len(cuts))))
    return [Segment(v, a, b) for v, a, b in zip(versions, cuts, cuts[1:], strict=False)]


states = st.dictionaries(texts, json_values, max_size=3)


@st.composite
def many_turns(draw: st.DrawFn, finished: bool, oldest: int) -> Trajectory:
    """Turns of the model with an environment's tokens between them; unfinished, it may stop anywhere."""
    pieces = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=3))
    mask = [m for model, other in pieces for m in [1] * model + [0] * other]
    turn_ends = [i + 1 for i, m in enumerate(mask[:-1]) if m and not mask[i + 1]]
    keep = turn_ends[-1] if finished else draw(st.integers(0, len(mask)))
    mask, turn_ends = mask[:keep], [end for end in turn_ends if end <= keep]
    reason = draw(st.sampled_from([1, 2, 3])) if finished else 0
    log_probs = [-draw(st.floats(0, 2.0**20, width=32)) if m else 0.0 for m in mask]
    return Trajectory(
        array(draw(st.lists(int32s, min_size=keep, max_size=keep)), "int32"),
        array(log_probs, "float32"),
        array(mask, "uint8"),
        draw(segments(keep, oldest)),
        1.0,
        FinishReason(reason),
        turn_ends=turn_ends,
        environment_state=None if finished else draw(st.none() | states),
        environment_metrics=draw(st.dictionaries(texts, float32s, max_size=2)) if finished else {},
    )


@st.composite
def trajectories(draw: st.DrawFn, finished: bool = True, oldest: int = 0) -> Trajectory:
    count = draw(st.integers(1 if finished else 0, 6))
    reasons = [FinishReason.STOP, FinishReason.LENGTH, FinishReason.TURN_LIMIT] if count else []
    if draw(st.booleans()):
        return draw(many_turns(finished, oldest))
    return Trajectory(
        array(draw(st.lists(int32s, min_size=count, max_size=count)), "int32"),
        array(draw(st.lists(st.floats(-(2.0**100), 0, width=32), min_size=count, max_size=count)), "float32"),
        array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), "uint8"),
        draw(segments(count, oldest)),
        draw(st.floats(2**-20, 2**20, width=32)),
        draw(st.sampled_from(reasons if finished else [*reasons, FinishReason.UNFINISHED])),
        draw(float32s),
        draw(st.dictionaries(texts, float32s, max_size=3)),
    )


prompts = st.builds(
    Prompt,
    sample_id=texts.filter(bool),
    issue=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**32 - 1),
    row=st.integers(0, 2**64 - 1),
    token_ids=st.lists(int32s, min_size=1, max_size=6).map(lambda ids: array(ids, "int32")),
    data_source=texts,
    ground_truth=texts,
    extra_info=st.dictionaries(texts, json_values, max_size=3),
)
samples = st.builds(
    Sample,
    prompt=prompts,
    trajectories=st.lists(trajectories(), min_size=1, max_size=3),
    owner=texts,
    attempt=st.integers(0, 2**32 - 1),
    generate_s=st.floats(0, 1e9),
    reward_s=st.floats(0, 1e9),
)
parked = st.lists(trajectories(finished=False), max_size=3)


# ---- what must hold ----


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Prompt | Sample | Trajectory):
        return type(a) is type(b) and all(same(v, getattr(b, k)) for k, v in vars(a).items())
    return bool(a == b)


def check_prompt(p: Prompt) -> None:
    assert p.sample_id
    assert p.token_ids.dtype == np.int32
    assert len(p.token_ids) > 0
    assert int(p.token_ids.min()) >= 0
    assert isinstance(p.extra_info, dict)


def check_trajectory(t: Trajectory, finished: bool) -> None:
    count = len(t.token_ids)
    assert (t.token_ids.dtype, t.log_probs.dtype, t.loss_mask.dtype) == (np.int32, np.float32, np.uint8)
    assert len(t.log_probs) == len(t.loss_mask) == count
    assert not finished or t.finish_reason is not FinishReason.UNFINISHED
    assert count > 0 or t.finish_reason is FinishReason.UNFINISHED
    assert (t.token_ids >= 0).all()
    assert np.isfinite(t.log_probs).all()
    assert (t.log_probs <= 1e-3).all()
    assert set(t.loss_mask.tolist()) <= {0, 1}
    covered = [i for s in t.segments for i in range(s.start, s.end)]
    assert covered == list(range(count))
    versions = [s.version for s in t.segments]
    assert versions == sorted(versions)
    assert t.versions == ((versions[0], versions[-1]) if versions else None)
    assert isinstance(t.finish_reason, FinishReason)
    assert t.turn_ends == sorted(set(t.turn_ends))
    assert all(0 < end <= count and t.loss_mask[end - 1] for end in t.turn_ends)
    assert all(end == count or not t.loss_mask[end] for end in t.turn_ends)
    unfinished = t.finish_reason is FinishReason.UNFINISHED
    assert unfinished or not t.turn_ends or t.turn_ends[-1] == count
    assert t.awaits_environment == (unfinished and count in t.turn_ends)
    assert t.environment_state is None or (isinstance(t.environment_state, dict) and not finished)
    assert all(math.isfinite(v) for v in t.environment_metrics.values())
    assert math.isfinite(t.reward)
    assert all(math.isfinite(v) for v in t.reward_parts.values())
    assert math.isfinite(t.temperature)
    assert t.temperature > 0


def check_sample(s: Sample) -> None:
    check_prompt(s.prompt)
    assert s.trajectories
    for t in s.trajectories:
        check_trajectory(t, finished=True)
    assert 0 <= s.min_version <= s.max_version
    assert 0 <= s.span <= s.max_version - s.min_version
    assert s.tokens > len(s.prompt.token_ids) * len(s.trajectories)


def check_parked(group: list[Trajectory]) -> None:
    for t in group:
        check_trajectory(t, finished=False)


DECODERS: list[tuple[Callable[[bytes], Any], Callable[[Any], None]]] = [
    (payloads.decode_prompt, check_prompt),
    (payloads.decode_sample, check_sample),
    (payloads.decode_parked, check_parked),
]


def attack(raw: bytes) -> None:
    for decode, check in DECODERS:
        try:
            value = decode(raw)
        except WireError:
            continue
        check(value)


# ---- round trips ----


@given(prompts)
def test_prompt_round_trip(prompt: Prompt) -> None:
    decoded = payloads.decode_prompt(payloads.encode_prompt(prompt))
    check_prompt(decoded)
    assert same(decoded, prompt)


@given(samples)
def test_sample_round_trip(sample: Sample) -> None:
    decoded = payloads.decode_sample(payloads.encode_sample(sample))
    check_sample(decoded)
    assert same(decoded, sample)


@given(parked)
def test_parked_group_round_trip(group: list[Trajectory]) -> None:
    decoded = payloads.decode_parked(payloads.encode_parked(group))
    check_parked(decoded)
    assert same(decoded, group)


# ---- hostile bytes ----


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes(raw: bytes) -> None:
    attack(raw)


@given(
    st.one_of(
        prompts.map(payloads.encode_prompt),
        samples.map(payloads.encode_sample),
        parked.map(payloads.encode_parked),
    ),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    st.floats(0, 1),
    st.binary(max_size=8),
)
@settings(max_examples=300)
def test_mutated_messages(raw: bytes, flips: list[tuple[float, int]], keep: float, tail: bytes) -> None:
    """Valid messages with bytes changed, cut short (mostly not), and followed by garbage."""
    data = bytearray(raw)
    for where, value in flips:
        if data:
            data[int(where * (len(data) - 1))] = value
    cut = len(data) if keep > 0.3 else int(keep * len(data))
    attack(bytes(data[:cut]) + tail)


awkward_floats = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-3, 2e-3, math.inf, -math.inf, math.nan, 1e-45])


@st.composite
def odd_trajectories(draw: st.DrawFn) -> pb.Trajectory:
    """Well-formed messages whose values break the contract in one place or another, or not."""
    count = draw(st.integers(0, 3))

    def about(size: int) -> bytes:
        return draw(st.sampled_from([b"\0" * size, b"\0" * size, b"\1" * size, b"\xff" * size, b"\0" * 5]))

    floats = draw(st.lists(awkward_floats, min_size=count, max_size=count))
    good = [pb.Segment(version=3, start=0, end=count)] if count else []
    odd = st.builds(pb.Segment, version=st.integers(0, 3), start=st.integers(0, 3), end=st.integers(0, 4))
    return pb.Trajectory(
        response_token_ids=about(4 * count),
        behaviour_log_probs=struct.pack(f"<{count}f", *floats),
        loss_mask=about(count),
        segments=draw(st.just(good) | st.lists(odd, max_size=3)),
        temperature=draw(awkward_floats),
        finish_reason=draw(st.sampled_from([0, 1, 2, 3, -1])),  # type: ignore[arg-type]
        reward=draw(awkward_floats),
        reward_parts=draw(st.dictionaries(texts, awkward_floats, max_size=1)),
        turn_ends=draw(st.just([]) | st.lists(st.integers(0, 4), max_size=2)),
        environment_state_json=draw(st.sampled_from(["", "", "{}", "[]", "{", "[" * 100_000, '{"a": NaN}'])),
        environment_metrics=draw(st.dictionaries(texts, awkward_floats, max_size=1)),
    )


odd_prompts = st.builds(
    pb.Prompt,
    sample_id=st.sampled_from(["", "0000000001"]),
    prompt_token_ids=st.sampled_from([b"", b"\0" * 4, b"\xff" * 4, b"\0" * 6]),
    extra_info_json=st.sampled_from(
        ["", "{}", "[]", "null", "{", "[" * 100_000, '{"a": NaN}', '{"a": ' + "9" * 5000 + "}", '"\\ud800"']
    ),
)


@given(odd_prompts, st.lists(odd_trajectories(), max_size=2))
@settings(max_examples=300)
def test_well_formed_messages_with_odd_values(prompt: pb.Prompt, group: list[pb.Trajectory]) -> None:
    attack(prompt.SerializeToString())
    attack(pb.Sample(prompt=prompt, trajectories=group).SerializeToString())
    attack(pb.ParkedGroup(trajectories=group).SerializeToString())


def good_trajectory(**changes: Any) -> pb.Trajectory:
    fields: dict[str, Any] = {
        "response_token_ids": struct.pack("<2i", 5, 6),
        "behaviour_log_probs": struct.pack("<2f", -0.5, 0.0),
        "loss_mask": b"\1\0",
        "segments": [pb.Segment(version=1, start=0, end=1), pb.Segment(version=2, start=1, end=2)],
        "temperature": 1.0,
        "finish_reason": 1,
    }
    return pb.Trajectory(**{**fields, **changes})


def good_prompt(**changes: Any) -> pb.Prompt:
    return pb.Prompt(**{"sample_id": "1", "prompt_token_ids": struct.pack("<i", 7), **changes})


def segment(version: int, start: int, end: int) -> pb.Segment:
    return pb.Segment(version=version, start=start, end=end)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"response_token_ids": b"123"}, "response_token_ids: 3 bytes is no multiple of 4"),
        ({"behaviour_log_probs": b"12345"}, "behaviour_log_probs: 5 bytes"),
        ({"loss_mask": b"\1"}, "2 token ids, 2 log-probs, 1 mask entries"),
        ({"loss_mask": b"\1\2"}, "other than 0 and 1"),
        ({"response_token_ids": struct.pack("<2i", 5, -6)}, "negative token id"),
        ({"behaviour_log_probs": struct.pack("<2f", -1, math.nan)}, "not finite"),
        ({"behaviour_log_probs": struct.pack("<2f", -1, -math.inf)}, "not finite"),
        ({"behaviour_log_probs": struct.pack("<2f", -1, 0.1)}, "above 0"),
        ({"segments": [segment(1, 0, 1)]}, "cover 1 of 2 tokens"),
        ({"segments": []}, "cover 0 of 2 tokens"),
        ({"segments": [segment(1, 0, 3)]}, "cover 3 of 2 tokens"),
        ({"segments": [segment(1, 0, 1), segment(1, 0, 2)]}, "does not follow token 1"),
        ({"segments": [segment(1, 0, 0), segment(1, 0, 2)]}, "does not follow token 0"),
        ({"segments": [segment(2, 0, 1), segment(1, 1, 2)]}, "version falls from 2 to 1"),
        ({"finish_reason": 0}, "is unfinished"),
        ({"finish_reason": 7}, "unknown finish reason 7"),
        ({"reward": math.nan}, "reward is not finite"),
        ({"reward_parts": {"a": math.inf}}, "reward is not finite"),
        ({"temperature": 0.0}, "temperature 0.0 is not positive"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"turn_ends": [0]}, "turn end 0 does not follow 0"),
        ({"turn_ends": [3]}, "turn end 3 does not follow 0 within 2 tokens"),
        ({"turn_ends": [1, 1]}, "turn end 1 does not follow 1"),
        ({"turn_ends": [2]}, "turn end 2 is behind a token that is not the model's"),
        ({"loss_mask": b"\1\1", "turn_ends": [1, 2]}, "turn end 1 is before another token of the model's"),
        ({"turn_ends": [1]}, "goes on for 1 tokens behind its last turn"),
        ({"environment_metrics": {"a": math.nan}}, "environment metric is not finite"),
        ({"environment_state_json": "{}"}, "finished sample has an environment state"),
        ({"environment_state_json": "["}, "environment_state_json: "),
        ({"environment_state_json": "[]"}, "environment_state_json is no object"),
        (
            {"response_token_ids": b"", "behaviour_log_probs": b"", "loss_mask": b"", "segments": []},
            "a finished trajectory has no tokens",
        ),
    ],
)
def test_a_bad_trajectory_is_refused_with_the_reason(change: dict[str, Any], told: str) -> None:
    def raw(t: pb.Trajectory) -> bytes:
        return pb.Sample(prompt=good_prompt(), trajectories=[t]).SerializeToString()

    payloads.decode_sample(raw(good_trajectory()))
    with pytest.raises(WireError, match=told):
        payloads.decode_sample(raw(good_trajectory(**change)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"prompt_token_ids": b""}, "no tokens"),
        ({"prompt_token_ids": b"\xff" * 4}, "negative"),
        ({"prompt_token_ids": b"12345"}, "no multiple"),
        ({"sample_id": ""}, "no sample_id"),
        ({"extra_info_json": "{"}, "extra_info_json: "),
        ({"extra_info_json": "[" * 100_000}, "extra_info_json: "),
        ({"extra_info_json": "[1]"}, "no object"),
    ],
)
def test_a_bad_prompt_is_refused_with_the_reason(change: dict[str, Any], told: str) -> None:
    with pytest.raises(WireError, match=told):
        payloads.decode_prompt(good_prompt(**change).SerializeToString())


def test_a_sample_without_trajectories_is_refused() -> None:
    with pytest.raises(WireError, match="no trajectories"):
        payloads.decode_sample(pb.Sample(prompt=good_prompt()).SerializeToString())


# ---- byte layout ----


def test_byte_layout() -> None:
    """Little-endian int32, float32 and uint8: what another implementation of the wire has to write."""
    prompt = Prompt("0000000007", 7, 0, 3, array([1, 258], "int64"), "d", "g", {"k": 1})
    t = Trajectory(
        array([3, 65536], "int32"),
        array([-0.5, -2.0], ">f4"),
        array([1, 0], "int64"),
        [Segment(300, 0, 2)],
        1.0,
        FinishReason.LENGTH,
    )
    encoded_prompt = payloads.encode_prompt(prompt)
    assert (
        encoded_prompt
        == (
            b"\x0a\x0a0000000007"  # 1: sample_id
            b"\x10\x07"  # 2: issue
            b"\x20\x03"  # 4: row
            b"\x2a\x08" + bytes([1, 0, 0, 0, 2, 1, 0, 0]) + b"\x32\x01d"  # 6: data_source
            b"\x3a\x01g"  # 7: ground_truth
            b'\x42\x08{"k": 1}'
        )
    )
    trajectory = (
        b"\x0a\x08" + bytes([3, 0, 0, 0, 0, 0, 1, 0])  # 1: int32
        + b"\x12\x08" + bytes([0, 0, 0, 0xBF, 0, 0, 0, 0xC0])  # 2: float32
        + b"\x1a\x02\x01\x00"  # 3: uint8
        + b"\x22\x05\x08\xac\x02\x18\x02"  # 4: segment of version 300, end 2
        + b"\x2d" + struct.pack("<f", 1.0)  # 5: temperature
        + b"\x30\x02"  # 6: finish reason
    )  # fmt: skip
    assert payloads.encode_parked([t]) == b"\x0a" + bytes([len(trajectory)]) + trajectory
    encoded = payloads.encode_sample(Sample(prompt, [t], "o", 2, 0.5, 0.0))
    assert encoded == (
        b"\x0a" + bytes([len(encoded_prompt)]) + encoded_prompt
        + b"\x12" + bytes([len(trajectory)]) + trajectory
        + b"\x1a\x01o\x20\x02\x29" + struct.pack("<d", 0.5)
    )  # fmt: skip
    (decoded,) = payloads.decode_parked(payloads.encode_parked([t]))
    assert decoded.token_ids.tolist() == [3, 65536]
    assert decoded.log_probs.tolist() == [-0.5, -2.0]
    assert decoded.loss_mask.tolist() == [1, 0]


@given(st.dictionaries(texts, json_values, max_size=3))
def test_extra_info_is_json_on_the_wire(extra: dict[str, Any]) -> None:
    prompt = Prompt("1", 0, 0, 0, array([1], "int32"), "", "", extra)
    written = pb.Prompt.FromString(payloads.encode_prompt(prompt)).extra_info_json
    assert (json.loads(written) if written else {}) == extra


# ---- continuing ----


@st.composite
def head_and_tail(draw: st.DrawFn) -> tuple[Trajectory, Trajectory]:
    """A tail is generated later, under the head's newest version or newer ones."""
    head = draw(trajectories(finished=False))
    newest = head.versions[1] if head.versions else 0
    tail = draw(st.just(newest) | st.integers(newest, 2**63))
    return head, draw(trajectories(finished=False, oldest=min(tail, 2**63)))


@given(head_and_tail(), st.booleans())
def test_extend_concatenates(pair: tuple[Trajectory, Trajectory], meet: bool) -> None:
    head, tail = pair
    if meet and head.versions and tail.segments:  # continued under the very version that it stopped in
        first = tail.segments[0]
        tail.segments[0] = Segment(head.versions[1], first.start, first.end)
    whole = payloads.extend(head, tail)
    assert whole.token_ids.tolist() == head.token_ids.tolist() + tail.token_ids.tolist()
    assert whole.log_probs.tolist() == head.log_probs.tolist() + tail.log_probs.tolist()
    assert whole.loss_mask.tolist() == head.loss_mask.tolist() + tail.loss_mask.tolist()
    assert (whole.temperature, whole.finish_reason) == (tail.temperature, tail.finish_reason)
    payloads.check_segments(whole.segments, len(whole.token_ids))

    def per_token(*parts: Trajectory) -> list[int]:
        return [s.version for t in parts for s in t.segments for _ in range(s.start, s.end)]

    assert per_token(whole) == per_token(head, tail), "each token keeps the version that sampled it"
    seam = 1 if head.segments and tail.segments else 0
    merged = seam and head.segments[-1].version == tail.segments[0].version
    assert len(whole.segments) <= len(head.segments) + len(tail.segments) - (1 if merged else 0)


def test_extend_merges_equal_versions() -> None:
    head = Trajectory(
        array([1, 2], "int32"), array([-1, -2], "float32"), array([1, 1], "uint8"),
        [Segment(4, 0, 2)], 0.7, FinishReason.UNFINISHED,
    )  # fmt: skip
    tail = Trajectory(
        array([3, 4, 5], "int32"), array([-3, -4, -5], "float32"), array([1, 0, 1], "uint8"),
        [Segment(4, 0, 1), Segment(6, 1, 3)], 0.7, FinishReason.STOP,
    )  # fmt: skip
    before = (head.token_ids.tolist(), list(head.segments), list(tail.segments))
    whole = payloads.extend(head, tail)
    assert whole.segments == [Segment(4, 0, 3), Segment(6, 3, 5)]
    assert whole.versions == (4, 6)
    assert (head.token_ids.tolist(), list(head.segments), list(tail.segments)) == before
    assert payloads.extend(payloads.empty_trajectory(0.7), tail).segments == tail.segments


def test_entries_from_before_there_were_environments_decode() -> None:
    """None of the fields is there: a response of one turn."""
    [t] = payloads.decode_sample(
        pb.Sample(prompt=good_prompt(), trajectories=[good_trajectory()]).SerializeToString()
    ).trajectories
    assert (t.turns, t.turn_ends, t.environment_state, t.environment_metrics) == (1, [], None, {})
    [t] = payloads.decode_parked(
        pb.ParkedGroup(trajectories=[good_trajectory(finish_reason=0)]).SerializeToString()
    )
    assert (t.turns, t.awaits_environment, t.environment_state) == (0, False, None)


def test_extend_keeps_the_turns_and_the_state() -> None:
    head = Trajectory(
        array([1, 2], "int32"), array([-1, -2], "float32"), array([1, 1], "uint8"),
        [Segment(4, 0, 2)], 0.7, FinishReason.UNFINISHED, turn_ends=[2], environment_state={"a": 1},
    )  # fmt: skip
    assert head.awaits_environment
    whole = payloads.extend(head, payloads.added_by_environment([7, 8], 5, 0.7))
    assert (whole.turn_ends, whole.environment_state, whole.awaits_environment) == ([2], {"a": 1}, False)
    assert whole.loss_mask.tolist() == [1, 1, 0, 0]
    assert whole.log_probs.tolist() == [-1, -2, 0, 0]
    assert whole.segments == [Segment(4, 0, 2), Segment(5, 2, 4)]


def test_versions_of_a_sample() -> None:
    prompt = Prompt("1", 0, 0, 0, array([1, 2, 3], "int32"), "", "")

    def t(*runs: Segment) -> Trajectory:
        n = runs[-1].end
        return Trajectory(
            array([1] * n, "int32"), array([-1] * n, "float32"), array([1] * n, "uint8"), list(runs),
            1.0, FinishReason.STOP,
        )  # fmt: skip

    sample = Sample(prompt, [t(Segment(5, 0, 2)), t(Segment(2, 0, 1), Segment(4, 1, 3))], "o", 1)
    assert (sample.min_version, sample.max_version, sample.span) == (2, 5, 2)
    assert sample.tokens == 3 + 2 + 3 + 3
