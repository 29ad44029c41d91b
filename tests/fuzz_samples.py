"""Mutated payloads against the reader: `python -m tests.fuzz_samples --payloads 1000000 --seed 1`.

Each payload begins as a valid one: a sample or a parked group, with and without an environment, a prompt, or
a validation result. It is changed in up to three places: bits of the encoded bytes, bytes cut out or put in,
or fields of the message (arrays cut short or made longer, absurd numbers, segments moved, another's prompt).
The reader must refuse it with a reason, or return exactly what the message says, and then an oracle that
shares no code with the reader finds every rule kept.
"""

from __future__ import annotations

import argparse
import random
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from headrace.config import RunConfig
from headrace.sample_checks import SampleReader, Told, Window, validation_result
from headrace.v1 import sample_pb2 as pb
from headrace.wire import Prompt, Sample, Trajectory, WireError, encode_prompt
from tests import sample_rules
from tests.sample_rules import Run

VOCABULARY, MAX_PROMPT, MAX_RESPONSE, GROUP = 200, 6, 10, 2
SAMPLE_ID = "0000000007"
EXTRA = {"k": [1, 2.5], "nan": float("nan"), "text": "\u00e9"}


def config(with_turns: bool, baseline: bool, parts: bool) -> RunConfig:
    algorithm: dict[str, Any] = {"adv_estimator": "remax"} if baseline else {}
    if parts:
        algorithm = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["score", "style"]}
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {
                "train_files": ["unused"],
                "max_prompt_length": MAX_PROMPT,
                "max_response_length": MAX_RESPONSE,
            },
            "rollout": {"n": GROUP, "total_rollout_steps": 8, "test_freq": 0},
            "actor": {"ppo_mini_batch_size": 2},
            "custom_reward_function": {"path": "unused"},
            "environment": {"name": "calculator"} if with_turns else {},
            "algorithm": algorithm,
        }
    )


# -- valid payloads -------------------------------------------------------------------------------


def trajectory(rng: random.Random, run: Run, parked: bool) -> pb.Trajectory:
    """A valid one; versions from the oldest that is allowed to the newest."""
    count = rng.randint(0 if parked else 1, MAX_RESPONSE)
    mask = [1] * count
    if run.with_turns and count > 2:
        for at in range(1, count - 1):
            mask[at] = int(rng.random() < 0.7)
    ends = [i + 1 for i in range(count) if mask[i] and (i + 1 < count and not mask[i + 1])]
    unfinished = parked and (count == 0 or rng.random() < 0.6)
    awaits = count > 0 and run.with_turns and (not unfinished or count == MAX_RESPONSE or rng.random() < 0.5)
    if awaits:
        ends.append(count)
    if unfinished and not awaits and count == MAX_RESPONSE:
        unfinished = False
    low, high = (run.oldest_parked, run.served) if parked else run.versions
    t = pb.Trajectory(
        response_token_ids=struct.pack(f"<{count}i", *(rng.randrange(VOCABULARY) for _ in range(count))),
        behaviour_log_probs=struct.pack(f"<{count}f", *(-rng.random() * on * 30 for on in mask)),
        loss_mask=bytes(mask),
        temperature=rng.choice([1.0, 0.7]),
        finish_reason=0 if unfinished else rng.choice([1, 2, 3] if run.with_turns else [1, 2]),  # type: ignore[arg-type]
        reward=rng.choice([0.0, 1.0, -2.5]),
        reward_parts={"style": 0.5, **({"other": 1.0} if rng.random() < 0.2 else {})},
        turn_ends=ends if run.with_turns else [],
    )
    cuts = sorted({0, count, *(rng.randint(0, count) for _ in range(rng.randint(0, 3)))})
    versions = sorted(rng.randint(low, high) for _ in cuts[1:])
    for start, end, version in zip(cuts, cuts[1:], versions, strict=False):
        t.segments.add(version=version, start=start, end=end)
    if run.with_turns and parked and rng.random() < 0.8:
        t.environment_state_json = '{"turn": 1}'
    if run.with_turns and not parked:
        t.environment_metrics["calls"] = 2.0
    return t


