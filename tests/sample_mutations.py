"""Changes of valid payloads: of their bytes, and of the fields of their messages."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

from headrace.v1 import sample_pb2 as pb

SAMPLE_ID = "0000000007"
MAX_RESPONSE = 10
ABSURD = [0, 1, 2, 9, 10, 11, 200, 1003, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
FLOATS = [
    0.0,
    -0.0,
    1e-3,
    2e-3,
    -199.0,
    -201.0,
    1e38,
    -1e38,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-45,
]


def flip_bits(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut_or_insert(rng: random.Random, raw: bytes) -> bytes:
    at, size = rng.randint(0, len(raw)), rng.randint(0, 8)
    how = rng.randrange(3)
    if how == 0:
        return raw[:at]
    return raw[:at] + (rng.randbytes(size) if how == 1 else b"") + raw[at if how == 1 else at + size :]


def change_array(rng: random.Random, raw: bytes, width: int) -> bytes:
    """One element absurd, the array shorter or longer by elements or by bytes, or swapped."""
    how = rng.randrange(5)
    if how == 0:
        return raw[: rng.randint(0, len(raw))]
    if how == 1:
        return raw + raw[: width * rng.randint(0, 3)] + b"\1" * rng.randint(0, 3)
    if len(raw) < width:
        return b"\0" * width
    at = width * rng.randrange(len(raw) // width)
    if width == 1:
        element = bytes([rng.choice([0, 1, 1, 0, 2, 255])])
    elif how == 2:
        element = struct.pack("<I", rng.choice(ABSURD) % 2**32)
    else:
        element = struct.pack("<f", rng.choice(FLOATS))
    return raw[:at] + element + raw[at + width :]


def change_trajectory(rng: random.Random, t: pb.Trajectory) -> None:
    how = rng.randrange(14)
    if how == 12:
        lengthen(t, rng.randint(1, MAX_RESPONSE))
    elif how == 13:
        unmask(rng, t)
    elif how < 3:
        name, width = [("response_token_ids", 4), ("behaviour_log_probs", 4), ("loss_mask", 1)][how]
        setattr(t, name, change_array(rng, getattr(t, name), width))
    elif how < 6:
        change_segments(rng, t)
    elif how == 6:
        setattr(t, rng.choice(["temperature", "reward"]), rng.choice(FLOATS))
    elif how == 7:
        t.finish_reason = rng.choice([0, 1, 2, 3, 4, -1])  # type: ignore[assignment]
    elif how == 8:
        t.turn_ends[:] = [*t.turn_ends, rng.randint(0, MAX_RESPONSE + 1)][rng.randint(0, 1) :]
    elif how == 9:
        rng.choice([t.reward_parts, t.environment_metrics])[rng.choice(["style", "x"])] = rng.choice(FLOATS)
    elif how == 10:
        t.environment_state_json = rng.choice(["", "{}", "[]", "{", "nul", '{"a": NaN}', "[" * 5000])
    else:
        t.reward_parts.clear()


def lengthen(t: pb.Trajectory, by: int) -> None:
    """More tokens, and all arrays agree."""
    t.response_token_ids += b"\1\0\0\0" * by
    t.behaviour_log_probs += b"\0\0\0\0" * by
    t.loss_mask += b"\1" * by
    if t.segments:
        t.segments[-1].end = min(t.segments[-1].end + by, 2**32 - 1)
    if t.turn_ends:
        t.turn_ends[-1] += by


def unmask(rng: random.Random, t: pb.Trajectory) -> None:
    """One token becomes the environment's, and its log-prob 0."""
    if not len(t.behaviour_log_probs) // 4 >= len(t.loss_mask) > 0:
        return
    at = rng.choice([0, rng.randrange(len(t.loss_mask))])
    t.loss_mask = t.loss_mask[:at] + b"\0" + t.loss_mask[at + 1 :]
    log_probs = t.behaviour_log_probs
    t.behaviour_log_probs = log_probs[: 4 * at] + b"\0\0\0\0" + log_probs[4 * at + 4 :]


def change_segments(rng: random.Random, t: pb.Trajectory) -> None:
    if not t.segments or rng.random() < 0.1:
        t.segments.add(version=rng.choice(ABSURD), start=rng.randint(0, 3), end=rng.randint(0, 12))
        return
    s = rng.choice(t.segments)
    how = rng.randrange(5)
    if how == 0:
        near = rng.choice([s.version + 1, s.version + 1000, s.version - 1])
        s.version = rng.choice([*ABSURD, min(max(near, 0), 2**64 - 1)])
    elif how == 1:
        s.start = rng.choice([rng.randint(0, MAX_RESPONSE), 2**32 - 1])
    elif how == 2:
        s.end = rng.choice([rng.randint(0, MAX_RESPONSE + 2), 2**32 - 1])
    elif how == 3:
        t.segments.remove(s)
    else:
        t.segments.append(s)


def change_prompt(rng: random.Random, p: pb.Prompt) -> None:
    how = rng.randrange(5)
    if how == 0:
        p.prompt_token_ids = change_array(rng, p.prompt_token_ids, 4)
    elif how == 1:
        setattr(p, rng.choice(["issue", "row", "epoch"]), rng.choice(ABSURD) % 2**32)
    elif how == 2:
        setattr(p, rng.choice(["data_source", "ground_truth"]), rng.choice(["", "x", "source", "truth"]))
    elif how == 3:
        p.sample_id = rng.choice(["", "0000000008", SAMPLE_ID, "\x1b[31m"])
    else:
        p.extra_info_json = rng.choice(
            ["", "{}", "[]", "{", '{"k": 1}', "[" * 5000, '{"a": ' + "9" * 5000 + "}"]
        )


def change_sample(rng: random.Random, s: pb.Sample) -> None:
    how = rng.randrange(14)
    if how < 9 and s.trajectories:
        change_trajectory(rng, rng.choice(s.trajectories))
    elif how == 9:
        change_prompt(rng, s.prompt)
    elif how == 10:
        s.attempt = rng.choice(ABSURD) % 2**32
    elif how == 11:
        s.owner = rng.choice(["", "rollouter-0-b", "rollouter-0-a"])
    elif how == 12:
        name = rng.choice(["generate_s", "reward_s", "baseline_reward"])
        setattr(s, name, rng.choice([*FLOATS, -1.0]))
    elif rng.random() < 0.5:
        change_group(rng, s)
    else:
        s.ClearField("baseline_reward")


def change_parked(rng: random.Random, group: pb.ParkedGroup) -> None:
    if rng.random() < 0.9 and group.trajectories:
        change_trajectory(rng, rng.choice(group.trajectories))
    else:
        change_group(rng, group)


def change_group(rng: random.Random, m: Any) -> None:
    if m.trajectories and rng.random() < 0.5:
        del m.trajectories[rng.randrange(len(m.trajectories))]
    else:
        m.trajectories.add()
        if len(m.trajectories) > 1:
            m.trajectories[-1].CopyFrom(m.trajectories[0])


def mutated(rng: random.Random, message: Any, change: Callable[[random.Random, Any], None]) -> bytes:
    """Mostly one change: a payload that breaks one rule alone finds the rule that nobody looks after."""
    bytes_alone = rng.random() < 0.3
    for _ in range(0 if bytes_alone else rng.choice([0, 1, 1, 1, 1, 2, 3])):
        change(rng, message)
    raw: bytes = message.SerializeToString()
    if bytes_alone:
        for _ in range(rng.choice([1, 1, 2])):
            raw = rng.choice([flip_bits, flip_bits, cut_or_insert])(rng, raw)
    return raw
