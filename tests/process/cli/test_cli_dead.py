"""`headrace dead` on a real ledger: of a run that is on, and of one that has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli.main import parse
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import SyncLedger
from headrace.local.valkey_server import start_valkey
from headrace.records.json_files import write_json
from headrace.records.layout import RunLayout
from tests.fast.config.test_config import GOOD
from tests.support import four_samples

TRACE = "RewardError: the reward raised KeyError('x')\n  File reward.py, line 3"


def tokenizer(path: Path) -> None:
    """Words as tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"what": 0, "is": 1, "one": 2, "two": 3, "[UNK]": 4}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path.mkdir()
    made.save(str(path / "tokenizer.json"))


class Run:
    """A run's directory, with a ledger of four samples: two dead, one trained, one ready."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root / "runs" / "x")
        self.runs = root / "runs"
        self.layout.create()
        tokenizer(root / "model")
        config = {**GOOD, "name": "x", "model": {**GOOD["model"], "path": str(root / "model")}}
        self.layout.config.write_text(yaml.safe_dump(config))
        with start_valkey(self.layout.redis, "secret") as server, connect(server.url, 5.0) as client:
            ledger = SyncLedger(client, "x")
            four_samples.begin(ledger)
            for item in ledger.run(ops.take("a", 0, 3)).items[:2]:
                ledger.run(ops.fail("a", item.sample_id, item.attempt, "reward_error", TRACE))
            ledger.run(ops.finish("a", "0000000002", 1, b"x", 0, 0, 3))
            ledger.run(ops.claim(1, 0, 1))
            ledger.run(ops.train(1, 1, ["0000000002"]))

    def __call__(self, *words: str) -> int:
        args = parse(["dead", "x", "--runs-dir", str(self.runs), *words])
        code: int = args.main(args)
        return code

    def ledger(self) -> Any:
        return start_valkey(self.layout.redis, "secret")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def live(run: Run) -> Iterator[SyncLedger]:
    """The run is on: its server is up, and somebody holds the directory."""
    lock = run.layout.lock()
    with run.ledger() as server, connect(server.url, 5.0) as client:
        write_json(run.layout.endpoints, {"redis_url": server.url, "run": "x"})
        yield SyncLedger(client, "x")
    lock.release()


def test_dead_samples_are_shown_with_prompt_and_traceback(
    run: Run, live: SyncLedger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    assert capsys.readouterr().out.splitlines() == [
        "x: 2 samples dead",
        "0000000000: reward_error; taken 1 times, 1 failures, 0 crashes of its owner",
        "  prompt: 'what is one'",
        "  RewardError: the reward raised KeyError('x')",
        "    File reward.py, line 3",
        "0000000001: reward_error; taken 1 times, 1 failures, 0 crashes of its owner",
        "  prompt: 'what is one'",
        "  the same as 0000000000",
    ]
    assert run("--limit", "1") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "and 1 more (--limit)"
    assert run("--json") == 0
    first, second = json.loads(capsys.readouterr().out)
    assert second["id"] == "0000000001"
    assert first == {
        "id": "0000000000",
        "reason": "reward_error",
        "attempts": 1,
        "failures": 1,
        "crashes": 0,
        "prompt": "what is one",
        "detail": TRACE,
    }


def test_a_run_that_is_on_gets_them_back(
    run: Run, live: SyncLedger, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--requeue", "0000000001", "0000000002", "nobody") == 1
    out, err = capsys.readouterr()
    assert out == "x: 1 sample on the way again\n"
    assert err == "headrace: not dead, or not of this run: 0000000002, nobody\n"
    assert run("--requeue") == 0
    assert capsys.readouterr().out == "x: 1 sample on the way again\n"
    assert live.run(ops.stats()).counts["ready"] == 3
    assert [item.sample_id for item in live.run(ops.take("a", 0, 2)).items] == ["0000000000", "0000000001"]


def test_a_run_that_is_ending_is_left_alone(
    run: Run, live: SyncLedger, capsys: pytest.CaptureFixture[str]
) -> None:
    (last,) = live.run(ops.take("a", 0, 1)).items
    live.run(ops.fail("a", last.sample_id, last.attempt, "timeout", ""))
    assert live.run(ops.claim(1, 0, 1)).status == "done"
    assert run("--requeue", "--json") == 1
    out, err = capsys.readouterr()
    refused = ["0000000000", "0000000001", "0000000003"]
    assert json.loads(out) == {"requeued": [], "refused": refused, "not_dead": []}
    assert "the run is ending" in err
    assert live.run(ops.stats()).counts["dead"] == 3


def test_a_run_that_has_ended_has_something_to_do_again(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(run.layout.summary, {"name": "x", "status": "completed"})
    assert run("--requeue", "0000000000") == 0
    assert "start it again" in capsys.readouterr().out
    assert (run.layout.read_summary() or {})["status"] == "stopped"
    with run.ledger() as server, connect(server.url, 5.0) as client:
        stats = SyncLedger(client, "x").run(ops.stats())
        assert (stats.counts["dead"], stats.counts["ready"], stats.balanced) == (1, 2, True)


def test_a_run_that_never_got_that_far(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "runs" / "y")
    layout.create()
    args = parse(["dead", "y", "--runs-dir", str(tmp_path / "runs")])
    with pytest.raises(Exception, match="holds no ledger"):
        args.main(args)
