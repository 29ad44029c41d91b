"""The protocol between a pool and its processes: length-prefixed JSON over a socket.

Nothing is unpickled, so neither end can make the other run code. This module needs the standard library only,
like everything that the processes import.

    to the process      {"path", "name", "key", "memory", "timeout_s"}   once: what to load
                        [id, data_source, solution, ground_truth, extra_info]
    from the process    {"ready": true, "concurrent": bool}   or   {"failed": message}
                        [id, score, parts, answer]   or   [id, null, message, traceback]
                        {"leaving": true}   it ends now, and no pending call is to blame
"""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
LARGEST = 256 * 1024 * 1024
"""Largest message in bytes. A longer announced length is an error."""


class FrameError(ValueError):
    """The received bytes are not a valid message."""


def encode(message: Any) -> bytes:
    """Encode a message. Raises TypeError or ValueError if JSON cannot hold it, ValueError if too large."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body)} bytes is too large")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that `data` completes. Raises FrameError."""
        self._buffer += data
        out, at = [], 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > LARGEST:
                raise FrameError(f"a message of {length} bytes was announced")
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            try:
                out.append(json.loads(self._buffer[at : at + length]))
            except (ValueError, RecursionError) as error:
                raise FrameError(f"a message is not JSON: {error}") from error
            at += length
        del self._buffer[:at]
        return out
