"""The trainer's claims on a real ledger: malformed payloads are generated anew, or die; none is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger, adopt
from headrace.ledger.replies import Taken
from headrace.local.valkey_server import start_valkey
from headrace.wire.payloads import (
    FinishReason,
    Prompt,
    Sample,
    Segment,
    Trajectory,
    encode_prompt,
    encode_sample,
)
from headrace.wire.sample_checks import SampleReader
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.learning.batch import Batches, ClaimFailed, RefillExhausted, Stopped
from headrace_trainer.learning.window_rule import WindowRule
from tests.single_rank import single_rank

OWNER = "rollouter-0-test"
VOCABULARY = 8
CONFIG = RunConfig.model_validate(
    {
        "name": "batches",
        "model": {"path": "unused"},
        "data": {"train_files": ["unused"], "max_prompt_length": 8, "max_response_length": 4},
        "rollout": {"n": 2, "total_rollout_steps": 6, "test_freq": 0},
        "actor": {"ppo_mini_batch_size": 2},
        "trainer": {"n_gpus_per_node": 1, "claim_timeout_s": 1.0},
        "custom_reward_function": {"path": "unused"},
    }
)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with single_rank() as found:
        yield found


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SyncLedger]:
    with start_valkey(tmp_path, "secret") as server:
        found = SyncLedger(connect(server.url), CONFIG.name)
        found.run(ops.configure(8, 2, 0, 0, 6, "test"))
        prompts = [encode_prompt(prompt(i)) for i in range(6)]
        assert found.run(ops.issue(0, prompts, True)).status == "issued"
        term = found.run(ops.open_term()).term
        lineage = found.run(ops.open_lineage(0)).lineage
        adopt(found, lineage, {})
        assert found.run(ops.hold(term, 1, lineage)) == "ok"
        assert found.run(ops.commit(term, 1, lineage, 0, "digest", [OWNER], False, False)).status == "ok"
        yield found
        found.close()


def batches_of(
    config: RunConfig, ledger: SyncLedger, ranks: Ranks, stopping: Callable[[], bool] = lambda: False
) -> Batches:
    rule = WindowRule(config.rule)
    return Batches(config, ledger, ranks, 1, stopping, SampleReader(config, VOCABULARY), rule)


def prompt(i: int, sample_id: str = "") -> Prompt:
    return Prompt(sample_id or f"{i:010d}", i, 0, i, np.asarray([5, 6, 7], np.int32), "test", "answer")


def sample(i: int, attempt: int, tokens: int = 3, version: int = 0) -> Sample:
    t = Trajectory(
        np.arange(1, tokens + 1, dtype=np.int32),
        np.full(tokens, -0.5, np.float32),
        np.ones(tokens, np.uint8),
        [Segment(version, 0, tokens)],
        1.0,
        FinishReason.STOP,
        reward=float(i % 2),
    )
    return Sample(prompt(i), [t, t], OWNER, attempt)


def finish_all(ledger: SyncLedger, payloads: dict[int, bytes]) -> None:
    """Take and finish all six samples; `payloads` replaces those of some."""
    for item in ledger.run(ops.take(OWNER, 0, 6)).items:
        i = int(item.sample_id)
        payload = payloads.get(i, encode_sample(sample(i, item.attempt)))
        assert ledger.run(ops.finish(OWNER, item.sample_id, item.attempt, payload, 0, 0, 12)) == "ok"


def test_malformed_payloads_are_buried_and_replaced(ledger: SyncLedger, ranks: Ranks) -> None:
    wrong_group = sample(3, 1)
    wrong_group.trajectories.pop()
    too_long = encode_sample(sample(4, 1, tokens=5))
    finish_all(ledger, {0: b"\xff\xfegarbage", 3: encode_sample(wrong_group), 4: too_long})
    batches = batches_of(CONFIG, ledger, ranks)
    first = batches.next(0)
    assert first is not None
    assert [i.sample_id for i in first.items] == ["0000000001", "0000000002"]
    ledger.run(ops.train(1, 1, [i.sample_id for i in first.items]))
    second = batches.next(0)
    assert second is not None
    assert [i.sample_id for i in second.items] == ["0000000005"]
    ledger.run(ops.train(1, 2, ["0000000005"]))
    assert batches.next(0) is None
    dead = {d.sample_id: d for d in ledger.run(ops.dead())}
    assert sorted(dead) == ["0000000000", "0000000003", "0000000004"]
    assert {d.reason for d in dead.values()} == {"malformed"}
    assert "1 trajectories" in dead["0000000003"].detail
    assert ledger.run(ops.stats()).counts["trained"] == 3


def lies(i: int, attempt: int) -> dict[str, bytes]:
    """Well-formed payloads that disagree with what the ledger knows, by the reason that is given."""

    def of(**changes: Any) -> bytes:
        return encode_sample(dataclasses.replace(sample(i, attempt), **changes))

    def response(**changes: Any) -> bytes:
        t = sample(i, attempt).trajectories[0]
        return of(trajectories=[dataclasses.replace(t, **changes), t])

    return {
        "tokens of versions 0 to 1000": response(segments=[Segment(0, 0, 1), Segment(1000, 1, 3)]),
        "token id 8 in the response": response(token_ids=np.asarray([1, 8, 2], np.int32)),
        "the prompt is not the issued one": of(prompt=prompt(i + 1, f"{i:010d}")),
        "payload of attempt": of(attempt=attempt + 1),
        "payload of owner": of(owner="somebody"),
    }


@pytest.mark.parametrize("lie", range(5))
def test_a_payload_that_lies_is_generated_anew(ledger: SyncLedger, ranks: Ranks, lie: int) -> None:
    """The gate lets in no more than the window trains: the place of what was rejected must come free, or the
    trainer would wait for ever."""
    ledger.run(ops.configure(2, 2, 1, 0, 6, "test"))
    ledger.run(ops.hold(1, 2, 1))
    assert ledger.run(ops.commit(1, 2, 1, 1, "digest", [OWNER], False, False, 2)).status == "ok"
    first, second = ledger.run(ops.take(OWNER, 1, 6)).items
    payload = list(lies(int(first.sample_id), 1).values())[lie]
    told: list[str] = []

    def finish(item: Taken, payload: bytes) -> None:
        assert ledger.run(ops.finish(OWNER, item.sample_id, item.attempt, payload, 1, 1, 12)) == "ok"

    def again() -> bool:
        """The rollouter's part, whenever the trainer looks whether it shall stop: it takes what came back."""
        for item in ledger.run(ops.take(OWNER, 1, 6)).items:
            told.append(item.sample_id)
            finish(item, encode_sample(sample(int(item.sample_id), item.attempt, version=1)))
        return False

    finish(first, payload)
    finish(second, encode_sample(sample(int(second.sample_id), 1, version=1)))
    batch = batches_of(CONFIG, ledger, ranks, again).next(1)
    assert batch is not None
    assert told == [first.sample_id]
    assert sorted((i.sample_id, i.attempt) for i in batch.items) == [
        (first.sample_id, 2),
        (second.sample_id, 1),
    ]
    assert [s.attempt for mini in batch.mini for s in mini] == [2, 1]
    assert ledger.run(ops.stats()).requeued == {"rejected": 1}


