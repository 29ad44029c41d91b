"""Exit codes for errors that end a service, as far as all services share them."""

from __future__ import annotations

from headrace.config.loading import ConfigError
from headrace.connections.net import PortTaken
from headrace.connections.tls import TlsError
from headrace.connections.variables import NoToken
from headrace.ledger.client import LedgerUnavailable, LedgerWentBack, LoginRefused
from headrace.service.coordinator_stream import CoordinatorRefused, TokenRefused
from headrace.system.disk import DiskFull
from headrace.system.endings import EX_BEYOND_REPAIR, EX_CONFIG, EX_FAILED, EX_OSERR, EX_UNAVAILABLE

_CODES: tuple[tuple[int, tuple[type[Exception], ...]], ...] = (
    (EX_CONFIG, (ConfigError, TlsError, NoToken, LoginRefused, TokenRefused, CoordinatorRefused)),
    (EX_UNAVAILABLE, (LedgerUnavailable,)),
    (EX_BEYOND_REPAIR, (LedgerWentBack,)),
    (EX_OSERR, (PortTaken,)),
    (EX_FAILED, (DiskFull,)),
)


def common_exit_code(error: Exception) -> int | None:
    """The exit code for `error`; None if it is specific to a service, or unexpected."""
    return next((code for code, kinds in _CODES if isinstance(error, kinds)), None)
