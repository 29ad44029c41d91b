"""Holds the coordinator's only record of versions and rounds.

It is read from the ledger at start-up, and updated by the coordinator's own commits after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.v1 import sync_pb2 as pb


@dataclass
class RoundState:
    version: int = -1
    """The last committed version."""
    round: int = 0
    """The newest round begun."""
    lineage: int = 0
    """Lineage of the current trainer."""
    pending: pb.BeginSync | None = None
    """The trainer's unanswered request."""
    manifest: pb.Manifest | None = None
    """Manifest of the trainer's snapshot."""
    tuning: pb.Tuning = field(default_factory=pb.Tuning)
    """The wanted S and eta. The trainer adopts them and reports them back with its next round."""
    last_committed: pb.Committed | None = None

    @property
    def canary(self) -> pb.Canary | None:
        """Canary of the committed version, or None until a trainer has brought it."""
        if self.manifest is None or self.manifest.version != self.version:
            return None
        return self.manifest.canary