class World:
    """One kind of run: what is valid in it, and the reader of its payloads."""

    def __init__(self, rng: random.Random) -> None:
        turns, baseline, parts, bounded = (rng.random() < 0.5 for _ in range(4))
        parts = parts and not baseline
        self.rng = rng
        ids = np.asarray([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, MAX_PROMPT))], np.int32)
        prompt = Prompt(SAMPLE_ID, 7, 0, 3, ids, "source", "truth", EXTRA if rng.random() < 0.5 else {})
        self.issued = encode_prompt(prompt)
        self.reader = SampleReader(config(turns, baseline, parts), VOCABULARY)
        low = rng.randint(0, 5)
        high = low + rng.randint(0, 3)
        window = high + rng.randint(0, 2)
        self.run = Run(
            VOCABULARY, MAX_PROMPT, MAX_RESPONSE, GROUP, turns, baseline, ("style",) if parts else (),
            pb.Prompt.FromString(self.issued), rng.randint(1, 4), "rollouter-0-a", (low, high), 0, window,
            window - low if bounded else None, low, high,
        )  # fmt: skip

    def sample(self) -> tuple[pb.Sample, Run]:
        run = self.run
        s = pb.Sample(prompt=run.issued, owner=run.owner, attempt=run.attempt, generate_s=1.5, reward_s=0.25)
        s.trajectories.extend(trajectory(self.rng, run, parked=False) for _ in range(run.group))
        if run.baseline:
            s.baseline_reward = 0.5
        found = [segment.version for t in s.trajectories for segment in t.segments]
        tokens = run.group * (len(run.issued.prompt_token_ids) // 4)
        told = {
            "versions": (min(found), max(found)),
            "tokens": tokens + sum(len(t.loss_mask) for t in s.trajectories),
        }
        return s, Run(**{**run.__dict__, **told})

    def parked(self) -> pb.ParkedGroup:
        count = self.run.group + self.run.baseline
        return pb.ParkedGroup(trajectories=[trajectory(self.rng, self.run, True) for _ in range(count)])


# -- mutations ------------------------------------------------------------------------------------

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


# -- the property ---------------------------------------------------------------------------------


def attack_sample(world: World) -> str:
    message, run = world.sample()
    raw = mutated(world.rng, message, change_sample)
    if world.rng.random() < 0.4:
        run = as_it_says(raw, run)
    told = Told(SAMPLE_ID, run.attempt, run.owner, *run.versions, run.tokens, world.issued)
    try:
        found = world.reader.sample(raw, told, Window(run.window, lambda oldest: run.bound))
    except WireError as error:
        return reason_of(error)
    said = pb.Sample.FromString(raw)
    sample_rules.sample_holds(said, run)
    same_sample(found, said)
    return ""


def as_it_says(raw: bytes, run: Run) -> Run:
    """A rollouter that lies to the ledger as well: what `finish` was told agrees with the payload."""
    try:
        said = pb.Sample.FromString(raw)
    except DecodeError:
        return run
    versions = [s.version for t in said.trajectories for s in t.segments] or [0]
    prompt = len(said.prompt.prompt_token_ids) // 4
    tokens = sum(prompt + len(t.loss_mask) for t in said.trajectories)
    return Run(**{**run.__dict__, "versions": (min(versions), max(versions)), "tokens": tokens})


def attack_parked(world: World) -> str:
    raw = mutated(world.rng, world.parked(), change_parked)
    try:
        found = world.reader.parked(raw, world.run.oldest_parked, world.run.served)
    except WireError as error:
        return reason_of(error)
    said = pb.ParkedGroup.FromString(raw)
    sample_rules.parked_holds(said, world.run)
    for t, m in zip(found, said.trajectories, strict=True):
        same_trajectory(t, m)
    return ""


def attack_prompt(world: World) -> str:
    """Its reader has nothing to compare it with but the sample's name: the oracle compares it with itself."""
    raw = mutated(world.rng, pb.Prompt.FromString(world.issued), change_prompt)
    try:
        found = world.reader.prompt(raw, SAMPLE_ID)
    except WireError as error:
        return reason_of(error)
    said = pb.Prompt.FromString(raw)
    sample_rules.prompt_holds(said, Run(**{**world.run.__dict__, "issued": said}))
    assert found.token_ids.tobytes() == said.prompt_token_ids
    assert found.sample_id == said.sample_id == SAMPLE_ID
    return ""


def attack_result(world: World) -> str:
    rng = world.rng

    def change(rng: random.Random, m: pb.ValidationResult) -> None:
        name = rng.choice(["version", "row", "reward"])
        setattr(m, name, rng.choice(FLOATS if name == "reward" else ABSURD))

    raw = mutated(rng, pb.ValidationResult(version=3, row=rng.randrange(10), reward=0.5, answer="a"), change)
    try:
        found = validation_result(raw, 3, 10)
    except WireError as error:
        return reason_of(error)
    assert (found.version, found.row < 10, abs(found.reward) < float("inf")) == (3, True, True)
    return ""


def same_sample(found: Sample, said: pb.Sample) -> None:
    assert found.prompt.token_ids.tobytes() == said.prompt.prompt_token_ids
    assert (found.owner, found.attempt) == (said.owner, said.attempt)
    for t, m in zip(found.trajectories, said.trajectories, strict=True):
        same_trajectory(t, m)


def same_trajectory(t: Trajectory, m: pb.Trajectory) -> None:
    assert t.token_ids.tobytes() == m.response_token_ids
    assert t.log_probs.tobytes() == m.behaviour_log_probs
    assert t.loss_mask.tobytes() == m.loss_mask
    assert [(s.version, s.start, s.end) for s in t.segments] == [
        (s.version, s.start, s.end) for s in m.segments
    ]
    assert (t.temperature, t.finish_reason, t.reward) == (m.temperature, m.finish_reason, m.reward)
    assert (t.turn_ends, t.reward_parts) == (list(m.turn_ends), dict(m.reward_parts))


def reason_of(error: WireError) -> str:
    """Without its numbers, so that reasons can be counted. It names something, and can be encoded."""
    text = str(error)
    assert len(text) > 8, "a reason that says nothing"
    text.encode()
    return re.sub(r"'[^']*'|\"[^\"]*\"|[0-9.,+]+|\b(nan|inf|e)\b", "#", text)[:48]


ATTACKS: list[Callable[[World], str]] = (
    [attack_sample] * 6 + [attack_parked] * 3 + [attack_prompt, attack_result]
)


def fuzz(payloads: int, seed: int) -> Counter[str]:
    """How often each reason was given; '' counts what was accepted. Raises AssertionError at the first
    payload for which the property does not hold, with the seed that makes it again."""
    told: Counter[str] = Counter()
    for number in range(0, payloads, 20):
        rng = random.Random(f"{seed}/{number}")
        world = World(rng)
        for _ in range(min(20, payloads - number)):
            attack = rng.choice(ATTACKS)
            try:
                told[attack(world)] += 1
            except DecodeError as error:
                raise AssertionError(f"accepted, and no message: seed {seed}, payload {number}+") from error
            except Exception as error:
                raise AssertionError(
                    f"{attack.__name__}, seed {seed}, payload {number}+: {error!r}"
                ) from error
    return told


def valid_ones_pass(seed: int, count: int = 200) -> None:
    """Else refusing everything would do."""
    rng = random.Random(seed)
    for _ in range(count):
        world = World(rng)
        message, run = world.sample()
        told = Told(SAMPLE_ID, run.attempt, run.owner, *run.versions, run.tokens, world.issued)
        world.reader.sample(
            message.SerializeToString(), told, Window(run.window, lambda oldest, r=run: r.bound)
        )
        sample_rules.sample_holds(message, run)
        parked = world.parked()
        world.reader.parked(parked.SerializeToString(), run.oldest_parked, run.served)
        sample_rules.parked_holds(parked, run)
        world.reader.prompt(world.issued, SAMPLE_ID)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--payloads", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    began = time.monotonic()
    valid_ones_pass(args.seed)
    each = -(-args.payloads // args.processes)
    shares = [min(each, args.payloads - each * i) for i in range(args.processes)]
    told: Counter[str] = Counter()
    with ProcessPoolExecutor(args.processes) as pool:
        for found in pool.map(fuzz, shares, [args.seed * 1000 + i for i in range(args.processes)]):
            told += found
    for reason, count in told.most_common():
        print(f"{count:9d}  {reason or '(accepted, and every rule holds)'}")
    print(f"{told.total()} payloads in {time.monotonic() - began:.0f} s, {told['']} accepted, 0 wrong")


if __name__ == "__main__":
    sys.exit(main())
