"""Every metric, once: keys of a run's rows (`row_keys`), and each service's Prometheus metrics.

An entry says what a metric means and where it is shown. The services' registries, the check of real rows,
docs/metrics.md, the charts of `headrace report` and the panels of the dashboard follow from it. A new metric
is one entry here and the line that sets it; `make docs` writes the page and the dashboard.
"""
