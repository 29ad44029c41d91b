"""`python -m headrace.demo`: prepare a demo and print where its files are."""

import argparse
import signal
import sys
import time
from pathlib import Path

from headrace.demo import TASKS, held_out_exact_match, is_cached, prepare
from headrace.service.early_stop import end_when_told


def _show_progress(step: int, total: int, loss: float) -> None:
    """One line on a terminal, rewritten in place; a line every tenth of the way in a log file."""
    line = f"warm-up {step}/{total}  loss {loss:.3f}"
    if sys.stderr.isatty():
        print(f"\r{line}", end="\n" if step == total else "", file=sys.stderr, flush=True)
    elif step % max(1, total // 10) == 0:
        print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, prepare (or find) a demo, print its paths and its starting score."""
    end_when_told(128 + signal.SIGTERM)
    parser = argparse.ArgumentParser(prog="python -m headrace.demo", description=__doc__)
    parser.add_argument(
        "--task", choices=TASKS, default="spell_backward", help="which demo (default: spell_backward)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the warm-up (default: 0)")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/demo"), help="folder of the files")
    parser.add_argument(
        "--link", type=Path, help="a link to the prepared folder, by a name that does not change with it"
    )
    args = parser.parse_args(argv)

    task = TASKS[args.task]
    cached = is_cached(args.cache_dir, args.seed, task=task)
    started = time.monotonic()
    assets = prepare(args.cache_dir, args.seed, _show_progress, task=task)
    if args.link is not None:
        args.link.unlink(missing_ok=True)
        args.link.symlink_to(assets.model_dir.parent)
    print(f"model: {assets.model_dir}")
    print(f"train: {assets.train_file}")
    print(f"val:   {assets.val_file}")
    print(f"held-out exact match (greedy): {held_out_exact_match(assets):.3f}")
    print("already cached" if cached else f"prepared in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
