"""The store at which a weight group meets: served by trainer rank 0, keys prefixed by the group epoch."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from headrace.connections.net import bound_socket
from headrace.weights.transports.communicator import CommunicatorError


def serve_store(host: str) -> dist.TCPStore:
    """A store on a free port of `host` only, given by `.port`. It lives as long as the returned object.

    Raises PortTaken.
    """
    # TCPStore serves on every interface, whatever host it is given, unless it gets a bound socket.
    listener = bound_socket(host, 0)
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        use_libuv=True,
        master_listen_fd=listener.detach(),  # closed by the store
    )


def client_store(host: str, port: int, epoch: int, timeout_s: float) -> dist.Store:
    try:
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, OSError) as error:
        raise CommunicatorError(f"no weight-group store at {host}:{port}: {error}") from error
    return dist.PrefixStore(f"weights/{epoch}", store)
