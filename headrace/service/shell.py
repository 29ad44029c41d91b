"""What is the same around every service, from its first line to its exit code.

    SIGTERM, Ctrl-C   end it at once until it has handlers of its own (`early_stop`, `stop_event`)
    arguments         --config, where it listens, and its own
    log               JSON lines on stderr, guarded against what a terminal would obey (`logs`)
    configuration     read and checked; cores, if it may be bound to some
    certificates      waited for when the environment names files that are not there yet (`tls.wait`)
    work              the module's `serve`, which is imported only now: that may take seconds
    end               its return value is the exit code. An error becomes an exit code (the module's own
                      `exit_code`, then `exit_codes`) and one sentence, the last line of the log (`endings`)

Secrets are no part of it: a service reads them from files where it needs them (`environment`).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol, cast

from headrace.config.loading import load
from headrace.config.run import RunConfig
from headrace.connections import tls
from headrace.service import cores
from headrace.service.early_stop import end_when_interrupted
from headrace.service.exit_codes import common_exit_code
from headrace.system import logs
from headrace.system.endings import EX_FAILED, say_why

log = logging.getLogger("headrace.service")

ExitCode = Callable[[Exception], int | None]


class Work(Protocol):
    """A service's module."""

    def serve(self, config: RunConfig, args: argparse.Namespace) -> int:
        """The whole life of the service; returns the exit code when it ends in order."""

    def exit_code(self, error: Exception) -> int | None:
        """Of an error that is the service's own; None for any other."""


@dataclass(frozen=True)
class Shell:
    name: str
    """Of the service, for its log and its last sentence."""
    description: str
    work: str
    """The module that is `Work`."""
    told: int = 0
    """Exit code when it is told to end before it has handlers."""
    cpus: Callable[[RunConfig], Sequence[int] | None] = lambda _: None
    """The cores it is bound to, the configuration's NAME.cpus."""
    cpus_key: str = ""

    def parser(self) -> argparse.ArgumentParser:
        """With `--config`; the service adds its own arguments."""
        parser = argparse.ArgumentParser(prog=f"headrace-{self.name}", description=self.description)
        parser.add_argument("--config", type=Path, required=True, help="the run's configuration (YAML)")
        return parser

    def run(self, args: argparse.Namespace) -> NoReturn:
        """Until the service ends; then the process ends, too."""
        replica = getattr(args, "replica", None)
        logs.setup(self.name if replica is None else f"{self.name}-{replica}")
        end_when_interrupted(self.told)
        own: ExitCode = lambda _: None  # noqa: E731
        try:
            config = load(args.config)
            cores.bind(self.cpus(config), self.cpus_key)
            tls.wait(config.services.start_timeout_s)
            work = cast(Work, importlib.import_module(self.work))
            own = work.exit_code
            code = work.serve(config, args)
        except Exception as error:  # the last resort of a process
            code = last_words(self.name, error, own)
        sys.exit(code)


def last_words(name: str, error: Exception, own: ExitCode) -> int:
    """Say why the service `name` ends; returns the exit code. `own`: its module's `exit_code`."""
    code = own(error)
    if code is None:
        code = common_exit_code(error)
    if code is not None:
        say_why(name, error)
        return code
    log.error("the service failed", exc_info=error)
    say_why(name, f"{type(error).__name__}: {error}")
    return EX_FAILED


def stop_event() -> asyncio.Event:
    """Set by SIGTERM or Ctrl-C from now on, in the running loop: the service is up, and ends in order."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
