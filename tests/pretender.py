"""Another user of this machine, who wants to stand in the place of a service that has crashed.

As a program: a line of JSON on stdin names the places, host and port or the path of a Unix socket each. It
takes each as soon as it can, and notes what is sent to it there. For each further line it prints that.
Started by root it is another user indeed. Otherwise it stays who it is, so that no permission can be tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

Place = tuple[str, int] | str

_NOBODY = 65534
_AGAIN_S = 0.002
IS_ANOTHER = os.geteuid() == 0


class Pretender:
    """The program, and what its user asks of it."""

    def __init__(self, places: list[Place]) -> None:
        """Returns once it is about to try."""
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._ask(json.dumps(places)) == "ready"

    def notes(self) -> dict[str, dict[str, Any]]:
        """By place: whether it was `taken`, what was `heard` there, the number of `failures` to take it, and
        the last `error`."""
        found: dict[str, dict[str, Any]] = json.loads(self._ask(""))
        return found

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Pretender:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


def bound(place: Place) -> socket.socket:
    """Raises OSError."""
    if isinstance(place, str):
        with contextlib.suppress(FileNotFoundError):
            if not _answers(place):
                Path(place).unlink()  # what a service that was killed has left behind
        return _listening(socket.socket(socket.AF_UNIX), place)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _listening(listener, tuple(place))


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _listening(listener: socket.socket, address: Any) -> socket.socket:
    try:
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def pretend(place: Place, note: dict[str, Any]) -> None:
    """For ever: take the place, and listen to whoever comes."""
    while True:
        try:
            listener = bound(place)
        except OSError as error:
            note["error"] = error.strerror
            note["failures"] += 1
            time.sleep(_AGAIN_S)
            continue
        note["taken"] = True
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=listen, args=(peer, note), daemon=True).start()


def listen(peer: socket.socket, note: dict[str, Any]) -> None:
    with peer, contextlib.suppress(OSError):
        peer.sendall(b"\0\0\0\4\0\0\0\0\0")  # gRPC's clients wait for the server's SETTINGS
        while data := peer.recv(1 << 16):
            note["heard"] += data.decode("latin-1")


def main() -> None:
    if IS_ANOTHER:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    places: list[Place] = json.loads(sys.stdin.readline())
    notes = {}
    for place in places:
        name = place if isinstance(place, str) else f"{place[0]}:{place[1]}"
        notes[name] = {"taken": False, "heard": "", "failures": 0, "error": ""}
        threading.Thread(target=pretend, args=(place, notes[name]), daemon=True).start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(notes), flush=True)


if __name__ == "__main__":
    main()
