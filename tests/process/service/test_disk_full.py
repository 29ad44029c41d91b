"""No room on the disk: one sentence with the path, nothing lost, nothing half taken for whole.

A limit on the size of files stands for the full disk: RLIMIT_FSIZE needs no root. /dev/full is one, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from headrace.config import loading
from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect
from headrace.ledger import LedgerUnavailable, SyncLedger, audit, ops
from headrace.local import valkey_server
from headrace.local.processes import ProcessFailed, SupervisedService
from headrace.local.valkey_server import start_valkey
from headrace.records.checkpoints import complete_checkpoints
from headrace.records.json_files import read_json, read_rows, write_json
from headrace.records.row_file import RowFile
from headrace.records.sample_dump import DIRECTORY, SampleDump
from headrace.system import disk
from headrace.system.endings import EX_CONFIG, EX_FAILED
from headrace.wire.payloads import Sample
from headrace_queue.loops import is_outage
from headrace_queue.validation import _replace
from headrace_trainer.checkpoints.checkpoint import Checkpoints, SaveFailed
from headrace_trainer.checkpoints.progress import TrainingProgress
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.model.policy import export_model
from headrace_trainer.records.run_log import RunLog
from headrace_trainer.worker import exit_code
from tests.support.learners import config, training
from tests.support.supervised import Bench, all_ready, wait_until

WHAT_TO_DO = r"free some space there and start the run again, it goes on$"


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_are_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    rows = RowFile(path)

    def fill() -> None:
        for n in range(100):
            rows.write({"step": n, "ids": ["0000000000"] * 9})

    with (
        no_file_beyond(1000),
        pytest.raises(disk.DiskFull, match=f"^{path} cannot be written: .*{WHAT_TO_DO}"),
    ):
        fill()
    there = path.read_text()
    assert there.endswith("}\n")
    assert 0 < len(there) <= 1000
    rows.write({"step": "next"})
    assert len(read_rows(path)) == there.count("\n") + 1


def test_a_row_that_an_older_release_cut_off_stays_alone(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "sync.jsonl"):
        (tmp_path / name).write_text('{"step": 1}\n{"step": 2, "re')
    log = RunLog(tmp_path)
    log.update({"step": 2})
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_a_device_without_room_is_told_with_both_sizes() -> None:
    with pytest.raises(
        disk.DiskFull, match=r"/dev/full .*No space left on device \(9 B were to be written, .* free\)"
    ):
        RowFile(Path("/dev/full")).write({"a": 1})


def test_half_a_checkpoint_is_none_and_leaves_nothing(tmp_path: Path, ranks: Ranks) -> None:
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(directory, config(), {"policy": training(0)}, ranks)
    first = checkpoints.save(TrainingProgress(step=1))
    with no_file_beyond(100), pytest.raises(SaveFailed) as failed:
        checkpoints.save(TrainingProgress(step=2))
    assert str(failed.value).startswith(f"the checkpoint {directory / 'step_00000002'} cannot be written: ")
    assert "were to be written" in str(failed.value)
    assert exit_code(failed.value) == EX_FAILED
    assert list(directory.iterdir()) == [first] == complete_checkpoints(directory)
    again = Checkpoints(directory, config(), {"policy": training(0)}, ranks)
    assert again.load(again.save(TrainingProgress(step=2))).step == 2


def test_what_torch_says_about_an_archive_that_was_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "shard"

    def save() -> None:
        with disk.writing(path), path.open("wb") as file:
            torch.save(torch.ones(1_000_000), file)

    with (
        no_file_beyond(1_000_000),
        pytest.raises(disk.DiskFull, match=f"^{path} cannot be written: ") as failed,
    ):
        save()
    assert "unexpected pos" in str(failed.value.__cause__)
    lone = RuntimeError(str(failed.value.__cause__))  # as it comes from another rank
    assert disk.full(lone, path) is not None


def test_half_an_export_is_none_and_leaves_nothing(
    tmp_path: Path, tiny: tuple[RunConfig, dict[str, Any]]
) -> None:
    config, state = tiny
    out = tmp_path / "final"
    with no_file_beyond(5000), pytest.raises(disk.DiskFull, match=f"^{out} cannot be written: .* were to be"):
        export_model(config, state, out)
    assert list(tmp_path.iterdir()) == []
    export_model(config, state, out)
    assert (out / "model.safetensors").exists()


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, Any]]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
    )
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a").save_pretrained(path)
    config = loading.load(Path("configs/demo.yaml"), [f"model.path={path}"])
    return config, dict(model.state_dict())


def test_the_record_of_samples_ends_with_one_error_and_whole_rows(
    tmp_path: Path, samples: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    recorded = SampleDump(tmp_path, samples_per_update=4, max_bytes=1 << 24)
    with no_file_beyond(20_000):
        for step in range(50):
            recorded.write(samples, step=step, version=0, lineage=1)
        recorded.close()
    (file,) = (tmp_path / DIRECTORY).iterdir()
    assert all(json.loads(line) for line in file.read_text().splitlines())
    (told,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert str(tmp_path / DIRECTORY) in told.reason  # type: ignore[attr-defined]


def test_files_that_are_replaced_stay_what_they_were(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    write_json(path, {"old": True})
    with no_file_beyond(100):
        with pytest.raises(disk.DiskFull, match=f"^{path} "):
            write_json(path, {"new": "x" * 1000})
        with pytest.raises(disk.DiskFull, match=f"^{tmp_path / 'eval.jsonl'} ") as failed:
            _replace(tmp_path / "eval.jsonl", b"x" * 1000)
    assert read_json(path) == {"old": True}
    assert is_outage(failed.value), "the queue service waits for room"


def test_an_exit_code_is_kept_where_the_log_has_no_room(tmp_path: Path) -> None:
    code = (
        "import sys; from headrace.system.endings import say_why; "
        f"say_why('queue', 'why'); sys.exit({EX_CONFIG})"
    )
    with open("/dev/full", "w") as full:
        env = {**os.environ, "HEADRACE_REASON_FILE": str(tmp_path / "reason")}
        ended = subprocess.run([sys.executable, "-c", code], stderr=full, env=env, timeout=60, check=False)
    assert ended.returncode == EX_CONFIG
    assert (tmp_path / "reason").read_text() == "why"


# -- the bundled server ---------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's program, whose files may have 64 KiB."""
    program = tmp_path / "valkey-small"
    program.write_text(
        f'#!/bin/sh\ntrap "" XFSZ\nulimit -f 128\nexec "{valkey_server.server_binary()}" "$@"\n'
    )
    program.chmod(0o700)
    real = valkey_server.server_binary
    monkeypatch.setattr(valkey_server, "server_binary", lambda fallback=None: program)
    monkeypatch.setattr(valkey_server, "with_room", real, raising=False)
    return program


