"""Entry point `vllm.general_plugins`: vLLM loads it in every process, the engine's workers included."""

from __future__ import annotations

import multiprocessing
import os

from headrace.service.spawn import die_with

OF_ROLLOUTER = "HEADRACE_ENGINE"
"""Variable of a rollouter's engine processes."""


def register() -> None:
    """Make the `headrace` weight-transfer backend known to vLLM. Called more than once per process."""
    starter = multiprocessing.parent_process()
    # Of a rollouter alone: elsewhere an engine may be started by a thread that ends. And no server that forks
    # may stand between.
    if OF_ROLLOUTER in os.environ and starter is not None and starter.pid == os.getppid():
        die_with(starter.pid)()  # an engine core would serve on for nobody

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "headrace" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "headrace", "headrace_rollouter.inference.transfer_engine", "HeadraceTransferEngine"
        )
