"""Reading a run of a cluster: the files that its trainer left, and a ledger that the environment names."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from headrace.cli.main import parse
from headrace.config.loading import load
from headrace.config.redis_url import parse as parse_url
from headrace.config.run import RunConfig
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.local.valkey_server import start_valkey
from headrace.records.layout import RunLayout, leave_config
from headrace.records.sample_dump import SampleDump
from headrace.records.trained_log import TrainedLog
from headrace.wire.payloads import FinishReason, Prompt, Sample, Segment, Trajectory
from tests.fast.config.test_config import GOOD
from tests.support import four_samples
from tests.waiting import until

PASSWORD = "not/plain"


class Run:
    """`/runs/math` as the trainer leaves it; a ledger of four samples: one dead, one trained, two ready."""

    def __init__(self, root: Path, ledger: SyncLedger) -> None:
        self.layout = RunLayout(root / "runs" / "math")
        self.ledger = ledger
        mounted = root / "mounted.yaml"
        mounted.write_text(
            yaml.safe_dump({**GOOD, "name": "math", "redis": {"url": "redis://:hidden@far/0"}})
        )
        leave_config(load(mounted), mounted, self.layout.root)
        self.layout.checkpoints.mkdir()
        row = {"step": 1, "wall_s": 1.0, "reward/mean": 0.5, "trainer/idle_ratio": 0.25}
        self.layout.metrics.write_text(json.dumps(row) + "\n")
        self.layout.sync.write_text('{"version": 0}\n')
        log = TrainedLog(self.layout.root)
        log.began(1, 0, version=-1, run_id="r")
        four_samples.begin(ledger)
        ledger.run(ops.take("a", 0, 2))
        ledger.run(ops.fail("a", "0000000000", 1, "reward_error", "KeyError"))
        self.train("0000000001")
        log.trained(1, 1, ["0000000001"], window=0)
        self.log = log

    def train(self, sample: str, step: int = 1) -> None:
        self.ledger.run(ops.finish("a", sample, 1, b"x", 0, 0, 3))
        self.ledger.run(ops.claim(1, 0, 1))
        self.ledger.run(ops.train(1, step, [sample]))

    def complete(self) -> None:
        """The rest dies; the trainer hears that nothing more will come."""
        for item in self.ledger.run(ops.take("a", 0, 2)).items:
            self.ledger.run(ops.fail("a", item.sample_id, item.attempt, "reward_error", "KeyError"))
        assert self.ledger.run(ops.claim(1, 0, 1)).status == "done"
        self.log.ended(1, 1, version=0)
        self.ledger.run(ops.complete(1))

    def __call__(self, command: str, *words: str) -> int:
        args = parse([command, str(self.layout.root), *words])
        code: int = args.main(args)
        return code


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    with start_valkey(tmp_path / "redis", PASSWORD) as server, connect(server.url, 5.0) as client:
        at = parse_url(server.url)
        monkeypatch.setenv("HEADRACE_REDIS_URL", f"redis://{at.host}:{at.port}/0")
        monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", PASSWORD)
        made = Run(tmp_path, SyncLedger(client, "math"))
        yield made
        made.log.close()
        assert not made.layout.private.exists(), "reading is not running"


def told(run: Run, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run("status", "--json", *words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_trainer_leaves_its_configuration(run: Run, tmp_path: Path) -> None:
    text = run.layout.config.read_text()
    assert "redis://:***@far/0" in text
    assert "hidden" not in text
    config = load(run.layout.config)
    assert config.name == "math"
    upgraded = config.model_copy(update={"seed": 7})
    leave_config(upgraded, tmp_path / "mounted.yaml", run.layout.root)
    assert load(run.layout.config).seed == 7, "as of the last start"


def test_a_runners_configuration_is_left_alone(tmp_path: Path) -> None:
    config = RunConfig.model_validate(GOOD)
    local = RunLayout(tmp_path / "local")
    local.create()
    leave_config(config, tmp_path / "mounted.yaml", local.root)
    assert not local.config.exists()
    (tmp_path / "given").mkdir()
    own = tmp_path / "given" / "config.yaml"
    own.write_text("# with comments\n")
    leave_config(config, own, own.parent)
    assert own.read_text() == "# with comments\n"


def test_status_comes_from_the_ledger(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    facts = told(run, capsys)
    assert facts["state"] == "running"
    assert facts["last_update"]["step"] == 1
    assert facts["ledger"]["counts"]["trained"] == facts["ledger"]["counts"]["dead"] == 1
    assert facts["recommendation"] is None
    run.complete()
    assert told(run, capsys)["state"] == "completed"
    assert run("status") == 0
    out = capsys.readouterr().out
    assert out.startswith(f"math: completed in {run.layout.root}\nstep 1, reward 0.500, trainer idle 25 %\n")
    assert "1 trained, 3 dead" in out
    assert "again" not in out
    assert run("status", "--watch") == 0
    assert out == capsys.readouterr().out


def test_a_watch_ends_with_the_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    watcher = threading.Thread(target=lambda: codes.append(run("status", "--watch", "0.05", "--json")))
    watcher.start()
    shown = ""

    def seen(state: str) -> bool:
        nonlocal shown
        shown += capsys.readouterr().out
        return f'"state": "{state}"' in shown

    until(lambda: seen("running"), "the run to be shown")
    run.complete()
    watcher.join(30.0)
    assert codes == [0]
    assert seen("completed")


def test_the_audit_holds_both_records_together(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (item,) = run.ledger.run(ops.take("a", 0, 1)).items
    run.train(item.sample_id, step=2)
    assert run("audit") == 0, "the trainer is about to write its row"
    said = capsys.readouterr().out
    assert "explained: step 2 of lineage 1 (1 sample: 0000000002): the ledger has heard of it" in said
    run.log.trained(1, 2, ["0000000003"], window=0)
    assert run("audit") == 1
    said = capsys.readouterr().out
    assert "2 problems:" in said
    assert "0000000002: trained in step 2 by the ledger, in no step by trained.jsonl" in said
    assert "0000000003: trained in step 2 by trained.jsonl, the ledger says ready" in said


def test_dead_samples_go_back_while_the_run_is_on(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("dead") == 0
    assert "0000000000: reward_error" in capsys.readouterr().out
    assert run("dead", "--requeue") == 0
    assert capsys.readouterr().out == "math: 1 sample on the way again\n"
    assert run.ledger.run(ops.stats()).counts["dead"] == 0


def test_and_stay_dead_once_it_has_completed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.complete()
    assert run("dead", "--requeue") == 1
    said = capsys.readouterr()
    assert said.out == "nothing was sent back\n"
    assert said.err.endswith("takes no more samples: 3 samples left dead\n")
    assert run.ledger.run(ops.stats()).counts["dead"] == 3


def trained_sample() -> Sample:
    ids = np.array([0, 1, 2], np.int32)
    prompt = Prompt("0000000001", 1, 0, 1, ids, "s", "t")
    whole = [Segment(0, 0, 3)]
    t = Trajectory(
        ids, np.zeros(3, np.float32), np.ones(3, np.uint8), whole, 1.0, FinishReason.STOP, reward=0.5
    )
    return Sample(prompt, [t], "a", 1)


def test_files_are_read_as_ever(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = SampleDump(run.layout.root, samples_per_update=2, max_bytes=1 << 20)
    recorded.write([trained_sample()], step=1, version=0, lineage=1)
    recorded.close()
    assert run("samples", "--best", "1") == 0
    assert "sample 0000000001 #0, s: reward 0.500" in capsys.readouterr().out
    page = tmp_path / "report.html"
    assert run("report", "--out", str(page)) == 0
    assert "running" in page.read_text()
    run.complete()
    assert run("report", "--out", str(page)) == 0
    assert '<span class="good">completed</span>' in page.read_text()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("scale", "rollouter=3"), "kubectl scale deployment/RELEASE-rollouter --replicas=3"),
        (
            ("tune", "async_training.staleness_threshold=0.75"),
            "--set-json config.async_training.staleness_threshold=0.75",
        ),
    ],
)
def test_what_a_runner_does_is_refused_with_the_clusters_way(
    run: Run, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], advice: str
) -> None:
    assert run(*words) == 2
    assert advice in capsys.readouterr().err


def test_without_the_pods_variables(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A copy at home: its files can be read, and what cannot says how."""
    monkeypatch.delenv("HEADRACE_REDIS_URL")
    facts = told(run, capsys)
    assert facts["state"] == "unknown"
    assert "HEADRACE_REDIS_URL" in facts["note"]
    assert run("status", "--watch") == 1
    assert run("audit") == 2
    assert "HEADRACE_REDIS_URL" in capsys.readouterr().err
    assert run("report", "--out", str(tmp_path / "report.html")) == 0


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("HEADRACE_REDIS_PASSWORD", "wrong", "refuses the login"),
        ("HEADRACE_REDIS_URL", "http://somewhere", "HEADRACE_REDIS_URL: must start with redis://"),
    ],
)
def test_a_ledger_that_cannot_be_read(
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    why: str,
) -> None:
    monkeypatch.setenv(variable, value)
    facts = told(run, capsys)
    assert facts["state"] == "unknown"
    assert why in facts["note"]
    assert PASSWORD not in facts["note"]


def test_an_audit_needs_the_ledger(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", "http://somewhere")
    with pytest.raises(LedgerError, match="HEADRACE_REDIS_URL: must start with redis://"):
        run("audit")
