"""Codec between the protobuf messages of `proto/headrace/v1/sample.proto` and numpy.

Guarantee: whatever the bytes, `decode_*` either returns a value that satisfies every invariant named below or
raises `WireError` with the reason. It raises no other exception.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from headrace.v1 import sample_pb2 as pb

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.uint8]

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("u1")

MOST_LOG_PROB = 1e-3
"""Largest log-prob of a token: 0 plus rounding error."""


class WireError(ValueError):
    """A message violates the contract. The text is the reason recorded with a dead sample."""


class FinishReason(enum.IntEnum):
    UNFINISHED = 0
    STOP = 1
    LENGTH = 2
    TURN_LIMIT = 3


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of a response, generated under `version`."""

    version: int
    start: int
    end: int


@dataclass
class Prompt:
    sample_id: str
    issue: int
    epoch: int
    row: int
    token_ids: Int32Array
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trajectory:
    """One response. Arrays have one element per token, and segments cover them without gap or overlap.

    With an environment, the response is the model's turns with the environment's tokens between them. Those
    have loss mask 0, log-prob 0.0 and the version that was being served when they were added.
    """

    token_ids: Int32Array
    log_probs: Float32Array
    loss_mask: MaskArray
    segments: list[Segment]
    temperature: float
    finish_reason: FinishReason
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    turn_ends: list[int] = field(default_factory=list)
    """Exclusive end index of each completed turn of the model; empty without an environment."""
    environment_state: dict[str, Any] | None = None
    """The environment's state, kept until the outcome is known; None before its start."""
    environment_metrics: dict[str, float] = field(default_factory=dict)
    """The environment's metrics for the whole trajectory."""

    @property
    def turns(self) -> int:
        """Completed turns of the model. A finished trajectory without an environment has one."""
        return len(self.turn_ends) or int(self.finish_reason is not FinishReason.UNFINISHED)

    @property
    def awaits_environment(self) -> bool:
        """Whether the model has completed its turn and the environment has not answered yet."""
        ended = bool(self.turn_ends) and self.turn_ends[-1] == len(self.token_ids)
        return ended and self.finish_reason is FinishReason.UNFINISHED

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest version, or None for an empty response."""
        if not self.segments:
            return None
        found = [s.version for s in self.segments]
        return min(found), max(found)


@dataclass
class Sample:
    prompt: Prompt
    trajectories: list[Trajectory]
    owner: str
    attempt: int
    generate_s: float = 0.0
    reward_s: float = 0.0
    baseline_reward: float | None = None
    """Reward of a greedy response to the same prompt, if the estimator needs one."""

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of the whole group: the size of a trainer rank's work on it."""
        return sum(len(self.prompt.token_ids) + len(t.token_ids) for t in self.trajectories)

    @property
    def min_version(self) -> int:
        return min(v[0] for t in self.trajectories if (v := t.versions))

    @property
    def max_version(self) -> int:
        return max(v[1] for t in self.trajectories if (v := t.versions))

    @property
    def span(self) -> int:
        """Largest newest-minus-oldest version within one trajectory. Above 0, the sample is partial."""
        return max((v[1] - v[0] for t in self.trajectories if (v := t.versions)), default=0)


def _array(raw: bytes, dtype: np.dtype[Any], what: str) -> npt.NDArray[Any]:
    if len(raw) % dtype.itemsize:
        raise WireError(f"{what}: {len(raw)} bytes is no multiple of {dtype.itemsize}")
    return np.frombuffer(raw, dtype=dtype)


def _parse(message: Any, raw: bytes, what: str) -> Any:
    try:
        message.ParseFromString(raw)
    except (DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"{what}: not a valid message: {error}") from error
    return message


def encode_prompt(p: Prompt) -> bytes:
    return _prompt_to_pb(p).SerializeToString()


def _prompt_to_pb(p: Prompt) -> pb.Prompt:
    return pb.Prompt(
        sample_id=p.sample_id,
        issue=p.issue,
        epoch=p.epoch,
        row=p.row,
        prompt_token_ids=p.token_ids.astype(_INT32).tobytes(),
        data_source=p.data_source,
        ground_truth=p.ground_truth,
        extra_info_json=json.dumps(p.extra_info) if p.extra_info else "",
    )


def _prompt_from_pb(m: pb.Prompt) -> Prompt:
    ids = _array(m.prompt_token_ids, _INT32, "prompt_token_ids")
    if not len(ids):
        raise WireError("prompt has no tokens")
    if int(ids.min()) < 0:
        raise WireError("prompt has a negative token id")
    if not m.sample_id:
        raise WireError("prompt has no sample_id")
    extra = _json_object(m.extra_info_json, "extra_info_json") or {}
    return Prompt(m.sample_id, m.issue, m.epoch, m.row, ids, m.data_source, m.ground_truth, extra)


