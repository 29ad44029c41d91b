"""Checkpoints in real runs: stopped, killed and resumed, from an older one, from damaged ones, exported."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headrace.connections.redis_client import connect
from headrace.ledger import SyncLedger, ops
from headrace.records.checkpoints import CHECKPOINT_MANIFEST, complete_checkpoints
from tests.support.run_process import (
    SAMPLES_PER_UPDATE,
    Run,
    make_run,
    processes_of,
    temporary_directory,
    wait_for,
)
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UPDATES = 12
LIMIT_S = 240.0
TOLERANCE = 1e-5
"""Of a weight. Which requests the engine batches together differs between two runs, and with that the last
bits of a log-prob."""
STRICT = [
    f"rollout.total_rollout_steps={UPDATES * SAMPLES_PER_UPDATE}",
    "async_training.staleness_threshold=0",
    "async_training.trigger_parameter_sync_step=1",
    "rollout.replicas=1",
    "rollout.test_freq=0",
    "trainer.n_gpus_per_node=1",
    "trainer.max_ckpt_to_keep=3",
]


def complete(run: Run, *more: str) -> str:
    process = run.start(*more)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output[-4000:]
    return output


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def checkpoints(run: Run) -> list[int]:
    found = complete_checkpoints(run.directory / "checkpoints")
    return [int(d.name.removeprefix("step_")) for d in found]


def versions(run: Run) -> list[int]:
    return [r["version"] for r in run.rows("sync.jsonl")]


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    with temporary_directory() as folder:
        yield folder


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Run:
    """Stopped in order, resumed, killed with everything that belongs to it, and resumed to its end."""
    run = make_run(tmp_path_factory.mktemp("runs"), "hurt", *STRICT)
    process = run.start(env={"TMPDIR": str(temporary)})
    wait_for("two checkpoints", lambda: len(checkpoints(run)) >= 2, process, LIMIT_S)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output[-4000:]
    assert run.summary["status"] == "stopped"
    assert not processes_of(run.directory)
    assert list(temporary.iterdir()) == [], "left behind by Ctrl-C"
    stopped, before = [r["step"] for r in run.rows()], versions(run)

    process = run.start(env={"TMPDIR": str(temporary)})
    wait_for("two more updates", lambda: len(run.rows()) >= len(stopped) + 2, process, LIMIT_S)
    steps = [r["step"] for r in run.rows()]
    assert steps == list(range(1, len(steps) + 1)), "a step was lost or counted twice by an orderly stop"
    assert versions(run)[len(before)] == before[-1] + 1, "the first act after a resume is a full sync"
    with connect(run.endpoints["redis_url"], timeout_s=5.0) as client:
        ledger = SyncLedger(client, "hurt")
        wait_for("samples at work", lambda: ledger.run(ops.stats()).counts["in_flight"] > 0, process, LIMIT_S)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    until(lambda: not processes_of(run.directory), "the processes of a killed runner to end", 30.0)
    until(lambda: not list(temporary.iterdir()), "what a killed runner left to be removed", 10.0)
    assert len({r["step"] for r in run.rows()}) < UPDATES, "it was over before it was killed"
    complete(run)
    return run


def test_stopped_killed_and_resumed_is_the_run_that_was_not(hurt: Run, tmp_path: Path) -> None:
    whole = make_run(tmp_path, "whole", *STRICT)
    complete(whole)
    rewards = {r["step"]: r["reward/mean"] for r in whole.rows()}
    assert {r["step"]: r["reward/mean"] for r in hurt.rows()} == rewards, "other responses were sampled"
    assert hurt.summary["ledger"]["requeued"] > 0
    difference = largest_difference(weights(whole.directory / "final"), weights(hurt.directory / "final"))
    print(f"largest difference of a weight: {difference:.2g}")
    assert difference <= TOLERANCE
    assert versions(hurt) == sorted(set(versions(hurt))), "versions must go on upward"
    rows = [json.loads(line) for line in (hurt.directory / "trained.jsonl").read_text().splitlines()]
    assert [r["lineage"] for r in rows if "from_step" in r] == [1, 2, 3]
    assert hurt.command("audit", str(hurt.directory)).returncode == 0

    again = hurt.command("run", "configs/demo.yaml", *hurt.overrides)
    assert (again.returncode, "trainer.resume=never" in again.stdout) == (0, True), again
    other = hurt.command("run", "configs/demo.yaml", *hurt.overrides, "rollout.n=4")
    assert (other.returncode, "rollout.n" in other.stdout + other.stderr) == (2, True), other


def test_exported_step_by_step(hurt: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, out = str(hurt.directory), tmp_path / "exported"
    done = hurt.command("export", where, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert largest_difference(weights(out), weights(hurt.directory / "final")) == 0.0
    first = str(checkpoints(hurt)[0])
    older = hurt.command("export", where, "--step", first, "--out", str(tmp_path / "older"))
    assert older.returncode == 0, older.stderr
    assert largest_difference(weights(out), weights(tmp_path / "older")) > 0.0
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    logits = model(torch.tensor([tokenizer("stone")["input_ids"]])).logits
    assert torch.isfinite(logits).all()

    again = hurt.command("export", where, "--out", str(out))
    assert (again.returncode, "not empty" in again.stderr) == (2, True), again.stderr
    unknown = hurt.command("export", where, "--step", "999", "--out", str(tmp_path / "none"))
    assert (unknown.returncode, "there are: " in unknown.stderr) == (2, True), unknown.stderr


def test_from_an_older_checkpoint_on_more_ranks_with_a_damaged_one_in_front(hurt: Run) -> None:
    """After the end of the run: what is damaged is refused, and the remedy that is told sets it aside."""
    before, known, there = weights(hurt.directory / "final"), versions(hurt), checkpoints(hurt)
    assert len(there) == 3
    assert hurt.start("trainer.resume=nowhere").wait(60) == 2, "a path that is no checkpoint"
    wanted = hurt.directory / "checkpoints" / f"step_{there[1]:08d}"
    manifest = wanted / CHECKPOINT_MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"lineage": ', b'"lineage": 1'))
    process = hurt.start(f"trainer.resume={wanted}")
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, f"{manifest} is damaged" in said) == (2, True), said
    (remedy,) = re.findall(r"trainer\.resume=\S+step_\d+", said)
    output = complete(hurt, remedy, "trainer.n_gpus_per_node=2")
    for step in there[1:]:
        assert (hurt.directory / "checkpoints" / f"aside_1_step_{step:08d}").is_dir()
    rows = [json.loads(line) for line in (hurt.directory / "trained.jsonl").read_text().splitlines()]
    assert [r["from_step"] for r in rows if "from_step" in r][-1] == there[0]
    assert versions(hurt) == sorted(set(versions(hurt))), "versions must go on upward"
    assert len(versions(hurt)) > len(known)
    difference = largest_difference(before, weights(hurt.directory / "final"))
    print(f"largest difference of a weight on two ranks: {difference:.2g}")
    assert difference <= 1e-3, "the same steps on two ranks lead elsewhere"
    audited = hurt.command("audit", str(hurt.directory))
    assert audited.returncode == 0, audited.stdout
    assert f"{UPDATES * SAMPLES_PER_UPDATE} samples trained once each" in audited.stdout, output[-500:]
