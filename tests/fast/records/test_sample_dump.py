"""The record of trained samples: what comes back, what it never exceeds, and what it survives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from headrace.records.sample_dump import DIRECTORY, ORDERS, Picks, SampleDump, pick, read
from headrace.wire.payloads import Sample


def dump(
    directory: Path, rank: int = 0, ranks: int = 1, per_update: int = 4, size: int = 1 << 24
) -> SampleDump:
    return SampleDump(directory, rank, ranks, samples_per_update=per_update, max_bytes=size)


def size(directory: Path) -> int:
    return sum(f.stat().st_size for f in (directory / DIRECTORY).iterdir())


def test_what_was_trained_comes_back(tmp_path: Path, samples: list[Sample]) -> None:
    ids = [s.prompt.sample_id for s in samples]
    recorded = SampleDump(tmp_path, samples_per_update=4, max_bytes=1 << 24, log_probs=True)
    recorded.write(samples, step=3, version=1, lineage=1, advantages={i: [0.5, -0.5, 0, 1] for i in ids})
    found = list(read(tmp_path))
    assert sorted((k.sample_id, k.number) for k in found) == [(i, n) for i in sorted(ids) for n in range(4)]
    by_id = {s.prompt.sample_id: s for s in samples}
    for kept in found:
        sample = by_id[kept.sample_id]
        t = sample.trajectories[kept.number]
        assert kept.prompt_ids == sample.prompt.token_ids.tolist()
        assert kept.response_ids == t.token_ids.tolist()
        assert kept.segments == [(s.version, s.start, s.end) for s in t.segments]
        assert kept.loss_mask == (None if t.loss_mask.all() else t.loss_mask.tolist())
        assert kept.log_probs == pytest.approx(t.log_probs.tolist(), abs=1e-5)
        assert (kept.reward, kept.step, kept.version) == (t.reward, 3, 1)
    assert [k.advantage for k in found[:4]] == [0.5, -0.5, 0, 1]


def test_two_ranks_keep_to_the_number_of_an_update(tmp_path: Path, samples: list[Sample]) -> None:
    for rank in (0, 1):
        dump(tmp_path, rank, 2, per_update=3).write(samples, step=1, version=0, lineage=1)
    assert len({(k.sample_id, k.owner) for k in read(tmp_path)}) <= 3
    lines = [line for f in (tmp_path / DIRECTORY).iterdir() for line in f.read_text().splitlines()]
    assert len(lines) == 3


def test_it_never_exceeds_its_size_and_keeps_beginning_and_end(tmp_path: Path, samples: list[Sample]) -> None:
    limit = 4_000_000
    for start in (0, 1000):  # two starts, the second with fewer ranks
        ranks = 2 if start == 0 else 1
        parts = [dump(tmp_path, rank, ranks, size=limit) for rank in range(ranks)]
        for step in range(start, start + 1000):
            for part in parts:
                part.write(samples, step=step, version=step, lineage=1 + start // 1000)
            assert size(tmp_path) <= limit, f"after step {step}"
    steps = {k.step for k in read(tmp_path)}
    assert 0 in steps
    assert 1999 in steps
    assert 500 not in steps, "nothing was deleted: the limit did not act"
    assert size(tmp_path) > limit // 2


def test_steps_that_were_taken_back_are_left_out(tmp_path: Path, samples: list[Sample]) -> None:
    first, second = dump(tmp_path), dump(tmp_path)
    for step in (1, 2, 3):
        first.write(samples[:1], step=step, version=0, lineage=1)
    second.write(samples[1:2], step=2, version=0, lineage=2)
    trained = [{"lineage": 1, "from_step": 0}, {"lineage": 2, "from_step": 1}]
    assert {(k.step, k.lineage) for k in read(tmp_path, trained)} == {(1, 1), (2, 2)}


def test_long_responses_leave_room_for_many_updates(tmp_path: Path, samples: list[Sample]) -> None:
    """One line is about 1.6 KB: with 128 KiB there is room for one sample an update, not for four."""
    small = dump(tmp_path, size=128 * 1024)
    for step in range(20):
        small.write(samples, step=step, version=0, lineage=1)
    assert {k.step for k in read(tmp_path)} == set(range(20))
    assert len({(k.step, k.sample_id) for k in read(tmp_path)}) == 20


def test_a_torn_line_costs_only_itself(tmp_path: Path, samples: list[Sample]) -> None:
    first = dump(tmp_path)
    first.write(samples, step=1, version=0, lineage=1)
    first.close()
    (file,) = (tmp_path / DIRECTORY).iterdir()
    file.write_bytes(file.read_bytes()[:-20])
    dump(tmp_path).write(samples, step=2, version=0, lineage=1)
    assert len([k for k in read(tmp_path) if k.step == 1]) == 4 * (len(samples) - 1)
    assert len([k for k in read(tmp_path) if k.step == 2]) == 4 * len(samples)


@pytest.mark.parametrize(
    "change", [{"segments": [[0, 0, 10**12]]}, {"loss_mask": [1]}, {"log_probs": [-1.0]}]
)
def test_a_line_that_contradicts_itself_is_passed_over(
    tmp_path: Path, samples: list[Sample], change: dict[str, object]
) -> None:
    """A segment of a million million tokens would be walked one by one."""
    dump(tmp_path).write(samples[:1], step=1, version=0, lineage=1)
    dump(tmp_path).write(samples[1:2], step=2, version=0, lineage=1)
    file, *_ = sorted((tmp_path / DIRECTORY).iterdir())
    row = json.loads(file.read_text())
    row["trajectories"][0] |= change
    file.write_text(json.dumps(row) + "\n")
    assert {k.step for k in read(tmp_path)} == {2}


def test_a_full_disk_ends_the_record_and_nothing_else(
    tmp_path: Path, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DIRECTORY).write_text("in the way")
    broken = dump(tmp_path)
    for step in (1, 2):
        broken.write(samples, step=step, version=0, lineage=1)
    broken.close()
    assert [r.getMessage() for r in caplog.records] == ["no more samples are recorded"]


def test_worst_best_longest_last(tmp_path: Path, samples: list[Sample]) -> None:
    dump(tmp_path).write(samples, step=1, version=0, lineage=1)
    found = list(read(tmp_path))
    rewards = sorted(k.reward for k in found)
    assert [k.reward for k in pick(found, "worst", 3)] == rewards[:3]
    assert [k.reward for k in pick(found, "best", 3)] == rewards[::-1][:3]
    assert len(pick(found, "longest", 1)[0].response_ids) == max(len(k.response_ids) for k in found)
    picks = Picks(3)
    for kept in found:
        picks.add(kept)
    for order in ORDERS:
        assert len(picks.of(order)) == 3
        keys = [ORDERS[order](k) for k in picks.of(order)]
        assert keys == sorted(map(ORDERS[order], found), reverse=True)[:3]
    later = [dataclasses.replace(k, step=2) for k in found[:1]]
    assert pick([*later, *found], "last", 2)[-1].step == 2
    json.dumps([dataclasses.asdict(k) for k in found])
