"""torchrun for one node, with a store that belongs to the launch.

    python -m headrace_trainer.launch.node_agent FOLDER ARGUMENTS

torchrun's agents and their ranks meet at a store. The agent of the launch's first node serves it, on a socket
that the node's launcher has bound and passes down: on loopback if there is only one node, else on the address
where the other nodes reach it. A launch therefore depends on nothing outside its nodes, and ranks that save
while everything around them shuts down do not lose their store. Agents put only text and numbers into it.
torchrun's c10d rendezvous would keep a pickle there, open to anyone who reaches the port.

Its `--rdzv-conf`: `node` (0 serves), `fd` (the bound socket, inherited; node 0 only), `timeout` in seconds.

torchrun itself ends with a traceback. A rank that decides to fail has left the reason (`verdict`, in FOLDER).
A rank that was killed has not, so this process says which rank it was and which signal. Exit code 1 for both.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import parse_args, run

from headrace.service.exits import describe_exit
from headrace.service.spawn import die_with
from headrace.system.endings import EX_FAILED
from headrace_trainer.launch import verdict
from headrace_trainer.launch.launcher import AGENT, BACKEND, LAUNCHER
from headrace_trainer.launch.verdict import LaunchVerdict

_LAST_WORDS_S = 2.0
_POLL_S = 0.02


class LaunchRendezvous(RendezvousHandler):
    """The rendezvous of one launch. The coordinator has fixed the members and their numbers beforehand."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._host, self._port = parse_rendezvous_endpoint(parameters.endpoint, -1)
        self._launch = parameters.run_id
        self._nodes = parameters.max_nodes
        self._node = int(parameters.config["node"])
        self._fd = int(parameters.config.get("fd", -1))
        self._timeout = timedelta(seconds=float(parameters.config["timeout"]))
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: ranks open no store of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises what TCPStore raises when the first node cannot be reached in time."""
        if self._store is None:
            first = self._node == 0
            self._store = TCPStore(
                self._host,
                self._port,
                is_master=first,
                timeout=self._timeout,
                wait_for_workers=False,
                master_listen_fd=self._fd if first else None,
            )
        return RendezvousInfo(
            PrefixStore(self._launch, self._store),
            self._node,
            self._nodes,
            RendezvousStoreInfo(self._host, self._port),
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._launch

    def shutdown(self) -> bool:
        """Let the other nodes get their last answers: the store ends with the process that serves it."""
        if self._store is None:
            return True
        try:
            gone = self._store.add("gone", 1)
            deadline = time.monotonic() + _LAST_WORDS_S
            while self._node == 0 and gone < self._nodes and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                gone = self._store.add("gone", 0)
        except DistError:  # the store ended with the first node
            return False
        return True


def main() -> int:
    # Not between fork and exec: the launcher has gRPC threads, whose locks a forked child could find held.
    if launcher := os.environ.get(LAUNCHER):
        die_with(int(launcher), signal.SIGTERM)()
    folder, arguments = Path(sys.argv[1]), parse_args(sys.argv[2:])
    rendezvous_handler_registry.register(BACKEND, LaunchRendezvous)
    os.environ[AGENT] = str(os.getpid())  # torchrun's ranks would outlive it
    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = describe_exit(f"rank {rank} (process {failure.pid})", failure.exitcode)
        verdict.leave(folder, LaunchVerdict(EX_FAILED, f"{how}; its log says no more"))
        return EX_FAILED
    except DistError as error:
        where = arguments.rdzv_endpoint
        verdict.leave(folder, LaunchVerdict(EX_FAILED, f"the ranks could not meet at {where}: {error}"))
        return EX_FAILED
    except SignalException as told:
        # Not requested by the launcher, or requested twice. It reads no verdict of ranks that it ends itself.
        name = signal.Signals(told.sigval).name
        verdict.leave(folder, LaunchVerdict(EX_FAILED, f"{name} has ended the ranks before they had saved"))
        return EX_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
