"""No text of others reaches a terminal as anything but text, whichever command shows it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer, models

from headrace.cli.main import COMMANDS, main
from headrace.config.loading import ConfigError
from headrace.connections.redis_client import connect
from headrace.ledger import ops
from headrace.ledger.client import LedgerError, SyncLedger
from headrace.local.progress import LivePanel, PlainLines, RunProgress, make_display
from headrace.local.valkey_server import ValkeyError, start_valkey
from headrace.records.json_files import write_json
from headrace.records.layout import RunInUseError, RunLayout
from headrace.records.sample_dump import SampleDump
from headrace.system import endings
from headrace.system.terminal import guard, one_line, safe
from headrace.wire.payloads import FinishReason, Prompt, Sample, Segment, Trajectory
from headrace_queue.metrics import QueueCollector, registry
from tests.fast.config.test_config import GOOD
from tests.support import four_samples
from tests.support.queue_fakes import make_stats

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x00\x7f\x85\u202eevil\u2066\u200f\u2028\u2029\u061c"
"""All kinds that can be in a file, and `evil` in the middle."""
WORD = EVIL.replace("\0", "")
"""The same for a command line, which ends at a zero."""
OBEYED = re.compile("[^\t\n -~\xa0-\U0010ffff]|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def assert_shown(text: str) -> None:
    found = OBEYED.search(text)
    assert found is None, f"{found[0]!r} in {text[max(0, found.start() - 80) : found.end() + 20]!r}"


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_safe_is_shown_and_all_else_stays(text: str) -> None:
    assert_shown(safe(text))
    assert_shown(one_line(text))
    assert "\n" not in one_line(text)
    assert safe(safe(text)) == safe(text)
    kept = {"Cc", "Cs", "Cf", "Zl", "Zp"}
    if not any(unicodedata.category(c) in kept for c in text):
        assert safe(text) == text
    assert json.loads(safe(json.dumps(text, ensure_ascii=False))) == text, "JSON keeps its meaning"


def test_emoji_and_scripts_stay_as_they_are() -> None:
    text = "naïve 日本\u3000語 👩\u200d🔬 می\u200cخواهم\n\tend"
    assert safe(text) == text
    assert one_line("a\nb") == "a\\nb"


# -- every command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A run that has ended, with text of others wherever a file of it, or its ledger, can hold some."""
    root = tmp_path_factory.mktemp("hostile")
    layout = RunLayout(root / "runs" / "x")
    layout.create()
    tokenizer = Tokenizer(models.WordLevel({EVIL: 0, "evil" + EVIL: 1, "b": 2}, unk_token="b"))
    (root / "model").mkdir()
    tokenizer.save(str(root / "model" / "tokenizer.json"))
    config = {**GOOD, "name": "x", "model": {**GOOD["model"], "path": str(root / "model")}}
    layout.config.write_text(yaml.safe_dump(config))
    row = {"step": 1, "lineage": 1, "reward/mean": 0.5, "optimizer_steps": 1, EVIL: EVIL}
    layout.metrics.write_text(json.dumps(row) + "\n")
    score = {"version": 1, "data_source": f"{EVIL}\nevil", "reward": 0.5, "n": 1, "unfinished": 0}
    layout.eval.write_text(json.dumps(score) + "\n")
    layout.trained.write_text(json.dumps({"step": 1, "lineage": 1, "ids": [f"{EVIL}\nevil"]}) + "\n")
    write_json(layout.engine, {"name": EVIL, "version": EVIL})
    reason = f"reason {EVIL}\nevil: completed"
    summary = {"name": "x" + EVIL, "status": EVIL, "reason": reason, "wall_s": 1.0, "final": EVIL}
    write_json(layout.summary, {**summary, "eval": [score], "memory": {EVIL: {"peak_mb": 1.0}}})
    with start_valkey(layout.redis, "secret") as server, connect(server.url, 5.0) as client:
        ledger = SyncLedger(client, "x")
        four_samples.begin(ledger)
        for item in ledger.run(ops.take("a", 0, 2)).items:
            trace = f"trace {EVIL}\nmore {EVIL}"
            ledger.run(ops.fail("a", item.sample_id, item.attempt, "reward_error", trace))
            client.hset(f"headrace:{{x}}:s:{item.sample_id}", "reason", f"why {EVIL}\nevil")
    ids, ones = np.array([0, 1], np.int32), np.ones(2, np.float32)
    segments = [Segment(1, 0, 2)]
    trajectory = Trajectory(
        ids, -ones, ones.astype(np.uint8), segments, 1.0, FinishReason.STOP, 0.5, {EVIL: 0.5}
    )
    sample = Sample(Prompt(EVIL, 0, 0, 0, ids, EVIL, f"truth {EVIL}\nevil"), [trajectory], EVIL, 1)
    dump = SampleDump(layout.root, samples_per_update=4, max_bytes=1 << 24)
    dump.write([sample], step=1, version=1, lineage=1)
    return layout