def decode_prompt(raw: bytes) -> Prompt:
    return _prompt_from_pb(_parse(pb.Prompt(), raw, "prompt"))


def _trajectory_to_pb(t: Trajectory) -> pb.Trajectory:
    return pb.Trajectory(
        response_token_ids=t.token_ids.astype(_INT32).tobytes(),
        behaviour_log_probs=t.log_probs.astype(_FLOAT32).tobytes(),
        loss_mask=t.loss_mask.astype(_UINT8).tobytes(),
        segments=[pb.Segment(version=s.version, start=s.start, end=s.end) for s in t.segments],
        temperature=t.temperature,
        finish_reason=cast(Any, int(t.finish_reason)),
        reward=t.reward,
        reward_parts=t.reward_parts,
        turn_ends=t.turn_ends,
        environment_state_json="" if t.environment_state is None else json.dumps(t.environment_state),
        environment_metrics=t.environment_metrics,
    )


def _trajectories_from_pb(messages: Sequence[pb.Trajectory], finished: bool) -> list[Trajectory]:
    """Decode a group. Its arrays are checked together: numpy takes about as long for all as for one."""
    counts = [_count(m) for m in messages]
    ids = np.frombuffer(b"".join([m.response_token_ids for m in messages]), _INT32)
    lps = np.frombuffer(b"".join([m.behaviour_log_probs for m in messages]), _FLOAT32)
    mask = np.frombuffer(b"".join([m.loss_mask for m in messages]), _UINT8)
    if len(ids):
        if ids.min() < 0:
            raise WireError("negative token id")
        # Negated, because comparisons with NaN are false.
        if not (lps.max() <= MOST_LOG_PROB and lps.min() > -math.inf):
            raise WireError("behaviour log-prob is not finite or above 0")
        if mask.max() > 1:
            raise WireError("loss mask has a value other than 0 and 1")
    out, at = [], 0
    for m, count in zip(messages, counts, strict=True):
        part = slice(at, at + count)
        at += count
        out.append(_trajectory_from_pb(m, ids[part], lps[part], mask[part], finished))
    return out


def _count(m: pb.Trajectory) -> int:
    """Return the number of tokens, after checking that each array has that many elements."""
    for name, dtype in (("response_token_ids", _INT32), ("behaviour_log_probs", _FLOAT32)):
        if (size := len(getattr(m, name))) % dtype.itemsize:
            raise WireError(f"{name}: {size} bytes is no multiple of {dtype.itemsize}")
    ids, lps = len(m.response_token_ids) // 4, len(m.behaviour_log_probs) // 4
    if not ids == lps == len(m.loss_mask):
        raise WireError(f"{ids} token ids, {lps} log-probs, {len(m.loss_mask)} mask entries")
    return ids


def _trajectory_from_pb(
    m: pb.Trajectory, ids: Int32Array, lps: Float32Array, mask: MaskArray, finished: bool
) -> Trajectory:
    segments = [Segment(s.version, s.start, s.end) for s in m.segments]
    check_segments(segments, len(ids))
    try:
        reason = FinishReason(m.finish_reason)
    except ValueError as error:
        raise WireError(f"unknown finish reason {m.finish_reason}") from error
    if reason is not FinishReason.UNFINISHED and not len(ids):
        raise WireError("a finished trajectory has no tokens")
    if finished and reason is FinishReason.UNFINISHED:
        raise WireError("a trajectory of a finished sample is unfinished")
    if not math.isfinite(m.reward) or not all(map(math.isfinite, m.reward_parts.values())):
        raise WireError("reward is not finite")
    if not (math.isfinite(m.temperature) and m.temperature > 0):
        raise WireError(f"temperature {m.temperature} is not positive")
    turn_ends = list(m.turn_ends)
    check_turns(turn_ends, mask, reason)
    if not all(map(math.isfinite, m.environment_metrics.values())):
        raise WireError("environment metric is not finite")
    state = _json_object(m.environment_state_json, "environment_state_json")
    if state is not None and finished:
        raise WireError("a trajectory of a finished sample has an environment state")
    return Trajectory(
        ids, lps, mask, segments, m.temperature, reason, m.reward, dict(m.reward_parts), turn_ends, state,
        dict(m.environment_metrics),
    )  # fmt: skip


