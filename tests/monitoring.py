"""Rules and dashboards as data, and a real Prometheus to ask: what the tests of monitoring share."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.connections.net import free_port
from headrace.monitoring import RULES
from headrace.monitoring.dashboard import TARGET
from headrace.reference.metrics import services
from tests.waiting import until

CHART = TARGET.parents[1]
RULE_TESTS = sorted((CHART / "rules" / "tests").glob("*.yaml"))

ELSEWHERE = {
    "DCGM_FI_DEV_GPU_UTIL": "NVIDIA's DCGM exporter, on machines with GPUs",
    "DCGM_FI_DEV_FB_USED": "the same",
    "DCGM_FI_DEV_POWER_USAGE": "the same",
    "DCGM_FI_DEV_XID_ERRORS": "the same",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "the same",
    "DCGM_FI_PROF_NVLINK_RX_BYTES": "the same",
    "kube_deployment_spec_replicas": "kube-state-metrics, in a cluster; without it the panel counts targets",
}
"""Metrics of others, which no run on one machine has, and where they come from."""
NEEDS_GPU = {name for name in ELSEWHERE if name.startswith("DCGM_")}

LABELS = {
    name.removesuffix("_total"): set(entry.labels)
    for found in services().values()
    for name, entry in found.items()
}
"""All that each of our metrics has: each takes a handful of values, whatever the run's length."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing (Debian: apt-get install prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is missing (Debian: apt-get install prometheus)"
)


def promtool(*words: str | Path, text: str | None = None) -> str:
    """Run it; returns what it said. Fails the test when it finds anything."""
    done = subprocess.run(
        ["promtool", *words], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 0, said
    return said


def dashboard() -> dict[str, Any]:
    return json.loads(TARGET.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def panel_expressions() -> list[tuple[str, str]]:
    """(panel, expression) of every query of the dashboard."""
    return [
        (panel["title"], target["expr"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def rules() -> list[dict[str, Any]]:
    """Every rule, recording or alerting."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


_WORDS = frozenset(
    (
        *("and", "or", "unless", "on", "ignoring", "by", "without", "group_left", "group_right"),
        *("bool", "offset", "inf", "nan", "Inf", "NaN"),
    )
)
_CALL = re.compile(r"\s*\(")
_LABELS = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")


def selectors(expression: str) -> list[str]:
    """The vector selectors of a PromQL expression, `metric{...}`, without ranges."""
    text = _LABELS.sub(" ", expression)
    found, at = [], 0
    token = re.compile(
        r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[0-9][\w.]*|([a-zA-Z_:][\w:]*)(\{(?:[^{}"]|"[^"]*")*\})?'
    )
    while (match := token.search(text, at)) is not None:
        at = match.end()
        name, braces = match.group(1), match.group(2)
        if name and name not in _WORDS and (braces or not _CALL.match(text, at)):
            found.append(name + (braces or ""))
    return found


def names(expression: str) -> set[str]:
    """The metrics that an expression reads."""
    return {selector.split("{")[0] for selector in selectors(expression)}


def filled_in(expression: str, rate_interval: str = "20s") -> str:
    """A panel's expression as Grafana sends it, with everything selected."""
    out = expression.replace("$__rate_interval", rate_interval)
    return re.sub(r"\$(namespace|release|pod)\b", ".*", out)


class Asked:
    """A Prometheus over data that another one has written."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.url = url
        self.process = process

    def get(self, path: str, **query: str | float) -> Any:
        words = urllib.parse.urlencode({k: str(v) for k, v in query.items()})
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{words}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()[:500]}") from error

    def has_data(self, expression: str, start: float, end: float) -> bool:
        """Whether there was anything but NaN at any second between two times."""
        found = self.get("/api/v1/query_range", query=expression, start=start, end=end, step=1)
        return any(value != "NaN" for series in found["result"] for _, value in series["values"])

    def answers(self) -> bool:
        assert self.process is None or self.process.poll() is None, "prometheus has ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
            return bool(answer.status == 200)
        return False


@contextlib.contextmanager
def prometheus_over(data: Path, scratch: Path) -> Iterator[Asked]:
    """Serve the time series in `data` (a copy of them), scraping nothing."""
    shutil.copytree(data, scratch / "data", ignore=shutil.ignore_patterns("lock"))
    (scratch / "prometheus.yml").write_text("global: {}\n")
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={scratch / 'prometheus.yml'}",
            f"--storage.tsdb.path={scratch / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=error",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    asked = Asked(f"http://{address}", process)
    try:
        until(asked.answers, "prometheus to serve its data", 60)
        yield asked
    finally:
        process.terminate()
        process.wait(30)
