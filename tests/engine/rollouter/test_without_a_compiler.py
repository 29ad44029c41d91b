"""On CPU a rollouter generates where no compiler is installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.config.run import RunConfig
from headrace.wire.payloads import empty_trajectory
from tests import no_compiler
from tests.engine.weights.test_weight_transfer import run_config
from tests.support import tiny_models

pytestmark = pytest.mark.slow

LENGTH = 16
# What makes vLLM compile most: its embedding over several workers has a compiled function, as its sampler,
# and `enforce_eager: false`, a GPU's setting, asks for a compiled model.
ENGINE = {"tensor_parallel_size": 2, "enforce_eager": False}


async def generate(model: Path, result: Path) -> None:
    """Writes a trajectory's tokens and log-probs as JSON to `result`."""
    from headrace_rollouter.inference.engine import Engine

    plain = run_config(model).to_plain()
    plain["rollout"]["engine"] |= ENGINE
    plain["data"]["max_response_length"] = LENGTH
    engine = await Engine.start(RunConfig.model_validate(plain), [])
    try:
        await engine.resume(0)
        work = engine.generate(np.asarray([1, 5, 9], np.int32), empty_trajectory(1.0), 7)
        made = await asyncio.wait_for(work, 60.0)
        result.write_text(json.dumps([made.token_ids.tolist(), made.log_probs.tolist()]))
    finally:
        engine.shutdown()


def test_log_probs_come_without_a_compiler(tmp_path: Path) -> None:
    """From two workers; with one the whole run of test_run.py has no compiler either."""
    model = tiny_models.save("llama", tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-m", __name__, tmp_path / "model", tmp_path / "result"],
        env=no_compiler.environment(tmp_path / "machine"),
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    tokens, log_probs = json.loads((tmp_path / "result").read_text())
    assert len(tokens) == LENGTH
    told = tiny_models.token_log_probs(model, [1, 5, 9, *tokens])
    np.testing.assert_allclose(log_probs, told[2:], atol=1e-4)


if __name__ == "__main__":
    asyncio.run(generate(Path(sys.argv[1]), Path(sys.argv[2])))
