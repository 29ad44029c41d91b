"""A trajectory of several turns: alignment of ids, masks, log-probs and versions, and going on elsewhere."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from headrace.environments import Done, Environment, Observation, Passage, Turn
from headrace.environments.loading import EnvironmentFailed
from headrace.wire.payloads import (
    FinishReason,
    Segment,
    Trajectory,
    check_segments,
    check_turns,
    decode_parked,
    empty_trajectory,
    encode_parked,
)
from tests.support.scripted_turns import (
    EOS,
    LIMIT,
    PROMPT,
    Counting,
    ScriptedEngine,
    config,
    decode,
    serving,
    trajectories,
)

FRESH = empty_trajectory(0.7)


def greedy(_: int) -> None:
    return None


def check(t: Trajectory) -> None:
    """What holds at any point: each token's mask and log-prob tell who said it."""
    check_segments(t.segments, len(t.token_ids))
    check_turns(t.turn_ends, t.loss_mask, t.finish_reason)
    for token, mask, log_prob in zip(t.token_ids.tolist(), t.loss_mask, t.log_probs, strict=True):
        assert mask == (token != 60), "60 is what the environment says, and the model never"
        assert log_prob == np.float32(ScriptedEngine.log_prob(token) if mask else 0.0)


def same(a: Trajectory, b: Trajectory) -> bool:
    return a.token_ids.tolist() == b.token_ids.tolist() and (
        a.turn_ends,
        a.finish_reason,
        a.environment_state,
    ) == (
        b.turn_ends,
        b.finish_reason,
        b.environment_state,
    )


async def whole() -> Trajectory:
    return await trajectories(serving(3), Counting()).to_the_end(PROMPT, FRESH, greedy, 0)


async def test_turns_and_observations_alternate() -> None:
    environment = Counting()
    t = await trajectories(serving(3), environment).to_the_end(PROMPT, FRESH, greedy, 0)
    check(t)
    assert t.finish_reason is FinishReason.STOP
    assert t.turns == len(t.turn_ends) == 4
    assert t.segments == [Segment(3, 0, len(t.token_ids))]
    ids = t.token_ids.tolist()
    assert [ids[end - 1] for end in t.turn_ends] == [EOS] * 4, "the end of a turn is a trained token"
    assert ids.count(60) == 1 + 2 + 3
    # What the model read is what it would read were all of it given at once: nothing was made anew.
    context = PROMPT.token_ids.tolist()
    for token, mask in zip(ids, t.loss_mask, strict=True):
        if mask:
            assert token == ScriptedEngine.next_token(context)
        context.append(token)
    # What the environment was told.
    starts = [0, *(end + number for number, end in enumerate(t.turn_ends, 1))]
    said = [decode(ids[a:b]) for a, b in zip(starts, t.turn_ends, strict=False)]
    assert [turn.text for turn in environment.steps] == said
    assert [turn.number for turn in environment.steps] == [1, 2, 3, 4]
    assert environment.steps[2].history == (
        Passage("model", said[0]),
        Passage("environment", "60"),
        Passage("model", said[1]),
        Passage("environment", "60 60"),
    )
    assert environment.steps[0].task.ground_truth == "truth"
    assert t.environment_state == {"heard": said}


async def test_interrupted_at_every_token_and_continued_elsewhere() -> None:
    expected = await whole()
    met_turns = set()
    for cut in range(len(expected.token_ids)):
        first = trajectories(serving(3), Counting(), cut_at=cut)
        t = await first.to_the_end(PROMPT, FRESH, greedy, 0)
        if not expected.loss_mask[cut]:
            # The engine is not asked for this token; it is interrupted where the model speaks again.
            continue
        assert t.finish_reason is FinishReason.UNFINISHED
        assert len(t.token_ids) == cut
        check(t)
        met_turns.add(len(t.turn_ends))
        (t,) = decode_parked(encode_parked([t]))
        t = await trajectories(serving(5), Counting()).to_the_end(PROMPT, t, greedy, 0)
        check(t)
        assert same(t, expected), f"interrupted at token {cut}"
        versions = [Segment(3, 0, cut), Segment(5, cut, len(t.token_ids))]
        assert t.segments == [s for s in versions if s.end > s.start]
    assert met_turns == {0, 1, 2, 3}


