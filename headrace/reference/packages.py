"""Write the table of packages in docs/find-your-way.md. `make docs` runs it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "find-your-way.md"
START = "<!-- made from the packages' docstrings: begin -->"
END = "<!-- made from the packages' docstrings: end -->"
SERVICES = {
    "headrace_queue": "services/queue",
    "headrace_coordinator": "services/sync-coordinator",
    "headrace_rollouter": "services/rollouter",
    "headrace_trainer": "services/trainer",
}
"""Python package of each service -> its folder."""
LAYERS = (
    *(
        "v1",
        "system",
        "plugins",
        "algorithms",
        "compat",
        "config",
        "connections",
        "ledger",
        "wire",
        "metrics",
    ),
    *("records", "traces", "models", "weights", "service", "environments", "demo", "data", "rewards"),
    *("monitoring", "local", "report", *SERVICES, "cli", "reference"),
)
"""The packages of `headrace` and the services, bottom first. Each imports only earlier ones."""


def folder(package: str) -> str:
    """Return the folder of a package of LAYERS, relative to the repository's root."""
    return f"{SERVICES[package]}/{package}" if package in SERVICES else f"headrace/{package}"


def table() -> str:
    """Return the table of packages, top first, each with the first paragraph of its docstring."""
    rows = []
    for package in reversed(LAYERS):
        source = (ROOT / folder(package) / "__init__.py").read_text(encoding="utf-8")
        text = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
        rows.append(f"| `{folder(package)}/` | {' '.join(text.split())} |")
    return "\n".join(["| package | what it is |", "|---|---|", *rows])


def render(page: str) -> str:
    """Return `page` with the current table."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}")
