import logging
import time

import numpy as np

from headrace.wire.payloads import Trajectory
from headrace_rollouter.inference.engine import Engine

log = logging.getLogger("headrace_example")


class TimedEngine(Engine):
    """vLLM, with the time of each response in the log."""

    async def generate(self, prompt_ids: np.ndarray, head: Trajectory, seed: int | None) -> Trajectory:
        began = time.monotonic()
        done = await super().generate(prompt_ids, head, seed)
        seconds = round(time.monotonic() - began, 3)
        log.info("response", extra={"seconds": seconds, "tokens": len(done.token_ids)})
        return done
