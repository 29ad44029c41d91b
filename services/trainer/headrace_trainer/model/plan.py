"""Who computes what: pure rules, the same on every rank.

A batch of R*M samples is cut into R mini-batches of M. Each mini-batch is split over the ranks by tokens, and
a rank's trajectories into micro-batches that fit. The gradient does not depend on how ranks or micro-batches
are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.ledger.replies import Claimed


def order(items: Sequence[Claimed], strict: bool) -> list[Claimed]:
    """Training order of a batch: by id if `strict`, so that runs are repeatable; else as samples finished."""
    return sorted(items, key=lambda i: i.sample_id) if strict else list(items)


def mini_batches(items: Sequence[Claimed], size: int) -> list[list[Claimed]]:
    """Consecutive mini-batches of `size`; the last one may be shorter."""
    return [list(items[i : i + size]) for i in range(0, len(items), size)]


def assign(items: Sequence[Claimed], ranks: int) -> list[list[Claimed]]:
    """Each sample to one rank, longest first to the rank with the fewest tokens so far.

    No rank gets more than 4/3 of the best possible largest load (Graham 1969). Within a rank the
    order of `items` is kept.
    """
    loads = [0] * ranks
    where: dict[str, int] = {}
    for item in sorted(items, key=lambda i: (-i.tokens, i.sample_id)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += item.tokens
        where[item.sample_id] = rank
    return [[i for i in items if where[i.sample_id] == rank] for rank in range(ranks)]


def micro_batches(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of trajectories, cut so that their tokens stay within `limit`: longest first, each to the first
    micro-batch with room. At most 11/9 of the fewest possible, and one (Johnson 1973). A trajectory longer
    than `limit` is alone.
    """
    out: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        into = next((n for n, left in enumerate(room) if lengths[index] <= left), None)
        if into is None:
            into = len(out)
            out.append([])
            room.append(limit)
        out[into].append(index)
        room[into] -= lengths[index]
    return out
