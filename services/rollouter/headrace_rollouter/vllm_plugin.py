"""Entry point `vllm.general_plugins`: vLLM loads it in every process, the engine's workers included."""

from __future__ import annotations

import multiprocessing
import os

from headrace.service.spawn import die_with

OF_ROLLOUTER = "HEADRACE_ENGINE"
"""Environment variable that marks a rollouter's engine processes."""


def register() -> None:
    """Make the `headrace` weight-transfer backend known to vLLM. Called more than once per process."""
    starter = multiprocessing.parent_process()
    # Only in a rollouter: elsewhere a short-lived thread may start the engine, and its end would kill it.
    # The starter must also be the direct parent, with no fork server in between.
    if OF_ROLLOUTER in os.environ and starter is not None and starter.pid == os.getppid():
        die_with(starter.pid)()  # otherwise an orphaned engine core would keep running

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "headrace" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "headrace", "headrace_rollouter.inference.transfer_engine", "HeadraceTransferEngine"
        )
