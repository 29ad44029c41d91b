"""New weights reach a real engine: what it scores afterwards is what the trainer's model scores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.config.run import RunConfig
from headrace.models.checkpoint_format import check_names
from headrace.v1 import sync_pb2 as pb
from headrace.weights.layout import units_to_pb
from headrace.weights.snapshot import Snapshot
from headrace.weights.transports import connect
from headrace.weights.transports.store import serve_store
from headrace.wire.payloads import FinishReason, empty_trajectory
from tests.support import tiny_models

pytestmark = pytest.mark.slow

CANARY = [1, 5, 9, 33, 70, 12, 8, 90, 41, 7, 3, 64, 22, 19]


def run_config(model_dir: Path, **rollout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model_dir), "dtype": "float32"},
            "data": {"train_files": ["unused"], "max_prompt_length": 32, "max_response_length": 64},
            "rollout": {
                "total_rollout_steps": 8,
                "test_freq": 0,
                "engine": {"kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 8},
                **rollout,
            },
            "actor": {"ppo_mini_batch_size": 2},
            "custom_reward_function": {"path": "unused"},
        }
    )


class Sender:
    """The trainer's side of a transfer, without FSDP: one rank that holds the whole model."""

    def __init__(self, model: torch.nn.Module, bucket_bytes: int = 4096) -> None:
        self.store = serve_store("127.0.0.1")
        self.snapshot = Snapshot(model, "float32", bucket_bytes, None)
        self.bucket_bytes = bucket_bytes
        self.epoch = 0

    def rendezvous(self) -> pb.Rendezvous:
        self.epoch += 1
        return pb.Rendezvous(
            host="127.0.0.1",
            port=self.store.port,
            epoch=self.epoch,
            world_size=2,
            transport="gloo",
            timeout_s=30,
        )

    def manifest(self) -> pb.Manifest:
        return pb.Manifest(
            units=units_to_pb(self.snapshot.units), bucket_bytes=self.bucket_bytes, bytes=self.snapshot.nbytes
        )

    def connect(self, r: pb.Rendezvous) -> Any:
        return connect("gloo", r.host, r.port, r.epoch, 0, 2, r.timeout_s, torch.device("cpu"))

    def send(self, comm: Any) -> str:
        import hashlib

        digest = hashlib.sha256()
        for packed in self.snapshot.gather():
            assert packed is not None
            digest.update(packed.numpy().data)
            for start in range(0, packed.numel(), self.bucket_bytes):
                comm.broadcast(packed[start : start + self.bucket_bytes])
        return digest.hexdigest()


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied", "qwen3-moe"])
async def test_engine_scores_like_the_trainer_after_every_sync(kind: str, tmp_path: Path) -> None:
    from headrace_rollouter.inference.engine import Engine

    model = tiny_models.save(kind, tmp_path)
    engine = await Engine.start(run_config(tmp_path), [2])
    try:
        first = pb.Canary(token_ids=CANARY, log_probs=tiny_models.token_log_probs(model, CANARY))
        await engine.resume(0)
        assert await engine.canary(first) < 1e-4, "the engine loads the checkpoint differently"
        sender = Sender(model)
        check_names(tmp_path, [t.name for u in sender.snapshot.units for t in u.tensors])
        r = sender.rendezvous()
        comm, _ = await asyncio.gather(asyncio.to_thread(sender.connect, r), engine.join_group(r, 1))
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            sender.snapshot.write()
            canary = pb.Canary(token_ids=CANARY, log_probs=tiny_models.token_log_probs(model, CANARY))
            assert await engine.canary(canary) > 1e-2, "the new weights change nothing: the test is blind"
            await engine.pause()
            digest, (received, _) = await asyncio.gather(
                asyncio.to_thread(sender.send, comm), engine.load(sender.manifest())
            )
            assert received == digest
            await engine.resume(version)
            assert await engine.canary(canary) <= 1e-4
            t = await engine.generate(np.asarray([1, 5, 9], np.int32), empty_trajectory(1.0), seed=3)
            assert [(s.version, s.start, s.end) for s in t.segments] == [(version, 0, len(t.token_ids))]
        comm.close()
    finally:
        engine.shutdown()