@pytest.mark.parametrize("call", [1, 2, 3, 4])
async def test_interrupted_while_the_environment_answers(call: int) -> None:
    """It is asked again elsewhere, and what the first call did to the state is forgotten."""
    expected = await whole()
    environment, state = Counting(), serving(3)
    environment.hang_at = call
    running = asyncio.create_task(trajectories(state, environment).to_the_end(PROMPT, FRESH, greedy, 0))
    async with asyncio.timeout(20):
        while environment.stepped < call:
            await asyncio.sleep(0)
    state.drain_began.set()
    t = await asyncio.wait_for(running, 5)
    assert t.awaits_environment
    assert len(t.turn_ends) == call
    check(t)
    (t,) = decode_parked(encode_parked([t]))
    again = Counting()
    t = await trajectories(serving(4), again).to_the_end(PROMPT, t, greedy, 0)
    check(t)
    assert same(t, expected)
    assert again.steps[0].number == call, "the same turn is answered again"


async def test_a_version_that_is_committed_while_the_environment_answers() -> None:
    """The observation carries what is served when it comes, and the next turn what samples it."""
    state = serving(3)

    class Slow(Counting):
        async def step(self, turn: Turn) -> Observation | Done:
            state.version = 3 + turn.number
            return await super().step(turn)

    t = await trajectories(state, Slow()).to_the_end(PROMPT, FRESH, greedy, 0)
    check(t)
    bounds = [0, *t.turn_ends[:-1], len(t.token_ids)]
    assert t.segments == [Segment(3 + n, a, b) for n, (a, b) in enumerate(itertools.pairwise(bounds))]


async def test_an_observation_is_never_older_than_the_turn_before_it() -> None:
    """The engine stamps a version a moment before this side hears of the resume."""
    expected = await whole()
    end = expected.turn_ends[0]
    t = Trajectory(
        expected.token_ids[:end],
        expected.log_probs[:end],
        expected.loss_mask[:end],
        [Segment(4, 0, end)],
        0.7,
        FinishReason.UNFINISHED,
        turn_ends=[end],
        environment_state={"heard": []},
    )
    state = serving(3)
    runner = trajectories(state, Counting(), cut_at=end + 1)
    t = await runner.to_the_end(PROMPT, t, greedy, 0)
    assert t.segments == [Segment(4, 0, end + 1)]


async def test_each_turn_is_sampled_with_a_seed_of_its_own() -> None:
    state = serving(3)
    runner = trajectories(state, Counting())
    t = await runner.to_the_end(PROMPT, FRESH, lambda have: 1000 + have, 0)
    engine = runner._engine
    assert isinstance(engine, ScriptedEngine)
    starts = [0, *(end + number for number, end in enumerate(t.turn_ends[:-1], 1))]
    assert engine.seeds == [1000 + start for start in starts]


async def test_the_turn_limit_ends_a_trajectory_behind_the_turn() -> None:
    environment = Counting(turns=99)
    t = await trajectories(serving(3), environment, config(max_turns=2)).to_the_end(PROMPT, FRESH, greedy, 0)
    check(t)
    assert t.finish_reason is FinishReason.TURN_LIMIT
    assert t.turn_ends[-1] == len(t.token_ids)
    assert [turn.is_last for turn in environment.steps] == [False, True]
    done = await trajectories(serving(3), Counting(turns=2), config(max_turns=2)).to_the_end(
        PROMPT, FRESH, greedy, 0
    )
    assert done.finish_reason is FinishReason.STOP, "Done at the last turn is an end like any other"


