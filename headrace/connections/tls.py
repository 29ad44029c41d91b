"""TLS between the services, by three files that the environment names; without them connections are plain.

    HEADRACE_TLS_CERT, HEADRACE_TLS_KEY   certificate chain and private key of this service, PEM
    HEADRACE_TLS_CA                       what peers' certificates are checked against, PEM

All three go together. Both sides show a certificate (mutual TLS): a peer that has none of this authority is
refused before its first byte is read. The files are read anew at every handshake, so that a certificate that
is replaced in place (a mounted Secret) is used without a restart. They are parsed first: gRPC would take what
is no PEM, or a key of another certificate, for a peer that is away. The token is asked for all the same.
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
"""gRPC would take `https_proxy`, which is there for downloads, for the way to services, too."""


log = logging.getLogger("headrace.tls")

AT_MOST_S = 60.0
"""A file that cannot be used is waited for so long at most: a Secret may just be mounted, or replaced."""
_AGAIN_S = 0.2


class TlsError(ValueError):
    """The environment names files that cannot be used."""


class NotUsable(TlsError):
    """A file cannot be read or holds no PEM, which may pass: it may be half-written."""


class Patience:
    """One wait for files that cannot be used yet, of `seconds`, and of AT_MOST_S at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = min(seconds, AT_MOST_S)
        self._deadline = time.monotonic() + self._seconds
        self._told = False

    def after(self, error: NotUsable) -> float:
        """After an attempt that has failed: seconds until the next. Raises TlsError when the time is up."""
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
        """(certificate chain, key, authority). Raises NotUsable; never shows their contents."""
        found = self._read()
        cert, key, ca = VARIABLES
        _check_certificates(cert, self.cert)
        _check_certificates(ca, self.ca)
        try:  # a key that has a password must not ask the terminal for it
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
    """One or more, each of them whole. `name`: what has named the file, for the message. Raises NotUsable."""
    try:
        _context().load_verify_locations(path)
    except ssl.SSLError:
        raise NotUsable(f"{name}: {path} is no certificate in PEM, or not the whole of it") from None
    except OSError as error:
        raise _unreadable(name, path, error) from None


def _context() -> ssl.SSLContext:
    """One that only parses."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _unreadable(name: str, path: Path, error: OSError) -> NotUsable:
    return NotUsable(f"{name}: {path} cannot be read: {error.strerror}")


def files() -> Files | None:
    """What the environment names; None without TLS. Raises TlsError when only a part is set."""
    values = {name: os.environ.get(name, "") for name in VARIABLES}
    missing = [name for name, value in values.items() if not value]
    if len(missing) == len(VARIABLES):
        return None
    if missing:
        raise TlsError(f"{' and '.join(missing)} not set: TLS takes {', '.join(VARIABLES)} together, or none")
    return Files(*(Path(value) for value in values.values()))


def wait(seconds: float, redis_url: str | None = None) -> None:
    """Until the files can be used that the environment and `redis_url` name, if any.

    Raises TlsError; see Patience."""
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
    if found is None or _own_authority(url) is not None:
        return {}
    return {
        "ssl_ca_certs": str(found.ca),
        "ssl_certfile": str(found.cert),
        "ssl_keyfile": str(found.key),
    }


def _own_authority(url: str) -> Path | None:
    """The CA file that a `rediss://` URL names itself."""
    if not url.startswith("rediss://"):
        return None
    named = dict(parse_qsl(urlsplit(url).query)).get("ssl_ca_certs")
    return Path(named) if named else None