async def test_interrupted_response_keeps_versions_and_log_probs_of_its_samplers(tmp_path: Path) -> None:
    """A response that crosses a sync: each token's log-prob is that of the weights that sampled it."""
    from headrace_rollouter.inference.engine import Engine

    model = tiny_models.save("llama", tmp_path)
    engine = await Engine.start(run_config(tmp_path), [])
    prompt = [1, 5, 9]
    try:
        await engine.resume(0)
        sender = Sender(model)
        r = sender.rendezvous()
        comm, _ = await asyncio.gather(asyncio.to_thread(sender.connect, r), engine.join_group(r, 1))
        old = tiny_models.build("llama")
        old.load_state_dict(model.state_dict())
        running = [
            asyncio.create_task(engine.generate(np.asarray(prompt, np.int32), empty_trajectory(0.7), seed=s))
            for s in range(8)
        ]
        while engine.running < 8:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # not a wait for a condition: lets some tokens come, any number will do
        await engine.pause()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        sender.snapshot.write()
        await asyncio.gather(asyncio.to_thread(sender.send, comm), engine.load(sender.manifest()))
        await engine.resume(1)
        results = await asyncio.gather(*running)
        crossed = [t for t in results if t.versions == (0, 1)]
        assert crossed, f"no response crossed the sync: {[t.segments for t in results]}"
        for t in results:
            stopped = t.finish_reason is FinishReason.STOP
            assert (t.token_ids[-1] == 2) if stopped else (len(t.token_ids) == 64)
            ids = torch.tensor([prompt + t.token_ids.tolist()])
            for segment in t.segments:
                scorer = old if segment.version == 0 else model
                with torch.no_grad():
                    logits = scorer(input_ids=ids).logits[0].float() / 0.7
                lps = torch.log_softmax(logits, -1)
                for at in range(segment.start, segment.end):
                    expected = float(lps[len(prompt) + at - 1, t.token_ids[at]])
                    assert abs(expected - float(t.log_probs[at])) < 1e-4
        comm.close()
    finally:
        engine.shutdown()


async def test_an_interrupted_greedy_response_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Frozen in place while the same weights come again, or aborted and continued from its tokens."""
    from headrace_rollouter.inference.engine import Engine

    model = tiny_models.save("llama", tmp_path)
    engine = await Engine.start(run_config(tmp_path), [])
    prompts = [np.asarray([1, 5 + i, 9 + 3 * i], np.int32) for i in range(8)]

    async def started() -> list[asyncio.Task[Any]]:
        """All running, and some tokens of them there."""
        before = engine.generated_tokens
        tasks = [asyncio.create_task(engine.generate(p, empty_trajectory(1.0), seed=None)) for p in prompts]
        while engine.generated_tokens < before + 24:
            await asyncio.sleep(0)
        return tasks

    try:
        await engine.resume(0)
        whole = [await engine.generate(p, empty_trajectory(1.0), seed=None) for p in prompts]
        sender = Sender(model)
        sender.snapshot.write()
        r = sender.rendezvous()
        comm, _ = await asyncio.gather(asyncio.to_thread(sender.connect, r), engine.join_group(r, 1))
        tasks = await started()
        await engine.pause()
        await asyncio.gather(asyncio.to_thread(sender.send, comm), engine.load(sender.manifest()))
        await engine.resume(1)
        frozen = await asyncio.gather(*tasks)
        assert any(t.versions == (0, 1) for t in frozen), "no response crossed the sync"

        tasks = await started()
        await engine.abort_all()
        heads = await asyncio.gather(*tasks)
        assert any(0 < len(t.token_ids) < len(w.token_ids) for t, w in zip(heads, whole, strict=True))
        continued = [
            t if t.finish_reason is not FinishReason.UNFINISHED else await engine.generate(p, t, seed=None)
            for p, t in zip(prompts, heads, strict=True)
        ]
        for wanted, *found in zip(whole, frozen, continued, strict=True):
            for t in found:
                assert t.token_ids.tolist() == wanted.token_ids.tolist()
                assert t.finish_reason is wanted.finish_reason
                np.testing.assert_allclose(t.log_probs, wanted.log_probs, atol=1e-4)
                ends = [(s.start, s.end) for s in t.segments]
                assert [0, *(end for _, end in ends)] == [*(start for start, _ in ends), len(t.token_ids)]
        comm.close()
    finally:
        engine.shutdown()