def test_a_server_without_room_says_so_and_keeps_what_it_acknowledged(
    bench: Bench, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, log = bench.path("redis"), bench.path("valkey.log")
    port = valkey_server.free_port("127.0.0.1")  # type: ignore[attr-defined]
    url = f"redis://:secret@127.0.0.1:{port}/0"
    server = SupervisedService(
        "valkey",
        log,
        lambda env: valkey_server.launch(directory, "secret", port, log, env),
        ready=lambda: valkey_server.answers(url),
        says=lambda: valkey_server.no_room(directory, log) or "",
    )
    supervisor = bench.supervise(server, max_restarts=0)
    bench.poll_until(lambda: all_ready(supervisor), "the server")
    with connect(url, 5.0) as client:
        ledger = SyncLedger(client, "small", retry_s=0.1)
        ledger.run(ops.configure(1000, 1, 1, 1, 1000, "f"))
        issued = 0
        with contextlib.suppress(LedgerUnavailable):
            while issued < 1000:
                issued = ledger.run(ops.issue(issued, [b"p" * 1000], False)).cursor
    failed = bench.outcome()
    assert isinstance(failed, ProcessFailed)
    assert failed.told
    assert failed.reason.startswith(f"valkey: {directory} cannot be written: ")
    monkeypatch.setattr(valkey_server, "server_binary", valkey_server.with_room)  # type: ignore[attr-defined]
    half = directory / "appendonlydir" / "temp-appendonly.aof.incr"  # as a server that is killed leaves it
    half.touch()
    with start_valkey(directory, "secret", log=log) as again, connect(again.url, 5.0) as client:
        assert SyncLedger(client, "small").run(ops.stats()).issued_total in (issued, issued + 1)
        assert audit(client, "small").balanced
        assert not half.exists()
        assert valkey_server.no_room(directory, log) is None, "of an earlier start"


def test_a_server_of_others_without_room_is_waited_for_and_named(tmp_path: Path, small_disk: Path) -> None:
    with start_valkey(tmp_path / "redis", "secret") as server, connect(server.url, 5.0) as client:
        client.config_set("appendfsync", "everysec")
        ledger = SyncLedger(client, "small", retry_s=0.5)
        ledger.run(ops.configure(1000, 1, 1, 1, 1000, "f"))

        def filled() -> bool:
            with contextlib.suppress(redis.ResponseError):
                client.set("fill", "x" * 10_000)
                return False
            return True

        wait_until(filled, "the file to be full")
        with pytest.raises(
            LedgerUnavailable, match=r"refused open_term for 0\.5 s: MISCONF .* free some space"
        ):
            ledger.run(ops.open_term())


def test_another_ranks_words_are_read_and_other_errors_are_none() -> None:
    error = OSError("/run/shard_00001.safetensors: I/O error: No space left on device (os error 28)")
    assert "were to be written" in str(disk.full(error, Path("/"), 10**9))
    assert disk.full(RuntimeError("else"), Path("/")) is None
    assert disk.size(1_500_000_000) == "1.5 GB"
