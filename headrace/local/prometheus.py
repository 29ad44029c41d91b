"""A Prometheus server for a local run: it scrapes every service and evaluates the chart's rules.

Targets carry the same labels as in a cluster, so the same rules and dashboards work: `namespace` (`local`),
`release` (the run's name), `pod` (the service's name) and `job` (the kind of service). The run does not
depend on the server. Its data stay in the run's directory.

    prometheus/prometheus.yml   its configuration
    prometheus/targets.json     its current targets; it reloads the file when it changes
    prometheus/data/            its time series
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from headrace.config.loading import ConfigError
from headrace.connections.net import PortTaken, bound_socket, free_port
from headrace.local.processes import SupervisedService, command
from headrace.local.services import PROMETHEUS, Endpoints, http_ok, part
from headrace.monitoring import RULES
from headrace.records.json_files import write_json
from headrace.records.layout import RunLayout

BINARY = "HEADRACE_PROMETHEUS"
SCRAPE_S = 2
"""Short, because runs on one machine are short. In a cluster Prometheus' own interval applies."""
_RETENTION = "1y"


def find_binary(environ: Mapping[str, str] = os.environ) -> Path:
    """The `prometheus` program. If there is none, raises a ConfigError that says where to get one."""
    named = environ.get(BINARY)
    found = shutil.which(named or "prometheus", path=environ.get("PATH"))
    if found is None:
        what = f"{BINARY}={named} is no program" if named else "there is no program `prometheus` on the PATH"
        raise ConfigError(
            [
                f"--prometheus: {what}; install one (Debian and Ubuntu: apt-get install prometheus; others: "
                f"https://prometheus.io/download), or name it in {BINARY}"
            ]
        )
    return Path(found)


class LocalPrometheus:
    """The Prometheus server of one run. Call `follow` once a second."""

    def __init__(self, layout: RunLayout, host: str, port: int) -> None:
        """`port` 0 takes a free port. Raises ConfigError if the server cannot be started."""
        self._binary = find_binary()
        if not RULES.is_file():
            raise ConfigError([f"--prometheus: {RULES}: no such file; install the package again"])
        if port:
            try:
                bound_socket(host, port).close()
            except PortTaken as error:
                raise ConfigError([f"--prometheus: {error}; choose another, or leave the port out"]) from None
        self._layout = layout
        self.address = f"{host}:{port or free_port(host)}"
        self._written: list[dict[str, Any]] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def _targets(self) -> Path:
        return self._layout.prometheus / "targets.json"

    def follow(self, ends: Endpoints) -> None:
        """Update the targets to the services that are running now."""
        found = targets(ends)
        if found != self._written:
            self._layout.prometheus.mkdir(exist_ok=True)
            write_json(self._targets, found)
            self._written = found

    def service(self) -> SupervisedService:
        """Write the server's configuration and return it as a service of the run."""
        directory = self._layout.prometheus
        directory.mkdir(exist_ok=True)
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration(self._targets), sort_keys=False), encoding="utf-8")
        argv: list[str | Path] = [
            self._binary,
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--storage.tsdb.retention.time={_RETENTION}",
            f"--web.listen-address={self.address}",
            "--log.level=warn",
        ]
        log = self._layout.log(PROMETHEUS)
        ready = f"{self.url}/-/ready"
        return SupervisedService(
            PROMETHEUS, log, command(argv, log), ready=lambda: http_ok(ready), stage=1, essential=False
        )


def configuration(targets_file: Path) -> dict[str, Any]:
    """The server's configuration; equivalent to the cluster's PodMonitor and PrometheusRule."""
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(RULES.resolve())],
        "scrape_configs": [{"job_name": "headrace", "file_sd_configs": [{"files": [str(targets_file)]}]}],
    }


def targets(ends: Endpoints) -> list[dict[str, Any]]:
    """Every service of the run, in the form of Prometheus' file discovery."""
    return [
        {
            "targets": [address],
            "labels": {"namespace": "local", "release": ends.run, "pod": name, "job": part(name)},
        }
        for name, address in ends.metrics.items()
    ]
