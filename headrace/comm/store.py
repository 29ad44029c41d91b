"""The store at which a weight group meets: served by trainer rank 0, keys prefixed by the group epoch."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from headrace.comm import CommunicatorError


def serve_store(host: str) -> dist.TCPStore:
    """A store on a free port; `.port` tells which. It lives as long as the returned object."""
    return dist.TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60), use_libuv=True
    )


def client_store(host: str, port: int, epoch: int, timeout_s: float) -> dist.Store:
    try:
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, OSError) as error:
        raise CommunicatorError(f"no weight-group store at {host}:{port}: {error}") from error
    return dist.PrefixStore(f"weights/{epoch}", store)
