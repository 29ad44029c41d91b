"""A picture of each mode from a real run: `python -m benchmarks.mode_pictures` writes docs/images/mode_*.png.

Short runs of the long-tail task with `trace.enable`, bound to cores as in `benchmarks.modes`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.modes import MODES
from benchmarks.runs import ROOT, finished_run, slug
from headrace.traces.picture import draw
from headrace.traces.reading import read

SAMPLES = 384
SPAN_S = 8.0
TAIL_S = 4.0
"""The end of the run, when nothing is generated any more."""


def last_update_s(directory: Path) -> float:
    """The end of the last local update, on the picture's axis."""
    found = read(directory)
    ends = [e.end for s in found.starts for e in s.events if e.name == "update_actor"]
    return (max(ends) - found.began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(MODES), help="these modes only")
    parser.add_argument("--fresh", action="store_true", help="run again what has finished before")
    args = parser.parse_args()
    for mode in args.only or MODES:
        directory = finished_run(
            f"picture-{slug(mode)}",
            [
                "configs/long_tail.yaml",
                f"configs/modes/{mode}.yaml",
                f"rollout.total_rollout_steps={SAMPLES}",
                "rollout.test_freq=0",
                "trainer.save_freq=0",
                "trace.enable=true",
                *MODES[mode],
            ],
            args.fresh,
        )
        out = ROOT / "docs" / "images" / f"mode_{mode}.png"
        end = last_update_s(directory) - TAIL_S
        draw(directory, out, (end - SPAN_S, end), mode.replace("_", " "))
        print(out, flush=True)


if __name__ == "__main__":
    main()
