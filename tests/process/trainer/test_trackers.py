"""TensorBoard and Weights & Biases for real, offline: one point a step, also over resumes and kills."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.run import RunConfig
from headrace.local import preflight, trackers
from headrace.plugins.trackers import TRACKERS
from headrace.records.trackers import Tracker
from headrace_trainer.distributed.ranks import Ranks
from headrace_trainer.records import trackers as feeding
from headrace_trainer.records.report import StepReport
from headrace_trainer.records.trackers import Tracking, follow
from tests.fast.rollouter.test_rollouter_parts import config as run_config
from tests.waiting import until


def configured(*loggers: str) -> RunConfig:
    plain = run_config().model_dump()
    plain["trainer"]["logger"] = list(loggers)
    return RunConfig.model_validate(plain)


def add_rows(directory: Path, *steps: int, lineage: int = 1) -> None:
    with (directory / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "reward/mean": lineage + step / 100, "wall_s": 1.0, "hist": {"0": 1}}
            file.write(json.dumps(row) + "\n")


def add_score(directory: Path, version: int, reward: float) -> None:
    with (directory / "eval.jsonl").open("a") as file:
        row = {"version": version, "data_source": "s", "reward": reward, "n": 9, "unfinished": 0}
        row |= {"k": 4, "best": reward + 0.25, "majority": reward - 0.125}
        file.write(json.dumps(row) + "\n")


def one_start(config: RunConfig, directory: Path, from_step: int, *steps: int, lineage: int = 1) -> None:
    """A start of the trainer that writes some rows and ends in order."""
    metrics = directory / "metrics.jsonl"
    offset = metrics.stat().st_size if metrics.exists() else 0
    add_rows(directory, *steps, lineage=lineage)
    done = threading.Event()
    done.set()
    assert follow(config, directory, from_step, offset, done)


def tensorboard_points(directory: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory / "tensorboard"))
    found.Reload()
    return [(e.step, pytest.approx(e.value, abs=1e-5)) for e in found.Scalars(key)]  # type: ignore[misc]


def test_tensorboard_has_one_point_a_step_over_a_resume(tmp_path: Path) -> None:
    config = configured("console", "tensorboard")
    add_score(tmp_path, 0, 0.25)
    one_start(config, tmp_path, 0, 1, 2, 3, 4)
    one_start(config, tmp_path, 2, 3, 4, 5, lineage=2)  # 3 and 4 were taken back
    points = tensorboard_points(tmp_path, "reward/mean")
    assert points == [(1, 1.01), (2, 1.02), (3, 2.03), (4, 2.04), (5, 2.05)]
    add_score(tmp_path, 2, 0.5)
    one_start(config, tmp_path, 5)
    for name, score in (("mean", 0.5), ("best", 0.75), ("maj", 0.375)):  # verl's keys
        assert tensorboard_points(tmp_path, f"val/s/reward/{name}@4")[-1] == (5, score)


def test_the_report_feeds_it(tmp_path: Path, ranks: Ranks) -> None:
    """Through the trainer's own door: rows after the step that it recovered."""
    report = StepReport(configured("tensorboard"), None, ranks, tmp_path)  # type: ignore[arg-type]
    report.began(0)
    assert report._log is not None
    report._log.update({"step": 1, "reward/mean": 0.5})
    report.close()
    assert tensorboard_points(tmp_path, "reward/mean") == [(1, 0.5)]


def test_a_killed_process_leaves_nothing_out(tmp_path: Path) -> None:
    config = configured("tensorboard")
    one_start(config, tmp_path, 0, 1, 2)
    add_rows(tmp_path, 3, 4)  # written by a trainer whose trackers were killed with it
    one_start(config, tmp_path, 4, 5)
    assert [step for step, _ in tensorboard_points(tmp_path, "reward/mean")] == [1, 2, 3, 4, 5]


