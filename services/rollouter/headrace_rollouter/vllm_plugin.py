"""Entry point `vllm.general_plugins`: vLLM loads it in every process, the engine's workers included."""

from __future__ import annotations


def register() -> None:
    """Make the `headrace` weight-transfer backend known to vLLM. Called more than once per process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "headrace" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "headrace", "headrace_rollouter.transfer_engine", "HeadraceTransferEngine"
        )
