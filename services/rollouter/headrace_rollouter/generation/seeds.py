"""Deterministic sampling seeds."""

from __future__ import annotations

import hashlib


def sampling_seed(run_seed: int, sample_id: str, index: int, have: int, failures: int = 0) -> int:
    """Seed of one trajectory that already has `have` tokens, a pure function of the arguments.

    `failures` enters the seed so that a sample that failed is not sampled in the same way again.
    """
    again = f"/{failures}" if failures else ""
    digest = hashlib.sha256(f"{run_seed}/{sample_id}/{index}/{have}{again}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)
