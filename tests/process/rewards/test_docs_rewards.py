"""The Python on docs/rewards.md does what the page says."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from pathlib import Path
from typing import Any

import uvicorn

from headrace.rewards.pool import FunctionPool
from headrace.rewards.remote import HttpReward
from headrace.rewards.source import Judged, Response

PAGE = Path(__file__).resolve().parents[3] / "docs" / "rewards.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
FUNCTION, COROUTINE, SERVICE = BLOCKS


async def judged(text: str, directory: Path, *solutions: str) -> list[Judged]:
    (directory / "my_reward.py").write_text(text)
    pool = FunctionPool(str(directory / "my_reward.py"), "compute_score", "custom_reward_function", 30.0)
    try:
        calls = [pool.judge(Response("s", text, "42", {"finish_reason": "stop"})) for text in solutions]
        return await asyncio.gather(*calls)
    finally:
        await pool.close()


async def test_the_function(tmp_path: Path) -> None:
    right, wrong, silent = await judged(FUNCTION, tmp_path, "17 + 25 = 42", "41", "no idea")
    assert (right.score, right.answer, right.parts["answered"]) == (1.0, "42", 1.0)
    assert (wrong.score, wrong.answer) == (0.0, "41")
    assert (silent.score, silent.answer, silent.parts["answered"]) == (0.0, None, 0.0)


async def test_the_coroutine(tmp_path: Path) -> None:
    assert [j.score for j in await judged(COROUTINE, tmp_path, "42 ", "41")] == [1.0, 0.0]


async def test_the_service() -> None:
    names: dict[str, Any] = {}
    exec(SERVICE, names)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(names["app"], log_config=None))
        server.install_signal_handlers = lambda: None
        running = asyncio.create_task(server._serve(sockets=[listener]))
        reward = HttpReward("k", f"http://127.0.0.1:{listener.getsockname()[1]}/score")
        found = await reward.judge(Response("s", "42", "42", {}))
        await reward.close()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await running
    assert found == Judged(1.0, {"length": 2.0}, None)
