"""The order in which prompts are issued, as a pure function of the run's seed.

What this module guarantees:

- Issue number -> (epoch, row) depends on (seed, number of rows, shuffle) alone: not on the process, on what
  was issued before, on the Python version or on any random generator's implementation. Any retained
  checkpoint can therefore be resumed, and a lost prompt made again.
- Every epoch issues every row exactly once.

The shuffled order of an epoch is that of the rows' keys

    key(row) = SHA-256 of the ASCII text "{seed}:{epoch}:{row}"  (decimal, no padding)

sorted ascending as bytes; equal keys, which nobody has seen yet, fall back to the row number.
"""

from __future__ import annotations

import hashlib
from array import array
from functools import lru_cache


def prompt_at(issue: int, n_rows: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """(epoch, row) of issue number `issue`, both counted from 0. Raises ValueError on a number out of range.

    The first call for an epoch sorts it (about two seconds for a million rows); two epochs are kept.
    """
    if issue < 0:
        raise ValueError(f"issue numbers start at 0, got {issue}")
    if n_rows < 1:
        raise ValueError("there are no rows to issue")
    epoch, place = divmod(issue, n_rows)
    return epoch, (_permutation(seed, epoch, n_rows)[place] if shuffle else place)


@lru_cache(maxsize=2)  # an epoch and the next: the feeder never looks back further
def _permutation(seed: int, epoch: int, n_rows: int) -> array[int]:
    """Row numbers in the order in which `epoch` issues them."""
    keys = [hashlib.sha256(b"%d:%d:%d" % (seed, epoch, row)).digest() for row in range(n_rows)]
    return array("Q", sorted(range(n_rows), key=keys.__getitem__))  # the sort is stable: ties keep row order
