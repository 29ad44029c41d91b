"""What hosts and tools read of this repository: workflows, hooks, templates, the site's configuration."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from scripts.site_links import rewrite
from tests.docs_commands import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yaml"))


class SiteLoader(yaml.SafeLoader):
    """MkDocs has a tag of its own for variables of the environment."""


def variable_and_default(loader: SiteLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node)


SiteLoader.add_constructor("!ENV", variable_and_default)
SITE: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), SiteLoader)


def targets(text: str) -> list[str]:
    """What `text` lets make make."""
    calls = re.findall(r"\bmake ((?:[a-z][a-z-]* ?\b(?!=))+)", text)
    return [target for call in calls for target in call.split()]


def test_targets_are_read() -> None:
    assert targets("make docs manifests\nmake test ARGS=x\n") == ["docs", "manifests", "test"]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_run_what_is_there(file: Path) -> None:
    workflow: dict[Any, Any] = yaml.safe_load(file.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 180, name
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), "by commit, with a comment"
            for target in targets(step.get("run", "")):
                made = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, check=False)
                assert made.returncode == 0, f"{name}: make {target}"


def test_ci_lints_tests_and_builds_the_site() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yaml").read_text())["jobs"]
    runs = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()}
    assert {name: targets(run) for name, run in runs.items()} == {
        "lint": ["lint", "docs", "manifests"],
        "test": ["test"],
        "site": ["site"],
    }


def test_hooks_run_what_make_lint_runs() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in local["hooks"]]
    lint = subprocess.run(["make", "-n", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for tool in (".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy"):
        assert tool in lint
        assert any(entry.startswith(tool) for entry in entries), tool
    assert targets(entries[-1]) == ["docs", "manifests"]


@pytest.mark.parametrize("file", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yaml")), ids=lambda p: p.name)
def test_issue_forms(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert {"name", "description", "body"} <= set(form)
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    for field in form["body"]:
        assert field["type"] in ("textarea", "input", "dropdown")
        assert field["attributes"]["label"]


def pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(children, list) or children
    return [page for child in children for page in pages(child)]  # type: ignore[attr-defined]


def test_the_site_has_every_page_once() -> None:
    """`make site` builds it, strictly; that is not part of these tests, since it installs packages."""
    docs = ROOT / "docs"
    there = sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
    assert sorted(pages(SITE["nav"])) == there
    assert (ROOT / SITE["hooks"][0]).is_file()


def test_the_index_links_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)#]+\.md)\)", index))
    assert {page for page in pages(SITE["nav"]) if "/" not in page} - linked == {"README.md"}


def test_the_sites_lock_is_what_the_extra_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements" / "docs.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for text in project["optional-dependencies"]["docs"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name])
    assert pins["mkdocstrings-python"]


def test_links_that_leave_the_pages() -> None:
    url = "https://example.org/blob/main"
    inside = "see [b](data.md), [c](./data.md#y), ![d](../images/d.png)"
    assert rewrite("[v](../helm/values.yaml)", "data.md", url) == f"[v]({url}/helm/values.yaml)"
    assert rewrite("[v](../helm/values.yaml)", "data.md", "") == "v"
    assert rewrite(inside, "decisions/gate.md", url) == inside
    assert rewrite("[x](../../headrace/a.py#L3)", "decisions/gate.md", url) == f"[x]({url}/headrace/a.py#L3)"