def test_what_is_wrong_stands_with_the_dead(ledger: SyncLedger, ranks: Ranks) -> None:
    wrong = lies(0, 1)
    payloads = dict(enumerate(list(lies(i, 1).values())[i] for i in range(5)))
    finish_all(ledger, payloads)
    batch = batches_of(CONFIG, ledger, ranks).next(0)
    assert batch is not None
    assert [i.sample_id for i in batch.items] == ["0000000005"]
    dead = ledger.run(ops.dead())
    assert {d.reason for d in dead} == {"malformed"}
    for d, reason in zip(sorted(dead, key=lambda d: d.sample_id), wrong, strict=True):
        assert reason in d.detail


def test_what_is_older_than_the_bound_is_not_trained(ledger: SyncLedger, ranks: Ranks) -> None:
    """Whatever the ledger was told: here a sample says of itself that it is of version 0, and waited."""
    finish_all(ledger, {})
    ledger.run(ops.hold(1, 2, 1))
    assert ledger.run(ops.commit(1, 2, 1, 1, "digest", [OWNER], False, False)).status == "ok"
    assert batches_of(CONFIG, ledger, ranks).next(1) is None
    dead = ledger.run(ops.dead())
    assert {d.detail for d in dead} == {"version gap 1 in window 1, the bound is 0"}
    assert len(dead) == 6


