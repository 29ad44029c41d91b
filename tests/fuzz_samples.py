"""Mutated payloads against the reader: `python -m tests.fuzz_samples --payloads 1000000 --seed 1`.

Each payload begins as a valid one: a sample or a parked group, with and without an environment, a prompt, or
a validation result. It is changed in up to three places: bits of the encoded bytes, bytes cut out or put in,
or fields of the message (arrays cut short or made longer, absurd numbers, segments moved, another's prompt).
The reader must refuse it with a reason, or return exactly what the message says, and then an oracle that
shares no code with the reader finds every rule kept.
"""

from __future__ import annotations

import argparse
import functools
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

from headrace.config.run import RunConfig
from headrace.ledger.replies import Claimed, Payload
from headrace.v1 import sample_pb2 as pb
from headrace.wire.payloads import Prompt, Sample, Trajectory, WireError, encode_prompt
from headrace.wire.sample_checks import SampleReader, Window, validation_result
from tests import sample_rules
from tests.sample_mutations import (
    ABSURD,
    FLOATS,
    MAX_RESPONSE,
    SAMPLE_ID,
    change_parked,
    change_prompt,
    change_sample,
    mutated,
)
from tests.sample_rules import Run

PART = 10_000
"""Payloads of one task of a process."""
VOCABULARY, MAX_PROMPT, GROUP = 200, 6, 2
EXTRA = {"k": [1, 2.5], "nan": float("nan"), "text": "\u00e9"}


@functools.cache
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


# -- the property ---------------------------------------------------------------------------------


def attack_sample(world: World) -> str:
    message, run = world.sample()
    raw = mutated(world.rng, message, change_sample)
    if world.rng.random() < 0.4:
        run = as_it_says(raw, run)
    told = Claimed(SAMPLE_ID, run.attempt, *run.versions, run.tokens)
    try:
        payload = Payload(raw, world.issued, run.owner)
        found = world.reader.sample(payload, told, window_of(run))
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


def window_of(run: Run) -> Window:
    return Window(run.window, lambda oldest: run.bound)


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


ATTACKS: list[Callable[[World], str]] = [
    *[attack_sample] * 6,
    *[attack_parked] * 3,
    attack_prompt,
    attack_result,
]


def fuzz(payloads: int, seed: str) -> Counter[str]:
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
            except Exception as error:  # whatever else the reader raises is a finding
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
        told = Claimed(SAMPLE_ID, run.attempt, *run.versions, run.tokens)
        payload = Payload(message.SerializeToString(), world.issued, run.owner)
        world.reader.sample(payload, told, window_of(run))
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
    parts = [min(PART, args.payloads - start) for start in range(0, args.payloads, PART)]
    told: Counter[str] = Counter()
    with ProcessPoolExecutor(args.processes) as pool:
        for found in pool.map(fuzz, parts, [f"{args.seed}/{number}" for number in range(len(parts))]):
            told += found
            if told.total() % (10 * PART) == 0:
                print(f"{told.total()} payloads, none wrong", file=sys.stderr, flush=True)
    for reason, count in told.most_common():
        print(f"{count:9d}  {reason or '(accepted, and every rule holds)'}")
    print(f"{told.total()} payloads in {time.monotonic() - began:.0f} s, {told['']} accepted, 0 wrong")


if __name__ == "__main__":
    main()
