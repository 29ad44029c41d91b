"""Structured logs: one JSON object per line on stderr. No secrets get here: URLs are masked first."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

from headrace.system import terminal

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats time (UTC), level, service, logger, event, then everything passed as `extra`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        millis = int(record.msecs)
        line: dict[str, object] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{millis:03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup(service: str) -> None:
    """Send every logger of this process to stderr as JSON lines. HEADRACE_LOG_LEVEL sets the level.

    All other output, such as tracebacks and libraries' own lines, is made safe for a terminal as well.
    """
    terminal.guard()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(os.environ.get("HEADRACE_LOG_LEVEL", "INFO"))
    for noisy in ("httpx", "httpcore", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
