"""The only way to read prompts, parked work, samples and validation results from the ledger.

Every payload is read here before a model, an engine or a reward sees any of it. Results satisfy every rule
below. Any violation raises `WireError`, whose text names the rule. No other exception is raised, whatever the
bytes. The invariants of `headrace.wire.payloads` hold as well (arrays of equal length, segments that cover
every token in order, finite log-probs of at most `MOST_LOG_PROB`, finite rewards).

- Token ids of prompts, responses and environments are below the size of the model's vocabulary.
- Prompts have at most `data.max_prompt_length` tokens, responses `data.max_response_length`.
- A group has `rollout.n` trajectories, plus a greedy one or its reward if the estimator needs one.
- Turns agree with the loss mask. Without an environment, every token is the model's. With one, a response
  begins with the model, and a turn ends after each run of the model's tokens.
- Log-probs are at least `LEAST_LOG_PROB` where the mask is set, and 0 where it is not.

A finished sample agrees with the ledger's record of it:

- Its sample id, attempt, owner and every field of its prompt are those that were issued.
- Its oldest and newest version and its number of tokens are those reported to `finish`. `finish` accepts only
  committed versions, and committed versions are consecutive, so every token has a committed version.
- Its version gap in the window that trains it is within the bound, and no token is newer than the window.

Parked work has no token older than the resume limit or newer than the served version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from google.protobuf.message import DecodeError

from headrace.config.run import RunConfig
from headrace.ledger.replies import Claimed, Payload
from headrace.v1 import sample_pb2 as pb
from headrace.wire.payloads import (
    FinishReason,
    MaskArray,
    Prompt,
    Sample,
    Trajectory,
    WireError,
    decode_parked,
    decode_prompt,
    decode_sample,
)

LEAST_LOG_PROB = -200.0
"""Smallest log-prob of a sampled token. The smallest positive float32 probability is exp(-103.3)."""


@dataclass(frozen=True)
class Window:
    """The sync window in which a sample is to be trained."""

    version: int
    bound: Callable[[int], int | None]
    """Maps the version of the oldest token to the largest allowed version gap; None: unbounded."""


class SampleReader:
    """Reads payloads of one run. `vocabulary`: size of the model's vocabulary; valid ids are below it."""

    def __init__(self, config: RunConfig, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._max_prompt = config.data.max_prompt_length
        self._max_response = config.data.max_response_length
        self._group = config.rollout.n
        self._has_baseline = config.has_greedy_baseline
        self._single_turn = config.environment.is_single_turn
        self._parts = [key for key in config.algorithm.gdpo_reward_keys if key != "score"]

    def prompt(self, raw: bytes, sample_id: str | None = None) -> Prompt:
        """Read a prompt. `sample_id`: its expected id; None for held-out prompts. Raises WireError."""
        prompt = decode_prompt(raw)
        if sample_id is not None and prompt.sample_id != sample_id:
            raise WireError(f"the prompt belongs to sample {_shown(prompt.sample_id)}")
        self._check_prompt(prompt)
        return prompt

    def parked(self, raw: bytes, oldest: int, newest: int) -> list[Trajectory]:
        """Read a group to resume. `oldest`, `newest`: allowed versions of its tokens. Raises WireError."""
        group = decode_parked(raw)
        expected = self._group + self._has_baseline
        if len(group) != expected:
            raise WireError(f"parked group of {len(group)}, {expected} are asked for")
        self._check_group(group)
        for t in group:
            found = t.versions or (oldest, oldest)
            if found[0] < oldest or found[1] > newest:
                raise WireError(
                    f"parked tokens of versions {found[0]} to {found[1]}, only {max(0, oldest)} to {newest} "
                    "may go on"
                )
            unfinished = t.finish_reason is FinishReason.UNFINISHED
            if unfinished and not t.awaits_environment and len(t.token_ids) >= self._max_response:
                raise WireError("parked response has no room to go on")
            if self._single_turn and t.environment_state is not None:
                raise WireError("environment state without an environment")
        return group

    def sample(self, payload: Payload, told: Claimed, window: Window | None = None) -> Sample:
        """Read a finished group. `told`: what was reported of it to `finish`. Raises WireError."""
        sample = decode_sample(payload.sample)
        _check_identity(sample, payload, told)
        if len(sample.trajectories) != self._group:
            raise WireError(f"{len(sample.trajectories)} trajectories, rollout.n is {self._group}")
        self._check_prompt(sample.prompt)
        self._check_group(sample.trajectories)
        if self._has_baseline and sample.baseline_reward is None:
            raise WireError("no reward of a greedy response")
        for key in self._parts:
            if any(key not in t.reward_parts for t in sample.trajectories):
                raise WireError(f"the reward gave no part {key!r} (algorithm.gdpo_reward_keys)")
        for name in ("generate_s", "reward_s"):
            if not 0 <= (seconds := getattr(sample, name)) < math.inf:
                raise WireError(f"{name} is {seconds}")
        _check_versions(sample, told, window)
        return sample

    def _check_prompt(self, prompt: Prompt) -> None:
        if len(prompt.token_ids) > self._max_prompt:
            raise WireError(
                f"prompt of {len(prompt.token_ids)} tokens is over the limit of {self._max_prompt}"
            )
        self._check_ids(prompt.token_ids.max(), "prompt")

    def _check_ids(self, largest: np.int32, where: str) -> None:
        if largest >= self._vocabulary:
            raise WireError(f"token id {largest} in the {where}, the vocabulary has {self._vocabulary}")

    def _check_group(self, group: Sequence[Trajectory]) -> None:
        """Check the arrays of the whole group at once: numpy takes about as long for one trajectory."""
        longest = max(len(t.token_ids) for t in group)
        if longest > self._max_response:
            raise WireError(f"response of {longest} tokens is over the limit of {self._max_response}")
        for t in group:
            (_check_single_turn if self._single_turn else _check_turn_ends)(t)
        if not longest:
            return
        self._check_ids(np.concatenate([t.token_ids for t in group]).max(), "response")
        log_probs = np.concatenate([t.log_probs for t in group])
        if log_probs.min() < LEAST_LOG_PROB:
            raise WireError(f"behaviour log-prob {log_probs.min():g} is below {LEAST_LOG_PROB:g}")
        mask = np.concatenate([t.loss_mask for t in group])
        if self._single_turn and not mask.all():
            raise WireError("loss mask of 0 without an environment")
        if log_probs[mask == 0].any():
            raise WireError("behaviour log-prob of a token that the policy did not choose is not 0")


def _check_single_turn(t: Trajectory) -> None:
    if t.turn_ends or t.environment_metrics or t.finish_reason is FinishReason.TURN_LIMIT:
        raise WireError("turns of an environment without an environment")


def _check_turn_ends(t: Trajectory) -> None:
    ends = _ends_of_turns(t.loss_mask)
    going_on = t.finish_reason is FinishReason.UNFINISHED and ends and ends[-1] == len(t.token_ids)
    if going_on and (not t.turn_ends or t.turn_ends[-1] != ends[-1]):
        ends.pop()  # the last turn is unfinished
    if len(t.token_ids) and not t.loss_mask[0]:
        raise WireError("a response begins with a token that is not the model's")
    if ends != t.turn_ends:
        raise WireError(f"turns end at {t.turn_ends[:8]}, by the loss mask at {ends[:8]}")


def _ends_of_turns(mask: MaskArray) -> list[int]:
    """Return the exclusive end index of each run of the model's tokens."""
    found: list[int] = (np.flatnonzero(mask[:-1] & (mask[1:] ^ 1)) + 1).tolist()
    return [*found, len(mask)] if len(mask) and mask[-1] else found


def _check_identity(sample: Sample, payload: Payload, told: Claimed) -> None:
    if sample.prompt.sample_id != told.sample_id:
        raise WireError(f"payload belongs to sample {_shown(sample.prompt.sample_id)}")
    if sample.attempt != told.attempt:
        raise WireError(f"payload of attempt {sample.attempt}, the ledger has attempt {told.attempt}")
    if sample.owner != payload.owner:
        raise WireError(f"payload of owner {_shown(sample.owner)}, it was finished by {payload.owner}")
    issued = decode_prompt(payload.prompt)
    for field in fields(Prompt):
        ours, theirs = getattr(issued, field.name), getattr(sample.prompt, field.name)
        # JSON may hold NaN, which does not equal itself, so compare by `repr`.
        same = np.array_equal(ours, theirs) if field.name == "token_ids" else repr(ours) == repr(theirs)
        if not same:
            raise WireError(f"the prompt is not the issued one: {field.name} differs")


def _check_versions(sample: Sample, told: Claimed, window: Window | None) -> None:
    oldest, newest = sample.min_version, sample.max_version
    if (oldest, newest) != (told.min_version, told.max_version):
        raise WireError(
            f"tokens of versions {oldest} to {newest}, the ledger was told {told.min_version} to "
            f"{told.max_version}"
        )
    if sample.tokens != told.tokens:
        raise WireError(f"{sample.tokens} tokens, the ledger was told {told.tokens}")
    if window is None:
        return
    if newest > window.version:
        raise WireError(f"a token of version {newest} in window {window.version}")
    gap, bound = window.version - oldest, window.bound(oldest)
    if bound is not None and gap > bound:
        raise WireError(f"version gap {gap} in window {window.version}, the bound is {bound}")


def validation_result(raw: bytes, version: int, rows: int) -> pb.ValidationResult:
    """Read one response to a held-out prompt. `rows`: the number of such prompts. Raises WireError."""
    try:
        result = pb.ValidationResult.FromString(raw)
    except DecodeError as error:
        raise WireError(f"not a valid message: {error}") from error
    if result.version != version:
        raise WireError(f"result of version {result.version}, version {version} was asked for")
    if result.row >= rows:
        raise WireError(f"result of row {result.row}, there are {rows}")
    if not math.isfinite(result.reward):
        raise WireError("reward is not finite")
    return result


def _shown(text: str) -> str:
    return repr(text[:60])
