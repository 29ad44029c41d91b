"""Faults that a run must not survive. Each has a run of its own, whose end is judged: it fails, says why in a
sentence, and the audit names what is missing. None may pass for a success."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

from headrace.records import trained_log
from headrace.records.checkpoints import complete_checkpoints
from headrace.records.row_file import read_lines
from headrace.system.endings import EX_BEYOND_REPAIR
from tests.chaos.faults import LIMIT_S
from tests.chaos.world import Stuck, World

END_S = 120.0
"""From the fault to the end of the run: every service looks at the ledger within seconds."""
FAILED = (1, EX_BEYOND_REPAIR)
"""What the runner may end with."""
DAMAGED = "(?i)corrupt|damaged|digest|altered|does not match|differs"
SAMPLE = re.compile(r"\b\d{10}\b")

Terminal = Callable[[World, random.Random], str]


def flush(world: World, rng: random.Random) -> str:
    _get_on(world, rng.randint(0, 12))
    with world.redis as client:
        client.flushall()
    _ends(world, "went back|no longer there")
    _audit_names_samples(world)
    return f"FLUSHALL after {world.steps} updates"


def lose_writes(world: World, rng: random.Random) -> str:
    """The server comes back with an older append-only file."""
    updates = rng.choice([1, 3, 10])
    world.remember_redis()
    _get_on(world, updates)
    world.restore_redis()
    _ends(world, "went back|no longer there")
    _audit_names_samples(world)
    return f"Valkey comes back without the writes of the last {updates} updates"


def flip_checkpoint(world: World, rng: random.Random) -> str:
    """The trainer is killed, and finds a bit of its newest checkpoint flipped."""
    checkpoints = world.layout.checkpoints
    world.wait("a checkpoint", lambda: complete_checkpoints(checkpoints), LIMIT_S)
    _get_on(world, rng.randint(0, 4))
    processes = world.trainer_processes()
    for process in processes:  # no newer one may be on its way
        world.signal(process.pid, signal.SIGSTOP)
    newest = complete_checkpoints(checkpoints)[-1]
    file = _flip(newest, rng)
    for process in processes:
        world.signal(process.pid, signal.SIGKILL)
    _ends(world, re.escape(file.name), DAMAGED)
    return f"a bit flips in {newest.name}/{file.name}, and the trainer is killed"


def _flip(checkpoint: Path, rng: random.Random) -> Path:
    file = rng.choice(sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size))
    content = bytearray(file.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return file


def _get_on(world: World, updates: int) -> None:
    done = world.steps
    world.wait(f"{updates} updates", lambda: world.steps >= done + updates, LIMIT_S)


def _ends(world: World, *patterns: str) -> None:
    """The run ends soon, fails, and says a sentence that has all of `patterns`. Raises Stuck."""
    world.wait("the end of the run", lambda: False, END_S)
    code, said = world.process.wait(30), world.said(60)
    summary = world.summary()
    if code not in FAILED or summary.get("status") != "failed":
        raise Stuck(
            f"the run ended with {code}, status {summary.get('status')}, as if it could go on:\n{said}"
        )
    missing = [pattern for pattern in patterns if not re.search(pattern, said)]
    if missing:
        raise Stuck(f"the run ended without a word of {' and '.join(missing)}:\n{said}")


def _audit_names_samples(world: World) -> None:
    """The audit of a ledger that lost writes fails, and says which samples. Raises Stuck."""
    found = world.command("audit", str(world.layout.root))
    said = found.stdout + found.stderr
    if found.returncode != 1:
        raise Stuck(f"headrace audit ended with {found.returncode}:\n{said[-2000:]}")
    trained = set(trained_log.follow(read_lines(world.layout.trained)).ids)
    if trained and not trained & set(SAMPLE.findall(said)):
        raise Stuck(
            f"headrace audit names none of the {len(trained)} samples that were trained:\n{said[-2000:]}"
        )


def second_trainer(world: World, rng: random.Random) -> str:
    """The newer lineage fences the run's own trainer, which must not fence it back: the run gives way."""
    second = world.double("trainer")
    _ends(world, "another trainer has taken over")
    second.kill()
    second.wait(30)
    found = world.command("audit", str(world.layout.root))
    if found.returncode:
        raise Stuck(f"headrace audit ended with {found.returncode}:\n{(found.stdout + found.stderr)[-2000:]}")
    return "a second trainer, to which the run gives way"


TERMINAL: dict[str, Terminal] = {
    "FLUSHALL": flush,
    "lost writes": lose_writes,
    "flipped checkpoint": flip_checkpoint,
    "second trainer": second_trainer,
}
