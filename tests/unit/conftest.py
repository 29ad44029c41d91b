"""What tests of the trainer share; imported where it is used, since most unit tests need no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.wire import Sample
    from headrace_trainer.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A process group of one."""
    from tests.single_rank import single_rank

    with single_rank() as found:
        yield found


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Four groups of four: unequal lengths, temperatures and masks."""
    from tests.unit import test_gradient_equivalence as equivalence

    return equivalence.samples("llama-tied")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama on disk, the one that sampled `samples`."""
    from tests.integration import tiny_models

    directory = tmp_path_factory.mktemp("model")
    tiny_models.save("llama-tied", directory)
    return str(directory)
