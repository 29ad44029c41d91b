"""Versions and rounds, as the coordinator knows them: the one place that has them.

Read from the ledger when a coordinator starts; from then on what it has committed itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.v1 import sync_pb2 as pb


@dataclass
class RoundState:
    version: int = -1
    """Committed last."""
    round: int = 0
    """The newest that was begun."""
    lineage: int = 0
    """Of the trainer that is heard."""
    pending: pb.BeginSync | None = None
    """What the trainer has asked for and has no answer to."""
    manifest: pb.Manifest | None = None
    """Of the trainer's snapshot."""
    tuning: pb.Tuning = field(default_factory=pb.Tuning)
    """S and eta as they are wanted; the trainer takes them up, and its next round brings them back."""
    last_committed: pb.Committed | None = None

    @property
    def canary(self) -> pb.Canary | None:
        """Of the committed version; None while nobody has brought it."""
        if self.manifest is None or self.manifest.version != self.version:
            return None
        return self.manifest.canary
