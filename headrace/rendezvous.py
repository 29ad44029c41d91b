"""torchrun's rendezvous store as a process of its own.

A store that dies takes torchrun's agents with it, so it shares no process with any service.
`python -m headrace.rendezvous --port P` serves until it is told to stop.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from datetime import timedelta

from headrace import logs
from headrace.early_stop import end_when_interrupted, end_when_told

log = logging.getLogger("headrace.rendezvous")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    logs.setup("rendezvous")
    end_when_told(0)
    end_when_interrupted(0)
    from torch.distributed import TCPStore

    store = TCPStore(
        args.host, args.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    log.info("serving", extra={"host": args.host, "port": store.port})
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


if __name__ == "__main__":
    main()