def test_scores_of_the_last_version_may_come_a_moment_late(tmp_path: Path) -> None:
    add_score(tmp_path, 2, 0.5)
    (tmp_path / "sync.jsonl").write_text('{"version": 2}\n{"version": 4}\n')
    late = threading.Timer(0.5, add_score, (tmp_path, 4, 0.7))
    late.start()
    one_start(configured("tensorboard"), tmp_path, 0, 1, 2)
    late.join()
    assert [value for _, value in tensorboard_points(tmp_path, "val/s/version")] == [2, 4]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the trainer starts it: a process; its rows are read back from the offline run's own file."""
    config = configured("wandb")
    for name, value in {
        "WANDB_MODE": "offline",
        "HEADRACE_TOKEN": "s3cret-token",
        "HEADRACE_REDIS_PASSWORD": "s3cret-token",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    for from_step, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        tracking = Tracking(config, tmp_path, from_step)
        add_rows(tmp_path, *steps, lineage=1 + from_step)
        add_score(tmp_path, from_step, 0.5 + from_step)
        tracking.check()
        tracking.close()
    history, rewards = wandb_history(tmp_path)
    assert history == [(1, 1.01), (2, 1.02), (3, 1.03), (4, 2.04)], "a step keeps its first point"
    assert rewards == [0.5, 1.5]
    state = json.loads((tmp_path / "wandb" / ".headrace.json").read_text())
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{state['id']}"))) == 2, "one run, two starts"
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert not any(b"s3cret-token" in f.read_bytes() for f in files)


def wandb_history(directory: Path) -> tuple[list[tuple[int, float]], list[float]]:
    """(step, reward/mean) and held-out rewards of all offline runs, start by start."""
    from wandb.proto import wandb_internal_pb2

    out, scores = [], []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        for data in leveldb_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                if "reward/mean" in row:
                    out.append((row["_step"], row["reward/mean"]))
                if "val/s/reward/mean@4" in row:
                    scores.append(row["val/s/reward/mean@4"])
    return out, scores


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB; each piece has a checksum, its length and its kind (whole,
    first, middle, last). The file's own header counts as part of the first block."""
    at, header, block, piece = 7, 7, 32 * 1024, b""
    log = bytes(7) + log
    while at + header <= len(log):
        if block - at % block < header:
            at += block - at % block
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        piece += log[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):
            yield piece
            piece = b""


def got(directory: Path) -> int:
    """The step that TensorBoard's files reach."""
    state = directory / "tensorboard" / ".headrace.json"
    return int(json.loads(state.read_text())["step"]) if state.exists() else -1


def stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Another program in place of the process."""
    package = directory / "headrace_trainer" / "records"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "trackers.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")]))


class Broken(Tracker):
    """A tracker that fails, or never finishes."""

    def log(self, step: int, values: Any) -> None:
        raise ConnectionError("nobody there")


def test_a_tracker_that_fails_is_said_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(TRACKERS._entries, "wandb", Broken)
    config = configured("wandb", "tensorboard")
    done = threading.Event()
    ended = threading.Thread(target=follow, args=(config, tmp_path, 0, 0, done))
    monkeypatch.setattr(feeding, "_POLL_S", 0.01)
    ended.start()
    for step in (1, 2, 3):
        add_rows(tmp_path, step)
        until(lambda s=step: got(tmp_path) == s, "the row", 30.0)  # type: ignore[misc]
    done.set()
    ended.join(30.0)
    assert [step for step, _ in tensorboard_points(tmp_path, "reward/mean")] == [1, 2, 3]
    said = [r for r in caplog.records if r.name == "headrace.trainer.trackers"]
    assert [getattr(r, "tracker", None) for r in said] == ["wandb"]


def test_the_trainer_does_not_wait_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(tmp_path, monkeypatch, "import time\ntime.sleep(600)\n")
    monkeypatch.setattr(feeding, "FINISH_S", -1.5)
    tracking = Tracking(configured("tensorboard"), tmp_path, 0)
    tracking.check()
    began = time.monotonic()
    tracking.close()
    assert time.monotonic() - began < 10.0
    assert "were killed" in caplog.text


def test_one_that_dies_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(tmp_path, monkeypatch, "raise SystemExit(3)\n")
    tracking = Tracking(configured("tensorboard"), tmp_path, 0)

    def has_ended() -> bool:
        tracking.check()
        return "training goes on" in caplog.text

    until(has_ended, "its end", 60.0)
    tracking.check()
    tracking.close()
    assert caplog.text.count("training goes on") == 1


def test_what_is_missing_is_said_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured("wandb", "tensorboard")
    assert list(trackers.problems(config)) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = preflight.examine(config).problems
    assert sum("pip install -e '.[logging]'" in problem for problem in found) == 2
    config.trainer.project_name = "a/b"
    assert any(p.startswith("trainer.project_name: 'a/b'") for p in trackers.problems(config))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    assert any("no login" in warning for warning in trackers.warnings(config))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password " + "a" * 40)
    assert list(trackers.warnings(config)) == []
    (tmp_path / ".netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert list(trackers.warnings(config)) == []


def test_a_trackers_checks_that_raise_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(Tracker):
        @staticmethod
        def problems(config: RunConfig) -> Iterator[str]:
            raise KeyError("project")

        warnings = problems

    monkeypatch.setitem(TRACKERS._entries, "tensorboard", Careless)
    config = configured("tensorboard")
    (problem,), (warning,) = list(trackers.problems(config)), list(trackers.warnings(config))
    assert "the check of tensorboard raised KeyError('project')" in problem
    assert "the warnings of tensorboard raised KeyError('project')" in warning
    with pytest.raises(TypeError, match=r"has no .*inherit from headrace.records.trackers.Tracker"):
        TRACKERS.register("object")(object())
