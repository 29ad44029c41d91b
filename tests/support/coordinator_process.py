"""A sync coordinator as a process, with its run's configuration, its ledger and a way to reach it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import redis
import yaml

from headrace.connections.net import unix_address
from headrace.connections.variables import bearer
from headrace.ledger import SyncLedger, adopt, ops
from headrace.ledger.replies import Stats
from headrace.local.valkey_server import ValkeyServer
from headrace.v1 import sync_pb2 as pb
from headrace.v1 import sync_pb2_grpc
from tests.support.coordinator_peers import TOKEN, Member, Peer, Trainer

PASSWORD = "secret"


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Poll until `condition` is true and return its value; the failure names what was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        await asyncio.sleep(0.01)


class Coordinator:
    """A run: its files, its ledger, the coordinator's process and the peers that talk to it."""

    def __init__(self, folder: Path, server: ValkeyServer, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.url = server.url
        self.port = 0
        self.socket: Path | None = None
        """Where it listens instead, from its next start on."""
        self.process: subprocess.Popen[bytes] | None = None
        self.peers: list[Peer] = []
        self._channel: grpc.aio.Channel | None = None
        self._log_from = 0
        folder.mkdir()
        config: dict[str, Any] = {
            "name": folder.name,
            "model": {"path": "nowhere"},
            "data": {"train_files": ["nowhere.jsonl"]},
            "rollout": {"n": 2, "total_rollout_steps": 1000, "test_freq": 0},
            "actor": {"ppo_mini_batch_size": 4},
            "async_training": {"staleness_threshold": 1},
            "custom_reward_function": {"path": "headrace.demo.reward"},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump({**config, **settings}))
        self.ledger = SyncLedger(redis.Redis.from_url(server.url), folder.name)
        self.ledger.run(ops.configure(8, 4, 1, 1, 1000, "print"))

    # -- the process -----------------------------------------------------------------------------

    def start(self, *options: str, token: str = TOKEN) -> subprocess.Popen[bytes]:
        """Start the process on the port that it had; returns at once."""
        env = {**os.environ, "HEADRACE_REDIS_URL": self.url, "HEADRACE_TOKEN": token}
        command = [sys.executable, "-m", "headrace_coordinator", "--config", str(self.folder / "run.yaml")]
        self._log_from = len(self.log())
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *self._where(), *options], env=env, stdout=log, stderr=log
            )
        return self.process

    async def up(self) -> Coordinator:
        """Start, and return once it serves."""
        self.start()
        served = await until(self._served, f"the coordinator to serve; its log: {self.folder / 'log'}", 90.0)
        self.port = served.get("port", 0)
        return self

    def _where(self) -> list[str]:
        return ["--socket", str(self.socket)] if self.socket else ["--port", str(self.port)]

    def _served(self) -> dict[str, Any] | None:
        assert self.process is not None
        log = self.log()[self._log_from :]
        assert self.process.poll() is None, log
        events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        return next((event for event in events if event["event"] == "serving"), None)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    async def exit_code(self, timeout_s: float = 30.0) -> int:
        """Of the process that was started, once it has ended."""
        assert self.process is not None
        process = self.process
        await until(lambda: process.poll() is not None, "the process to end", timeout_s)
        return process.returncode

    @property
    def address(self) -> str:
        return unix_address(self.socket) if self.socket else f"127.0.0.1:{self.port}"

    async def close(self) -> None:
        for peer in self.peers:
            await peer.close()
        if self._channel is not None:
            await self._channel.close()
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.ledger.close()

    # -- the peers and the ledger ----------------------------------------------------------------

    async def member(self, name: str, **state: Any) -> Member:
        """A member that is connected and welcome."""
        member = Member(self.address, name, **state)
        self.peers.append(member)
        await member.connect()
        await member.expect("welcome")
        return member

    async def trainer(self, lineage: int | None = None, snapshot: int = -1, nccl: str = "") -> Trainer:
        """A trainer that is connected and welcome, by default of a lineage opened just now."""
        trainer = Trainer(self.address, lineage or self.open_lineage(), snapshot, nccl)
        self.peers.append(trainer)
        await trainer.connect()
        await trainer.expect("welcome")
        return trainer

    def open_lineage(self) -> int:
        """What a trainer does first at its start."""
        reply = self.ledger.run(ops.open_lineage(self.stats().lineage))
        assert reply.ok
        adopt(self.ledger, reply.lineage, {})
        return reply.lineage

    def stats(self) -> Stats:
        return self.ledger.run(ops.stats())

    async def status(self) -> pb.GetStatusReply:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address)
        stub = sync_pb2_grpc.CoordinatorStub(self._channel)
        return await stub.GetStatus(
            pb.GetStatusRequest(), metadata=bearer(TOKEN), wait_for_ready=True, timeout=10
        )

    async def waits_for(self, phase: str, *who: str) -> None:
        """Until a session is in this phase and waits for exactly these."""

        async def as_wanted() -> bool:
            status = await self.status()
            return status.phase == phase and list(status.waiting_for) == sorted(who)

        await until(as_wanted, f"{phase} to wait for {who}")
