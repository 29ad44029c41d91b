"""Where the randomness of sampling comes from."""

from __future__ import annotations

import hashlib


def sampling_seed(run_seed: int, sample_id: str, index: int, have: int, failures: int = 0) -> int:
    """Seed of one trajectory, a pure function of what it is; `have` tokens already exist.

    A sample that has failed is not sampled in the same way again.
    """
    again = f"/{failures}" if failures else ""
    digest = hashlib.sha256(f"{run_seed}/{sample_id}/{index}/{have}{again}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & (2**63 - 1)
