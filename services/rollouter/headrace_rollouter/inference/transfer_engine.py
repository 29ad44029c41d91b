"""vLLM weight-transfer backend: receives packed buckets over a Headrace communicator.

Runs inside the engine's worker process. One update is start (layer-wise reload begins) -> receive
(every bucket, in order) -> finish (reload ends). If any of them raises, the model is half-loaded and
must not generate until a full update has succeeded.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from headrace.plugins.transports import TRANSPORTS
from headrace.weights.layout import Unit, unpack
from headrace.weights.transports import Communicator, connect


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where to meet, and the rank of this engine's first worker."""

    host: str
    port: int
    epoch: int
    world_size: int
    rank_offset: int
    transport: str
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`units`: [[[name, dtype, shape], ...], ...] in the order in which they arrive."""

    units: list[list[Any]] = field(default_factory=list)
    bucket_bytes: int = 0


class HeadraceTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._comm: Communicator | None = None
        self.last_digest = ""
        self.last_receive_s = 0.0

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # close the old communicator first
        self._comm = connect(
            init_info.transport,
            init_info.host,
            init_info.port,
            init_info.epoch,
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            init_info.timeout_s,
            self.device if TRANSPORTS.get(init_info.transport).memory == "cuda" else torch.device("cpu"),
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do what the base class does, but skip its accelerator synchronisation on CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._comm is None:
            raise RuntimeError("weights announced before a weight group was joined")
        began = time.monotonic()
        digest = hashlib.sha256()
        for raw_unit in update_info.units:
            unit = Unit.from_plain(raw_unit)
            self.model.load_weights(self._receive(self._comm, unit, update_info.bucket_bytes, digest))
        self.last_digest = digest.hexdigest()
        self.last_receive_s = time.monotonic() - began

    def _receive(
        self, comm: Communicator, unit: Unit, bucket_bytes: int, digest: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        # A fresh buffer per unit: the layer-wise reload keeps tensors until their layer is complete.
        on = self.device if self.device.type != "cpu" else torch.device("cpu")
        packed = torch.empty(unit.nbytes, dtype=torch.uint8, device=on)
        for start in range(0, unit.nbytes, bucket_bytes):
            comm.broadcast(packed[start : start + bucket_bytes])
        digest.update(packed.cpu().numpy().data)
        yield from unpack(packed, unit)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_for_cpu(self.model)

    def shutdown(self) -> None:
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.close()


def _repack_for_cpu(model: torch.nn.Module) -> None:
    """Repack the weights that the CPU backend packs once at start-up and a reload does not update.

    Without this the output head (tied embeddings) and MoE experts silently keep using their old packed
    weights. Only CPU kernels keep such copies.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


class WorkerExtension:
    """Methods that vLLM mixes into its worker class, called by `collective_rpc`."""

    weight_transfer_engine: HeadraceTransferEngine

    def headrace_weight_digest(self) -> tuple[str, float]:
        """SHA-256 of the bytes of the last update, and the seconds spent receiving them."""
        return self.weight_transfer_engine.last_digest, self.weight_transfer_engine.last_receive_s
