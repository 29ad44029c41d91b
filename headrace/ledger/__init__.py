"""The ledger: where every sample of a run is, in one Redis or Valkey server.

`states` defines the table of transitions. `ops` builds operations and `client` runs them. `lua/` holds one
script per transition. `in_memory` is the same ledger in plain Python. `audit` checks the ledger, and
`observer` detects dead owners.
"""

from headrace.ledger import ops
from headrace.ledger.audit import AuditReport, audit
from headrace.ledger.client import (
    AdoptError,
    ArgumentRefused,
    AsyncLedger,
    LedgerError,
    LedgerUnavailable,
    LedgerWentBack,
    LoginRefused,
    SyncLedger,
    adopt,
)
from headrace.ledger.observer import BeatObserver
from headrace.ledger.states import State

__all__ = [
    "AdoptError",
    "ArgumentRefused",
    "AsyncLedger",
    "AuditReport",
    "BeatObserver",
    "LedgerError",
    "LedgerUnavailable",
    "LedgerWentBack",
    "LoginRefused",
    "State",
    "SyncLedger",
    "adopt",
    "audit",
    "ops",
]