async def test_the_response_limit_counts_the_environments_tokens() -> None:
    expected = await whole()
    reasons = set()
    for limit in range(1, len(expected.token_ids) + 2):
        environment = Counting()
        t = await trajectories(serving(3), environment, config(limit)).to_the_end(PROMPT, FRESH, greedy, 0)
        check(t)
        assert len(t.token_ids) <= limit
        assert t.token_ids.tolist() == expected.token_ids[: len(t.token_ids)].tolist()
        assert t.turn_ends[-1] == len(t.token_ids), "no observation stands at the end"
        assert (t.finish_reason is FinishReason.STOP) == (len(t.token_ids) == len(expected.token_ids))
        reasons.add((t.finish_reason, int(t.token_ids[-1]) == EOS))
        await trajectories(serving(3), environment, config(limit)).outcome(PROMPT, t, 0)
    # Cut within a turn, cut behind one whose answer did not fit, and whole.
    assert reasons == {(FinishReason.LENGTH, False), (FinishReason.LENGTH, True), (FinishReason.STOP, True)}


async def test_no_answer_is_asked_for_a_turn_that_was_cut() -> None:
    environment = Counting()
    t = await trajectories(serving(3), environment, config(1)).to_the_end(PROMPT, FRESH, greedy, 0)
    assert t.token_ids[-1] != EOS, "the test wants a turn longer than a token: choose another prompt"
    assert (t.finish_reason, environment.steps) == (FinishReason.LENGTH, [])
    outcome = await trajectories(serving(3), environment).outcome(PROMPT, t, 0)
    assert outcome is not None
    assert outcome.metrics == {"heard": 0.0}


async def test_what_is_finished_or_drained_is_left_alone() -> None:
    t = await whole()
    assert await trajectories(serving(3), Counting()).to_the_end(PROMPT, t, greedy, 0) is t
    state = serving(3)
    state.drain_began.set()
    assert await trajectories(state, Counting()).to_the_end(PROMPT, FRESH, greedy, 0) is FRESH


async def test_an_observation_of_nothing_is_refused() -> None:
    class Silent(Environment):
        async def step(self, turn: Turn) -> Observation | Done:
            return Observation("")

    def refuse(observation: Observation) -> list[int]:
        raise EnvironmentFailed("no tokens")

    with pytest.raises(EnvironmentFailed, match="no tokens"):
        await trajectories(serving(3), Silent(), encoder=refuse).to_the_end(PROMPT, FRESH, greedy, 0)


async def test_an_environment_cannot_change_the_prompt_or_a_state_that_is_kept() -> None:
    class Meddling(Counting):
        async def step(self, turn: Turn) -> Observation | Done:
            turn.task.extra_info["k"].append(2)
            turn.state["deep"] = {"list": [turn.number]}
            if turn.number == 2:
                turn.state["deep"]["list"].append(99)
                raise RuntimeError("in the middle")
            return Observation("60")

    runner = trajectories(serving(3), Meddling(), cut_at=None)
    t = await whole()
    end = t.turn_ends[0]
    first = replace(
        t,
        token_ids=t.token_ids[:end], log_probs=t.log_probs[:end], loss_mask=t.loss_mask[:end],
        segments=[Segment(3, 0, end)], finish_reason=FinishReason.UNFINISHED, turn_ends=[end],
        environment_state={"heard": [], "deep": {"list": [0]}},
    )  # fmt: skip
    with pytest.raises(EnvironmentFailed, match="in the middle"):
        await runner.to_the_end(PROMPT, first, greedy, 0)
    assert first.environment_state == {"heard": [], "deep": {"list": [0]}}
    assert PROMPT.extra_info == {"k": [1]}


def test_the_scripted_trajectory_is_long_enough_to_mean_something() -> None:
    t = asyncio.run(whole())
    assert 12 < len(t.token_ids) < LIMIT, f"{len(t.token_ids)} tokens: choose another prompt"
