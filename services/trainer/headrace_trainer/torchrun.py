"""`python -m headrace_trainer.torchrun FOLDER ARGUMENTS`: torchrun, without the traceback that it ends with.

A rank that fails by its own judgement has said why (`verdict`). One that was killed has not: then this
process says which it was, and by which signal. Exit code 1 for either.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, run

from headrace.endings import EX_FAILED
from headrace.runner.processes import describe_exit
from headrace.runner.services import tcp_open
from headrace_trainer import verdict
from headrace_trainer.verdict import Verdict

MEET_S = 600.0
"""How long the store may take to be there, and then the other nodes."""
_POLL_S = 0.2


def main() -> int:
    folder = Path(sys.argv[1])
    arguments = parse_args(sys.argv[2:])
    try:
        _wait_for_store(arguments.rdzv_endpoint)
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = describe_exit(f"rank {rank} (process {failure.pid})", failure.exitcode)
        verdict.leave(folder, Verdict(EX_FAILED, f"{how}; its log says no more"))
        return EX_FAILED
    except RendezvousError as error:
        where = arguments.rdzv_endpoint
        verdict.leave(folder, Verdict(EX_FAILED, f"the ranks could not meet at {where}: {error}"))
        return EX_FAILED
    except SignalException as told:  # its launcher ends it, and the ranks with it
        return 128 + signal.Signals(told.sigval)
    return 0


def _wait_for_store(address: str) -> None:
    """torch's own client waits as well, and writes a page about each minute of it. Raises RendezvousError."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + MEET_S
    while not tcp_open(host, int(port)):
        if time.monotonic() > deadline:
            raise RendezvousError(f"no store has answered there for {MEET_S:g} s")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
