"""Read held-out scores from `eval.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.records.json_files import read_rows


def eval_rows(path: Path) -> list[dict[str, Any]]:
    """Held-out scores sorted by version, then data source. The last row of each pair wins."""
    keys = ("version", "data_source", "reward", "n", "unfinished", "k", "best", "majority")
    found = {
        (row["version"], str(row.get("data_source"))): {key: row.get(key) for key in keys}
        for row in read_rows(path)
        if isinstance(row.get("version"), int)
    }
    return [found[key] for key in sorted(found)]
