"""Starts this node's ranks under torchrun, as often as necessary, and forwards stop requests to them.

With several nodes each start is a launch of all of them. The coordinator assigns its id and each node's
number. A launch that is over on one node is over on all. Its launchers then wait for the next launch instead
of exiting, so that one lost node costs one container and not all of them.

Ranks that are stopping depend only on each other. The first node serves the store at which they met
(`node_agent`), and a checkpoint needs neither the coordinator nor Redis.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

from headrace.config.run import RunConfig
from headrace.connections import variables
from headrace.connections.net import GLOO_INTERFACE, address_facing, bound_socket, interface_of, is_loopback
from headrace.service.guardian import MARK, kill_marked
from headrace.service.module_command import module_command
from headrace.system.endings import EX_FAILED, EX_STOPPED, FINAL, say_why
from headrace.v1 import sync_pb2 as pb
from headrace_trainer.distributed import heartbeat
from headrace_trainer.launch import verdict
from headrace_trainer.launch.launch_stream import LaunchStream

log = logging.getLogger("headrace.trainer.launch")

EX_UNSAVED = 143
"""For the coordinator, of ranks ended before all could agree on a stop: the other nodes' must end."""
STARTED = "started"
"""In the directory that ranks share with their launcher: from now on they heed a stop, and save first."""
FORGIVEN_AFTER_S = 120.0
"""Ranks that ran for so long start again with a clean record."""
BACKEND = "launch"
"""torchrun's name for the meeting of `node_agent`, which is not imported here: it takes torch with it."""
AGENT = "HEADRACE_NODE_AGENT"
"""Environment variable of the ranks: the process with which they end."""
LAUNCHER = "HEADRACE_LAUNCHER"
"""The same for the node agent."""
_MEET_S = 600.0
"""How long the nodes of a launch may take until their agents have met."""
_POLL_S = 0.2
_TERM_S = 15.0


