"""The generated wire types in the repository are what the .proto files say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def generated(directory: Path) -> dict[str, bytes]:
    found = [p for p in (directory / "headrace" / "v1").iterdir() if "_pb2" in p.name and p.is_file()]
    return {p.name: p.read_bytes() for p in found}


def test_checked_in_wire_types_are_current(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gen_proto.sh", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    fresh, kept = generated(tmp_path), generated(ROOT)
    assert len(fresh) >= 5
    assert sorted(fresh) == sorted(kept)
    stale = [name for name in fresh if fresh[name] != kept[name]]
    assert not stale, "run scripts/gen_proto.sh: the files differ from what it writes"
