"""Every number of tests/data/algorithms.json, or of the file HEADRACE_VECTORS names, against our functions.

Nothing here repeats the data: parameters come from the entries and their names. Each leaf of the file is
either an input that a comparison reads or an expectation that it compares;
`test_every_entry_of_the_vectors_is_known` fails on a leaf that is neither. Token tensors are compared on the
tokens of the mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS
from headrace.algorithms.registries import AGGREGATIONS, KL_PENALTIES
from tests.fast.algorithms import vectors_advantages as advantages
from tests.fast.algorithms import vectors_losses as losses
from tests.fast.algorithms import vectors_mismatch as mismatch
from tests.fast.algorithms.vectors_file import DATA, Vectors, leaves

torch.set_num_threads(1)

EXPECTED_FAILURES: dict[str, str] = {}
"""Case id: why our number differs on purpose."""

Case = Callable[[Vectors, str], None]


def read_only(section: str) -> Case:
    """A section of inputs alone."""
    return lambda v, _: v.read(section) and None


PER_ENTRY: dict[str, Case] = {
    "advantage_estimators": advantages.advantage_estimators,
    "agg_loss": losses.agg_loss,
    "kl_penalty": losses.kl_penalty,
    "policy_losses": losses.policy_losses,
    "value_loss": losses.value_loss_cases,
    "rollout_correction": mismatch.rollout_correction,
    "dapo_overlong": losses.dapo_overlong,
    "areal": mismatch.areal,
    "legacy_rollout_correction": mismatch.legacy_rollout_correction,
    "tppo_egae": advantages.tppo_egae,
    "capacity": mismatch.capacity,
}
WHOLE: dict[str, Case] = {
    "_meta": read_only("_meta"),
    "batch": read_only("batch"),
    "advantage_config": read_only("advantage_config"),
    "agg_loss_matrix": read_only("agg_loss_matrix"),
    "loss_advantages": read_only("loss_advantages"),
    "loss_is_weights": read_only("loss_is_weights"),
    "masked_whiten": advantages.masked_whiten,
    "adaptive_kl": losses.adaptive_kl,
    "entropy": losses.entropy,
    "prime_rl_default_loss": losses.prime_rl_default_loss,
    "aipo_hand": losses.aipo_hand,
    "magistral_advantage": advantages.magistral_advantage,
    "pipelinerl_advantage": advantages.pipelinerl_advantage,
}


def cases() -> Iterator[tuple[str, Case, str]]:
    """(id, comparison, its argument) of every entry of a known section."""
    for section, value in DATA.items():
        if section in PER_ENTRY:
            entries = map(str, range(len(value))) if isinstance(value, list) else value
            for entry in entries:
                yield f"{section}/{entry}", PER_ENTRY[section], entry
        elif section in WHOLE:
            yield section, WHOLE[section], ""


def marked() -> list[Any]:
    return [
        pytest.param(
            comparison,
            entry,
            id=name,
            marks=[pytest.mark.xfail(reason=EXPECTED_FAILURES[name], strict=True)]
            if name in EXPECTED_FAILURES
            else [],
        )
        for name, comparison, entry in cases()
    ]


@pytest.mark.parametrize(("comparison", "entry"), marked())
def test_vectors(comparison: Case, entry: str) -> None:
    comparison(Vectors(), entry)


def test_every_entry_of_the_vectors_is_known() -> None:
    v = Vectors()
    for name, comparison, entry in cases():
        if name in EXPECTED_FAILURES:
            section, _, key = name.partition("/")
            v.read(section, *([key] if key else []))
            continue
        try:
            comparison(v, entry)
        except Exception as error:  # of any kind: a comparison is code of the tests
            # The entry's own test reports it; here only what no comparison looks at counts.
            print(f"{name}: {error}")
            v.read(*name.split("/", 1))
    unknown = ["/".join(path) for path in leaves(DATA, ()) if path not in v.known]
    assert unknown == []


def test_every_aggregation_and_penalty_has_vectors() -> None:
    assert set(AGGREGATIONS.names()) <= set(DATA["agg_loss"])
    assert set(KL_PENALTIES.names()) <= set(DATA["kl_penalty"])


def test_every_estimator_has_vectors() -> None:
    named = {re.sub(r"\(.*", "", name) for name in DATA["advantage_estimators"]}
    elsewhere = {
        "tppo": "tppo_egae",
        "magistral": "magistral_advantage",
        "pipelinerl": "pipelinerl_advantage",
    }
    for name in ADVANTAGE_ESTIMATORS.names():
        if not ADVANTAGE_ESTIMATORS.get(name).__module__.startswith("headrace."):
            continue  # another test's
        assert name in named or elsewhere[name] in DATA
