"""The trainer service of one node: the launcher, and what it needs in a cluster besides."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.records.layout import RunLayout
from headrace_trainer.distributed import heartbeat
from headrace_trainer.launch.launcher import Launcher


def serve(config: RunConfig, args: argparse.Namespace) -> int:
    with _trace_of_others(config), tempfile.TemporaryDirectory(prefix="headrace-trainer-") as state:
        heart = heartbeat.Launch(args.heartbeat or Path(state) / "heartbeat")
        return Launcher(config, args, Path(state), heart).run()


def exit_code(_: Exception) -> int | None:
    """None: the launcher's own errors have no exit code of their own. A rank's verdict brings its code."""
    return None


def _trace_of_others(config: RunConfig) -> AbstractContextManager[None]:
    """Collect the other pods' events in a cluster. Not in a rank: events also come while no ranks run."""
    run_dir = variables.run_dir_if_set()
    if not config.trace.enable or run_dir is None or not RunLayout(run_dir).in_cluster:
        return nullcontext()
    from headrace.traces.relay import collecting

    return collecting(variables.redis_url(), config.name, run_dir)
