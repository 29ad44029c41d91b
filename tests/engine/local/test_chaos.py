"""A short run of `make chaos`: one fault of each family, and no sample lost or trained twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import shared_run
from tests.chaos.kinds import KINDS, plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 3
SHORT = [
    "lost replies",
    "kill engine core",
    "Valkey restart",
    "freeze rollouter",
    "raising reward",
    "member receives",
]


def test_a_run_under_faults_loses_nothing(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    faults = list(enumerate(SHORT, start=1))
    verdict = shared_run(tmp_path / "run", faults, SEED, samples_per_fault=160, overrides=[])
    assert not verdict.troubles, "\n".join(verdict.troubles)
    assert verdict.line == f"chaos: {len(SHORT)} faults, 0 lost, 0 trained twice"


def test_every_kind_comes_as_often_as_the_others() -> None:
    import random

    kinds = plan(2 * len(KINDS) + 3, random.Random(SEED))
    counts = {kind: kinds.count(kind) for kind in KINDS}
    assert set(counts.values()) <= {2, 3}
    assert sum(counts.values()) == 2 * len(KINDS) + 3
    assert plan(5, random.Random(SEED)) == kinds[:5], "the same seed gives the same faults"
