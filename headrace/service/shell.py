"""The main program shared by all services, from the first line to the exit code.

    SIGTERM, Ctrl-C   end the service at once until it has its own handlers (`early_stop`, `stop_event`)
    arguments         --config, the address to listen on, and the service's own
    log               JSON lines on stderr, with terminal control characters escaped (`logs`)
    configuration     read and checked; the process is bound to cores if the configuration says so
    certificates      waited for if the environment names files that cannot be used yet (`tls.wait`)
    work              the module's `serve`; the module is imported only now, as that may take seconds
    end               the return value of `serve` is the exit code. An error becomes an exit code (the
                      module's `exit_code`, then `exit_codes`) and one sentence, the last line of the log
                      (`endings`)

Secrets are not handled here: a service reads them from files where it needs them (`variables`).
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
from headrace.connections import tls, variables
from headrace.service import cores
from headrace.service.early_stop import end_when_interrupted
from headrace.service.exit_codes import common_exit_code
from headrace.system import logs
from headrace.system.endings import EX_FAILED, say_why

log = logging.getLogger("headrace.service")

ExitCode = Callable[[Exception], int | None]


class Work(Protocol):
    """The interface of a service's module."""

    def serve(self, config: RunConfig, args: argparse.Namespace) -> int:
        """Run the service; returns the exit code when it ends cleanly."""

    def exit_code(self, error: Exception) -> int | None:
        """The exit code of an error specific to the service; None for any other."""


@dataclass(frozen=True)
class Shell:
    """The main program of one service."""

    name: str
    """Name of the service, for its log and its last sentence."""
    description: str
    work: str
    """Name of the module that implements `Work`."""
    told: int = 0
    """Exit code for a signal that arrives before the service has handlers."""
    cpus: Callable[[RunConfig], Sequence[int] | None] = lambda _: None
    """The cores to bind to: the configuration's NAME.cpus."""
    cpus_key: str = ""

    def parser(self) -> argparse.ArgumentParser:
        """A parser with `--config`, to which the service adds its own arguments."""
        parser = argparse.ArgumentParser(prog=f"headrace-{self.name}", description=self.description)
        parser.add_argument("--config", type=Path, required=True, help="the run's configuration (YAML)")
        return parser

    def run(self, args: argparse.Namespace) -> NoReturn:
        """Run the service, then end the process."""
        replica = getattr(args, "replica", None)
        logs.setup(self.name if replica is None else f"{self.name}-{replica}")
        end_when_interrupted(self.told)
        own: ExitCode = lambda _: None  # noqa: E731
        try:
            config = load(args.config)
            cores.bind(self.cpus(config), self.cpus_key)
            tls.wait(config.services.start_timeout_s, variables.redis_url_if_set())
            work = cast(Work, importlib.import_module(self.work))
            own = work.exit_code
            code = work.serve(config, args)
        except Exception as error:  # the last resort of a process
            code = last_words(self.name, error, own)
        sys.exit(code)


def last_words(name: str, error: Exception, own: ExitCode) -> int:
    """Log why the service `name` ends; returns the exit code. `own`: its module's `exit_code`."""
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
    """An event of the running loop that SIGTERM and Ctrl-C set from now on, so the service ends cleanly."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
