"""What a sample must be, written a second time: an oracle in plain Python with no code of the reader's.

It works on the message and on struct's numbers, token by token, and knows nothing of numpy.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass

from headrace.v1 import sample_pb2 as pb

MOST = struct.unpack("<f", struct.pack("<f", 0.001))[0]


@dataclass(frozen=True)
class Run:
    """Settings of a run, and what its ledger knows of one sample."""

    vocabulary: int
    max_prompt: int
    max_response: int
    group: int
    with_turns: bool
    baseline: bool
    parts: tuple[str, ...]
    issued: pb.Prompt
    attempt: int
    owner: str
    versions: tuple[int, int]
    tokens: int
    window: int
    bound: int | None
    oldest_parked: int
    served: int


def prompt_holds(p: pb.Prompt, run: Run) -> None:
    ids = _numbers(p.prompt_token_ids, "i")
    assert 1 <= len(ids) <= run.max_prompt
    assert all(0 <= i < run.vocabulary for i in ids)
    for name in ("sample_id", "issue", "epoch", "row", "prompt_token_ids", "data_source", "ground_truth"):
        assert getattr(p, name) == getattr(run.issued, name), name
    assert _json(p.extra_info_json) == _json(run.issued.extra_info_json)


def sample_holds(s: pb.Sample, run: Run) -> None:
    prompt_holds(s.prompt, run)
    assert (s.attempt, s.owner) == (run.attempt, run.owner)
    assert len(s.trajectories) == run.group
    versions = [v for t in s.trajectories for v in trajectory_holds(t, run, parked=False)]
    assert (min(versions), max(versions)) == run.versions
    assert max(versions) <= run.window
    assert run.bound is None or run.window - min(versions) <= run.bound
    prompt = len(s.prompt.prompt_token_ids) // 4
    assert sum(prompt + len(t.loss_mask) for t in s.trajectories) == run.tokens
    if run.baseline:
        assert s.HasField("baseline_reward")
    if s.HasField("baseline_reward"):
        assert math.isfinite(s.baseline_reward)
    assert 0 <= s.generate_s < math.inf
    assert 0 <= s.reward_s < math.inf
    for t in s.trajectories:
        assert all(part in t.reward_parts for part in run.parts)


def parked_holds(group: pb.ParkedGroup, run: Run) -> None:
    assert len(group.trajectories) == run.group + run.baseline
    for t in group.trajectories:
        for version in trajectory_holds(t, run, parked=True):
            assert run.oldest_parked <= version <= run.served


def trajectory_holds(t: pb.Trajectory, run: Run, parked: bool) -> list[int]:
    """The version of each token."""
    ids = _numbers(t.response_token_ids, "i")
    log_probs = _numbers(t.behaviour_log_probs, "f")
    mask = list(t.loss_mask)
    count = len(ids)
    assert len(log_probs) == len(mask) == count
    assert (0 if parked else 1) <= count <= run.max_response
    finished = t.finish_reason in (1, 2, 3)
    assert finished or (parked and t.finish_reason == 0)
    versions: list[int] = []
    for s in t.segments:
        assert s.start == len(versions)
        assert s.end > s.start
        assert s.end <= count
        assert not versions or s.version >= versions[-1]
        versions += [s.version] * (s.end - s.start)
    assert len(versions) == count
    for token, log_prob, on in zip(ids, log_probs, mask, strict=True):
        assert 0 <= token < run.vocabulary
        assert on in (0, 1)
        assert -200.0 <= log_prob <= MOST if on else log_prob == 0.0
    assert all(map(math.isfinite, [t.reward, *t.reward_parts.values(), *t.environment_metrics.values()]))
    assert 0 < t.temperature < math.inf
    if not run.with_turns:
        assert all(mask)
        assert t.finish_reason != 3
        assert not t.turn_ends
        assert not t.environment_metrics
        assert not t.environment_state_json
        assert finished or count < run.max_response
        return versions
    if not parked:
        assert not t.environment_state_json
    _json(t.environment_state_json)
    _turns_hold(mask, list(t.turn_ends), finished)
    awaits = bool(t.turn_ends) and t.turn_ends[-1] == count
    assert finished or awaits or count < run.max_response
    return versions


def _turns_hold(mask: list[int], ends: list[int], finished: bool) -> None:
    """Model and environment alternate, the model first; behind each of its turns is an end."""
    if mask:
        assert mask[0] == 1
    expected = [i + 1 for i in range(len(mask)) if mask[i] and i + 1 < len(mask) and not mask[i + 1]]
    if finished:
        assert mask[-1] == 1
        assert ends == [*expected, len(mask)]
    elif mask and mask[-1]:
        assert ends in (expected, [*expected, len(mask)])
    else:
        assert ends == expected


def _numbers(raw: bytes, kind: str) -> list[float]:
    assert len(raw) % 4 == 0
    return list(struct.unpack(f"<{len(raw) // 4}{kind}", raw))


def _json(text: str) -> str:
    """As text that can be compared: a nan does not equal itself."""
    found = json.loads(text) if text else {}
    assert isinstance(found, dict)
    return json.dumps(found)
