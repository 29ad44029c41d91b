"""Measures a round's phases, for the trainer that asked for it and for the timeline."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headrace.traces.recording import Recorder
from headrace.v1 import sync_pb2 as pb


@dataclass
class Timings:
    """Monotonic seconds at which each phase ended."""

    began: float = field(default_factory=time.monotonic)
    paused: float = 0.0
    transferred: float = 0.0
    committed: float = 0.0

    def report(self, version: int, round_: int, members: int, attempts: int) -> pb.Committed:
        return pb.Committed(
            version=version,
            round=round_,
            pause_s=self.paused - self.began,
            transfer_s=self.transferred - self.paused,
            commit_s=self.committed - self.transferred,
            total_s=self.committed - self.began,
            members=members,
            attempts=attempts,
        )

    def draw(self, trace: Recorder, version: int, round_: int) -> None:
        """Add the round and its phases to the trace."""
        marks = [int(t * 1e9) for t in (self.began, self.paused, self.transferred, self.committed)]
        trace.complete("round", marks[0], marks[-1], version=version, round=round_)
        for name, start, end in zip(("pause", "transfer", "commit"), marks, marks[1:], strict=False):
            trace.complete(name, start, end, version=version)
