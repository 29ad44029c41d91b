"""Resident memory of every service's process tree, once a second."""

from __future__ import annotations

from collections.abc import Mapping

import psutil


class MemoryRecord:
    """Samples in MB (10^6 bytes) by service. Pages shared within a tree are counted once per process."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def sample(self, pids: Mapping[str, int]) -> None:
        """Add one sample for each of `pids`. A process that is gone is skipped."""
        for name, pid in pids.items():
            try:
                root = psutil.Process(pid)
                tree = [root, *root.children(recursive=True)]
            except psutil.Error:
                continue
            self.samples.setdefault(name, []).append(sum(map(_resident, tree)) / 1e6)


def _resident(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss)
    except psutil.Error:
        return 0.0
