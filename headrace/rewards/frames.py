"""What goes over the socket between a pool and its processes: JSON with its length before it.

Both ends are ours and neither trusts the other's bytes to be code: nothing is unpickled. Standard library
only, as everything that the processes import.

    to the process      {"path", "name", "key", "memory", "timeout_s"}   once: what to load
                        [id, data_source, solution, ground_truth, extra_info]
    from the process    {"ready": true, "concurrent": bool}   or   {"failed": message}
                        [id, score, parts, answer]   or   [id, null, message, traceback]
                        {"leaving": true}   it ends now, through no fault of what is still to be done
"""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct(">I")
LARGEST = 256 * 1024 * 1024
"""Bytes of one message; whoever announces more is not to be believed."""


class FrameError(ValueError):
    """What came is no message."""


def encode(message: Any) -> bytes:
    """Raises TypeError or ValueError for what JSON cannot hold, ValueError for what is too large."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LARGEST:
        raise ValueError(f"a message of {len(body)} bytes is too large")
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes. Raises FrameError."""
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