def words(layout: RunLayout, bad: Path) -> dict[str, list[list[str]]]:
    """For every command what it is asked: about the hostile run, and with hostile words."""
    run = ["x", "--runs-dir", str(layout.root.parent)]
    out = str(bad.with_name("out"))
    missing = str(bad.with_name(WORD + ".yaml"))
    config = [[str(bad)], [missing], [str(layout.config), WORD + "=1"]]
    return {
        "run": [[*c, "--dry-run"] for c in config],
        "validate": config,
        "data": config,
        "convert-config": config,
        "modes": config,
        "status": [run, [*run, "--json"], [*run, "--watch", "1"], [WORD]],
        "scale": [["x", WORD, *run[1:]], [WORD, "rollouter=1"]],
        "tune": [["x", WORD + "=1", *run[1:]], [WORD, "async_training.staleness_threshold=1"]],
        "dead": [run, [*run, "--json"], [*run, "--requeue", WORD], [WORD]],
        "audit": [run, [*run, "--json"], [WORD]],
        "samples": [run, [*run, "--json"], [WORD]],
        "report": [[*run, "--out", out + ".html"], [*run, "--out", f"{out}/{WORD}/y"], [WORD]],
        "trace": [run, [WORD]],
        "export": [[*run, "--out", out], [WORD, "--out", out]],
        "completion": [[WORD], ["bash"]],
    }


TELLS_OF_IT = {"run", "validate", "data", "modes", "status", "scale", "tune", "dead", "audit", "samples"}
"""Commands that have something of it to show: the others are to be silent or to refuse."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_shows_text_of_others_and_obeys_none(
    command: str, hostile: RunLayout, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump({**GOOD, EVIL: 1, "name": EVIL}))
    said = ""
    for argv in words(hostile, bad)[command]:
        with pytest.raises(SystemExit):
            main([command, *argv])
        both = capfdbinary.readouterr()
        for stream in (both.out, both.err):
            text = stream.decode()
            assert_shown(text)
            assert not re.search("^evil", text, re.MULTILINE), "it makes up a line of its own"
            said += text
    if command in TELLS_OF_IT:
        assert "\\u202e" in said


KINDS: dict[str, Callable[[], Exception]] = {
    "config": lambda: ConfigError([EVIL]),
    "in use": lambda: RunInUseError(EVIL),
    "ledger": lambda: LedgerError(EVIL),
    "valkey": lambda: ValkeyError(EVIL),
    "os": lambda: OSError(5, EVIL, EVIL),
    "mistake": lambda: RuntimeError(EVIL + "\ud800"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_knows_nothing_of_it_is_safe_too(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The seam is the program's streams: one that is written tomorrow cannot forget it."""

    def careless(args: Any) -> int:
        print(EVIL + "\ud800")
        print(EVIL, file=sys.stderr)
        sys.stdout.writelines([EVIL])
        raise KINDS[kind]()

    monkeypatch.setattr(import_module("headrace.cli.modes"), "main", careless)
    try:
        main(["modes", "x.yaml"])
    except RuntimeError:
        sys.__excepthook__(*sys.exc_info())  # as the interpreter does with what nobody foresees
    except SystemExit:
        pass
    both = capfdbinary.readouterr()
    for stream in (both.out, both.err):
        assert_shown(stream.decode())
        assert b"\\u202eevil" in stream


# -- the runner's display -------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


OURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""What the panel itself writes: moves and colours."""


def test_the_panel_draws_and_what_it_shows_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Tty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", out)
    guard()
    progress = RunProgress(2, scores=[(0, EVIL, 0.5)])
    progress.values = {"reward/mean": 0.5}
    progress.services = {"rollouter-0" + EVIL: EVIL}
    display = make_display(sys.stdout, "headrace: x" + EVIL)
    assert isinstance(display, LivePanel)
    display.phase("starting " + EVIL)
    display.note(f"log: {EVIL}")
    print(f"printed meanwhile: {EVIL}")
    display.update(progress)
    display.close()
    text = out.getvalue()
    assert "\x1b[" in text, "it is a panel"
    for never in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"):
        assert never not in text
    assert_shown(OURS.sub("", text))
    assert "log: \\u001b[2J" in " ".join(text.split())
    assert "meanwhile: \\u001b[2J" in " ".join(text.split())


def test_a_bar_of_a_library_is_not_drawn_over_and_over(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "from headrace.system.terminal import guard; guard()\nimport tqdm\nfor _ in tqdm.tqdm(range(3)): pass"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert capfd.readouterr() == ("", "")


def test_plain_lines_are_text_too(capsys: pytest.CaptureFixture[str]) -> None:
    guard()
    display = make_display(sys.stdout, "x")
    assert isinstance(display, PlainLines)
    display.note(EVIL)
    assert_shown(capsys.readouterr().out)


# -- services -------------------------------------------------------------------------------------


def test_last_words_are_text_for_the_log_the_runner_and_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(endings.REASON_FILE, str(tmp_path / "reason"))
    endings.say_why("rollouter", ValueError(EVIL + "\ud800"))
    for text in (capsys.readouterr().err, (tmp_path / "reason").read_text()):
        assert_shown(text)
        assert "\\u202eevil" in text


def test_a_service_logs_text_and_so_does_what_it_does_not_catch() -> None:
    program = f"""
import logging
from headrace.system import logs
logs.setup("x")
logging.getLogger().warning({EVIL!r}, extra={{"why": {EVIL!r}}})
print({EVIL!r})
raise ValueError({EVIL!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    for stream in (done.stdout, done.stderr):
        assert_shown(stream.decode())
    assert json.loads(done.stderr.splitlines()[0])["why"] == EVIL
    assert b"ValueError: \\u001b[2J" in done.stderr


def test_labels_of_metrics_stay_labels() -> None:
    odd = 'a"} 1\nheadrace_queue_depth 99\n' + EVIL
    collector = QueueCollector({})
    collector.stats = make_stats(died={odd: 2}, fenced_by={odd: 1})
    text = generate_latest(registry(collector)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [s.value for s in families["headrace_queue_depth"].samples] != [99]
    died = {s.labels["reason"]: s.value for s in families["headrace_queue_dead_letters"].samples}
    assert died[odd] == 2
