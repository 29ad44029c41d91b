"""The order in which prompts are issued, as a pure function of the run's seed.

What this module guarantees:

- The mapping from issue number to (epoch, row) depends only on (seed, sizes, weights, shuffle). It does not
  depend on the process, on earlier issues, on the Python version or on a random generator's implementation.
  A run can therefore resume from any retained checkpoint, and a lost prompt can be recreated.
- Every epoch issues every row exactly once. In a mixture each entry has its own epochs, and every row of
  every entry is issued again and again.

Shuffling an epoch sorts its rows by the keys

    key(row) = SHA-256 of the ASCII text "{seed}:{epoch}:{row}"  (decimal, no padding)

ascending as bytes. Equal keys, which have never been observed, fall back to the row number.

A mixture is issued in blocks of N prompts. N is the total number of rows, or more if an entry would otherwise
get less than one prompt per block. With s(i) = (w(1) + ... + w(i)) / (w(1) + ... + w(n)) and
C(i, b) = floor(N b s(i)), block b holds C(i, b + 1) - C(i, b) - C(i - 1, b + 1) + C(i - 1, b) prompts of
entry i. After any number of blocks an entry has had its share to within one prompt. Within a block the
places are shuffled by the keys "{seed}:mix:{block}:{place}", or spread evenly without shuffling. The prompts
of an entry come from its own rows, in the order above with "{seed}/{entry}" as the seed (entries from 0).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Protocol


class FeedOrder(Protocol):
    """Maps issue numbers to prompts."""

    def at(self, issue: int) -> tuple[int, int]:
        """(epoch, row) of issue number `issue`, all counted from 0.

        `epoch` is how often the row has been issued before. Raises ValueError on a number out of range.
        """
        ...


def feed_order(sizes: Sequence[int], weights: Sequence[float] | None, seed: int, shuffle: bool) -> FeedOrder:
    """The order for consecutive entries of `sizes` rows: all rows alike, or mixed by `weights` (above 0)."""
    if weights is None:
        return AllRows(sum(sizes), seed, shuffle)
    return Mixture(sizes, weights, seed, shuffle)


class AllRows:
    """Issues all rows, epoch after epoch."""

    def __init__(self, n_rows: int, seed: int, shuffle: bool) -> None:
        self.n_rows, self.seed, self.shuffle = n_rows, seed, shuffle

    def at(self, issue: int) -> tuple[int, int]:
        return prompt_at(issue, self.n_rows, self.seed, self.shuffle)


class Mixture:
    """Issues entries in proportion to their weights. Caches the two latest blocks and epochs."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        if len(sizes) != len(weights) or not sizes or min(sizes) < 1 or min(weights) <= 0:
            raise ValueError(f"each entry needs rows and a weight above 0, got {sizes} and {weights}")
        self.sizes, self.seed, self.shuffle = tuple(sizes), seed, shuffle
        exact = [Fraction(str(weight)) for weight in weights]
        self.shares = [weight / sum(exact) for weight in exact]
        self.block = max(sum(sizes), *(-(-share.denominator // share.numerator) for share in self.shares))
        self._sums = [sum(self.shares[:number], Fraction(0)) for number in range(len(sizes) + 1)]
        self._first_row = [sum(sizes[:number]) for number in range(len(sizes))]
        self._places = lru_cache(maxsize=2)(self._make_places)
        self._permutation = lru_cache(maxsize=2 * len(sizes))(_permutation)

    def at(self, issue: int) -> tuple[int, int]:
        if issue < 0:
            raise ValueError(f"issue numbers start at 0, got {issue}")
        block, place = divmod(issue, self.block)
        entries, counts = self._places(block)
        entry = entries[place]
        epoch, number = divmod(self.issued_before(block, entry) + counts[place], self.sizes[entry])
        if self.shuffle:
            number = self._permutation(f"{self.seed}/{entry}", epoch, self.sizes[entry])[number]
        return epoch, self._first_row[entry] + number

    def issued_before(self, block: int, entry: int) -> int:
        """Prompts of `entry` in all blocks before `block`."""
        issued = self.block * block
        return int(issued * self._sums[entry + 1]) - int(issued * self._sums[entry])

    def _make_places(self, block: int) -> tuple[array[int], array[int]]:
        """For each place of the block: its entry, and how many of that entry's prompts precede it there."""
        quotas = [
            self.issued_before(block + 1, entry) - self.issued_before(block, entry)
            for entry in range(len(self.sizes))
        ]
        owners = [entry for entry, quota in enumerate(quotas) for _ in range(quota)]
        if self.shuffle:
            keys = [
                hashlib.sha256(b"%d:mix:%d:%d" % (self.seed, block, n)).digest() for n in range(self.block)
            ]
            order = sorted(range(self.block), key=keys.__getitem__)
        else:
            at = [Fraction(2 * n + 1, 2 * quota) for quota in quotas for n in range(quota)]
            order = sorted(range(self.block), key=at.__getitem__)
        entries, counts, seen = array("Q"), array("Q"), [0] * len(quotas)
        for place in order:
            entry = owners[place]
            entries.append(entry)
            counts.append(seen[entry])
            seen[entry] += 1
        return entries, counts


def prompt_at(issue: int, n_rows: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """(epoch, row) of issue number `issue`, both counted from 0. Raises ValueError on a number out of range.

    The first call for an epoch sorts it (about two seconds for a million rows). Two epochs are cached.
    """
    if issue < 0:
        raise ValueError(f"issue numbers start at 0, got {issue}")
    if n_rows < 1:
        raise ValueError("there are no rows to issue")
    epoch, place = divmod(issue, n_rows)
    return epoch, (_latest_permutations(str(seed), epoch, n_rows)[place] if shuffle else place)


def _permutation(seed: str, epoch: int, n_rows: int) -> array[int]:
    """Row numbers in the order in which `epoch` issues them."""
    start = f"{seed}:{epoch}:".encode()
    keys = [hashlib.sha256(b"%b%d" % (start, row)).digest() for row in range(n_rows)]
    return array("Q", sorted(range(n_rows), key=keys.__getitem__))  # the sort is stable: ties keep row order


_latest_permutations = lru_cache(maxsize=2)(_permutation)
"""Two epochs are enough: the feeder never goes back further."""
