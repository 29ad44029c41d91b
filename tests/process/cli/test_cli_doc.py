"""docs/cli.md says what the commands take, and their JSON has the keys that it names."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.cli import audit, modes, run, samples, status
from headrace.cli.completion import SHELLS, script
from headrace.cli.main import COMMANDS, main, parser
from headrace.records.sample_dump import Kept, SampleDump
from headrace.reference.cli import TARGET, render, subcommands
from headrace.wire.payloads import Sample
from tests.support.cli_desk import Desk


def test_the_page_is_current() -> None:
    assert TARGET.read_text() == render(), "run `make docs`"


def test_a_command_with_json_says_what_it_prints() -> None:
    for name, command in subcommands(parser()).items():
        module = importlib.import_module(f"headrace.cli.{name.replace('-', '_')}")
        assert ("--json" in command.format_help()) == bool(getattr(module, "JSON", None)), name


def test_json_of_a_plan(desk: Desk) -> None:
    code, output = desk.headrace("run", "run.yaml", "--dry-run", "--json")
    printed = output[output.index("{") :]  # without the warnings, which go to standard error
    assert (code, list(json.loads(printed))) == (0, list(run.JSON))
    code, output = desk.headrace("modes", "run.yaml", "--json", "async_training.staleness_threshold=0.5")
    assert (code, list(json.loads(output))) == (0, list(modes.JSON))
    assert json.loads(output)["max_required"] == 12
    code, output = desk.headrace("run", "run.yaml", "--json")
    assert code == 2
    assert "--json needs --dry-run" in output


def test_json_of_a_run_that_is_on_and_then_ended(desk: Desk) -> None:
    process = desk.start("run", "run.yaml", standin="wait")
    desk.wait_for_training()
    watched = desk.start("status", "x", "--watch", "0.2")
    told = json.loads(desk.headrace("status", "x", "--json")[1])
    assert set(told) <= set(status.JSON)
    assert {"state", "services", "last_update", "eval", "ledger"} <= set(told)
    found = json.loads(desk.headrace("audit", "x", "--json")[1])
    assert list(found) == list(audit.JSON)
    assert found["counts"]["ready"] == found["issued_total"] == 4
    assert desk.headrace("report", "x", "--out", "live.html")[0] == 0
    assert "Still on, and shown as far as they had come: x." in (desk.directory / "live.html").read_text()
    process.terminate()
    process.communicate(timeout=60)
    output, _ = watched.communicate(timeout=60)
    assert watched.returncode == process.returncode == 130
    assert "step 2/2" in output
    assert "run x: stopped" in output
    assert set(json.loads(desk.headrace("status", "x", "--json")[1])) <= set(status.JSON)
    for exit_code, state in ((130, "stopped"), (1, "failed"), (0, "completed")):
        desk.layout.summary.write_text(json.dumps({**desk.summary(), "status": state}))
        assert desk.headrace("status", "x", "--watch")[0] == exit_code
    os.utime(desk.layout.config)  # as a start does that is killed later
    os.utime(desk.layout.summary, (1, 1))
    assert desk.headrace("status", "x", "--watch")[0] == 1
    assert desk.headrace("status", "x", "--watch", "0")[0] == 2


def test_samples_as_text_and_json(
    tmp_path: Path, samples_of_a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["samples", str(samples_of_a_run), *words])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    code, out, err = said("--json", "--worst", "3")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, len(rows)) == (0, 3)
    assert set(rows[0]) == set(samples.JSON)
    assert "tokenizer is not there" in err
    code, out, _ = said("--version", "4", "--longest", "1")
    assert code == 0
    assert out.startswith("── sample ")
    assert "window of version 4" in out
    code, _, err = said("--version", "5")
    assert code == 2
    assert "versions 4 to 4" in err
    assert said("--worst", "0")[0] == 2
    empty = tmp_path / "empty"
    (empty / "private").mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(["samples", str(empty)])
    assert "no samples are recorded" in capsys.readouterr().err


def test_samples_obey_no_terminal_code_and_name_the_environment() -> None:
    kept = Kept(
        1, 1, 1, "s\x1b[2J", 0, "gsm8k\x1b[31m", "t\x1b", "o\n", 1, 0.5, [1], [3, 4, 5, 6],
        [(0, 0, 4)], 1.0, "turn_limit", {"part\x1b]0;x\x07": 0.5}, None, [1, 0, 0, 1], None,
    )  # fmt: skip
    told = list(samples.as_text(kept, lambda ids: f"{list(ids)}"))
    assert all(line.isprintable() for line in told)
    assert "gsm8k\\u001b[31m: reward 1.000, part\\u001b]0;x\\u0007 0.500" in told[0]
    assert [line.split() for line in told[3:6]] == [["v0", "[3]"], ["env", "[4,", "5]"], ["v0", "[6]"]]


@pytest.fixture
def samples_of_a_run(tmp_path: Path, samples: list[Sample]) -> Path:
    root = tmp_path / "run"
    (root / "private").mkdir(parents=True)
    SampleDump(root, samples_per_update=4, max_bytes=1 << 24).write(samples, step=9, version=4, lineage=1)
    return root


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_every_command(shell: str) -> None:
    text = script(shell)
    assert all(name in text for name in COMMANDS)
    assert "headrace_runs" in text


def test_bash_completes_commands_options_and_runs(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "script").write_text(script("bash"))
    for name in ("first", "second", "no-run"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        (tmp_path / "elsewhere" / name / ("x" if name == "no-run" else "config.yaml")).touch()
    ask = (
        'source ./script; try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _shtab_headrace; '
        'echo "${COMPREPLY[*]}"; }; try headrace sta; try headrace status --wa; '
        'try headrace report --runs-dir elsewhere ""; try headrace completion z'
    )
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["status", "--watch", "first second", "zsh"]


def test_bash_runs_no_name_of_a_directory(tmp_path: Path) -> None:
    """Whoever can make a directory must not be able to run something in the shell of another."""
    (tmp_path / "script").write_text(script("bash"))
    for name in ("$(touch pwned)", "`touch pwned`", "a b", "ab", "*"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    ask = 'source ./script; for word in "" a "*" "$(echo)"; do _headrace_runs "$word"; done'
    done = subprocess.run(["bash", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not (tmp_path / "pwned").exists()
    assert done.stdout.splitlines() == ["ab", "ab", "ab"]
    assert done.stderr == ""
