"""TLS between the services, by three files that the environment names; without them connections are plain.

    HEADRACE_TLS_CERT, HEADRACE_TLS_KEY   certificate chain and private key of this service, PEM
    HEADRACE_TLS_CA                       what peers' certificates are checked against, PEM

All three go together. Both sides show a certificate (mutual TLS): a peer that has none of this authority is
refused before its first byte is read. The files are read anew at every handshake, so that a certificate that
is replaced in place (a mounted Secret) is used without a restart. The token is asked for all the same.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLES = ("HEADRACE_TLS_CERT", "HEADRACE_TLS_KEY", "HEADRACE_TLS_CA")

Options = Sequence[tuple[str, Any]]

_NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)
"""gRPC would take `https_proxy`, which is there for downloads, for the way to services, too."""


log = logging.getLogger("headrace.tls")

AT_MOST_S = 60.0
"""A file that cannot be read is waited for so long at most: a Secret may just be mounted, or replaced."""
_AGAIN_S = 0.2


class TlsError(ValueError):
    """The environment names files that cannot be used."""


class NotThere(TlsError):
    """A file cannot be read, which may pass."""


class Patience:
    """One wait for files that cannot be read yet, of `seconds`, and of AT_MOST_S at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, AT_MOST_S)
        self._deadline = time.monotonic() + self._seconds
        self._told = False

    def after(self, error: NotThere) -> float:
        """After an attempt that has failed: seconds until the next. Raises TlsError when the time is up."""
        if time.monotonic() >= self._deadline:
            waited = f"after {self._seconds:g} s of waiting (at most services.start_timeout_s)"
            raise TlsError(f"{error}, {waited}; mount the file, or correct the path") from None
        if not self._told:
            self._told = True
            log.warning(
                "waiting for certificate files", extra={"why": str(error), "at_most_s": self._seconds}
            )
        return min(_AGAIN_S, self._seconds)


@dataclass(frozen=True)
class Files:
    """Paths of PEM files."""

    cert: Path
    key: Path
    ca: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate chain, key, authority). Raises NotThere; never shows their contents."""
        found = []
        for name, path in zip(VARIABLES, (self.cert, self.key, self.ca), strict=True):
            try:
                found.append(path.read_bytes())
            except OSError as error:
                raise NotThere(f"{name}: {path} cannot be read: {error.strerror}") from None
        return found[0], found[1], found[2]


def files() -> Files | None:
    """What the environment names; None without TLS. Raises TlsError when only a part is set."""
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(VARIABLES):
        return None
    if missing:
        raise TlsError(f"{' and '.join(missing)} not set: TLS takes {', '.join(VARIABLES)} together, or none")
    return Files(*(Path(value) for value in values.values()))


def wait(seconds: float) -> None:
    """Until the files can be read that the environment names, if any. Raises TlsError; see Patience."""
    patience = Patience(seconds)
    while (found := files()) is not None:
        try:
            found.read()
            return
        except NotThere as error:
            time.sleep(patience.after(error))


def listen(server: Any, address: str) -> int:
    """Make a grpc.aio server listen on `address`; returns the port. Raises RuntimeError, TlsError."""
    import grpc

    found = files()
    if found is None:
        return int(server.add_insecure_port(address))

    def configuration() -> grpc.ServerCertificateConfiguration:
        cert, key, ca = found.read()
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        try:
            return configuration()
        except TlsError:
            return None  # half of a replacement: this handshake uses what the one before did

    credentials = grpc.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=True
    )
    return int(server.add_secure_port(address, credentials))


def channel(address: str, options: Options) -> Any:
    """A channel for threads. `address`: a target of gRPC, `host:port` or `unix:PATH`. Raises TlsError."""
    import grpc

    return _channel(grpc, address, options)


def aio_channel(address: str, options: Options) -> Any:
    """The same for asyncio."""
    import grpc.aio

    return _channel(grpc.aio, address, options)


def _channel(kind: Any, address: str, options: Options) -> Any:
    """`kind`: the module that makes them."""
    import grpc

    found, options = files(), [*_NO_PROXY, *options]
    if found is None:
        return kind.insecure_channel(address, options=options)
    cert, key, ca = found.read()
    credentials = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
    return kind.secure_channel(address, credentials, options=options)


def redis_options(url: str) -> dict[str, Any]:
    """What a redis-py client of `url` is given in addition: nothing unless it is a `rediss://` one.

    What the URL itself says (`?ssl_ca_certs=...`) goes first.
    """
    found = files() if url.startswith("rediss://") else None
    if found is None or "ssl_ca_certs=" in url:
        return {}
    return {
        "ssl_ca_certs": str(found.ca),
        "ssl_certfile": str(found.cert),
        "ssl_keyfile": str(found.key),
    }
