"""Every command that the documentation shows is run, or is one that another test runs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.algorithms.estimator import ADVANTAGE_ESTIMATORS
from headrace.algorithms.policy_loss import POLICY_LOSSES
from headrace.cli.main import parse
from headrace.config.run import RunConfig
from headrace.reference import metrics, verl
from headrace.reference.config import TARGET, render
from tests import docs_commands
from tests.docs_commands import PAGES, ROOT

RUN_ELSEWHERE = {
    # Both want the demo's model, which a fresh clone has not made yet:
    # `tests/process/cli/test_data_command.py` and `tests/process/local/test_validate.py` run
    # them with others.
    ".venv/bin/headrace data configs/demo.yaml --show 1",
    ".venv/bin/headrace validate configs/demo.yaml",
}


@pytest.mark.parametrize(("page", "command"), docs_commands.all_commands())
def test_command_works(page: str, command: str) -> None:
    """Those of the tutorial run in `test_tutorial.py`, those about a finished run in
    `tests/engine/local/test_run.py`. Here they are parsed, and whatever starts nothing is run."""
    words = shlex.split(command)
    if page == docs_commands.TUTORIAL or command in RUN_ELSEWHERE:
        return
    if words[0] == "make":
        # The targets themselves are this test run, the demo and the benchmarks: here only that they exist.
        argv = ["make", "-n", *words[1:]]
    else:
        assert words[0] == ".venv/bin/headrace", f"{page}: no test knows how to run {command!r}"
        if words[1] in docs_commands.ABOUT_A_RUN:
            parse(words[1:])
            return
        if words[1] == "run" and "--dry-run" not in words:
            words.append("--dry-run")
        assert words[1] in ("run", "convert-config", "modes"), f"{page}: {command!r} is run by no test"
        argv = [sys.executable, "-m", "headrace.cli.main", *words[1:]]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "block", [b for p in PAGES for b in re.findall(r"```yaml\n(.*?)```", p.read_text(), re.DOTALL)]
)
def test_configurations_are_valid(block: str) -> None:
    """A whole configuration, or sections of one."""
    found = yaml.safe_load(textwrap.dedent(block))
    if "model" not in found:
        whole = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
        if "sources" in found.get("reward", {}):
            del whole["custom_reward_function"]  # the demo's: it is one or the other
        found = whole | {key: {**whole.get(key, {}), **values} for key, values in found.items()}
    RunConfig.model_validate(found)


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(body) for _, body in found]


@pytest.mark.parametrize("block", [b for p in PAGES for b in blocks(p, "json")])
def test_json_is_json(block: str) -> None:
    """One value, or one a line."""
    try:
        json.loads(block)
    except ValueError:
        for line in block.splitlines():
            json.loads(line)


def test_the_reward_of_the_readme_scores_its_row() -> None:
    readme = PAGES[0]
    row = json.loads(blocks(readme, "json")[0])
    (code,) = [block for block in blocks(readme, "python") if "def compute_score(" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    truth = row["reward_model"]["ground_truth"]
    scores = [
        names["compute_score"](row["data_source"], answer, truth, row["extra_info"])
        for answer in (f" {truth}\n", "", f"{truth}0")
    ]
    assert scores == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_nothing_is_installed_from_a_package_index_under_our_name(page: Path) -> None:
    assert not re.findall(r"install '?headrace\b", page.read_text())


def test_configuration_page_is_current() -> None:
    assert TARGET.read_text() == render(), "run `make docs`"


def test_page_for_users_of_verl_is_current() -> None:
    page = verl.TARGET.read_text()
    assert page == verl.render(page), "run `make docs`"


def test_metrics_page_is_current() -> None:
    assert metrics.TARGET.read_text() == metrics.render(), "run `make docs`"


def test_every_key_says_what_it_means() -> None:
    empty = [line for line in render().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert not empty


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """What links may name on it: its headings, as GitHub and the site spell them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_anchors_are_there(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*\.md)?#([^)\s]+)\)", page.read_text()):
        other = page.parent / target if target else page
        assert anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def test_the_readme_counts_algorithms_without_their_aliases() -> None:
    spelt = {15: "Fifteen", 16: "sixteen"}
    for registry, noun in ((ADVANTAGE_ESTIMATORS, "advantage estimators"), (POLICY_LOSSES, "policy losses")):
        ours = (registry.get(name) for name in registry.names())
        count = len({entry for entry in ours if entry.__module__.startswith("headrace.")})
        assert f"{spelt.get(count, count)} {noun}" in PAGES[0].read_text()
