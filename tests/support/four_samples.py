"""A run of four samples, as several tests of the command line begin it."""

from __future__ import annotations

import numpy as np

from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.wire.payloads import Prompt, encode_prompt


def begin(ledger: SyncLedger) -> None:
    """Four prompts `0000000000` and so on are issued, version 0 is committed, and `a` is its member."""
    ledger.run(ops.configure(8, 1, 0, 1, 4, "print"))
    ledger.run(ops.open_term())
    ledger.run(ops.open_lineage(0))
    ledger.run(ops.finish_adopt(1))
    ids = np.array([0, 1, 2], np.int32)
    prompts = [encode_prompt(Prompt(f"{n:010d}", n, 0, n, ids, "s", "t")) for n in range(4)]
    ledger.run(ops.issue(0, prompts, end=True))
    ledger.run(ops.hold(1, 1, 1))
    ledger.run(ops.commit(1, 1, 1, 0, "d", ["a"], validate=False))
