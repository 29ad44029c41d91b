"""GPUs and nodes: the rule of the recipe, the packing against brute force, the evenness of batches."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.gpu_arithmetic import (
    BatchPlan,
    batch_notes,
    gpus,
    held_told,
    nodes_needed,
    replicas_held,
    samples_per_rank,
    uneven_share,
)

small = st.integers(1, 8)


def fits(nodes: int, trainer: int, t: int, replicas: int, tp: int, g: int) -> bool:
    """By placing: the trainer on the first nodes (all are alike), then the replicas one by one."""
    if nodes < trainer:
        return False
    free = [g - t if node < trainer else g for node in range(nodes)]
    for _ in range(replicas):
        place = next((node for node in range(nodes) if free[node] >= tp), None)
        if place is None:
            return False
        free[place] -= tp
    return True


@given(st.integers(1, 4), small, st.integers(0, 20), small, small)
def test_the_fewest_nodes_that_hold_everything(trainer: int, t: int, replicas: int, tp: int, g: int) -> None:
    if max(t, tp) > g:
        with pytest.raises(ValueError, match=f"a node has {g} GPUs"):
            nodes_needed(trainer, t, replicas, tp, g)
        return
    nodes = nodes_needed(trainer, t, replicas, tp, g)
    assert fits(nodes, trainer, t, replicas, tp, g)
    assert not fits(nodes - 1, trainer, t, replicas, tp, g)
    found = gpus(trainer, t, replicas, tp, g)
    assert found.total == trainer * t + replicas * tp
    assert found.idle == nodes * g - found.total >= 0


@given(st.integers(1, 8), st.integers(1, 4), small, small, small)
def test_the_most_that_nodes_hold(nodes: int, trainer: int, t: int, tp: int, g: int) -> None:
    if max(t, tp) > g:
        return
    held = replicas_held(nodes, trainer, t, tp, g)
    if held is None:
        assert not fits(nodes, trainer, t, 0, tp, g)
    else:
        assert fits(nodes, trainer, t, held, tp, g)
        assert not fits(nodes, trainer, t, held + 1, tp, g)


def test_what_nodes_hold_is_told() -> None:
    assert held_told(1, 8, 8, None).startswith("1 node of 8 cannot hold the trainer: it stays pending")
    assert held_told(2, 8, 8, 0) == "2 nodes of 8 can hold the trainer and no rollouter: nothing is generated"
    assert held_told(2, 8, 1, 1) == "2 nodes of 8 can hold the trainer and 1 rollouter"
    assert held_told(2, 8, 9, 8).endswith(
        "8 rollouters: 1 of 9 stay pending, and the run goes on without them"
    )


def recipe_nodes(
    trainer_nodes: int, trainer_gpus: int, rollout_nodes: int, rollout_gpus: int, gpus_per_node: int
) -> int:
    """The rule of verl's recipe, which ours is held against; `*_gpus` are per node."""
    if trainer_gpus + rollout_gpus <= gpus_per_node:
        return max(trainer_nodes, rollout_nodes)
    return trainer_nodes + rollout_nodes


@given(st.integers(1, 4), small, st.integers(1, 4), small, small, small)
def test_never_more_nodes_than_the_recipe_asks_for(
    trainer: int, t: int, rollout: int, r: int, tp: int, g: int
) -> None:
    """The recipe's pool of `rollout` nodes with r GPUs each holds r // tp replicas per node."""
    if max(t, r, tp) > g or r < tp:
        return
    replicas = rollout * (r // tp)
    assert nodes_needed(trainer, t, replicas, tp, g) <= recipe_nodes(trainer, t, rollout, r, g)


@pytest.mark.parametrize(
    ("trainer", "t", "rollout", "r", "nodes"),
    [(1, 6, 1, 2, 1), (1, 8, 1, 8, 2), (8, 8, 8, 8, 16), (2, 6, 2, 2, 2), (2, 12, 2, 4, 2), (1, 6, 2, 8, 3)],
)
def test_layouts_of_the_recipe(trainer: int, t: int, rollout: int, r: int, nodes: int) -> None:
    g = 16 if t > 8 else 8
    assert recipe_nodes(trainer, t, rollout, r, g) == nodes
    assert nodes_needed(trainer, t, rollout * r, 1, g) == nodes


@given(st.integers(1, 4), st.integers(0, 20), small)
def test_one_replica_more_needs_at_most_one_node_more(trainer: int, replicas: int, tp: int) -> None:
    counts = [nodes_needed(trainer, 8, n, tp, 8) for n in range(replicas + 1)]
    assert all(0 <= later - earlier <= 1 for earlier, later in pairwise(counts))


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 4), st.integers(0, 5000))
def test_batches(mini_batch: int, ranks: int, r: int, more: int) -> None:
    fewest, most = samples_per_rank(mini_batch, ranks)
    assert fewest * ranks <= mini_batch <= most * ranks
    assert most - fewest == (mini_batch % ranks > 0)
    assert 0 <= uneven_share(mini_batch, ranks) < 1
    assert (uneven_share(mini_batch, ranks) == 0) == (mini_batch % ranks == 0)
    b = BatchPlan(r * mini_batch + more, r * mini_batch, mini_batch, ranks)
    assert b.whole_updates * b.per_update + b.rest == b.samples
    notes = list(batch_notes(b))
    assert len(notes) == (mini_batch % ranks > 0) + (b.rest > 0)


def test_notes_name_the_change() -> None:
    (note,) = batch_notes(BatchPlan(samples=100, per_update=10, mini_batch=10, ranks=4))
    assert "some get 3 samples and others 2, and 17 % of their time" in note
    assert note.endswith("set it to 8 or 12")
    (short,) = batch_notes(BatchPlan(samples=105, per_update=10, mini_batch=10, ranks=5))
    assert short.endswith("set it to 100 or 110")
