"""What Prometheus and Grafana need to know: rules and dashboards.

The chart in `helm/headrace` holds both. `rules.yaml` here is a link to the chart's file, which a build of the
package replaces by its content: a cluster and a run on one machine are judged by the same rules.
"""

from __future__ import annotations

from pathlib import Path

RULES = Path(__file__).with_name("rules.yaml")
"""Recording rules and alerts, in Prometheus' own format."""
