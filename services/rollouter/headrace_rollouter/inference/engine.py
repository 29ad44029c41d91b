"""The vLLM engine of one rollouter, behind the few verbs that the rest needs.

Guarantees: the engine supplies the behaviour log-prob and policy version of each token. The pieces of an
interrupted response concatenate. Nothing is generated while `dirty`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from headrace.config.run import RunConfig
from headrace.connections.net import GLOO_INTERFACE, LOOPBACK_INTERFACE
from headrace.service.module_command import safe_path_for_children
from headrace.traces.recording import Recorder
from headrace.v1 import sync_pb2 as pb
from headrace.weights.layout import units_from_pb
from headrace.wire.payloads import FinishReason, Segment, Trajectory, extend
from headrace_rollouter.vllm_plugin import OF_ROLLOUTER

log = logging.getLogger("headrace.rollouter.engine")


_LOOK_S = 0.5
_DEAD = "the engine core has died; its last lines in this log say why"


class EngineFailed(RuntimeError):
    """The engine process is gone or misbehaves. This rollouter must be restarted."""


class NotPaused(RuntimeError):
    """A load was requested from an engine that may be generating."""


class Engine:
    """One AsyncLLM. Not thread-safe: everything runs on one event loop."""

    trace = Recorder(None, "engine")
    """Records the intervals with at least one running request. `active_s` is their sum."""

    def __init__(self, config: RunConfig, llm: Any, stop_token_ids: list[int]) -> None:
        self._config = config
        self._llm = llm
        self._stop_ids = stop_token_ids
        self._open: dict[str, float] = {}  # request id -> monotonic start time
        self._active_since: float | None = None
        self._active_s = 0.0
        self._sequence_s = 0.0
        self._counted_at = time.monotonic()
        self.dirty = False
        """Weights are only partly loaded. A full transfer must succeed before anything is generated."""
        self._exchanging = False
        self.generated_tokens = 0
        # Token progress matters only where a pause lets running work finish. Elsewhere final outputs suffice.
        self._counts_tokens = config.rule.crosses is not None

    @staticmethod
    def version() -> str:
        """Version of the inference engine, for the run's summary."""
        import vllm

        return str(vllm.__version__)

    @classmethod
    async def start(cls, config: RunConfig, stop_token_ids: list[int]) -> Engine:
        e = config.rollout.engine
        # Replicas share a machine when they run locally, so vLLM must not bind threads to cores.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # oneDNN caches a compiled kernel per shape, 1024 by default. With batches of all sizes that is
        # hundreds of megabytes and looks like a leak.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        os.environ["OMP_NUM_THREADS"] = str(e.omp_threads)
        # The engine's own process group stays on this machine. By default it would listen on the address
        # that the host name resolves to.
        os.environ[GLOO_INTERFACE] = LOOPBACK_INTERFACE
        os.environ[OF_ROLLOUTER] = "1"
        # Its Unix sockets accept pickles, so no other user may write to them.
        os.umask(os.umask(0o022) | 0o022)
        if e.tensor_parallel_size == 1:
            # On CPU the engine core then runs the model in its own process instead of an extra one.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import AsyncEngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        length = config.longest_sequence
        options: dict[str, Any] = {}
        if current_platform.is_cpu():
            # vLLM decorates small functions of its sampler and embedding with `torch.compile`, which needs a
            # C++ compiler on CPU, whatever `enforce_eager` says. The processes that run the model inherit
            # this variable and compile nothing. A value that the user has set is kept.
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
            options["kv_cache_memory_bytes"] = e.kv_cache_memory_bytes
            # A chunked prefill rewinds the generator of a seeded request. CPU generators cannot rewind, and
            # the engine dies. It would happen at a resume, which prefills all frozen requests at once.
            options["enable_chunked_prefill"] = False
            options["max_num_batched_tokens"] = max(2048, length)
        else:
            options["gpu_memory_utilization"] = e.gpu_memory_utilization
        args = AsyncEngineArgs(
            model=config.model.path,
            dtype=config.model.dtype,
            max_model_len=length,
            tensor_parallel_size=e.tensor_parallel_size,
            max_num_seqs=e.max_num_seqs,
            enforce_eager=e.enforce_eager,
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
            # After temperature: the distribution that sampled the token.
            logprobs_mode="processed_logprobs",
            # The model's own sampling defaults are not inherited.
            generation_config="vllm",
            skip_tokenizer_init=True,
            weight_transfer_config=WeightTransferConfig(backend="headrace"),
            worker_extension_cls="headrace_rollouter.inference.transfer_engine.WorkerExtension",
            disable_log_stats=False,
            **options,
        )

        class Core(AsyncLLM):
            """Is shut down in order. What is left of it at Python's own end has lost the modules it needs."""

            def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
                if not is_finalizing():
                    super().__del__()

        with safe_path_for_children():  # a model's class is looked at in a process that vLLM starts
            llm = Core.from_engine_args(args)
        return cls(config, llm, stop_token_ids)

    # -- generation ------------------------------------------------------------------------------

    async def generate(self, prompt_ids: np.ndarray, head: Trajectory, seed: int | None) -> Trajectory:
        """Continue `head` to its end. The result is UNFINISHED when the request was aborted.

        prompt_ids: (P,) int32. `seed` None means greedy.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._config.data.max_response_length - len(head.token_ids)
        greedy = seed is None
        params = SamplingParams(
            n=1,
            temperature=0.0 if greedy else head.temperature,
            top_p=1.0 if greedy else self._config.rollout.top_p,
            top_k=0 if greedy else max(0, self._config.rollout.top_k),
            max_tokens=room,
            logprobs=0,
            seed=seed,
            stop_token_ids=self._stop_ids,
            detokenize=False,
            # Partial outputs are only counted, so that a long response is seen to make progress.
            output_kind=RequestOutputKind.CUMULATIVE if self._counts_tokens else RequestOutputKind.FINAL_ONLY,
        )
        ids = prompt_ids.tolist() + head.token_ids.tolist()
        request_id = uuid.uuid4().hex
        final = None
        with self._running(request_id):
            have = 0
            async for output in self._llm.generate({"prompt_token_ids": ids}, params, request_id):
                final = output
                count = len(output.outputs[0].token_ids) if output.outputs else have
                self.generated_tokens += count - have
                have = count
        if final is None or not final.outputs:
            return head
        tail = _to_trajectory(final.outputs[0], head.temperature)
        return extend(head, tail) if len(tail.token_ids) else head

    def _running(self, request_id: str) -> _Running:
        return _Running(self, request_id)

    @property
    def running(self) -> int:
        return len(self._open)

    @property
    def active_s(self) -> float:
        """Seconds with at least one running request, pauses included."""
        since = self._active_since
        return self._active_s + (time.monotonic() - since if since is not None else 0.0)

    def sequence_s(self) -> float:
        """Integral of running sequences over time so far, in sequence-seconds."""
        now = time.monotonic()
        self._sequence_s += len(self._open) * (now - self._counted_at)
        self._counted_at = now
        return self._sequence_s

    def tokens_in_flight(self) -> int:
        """Estimate of the tokens that running requests have generated: their time at the average rate."""
        ran = self.sequence_s()
        now = time.monotonic()
        running_s = sum(now - since for since in self._open.values())
        return round(running_s * self.generated_tokens / ran) if ran > 0 else 0

    async def abort_all(self) -> None:
        """Abort every running request. Each `generate` returns what it has so far."""
        await self._llm.abort(list(self._open))

    # -- sync ------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Freeze running requests. A resume prefills them again under the weights then loaded."""
        await self._llm.pause_generation(mode="keep", clear_cache=True)

    async def resume(self, version: int) -> None:
        """Resume generation, stamping `version` on every token from here on."""
        if self.dirty:
            raise EngineFailed("asked to resume with half-loaded weights")
        await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()

    async def join_group(self, r: pb.Rendezvous, rank_offset: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with self._exchange():
            await self._llm.init_weight_transfer_engine(
                WeightTransferInitRequest(
                    init_info={
                        "host": r.host,
                        "port": r.port,
                        "epoch": r.epoch,
                        "world_size": r.world_size,
                        "rank_offset": rank_offset,
                        "transport": r.transport,
                        "timeout_s": r.timeout_s,
                    }
                )
            )

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Mark a block in which the engine's loop is blocked on the trainer. The caller sets a deadline."""
        self._exchanging = True
        try:
            yield
        finally:
            self._exchanging = False

    async def load(self, manifest: pb.Manifest) -> tuple[str, float]:
        """Receive a full set of weights. Returns (digest of the received bytes, seconds spent receiving).

        Raises NotPaused, with nothing changed, or whatever the worker raised. After a worker's error the
        engine stays `dirty` until a load succeeds.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if not await self._llm.is_paused():
            raise NotPaused("weights came for an engine that is not paused")
        self.dirty = True
        with self._exchange():
            await self._llm.start_weight_update()
            await self._llm.update_weights(
                WeightTransferUpdateRequest(
                    update_info={
                        "units": [u.to_plain() for u in units_from_pb(manifest.units)],
                        "bucket_bytes": manifest.bucket_bytes,
                    }
                )
            )
            await self._llm.finish_weight_update()
            answers = await self._llm.collective_rpc("headrace_weight_digest")
        digests = {digest for digest, _ in answers}
        if len(digests) != 1:
            raise EngineFailed(f"workers of one engine received different weights: {sorted(digests)}")
        self.dirty = False
        return digests.pop(), max(seconds for _, seconds in answers)

    async def canary(self, canary: pb.Canary) -> float:
        """Largest |log-prob difference| between this engine and the trainer over the canary's tokens."""
        from vllm import SamplingParams

        ids = list(canary.token_ids)
        if len(ids) < 2:
            return 0.0
        params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        final = None
        async for output in self._llm.generate(
            {"prompt_token_ids": ids}, params, f"canary-{uuid.uuid4().hex}"
        ):
            final = output
        if final is None or final.prompt_logprobs is None:
            raise EngineFailed("the engine gave no log-probs for the canary")
        ours = [entry[token].logprob for entry, token in zip(final.prompt_logprobs[1:], ids[1:], strict=True)]
        return float(np.abs(np.asarray(ours) - np.asarray(canary.log_probs)).max())

    # -- life ------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Never return. Raises EngineFailed soon after the engine core has died, which vLLM detects."""
        while not self._llm.errored:  # noqa: ASYNC110 - vLLM offers a flag, not an event
            await asyncio.sleep(_LOOK_S)
        raise EngineFailed(_DEAD)

    async def check(self) -> None:
        """Raise EngineFailed when the engine does not answer.

        During a weight transfer even a healthy engine cannot answer, for longer than a probe waits. The
        check then passes, because transfers have deadlines of their own.
        """
        if self._llm.errored:
            raise EngineFailed(_DEAD)
        if self._exchanging:
            return
        try:
            await asyncio.wait_for(self._llm.is_paused(), 30.0)
        except Exception as error:  # vLLM raises many kinds; they all mean the same here
            raise EngineFailed(f"the engine does not answer: {error!r}") from error

    @property
    def workers(self) -> int:
        return self._config.rollout.engine.tensor_parallel_size

    def shutdown(self) -> None:
        self._llm.shutdown()


class _Running:
    """Counts a request as running for the duration of a `with` block."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine, self._id = engine, request_id

    def __enter__(self) -> None:
        e = self._engine
        e.sequence_s()  # account for the time so far, before the number of open requests changes
        if not e._open:
            e._active_since = time.monotonic()
        e._open[self._id] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        e = self._engine
        e.sequence_s()
        e._open.pop(self._id, None)
        if not e._open and e._active_since is not None:
            now = time.monotonic()
            e._active_s += now - e._active_since
            e.trace.complete("busy", int(e._active_since * 1e9), int(now * 1e9), track="engine")
            e._active_since = None


def _to_trajectory(completion: Any, temperature: float) -> Trajectory:
    """Convert one vLLM completion: ids, log-probs and version spans as the engine gave them."""
    ids = np.asarray(completion.token_ids, dtype=np.int32)
    log_probs = np.asarray(
        [
            entry[token].logprob
            for entry, token in zip(completion.logprobs or [], completion.token_ids, strict=True)
        ],
        dtype=np.float32,
    )
    segments = [
        Segment(int(span.version), int(span.start), int(span.end))
        for span in completion.weight_versions or []
        if span.end > span.start
    ]
    reason = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(
        completion.finish_reason, FinishReason.UNFINISHED
    )
    # Rounding can put the log-prob of a token with probability 1 slightly above zero.
    return Trajectory(
        ids, np.minimum(log_probs, 0.0), np.ones(len(ids), np.uint8), segments, temperature, reason
    )
