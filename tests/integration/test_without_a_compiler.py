"""On CPU a rollouter generates where no compiler is installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.wire import empty_trajectory
from tests import no_compiler
from tests.integration import tiny_models
from tests.integration.test_weight_transfer import run_config

pytestmark = pytest.mark.slow

LENGTH = 16


async def generate(model: Path, engine_options: dict[str, object]) -> None:
    """Prints a trajectory's tokens and log-probs."""
    from headrace_rollouter.engine import Engine

    plain = run_config(model).to_plain()
    plain["rollout"]["engine"] |= engine_options
    plain["data"]["max_response_length"] = LENGTH
    engine = await Engine.start(type(run_config(model)).model_validate(plain), [])
    try:
        await engine.resume(0)
        work = engine.generate(np.asarray([1, 5, 9], np.int32), empty_trajectory(1.0), 7)
        made = await asyncio.wait_for(work, 60.0)
        print(json.dumps([made.token_ids.tolist(), made.log_probs.tolist()]))
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    "engine_options",
    [{"enforce_eager": False}, {"tensor_parallel_size": 2}],
    ids=["one worker", "two workers"],
)
def test_log_probs_come_without_a_compiler(engine_options: dict[str, object], tmp_path: Path) -> None:
    """vLLM's sampler counts ranks in a compiled function, its embedding over several workers has another.

    `enforce_eager: false` is a GPU's setting, which on CPU would compile the whole model.
    """
    model = tiny_models.save("llama", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", __name__, tmp_path / "model", json.dumps(engine_options)],
        env=no_compiler.environment(tmp_path / "machine"),
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    tokens, log_probs = json.loads(done.stdout.splitlines()[-1])
    assert len(tokens) == LENGTH
    told = tiny_models.token_log_probs(model, [1, 5, 9, *tokens])
    np.testing.assert_allclose(log_probs, told[2:], atol=1e-4)


if __name__ == "__main__":
    asyncio.run(generate(Path(sys.argv[1]), json.loads(sys.argv[2])))
