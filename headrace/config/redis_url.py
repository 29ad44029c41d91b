"""Parse Redis URLs, and mask their passwords for display.

redis-py accepts a password in the user part (`redis://user:secret@host`) and in the query
(`?password=secret`). Both are masked here, so the result of `masked` may be printed or logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

MASK = "***"
DEFAULT_PORT = 6379
_SECRET_QUERY_KEYS = ("password", "ssl_password")


@dataclass(frozen=True)
class RedisAddress:
    """The parts of a URL. `path` is set only for Unix sockets, `host` and `port` only for other URLs."""

    scheme: str
    host: str
    port: int
    path: str | None
    username: str | None
    password: str | None

    @property
    def where(self) -> str:
        """Return `host:port` or the socket's path, for messages."""
        return self.path if self.path is not None else f"{self.host}:{self.port}"


def parse(url: str) -> RedisAddress:
    """Parse `url`. Raises ValueError, which never quotes the password, if it is malformed."""
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise ValueError("not a readable URL; write redis://:password@host:port/0") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError("must start with redis://, rediss:// or unix://")
    query = dict(parse_qsl(parts.query))
    password = unquote(parts.password) if parts.password is not None else query.get("password")
    return RedisAddress(
        scheme=parts.scheme,
        host=parts.hostname or "localhost",
        port=port,
        path=unquote(parts.path) if parts.scheme == "unix" else None,
        username=unquote(parts.username) if parts.username else query.get("username"),
        password=password,
    )


def masked(url: str) -> str:
    """Replace every password in `url` by `***`. A malformed URL is masked entirely.

    So is one whose password contains an unquoted `/`, `?` or `#`, which moves the rest out of the user part.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return MASK
    if "@" in parts.path or "@" in parts.query or parts.fragment:
        return f"{parts.scheme}://{MASK}"
    netloc = parts.netloc
    user, at, host = netloc.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        netloc = f"{name}:{MASK}@{host}" if colon else netloc
    query = parts.query
    pairs = parse_qsl(query, keep_blank_values=True)
    if any(key in _SECRET_QUERY_KEYS for key, _ in pairs):
        query = urlencode([(k, MASK if k in _SECRET_QUERY_KEYS else v) for k, v in pairs], safe="*")
    return f"{parts.scheme}://{netloc}{parts.path}{'?' if query else ''}{query}"


def build(host: str, port: int, password: str, db: int = 0) -> str:
    """Return a `redis://` URL for a server with a password."""
    return f"redis://:{quote(password, safe='')}@{host}:{port}/{db}"


def at_socket(path: Path, password: str, db: int = 0) -> str:
    """Return a `unix://` URL for a server with a password."""
    return f"unix://:{quote(password, safe='')}@{quote(str(path))}?db={db}"


def with_password(url: str, password: str) -> str:
    """Add the password to `url`, unless it has one."""
    try:
        if parse(url).password is not None:
            return url
    except ValueError:
        return url  # the connection attempt reports what is wrong with it
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user if at else ''}:{quote(password, safe='')}@{host}"))
