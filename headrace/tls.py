"""TLS between the services, by three files that the environment names; without them connections are plain.

    HEADRACE_TLS_CERT, HEADRACE_TLS_KEY   certificate chain and private key of this service, PEM
    HEADRACE_TLS_CA                       what peers' certificates are checked against, PEM

All three go together. Both sides show a certificate (mutual TLS): a peer that has none of this authority is
refused before its first byte is read. The files are read anew at every handshake, so that a certificate that
is replaced in place (a mounted Secret) is used without a restart. The token is asked for all the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLES = ("HEADRACE_TLS_CERT", "HEADRACE_TLS_KEY", "HEADRACE_TLS_CA")

Options = Sequence[tuple[str, Any]]

_NO_PROXY: Options = (("grpc.enable_http_proxy", 0),)
"""gRPC would take `https_proxy`, which is there for downloads, for the way to services, too."""


class TlsError(ValueError):
    """The environment names files that cannot be used."""


@dataclass(frozen=True)
class Files:
    """Paths of PEM files."""

    cert: Path
    key: Path
    ca: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate chain, key, authority). Raises TlsError; never shows their contents."""
        found = []
        for name, path in zip(VARIABLES, (self.cert, self.key, self.ca), strict=True):
            try:
                found.append(path.read_bytes())
            except OSError as error:
                raise TlsError(f"{name}: {path} cannot be read: {error.strerror}") from None
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


def check() -> None:
    """Raise TlsError when the environment asks for TLS with files that are not there."""
    if (found := files()) is not None:
        found.read()


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
    """A channel for threads. Raises TlsError."""
    import grpc

    credentials = _credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=[*_NO_PROXY, *options])
    return grpc.secure_channel(address, credentials, options=[*_NO_PROXY, *options])


def aio_channel(address: str, options: Options) -> Any:
    """A channel for asyncio. Raises TlsError."""
    import grpc

    credentials = _credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=[*_NO_PROXY, *options])
    return grpc.aio.secure_channel(address, credentials, options=[*_NO_PROXY, *options])


def _credentials() -> Any:
    import grpc

    found = files()
    if found is None:
        return None
    cert, key, ca = found.read()
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


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
