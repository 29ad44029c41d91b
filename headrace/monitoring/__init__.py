"""Rules for Prometheus and dashboards for Grafana.

Both are in the chart `helm/headrace`. `rules.yaml` here is a link to the chart's file, so the same rules
apply in a cluster and on one machine. Building the package replaces the link by the file's content.
"""

from __future__ import annotations

from pathlib import Path

RULES = Path(__file__).with_name("rules.yaml")
"""Recording rules and alerts, in Prometheus' own format."""