def test_what_cannot_be_trained_starts_again_and_dies_in_the_end(ledger: SyncLedger, ranks: Ranks) -> None:
    finish_all(ledger, {})
    ledger.run(ops.configure(8, 2, 1, 0, 6, "test"))  # one retry
    batches = batches_of(CONFIG, ledger, ranks)
    batch = batches.next(0)
    assert batch is not None
    bad, good = (i.sample_id for i in batch.items)
    batches.reject(batch, {bad: "not finite"})
    assert [i.sample_id for i in batch.items] == [good]
    assert [s.prompt.sample_id for mini in batch.mini for s in mini] == [good]
    assert ledger.run(ops.train(1, 1, [good])) == "ok"
    again = ledger.run(ops.take(OWNER, 0, 6)).items
    assert [i.sample_id for i in again] == [bad]
    payload = encode_sample(sample(int(bad), again[0].attempt))
    assert ledger.run(ops.finish(OWNER, bad, again[0].attempt, payload, 0, 0, 12)) == "ok"
    trained = 1
    while (batch := batches.next(0)) is not None:
        trained += 1
        batches.reject(batch, {bad: "not finite"})
        if batch.items:
            assert ledger.run(ops.train(1, trained, [i.sample_id for i in batch.items])) == "ok"
    stats = ledger.run(ops.stats())
    assert (stats.counts["dead"], stats.counts["trained"]) == (1, 5)
    (dead,) = ledger.run(ops.dead())
    assert (dead.sample_id, dead.reason, dead.detail) == (bad, "non_finite", "not finite")
    assert stats.requeued == {"rejected": 1}


def test_a_late_trainer_takes_nothing_back(ledger: SyncLedger, ranks: Ranks) -> None:
    finish_all(ledger, {})
    batches = batches_of(CONFIG, ledger, ranks)
    batch = batches.next(0)
    assert batch is not None
    assert ledger.run(ops.open_lineage(1)).ok
    with pytest.raises(ClaimFailed, match="refused to take back"):
        batches.reject(batch, {batch.items[0].sample_id: "not finite"})


def filtering(limit: int) -> RunConfig:
    plain = CONFIG.model_dump()
    plain["algorithm"]["filter_groups"] = {"enable": True, "max_num_gen_batches": limit}
    return RunConfig.model_validate(plain)


def with_spread(i: int) -> bytes:
    found = sample(i, 1)
    first, second = found.trajectories
    found.trajectories = [first, dataclasses.replace(second, reward=0.5)]
    return encode_sample(found)


def test_groups_without_spread_are_dropped_and_replaced(ledger: SyncLedger, ranks: Ranks) -> None:
    finish_all(ledger, {i: with_spread(i) for i in (1, 4, 5)})
    batches = batches_of(filtering(10), ledger, ranks)
    first = batches.next(0)
    assert first is not None
    assert [i.sample_id for i in first.items] == ["0000000001", "0000000004"]
    ledger.run(ops.train(1, 1, [i.sample_id for i in first.items]))
    second = batches.next(0)
    assert second is not None
    assert [i.sample_id for i in second.items] == ["0000000005"]
    ledger.run(ops.train(1, 2, ["0000000005"]))
    assert batches.next(0) is None
    stats = ledger.run(ops.stats())
    assert (stats.counts["trained"], stats.counts["dropped"]) == (3, 3)
    assert stats.dropped_reasons == {"zero_spread": 3}


def test_refilling_for_ever_is_an_error_with_a_name(ledger: SyncLedger, ranks: Ranks) -> None:
    finish_all(ledger, {})
    with pytest.raises(RefillExhausted, match="max_num_gen_batches = 1"):
        batches_of(filtering(1), ledger, ranks).next(0)


def test_waiting_for_samples_ends(ledger: SyncLedger, ranks: Ranks) -> None:
    with pytest.raises(ClaimFailed, match=r"claim_timeout_s .* counts"):
        batches_of(CONFIG, ledger, ranks).next(0)
    with pytest.raises(Stopped):
        batches_of(CONFIG, ledger, ranks, lambda: True).next(0)
    assert ledger.run(ops.open_lineage(1)).ok
    with pytest.raises(ClaimFailed, match="no longer the newest"):
        batches_of(CONFIG, ledger, ranks).next(0)