def _json_object(text: str, what: str) -> dict[str, Any] | None:
    """Parse a JSON object; None for empty text."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what}: {error}") from error
    if found is not None and not isinstance(found, dict):
        raise WireError(f"{what} is no object")
    return found


def check_turns(turn_ends: Sequence[int], loss_mask: MaskArray, reason: FinishReason) -> None:
    """Check that each turn ends after a token of the model, followed by the environment's tokens or nothing.

    A finished trajectory ends with its last turn, since the model would not see any later token. Raises
    WireError.
    """
    at, count = 0, len(loss_mask)
    for end in turn_ends:
        if not at < end <= count:
            raise WireError(f"turn end {end} does not follow {at} within {count} tokens")
        if not loss_mask[end - 1]:
            raise WireError(f"turn end {end} is behind a token that is not the model's")
        if end < count and loss_mask[end]:
            raise WireError(f"turn end {end} is before another token of the model's")
        at = end
    if turn_ends and reason is not FinishReason.UNFINISHED and at != count:
        raise WireError(f"a finished trajectory goes on for {count - at} tokens behind its last turn")


def check_segments(segments: Sequence[Segment], tokens: int) -> None:
    """Check that segments cover [0, tokens) in order, without gap or overlap, and versions never decrease.

    Raises WireError.
    """
    at, version = 0, 0
    for s in segments:
        if s.start != at or s.end <= s.start:
            raise WireError(f"segment [{s.start}, {s.end}) does not follow token {at}")
        if s.version < version:
            raise WireError(f"segment version falls from {version} to {s.version}")
        at, version = s.end, s.version
    if at != tokens:
        raise WireError(f"segments cover {at} of {tokens} tokens")


def encode_sample(s: Sample) -> bytes:
    return pb.Sample(
        prompt=_prompt_to_pb(s.prompt),
        trajectories=[_trajectory_to_pb(t) for t in s.trajectories],
        owner=s.owner,
        attempt=s.attempt,
        generate_s=s.generate_s,
        reward_s=s.reward_s,
        baseline_reward=s.baseline_reward,
    ).SerializeToString()


def decode_sample(raw: bytes) -> Sample:
    m = _parse(pb.Sample(), raw, "sample")
    if not m.trajectories:
        raise WireError("sample has no trajectories")
    baseline = m.baseline_reward if m.HasField("baseline_reward") else None
    if baseline is not None and not math.isfinite(baseline):
        raise WireError("baseline_reward is not finite")
    return Sample(
        _prompt_from_pb(m.prompt),
        _trajectories_from_pb(m.trajectories, finished=True),
        m.owner,
        m.attempt,
        m.generate_s,
        m.reward_s,
        baseline,
    )


def encode_parked(trajectories: Sequence[Trajectory]) -> bytes:
    return pb.ParkedGroup(trajectories=[_trajectory_to_pb(t) for t in trajectories]).SerializeToString()


def decode_parked(raw: bytes) -> list[Trajectory]:
    m = _parse(pb.ParkedGroup(), raw, "parked group")
    return _trajectories_from_pb(m.trajectories, finished=False)


def empty_trajectory(temperature: float) -> Trajectory:
    """Return a trajectory without tokens, for work that has not begun."""
    return Trajectory(
        np.zeros(0, np.int32),
        np.zeros(0, np.float32),
        np.zeros(0, np.uint8),
        [],
        temperature,
        FinishReason.UNFINISHED,
    )


def extend(head: Trajectory, tail: Trajectory) -> Trajectory:
    """Append `tail`, whose segments count from 0, to `head`: ids, log-probs and versions concatenate.

    Turns and the environment's state come from `head`.
    """
    shift = len(head.token_ids)
    segments = list(head.segments)
    for s in tail.segments:
        last = segments[-1] if segments else None
        if last is not None and last.version == s.version:
            segments[-1] = Segment(last.version, last.start, s.end + shift)
        else:
            segments.append(Segment(s.version, s.start + shift, s.end + shift))
    return Trajectory(
        np.concatenate([head.token_ids, tail.token_ids]),
        np.concatenate([head.log_probs, tail.log_probs]),
        np.concatenate([head.loss_mask, tail.loss_mask]),
        segments,
        tail.temperature,
        tail.finish_reason,
        turn_ends=list(head.turn_ends),
        environment_state=head.environment_state,
    )


def added_by_environment(ids: Sequence[int], version: int, temperature: float) -> Trajectory:
    """Return tokens that the policy did not sample, as a tail for `extend`."""
    n = len(ids)
    return Trajectory(
        np.asarray(ids, np.int32),
        np.zeros(n, np.float32),
        np.zeros(n, np.uint8),
        [Segment(version, 0, n)] if n else [],
        temperature,
        FinishReason.UNFINISHED,
    )
