"""The coordinator's scenarios do what their files say; `--rewrite` writes into the files what they do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.coordinator.coordinator_scenarios import Block, parse, play, render
from tests.fast.coordinator.coordinator_stage import Stage, StandingClock

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.delenv("HEADRACE_RUN_DIR", raising=False)
    loop = StandingClock()
    monkeypatch.setattr(time, "monotonic", loop.time)
    asyncio.set_event_loop(loop)
    made = Stage(loop)
    yield made
    made.close()
    asyncio.set_event_loop(None)
    loop.close()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario(file: Path, stage: Stage, request: pytest.FixtureRequest) -> None:
    played = render(play(stage, parse(file.read_text())))
    if request.config.getoption("--rewrite"):
        file.write_text(played)
    assert played == file.read_text(), (
        f"{file.name} is another story; pytest --rewrite and read the difference"
    )


def test_a_file_is_read_and_written_as_it_is() -> None:
    text = "# A story\n\ncoordinator\nmember a\n----\na <- welcome\n\nbegin 0\n----\n"
    blocks = parse(text)
    assert blocks[0] == Block(["# A story", "", "coordinator", "member a"], ["a <- welcome"])
    assert (blocks[0].commands, blocks[1].commands) == (["coordinator", "member a"], ["begin 0"])
    assert render(blocks) == text
