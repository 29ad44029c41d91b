"""TLS between the services, from three files that the environment names. Without them, there is no TLS.

    HEADRACE_TLS_CERT, HEADRACE_TLS_KEY   certificate chain and private key of this service, PEM
    HEADRACE_TLS_CA                       what peers' certificates are checked against, PEM

All three must be set together. Both sides present a certificate (mutual TLS): a peer without one from this
authority is refused before its first byte is read. The files are read again at every handshake, so a
certificate replaced in place (a mounted Secret) is used without a restart. They are parsed first: gRPC would
report a file that is not PEM, or a key that does not match, as an unavailable peer. The token is still
required.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

VARIABLES = ("HEADRACE_TLS_CERT", "HEADRACE_TLS_KEY", "HEADRACE_TLS_CA")

Options = Sequence[tuple[str, Any]]

_NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)
"""Without it, gRPC would also reach services through `https_proxy`, which is meant for downloads."""


log = logging.getLogger("headrace.tls")

AT_MOST_S = 60.0
"""Longest wait for an unusable file, in seconds: a Secret may be in the middle of a mount or replacement."""
_AGAIN_S = 0.2


class TlsError(ValueError):
    """The environment names unusable files."""


class NotUsable(TlsError):
    """A file cannot be read or is not PEM. This may be transient: it may be half-written."""


class Patience:
    """One wait for files that are not usable yet: `seconds`, but at most AT_MOST_S."""

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, AT_MOST_S)
        self._deadline = time.monotonic() + self._seconds
        self._told = False

    def after(self, error: NotUsable) -> float:
        """Return the seconds to wait after a failed attempt. Raises TlsError when the time is up."""
        if time.monotonic() >= self._deadline:
            waited = f"after {self._seconds:g} s of waiting (at most services.start_timeout_s)"
            raise TlsError(f"{error}, {waited}; mount the right file, or correct the path") from None
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
        """Return (certificate chain, key, authority). Raises NotUsable, which never quotes their contents."""
        found = self._read()
        cert, key, ca = VARIABLES
        _check_certificates(cert, self.cert)
        _check_certificates(ca, self.ca)
        try:  # an encrypted key must not prompt for its password on the terminal
            _context().load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            why = "is no private key in PEM without a password"
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
                why = f"is not the key of the certificate in {self.cert}"
            raise NotUsable(f"{key}: {self.key} {why}") from None
        if self._read() != found:
            raise NotUsable(f"{cert}: {self.cert} is being replaced")
        return found

    def _read(self) -> tuple[bytes, bytes, bytes]:
        found = []
        for name, path in zip(VARIABLES, (self.cert, self.key, self.ca), strict=True):
            try:
                found.append(path.read_bytes())
            except OSError as error:
                raise _unreadable(name, path, error) from None
        return found[0], found[1], found[2]


def _check_certificates(name: str, path: Path) -> None:
    """Check that a file has certificates, all complete. `name`: what named the file. Raises NotUsable."""
    try:
        _context().load_verify_locations(path)
    except ssl.SSLError:
        raise NotUsable(f"{name}: {path} is no certificate in PEM, or not the whole of it") from None
    except OSError as error:
        raise _unreadable(name, path, error) from None


def _context() -> ssl.SSLContext:
    """Return a context that is used only to parse files."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _unreadable(name: str, path: Path, error: OSError) -> NotUsable:
    return NotUsable(f"{name}: {path} cannot be read: {error.strerror}")


def files() -> Files | None:
    """Return the files that the environment names; None without TLS. Raises TlsError if only some are set."""
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(VARIABLES):
        return None
    if missing:
        raise TlsError(f"{' and '.join(missing)} not set: TLS takes {', '.join(VARIABLES)} together, or none")
    return Files(*(Path(value) for value in values.values()))


def wait(seconds: float, redis_url: str | None = None) -> None:
    """Wait until the files that the environment and `redis_url` name, if any, are usable.

    Raises TlsError; see Patience.
    """
    patience = Patience(seconds)
    while True:
        try:
            if (found := files()) is not None:
                found.read()
            if (ca := _own_authority(redis_url or "")) is not None:
                _check_certificates("ssl_ca_certs of the Redis URL", ca)
            return
        except NotUsable as error:
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
            return None  # a replacement is under way: this handshake uses the previous files

    credentials = grpc.dynamic_ssl_server_credentials(
        configuration(), fetch, require_client_authentication=True
    )
    return int(server.add_secure_port(address, credentials))


def channel(address: str, options: Options) -> Any:
    """Return a synchronous channel. `address`: `host:port` or `unix:PATH`. Raises TlsError."""
    import grpc

    return _channel(grpc, address, options)


def aio_channel(address: str, options: Options) -> Any:
    """Return an asyncio channel, with the arguments and errors of `channel`."""
    import grpc.aio

    return _channel(grpc.aio, address, options)


def _channel(kind: Any, address: str, options: Options) -> Any:
    """Return a channel. `kind`: the gRPC module that makes it."""
    import grpc

    found, options = files(), [*_NO_PROXY, *options]
    if found is None:
        return kind.insecure_channel(address, options=options)
    cert, key, ca = found.read()
    credentials = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
    return kind.secure_channel(address, credentials, options=options)


def redis_options(url: str) -> dict[str, Any]:
    """Return additional redis-py client options for `url`; empty unless it is a `rediss://` one.

    Options in the URL itself (`?ssl_ca_certs=...`) take precedence.
    """
    found = files() if url.startswith("rediss://") else None
    if found is None or _own_authority(url) is not None:
        return {}
    return {
        "ssl_ca_certs": str(found.ca),
        "ssl_certfile": str(found.cert),
        "ssl_keyfile": str(found.key),
    }


def _own_authority(url: str) -> Path | None:
    """Return the CA file that a `rediss://` URL names, if any."""
    if not url.startswith("rediss://"):
        return None
    named = dict(parse_qsl(urlsplit(url).query)).get("ssl_ca_certs")
    return Path(named) if named else None
