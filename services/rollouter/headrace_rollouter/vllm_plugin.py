"""Entry point `vllm.general_plugins`: vLLM loads it in every process, the engine's workers included."""

from __future__ import annotations

import multiprocessing

from headrace.runner.spawn import die_with


def register() -> None:
    """Make the `headrace` weight-transfer backend known to vLLM. Called more than once per process."""
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        die_with(parent.pid)()  # an engine core would serve on for nobody

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "headrace" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "headrace", "headrace_rollouter.transfer_engine", "HeadraceTransferEngine"
        )