class Launcher:
    def __init__(
        self, config: RunConfig, args: argparse.Namespace, state: Path, heart: heartbeat.Launch
    ) -> None:
        """`state`: a directory that only this process uses."""
        self._config = config
        self._args = args
        self._state = state
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = state
        self._stops = 0
        self._reason = ""
        """Why the last ranks failed, as they say."""
        self._heart = heart

    def run(self) -> int:
        """Run until the ranks have finished, were stopped, or cannot continue. Returns the exit code.

        Raises TokenRefused, CoordinatorRefused and TlsError."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        if self._config.trainer.nnodes == 1:
            with _store_socket("127.0.0.1") as store:
                only = pb.NodeStart(launch=uuid.uuid4().hex, store=_address(store))
                code = self._ranks(only, store, None)
            assert code is not None
        else:
            code = self._launches()
        if code == EX_UNSAVED:
            return EX_STOPPED
        if code == 0 and self._args.stay:
            log.info("completed; waiting to be stopped")
            while not self._stops:
                heartbeat.sleep(_POLL_S)  # a signal interrupts it
        if code not in (0, EX_STOPPED):
            say_why("trainer", self._reason or f"the ranks ended with code {code}")
        return code

    def _launches(self) -> int:
        name = f"{self._args.node_name or socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        failures = 0
        coordinator = variables.coordinator()
        here = self._args.node_address or address_facing(coordinator)
        while True:
            store = _store_socket(here)
            stream = LaunchStream(
                coordinator,
                variables.token(),
                name,
                self._config.trainer.nnodes,
                _address(store),
                self._config.services.start_timeout_s,
            )
            code: int | None = None
            try:
                if (launch := stream.wait(lambda: self._stops > 0)) is None:
                    return EX_STOPPED
                began = time.monotonic()
                code = self._ranks(launch, store, stream)
            finally:
                store.close()
                stream.close(code)
            if code is None:
                log.warning("launch is over", extra={"reason": stream.over})
                if self._stops:
                    self._reason = f"the launch was over before its ranks had saved: {stream.over}"
                    return EX_FAILED
                continue
            if code == 0 or code in FINAL or self._stops:
                return code
            if code == EX_STOPPED:  # another node was stopped; its replacement will come
                continue
            failures = 1 if time.monotonic() - began >= FORGIVEN_AFTER_S else failures + 1
            if failures > self._config.services.max_restarts:
                return code
            why = {"code": code, "reason": self._reason, "failures": failures}
            log.warning("ranks ended", extra=why)

    def _ranks(self, start: pb.NodeStart, store: socket.socket, stream: LaunchStream | None) -> int | None:
        """Run torchrun once. Returns its exit code, or None if it was ended because the launch is over.
        `store`: the socket on which it serves the launch's store if this is the first node."""
        launch = start.launch
        self._folder = self._state / launch
        self._folder.mkdir()
        if self._stops:
            (self._folder / "stop").touch()
        mark = f"{os.environ.get(MARK, 'headrace-trainer')}/{launch}"
        self._heart.ranks_begin(self._config.trainer.n_gpus_per_node)
        self._child = subprocess.Popen(
            _command(self._config, self._args, start, store, self._folder, self._heart.directory),
            env={**os.environ, **_where_gloo_listens(store), MARK: mark, LAUNCHER: str(os.getpid())},
            start_new_session=True,  # Ctrl-C goes to this process alone, which forwards it
            pass_fds=[] if start.number else [store.fileno()],
        )
        store.close()  # the child holds it; once nobody serves the port, connections must be refused
        try:
            while (code := _wait(self._child)) is None:
                heartbeat.beat()
                nothing_to_save = self._stops > 0 and not (self._folder / STARTED).exists()
                # Ranks that are stopping may be saving; a coordinator that ends must not cut that short.
                over = stream is not None and stream.over is not None and not self._stops
                if nothing_to_save or over:
                    self._child.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._child.wait(_TERM_S)
                    return EX_UNSAVED if nothing_to_save else None
        finally:
            kill_marked(mark)  # no rank of this launch may meet one of the next
            self._child.wait()
            self._child = None
            self._heart.ranks_ended()
        told = verdict.find(self._folder)
        self._reason = told.reason if told is not None else ""
        if told is not None:
            code = told.code
        if code not in (0, EX_STOPPED, *FINAL) and stream is not None and stream.over is not None:
            return None  # the other nodes went first
        return code

    def _stop(self, number: int, _: object) -> None:
        self._stops += 1
        if self._stops > 1 and self._child is not None:
            self._child.send_signal(number)  # the second request ends the ranks at once
        elif self._folder.is_dir():  # also while the ranks are just being started
            (self._folder / "stop").touch()  # ranks check for it between updates and in waits


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return None


def _where_gloo_listens(store: socket.socket) -> dict[str, str]:
    """Environment that makes Gloo listen on the interface of the store's address, not of the host's name.

    With several nodes the user's own setting takes precedence.
    """
    address = store.getsockname()[0]
    if not is_loopback(address) and GLOO_INTERFACE in os.environ:
        return {}
    return {GLOO_INTERFACE: interface_of(address)}


def _store_socket(host: str) -> socket.socket:
    """A listening socket, so that a node that is early waits instead of being refused. Raises PortTaken."""
    found = bound_socket(host, 0)
    found.listen()
    return found


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _command(
    config: RunConfig,
    args: argparse.Namespace,
    start: pb.NodeStart,
    store: socket.socket,
    state: Path,
    heart: Path,
) -> list[str]:
    """The torchrun command for this node."""
    serves = "" if start.number else f",fd={store.fileno()}"
    return [
        *module_command("headrace_trainer.launch.node_agent", str(state)),
        f"--nnodes={config.trainer.nnodes}", f"--nproc-per-node={config.trainer.n_gpus_per_node}",
        f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={start.store}", f"--rdzv-id={start.launch}",
        f"--rdzv-conf=node={start.number},timeout={_MEET_S:g}{serves}",
        f"--local-addr={store.getsockname()[0]}",
        # torchrun's own `-m` would put the working directory first on the ranks' path.
        "--max-restarts=0", "--no-python", *module_command("headrace_trainer.worker"),
        "--config", str(args.config), "--state", str(state), "--port", str(args.port),
        "--heartbeat", str(heart),
        *(["--host", args.host] if args.host else []),
    ]  # fmt: skip
