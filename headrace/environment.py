"""What a service learns from its environment: endpoints and the shared token. None of it is logged."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from headrace.net import is_loopback
from headrace.redis_url import with_password

SECRETS = ("HEADRACE_REDIS_URL", "HEADRACE_REDIS_PASSWORD", "HEADRACE_TOKEN")
"""Variables that no process with somebody else's code is given."""


def without_secrets() -> dict[str, str]:
    """The environment for such a process."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def _required(name: str, what: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise SystemExit(f"{name} is not set: {what}")
    return value


def redis_url() -> str:
    """HEADRACE_REDIS_URL, with the password of HEADRACE_REDIS_PASSWORD where that is set."""
    url = _required("HEADRACE_REDIS_URL", "give the Redis URL, e.g. redis://:password@host:6379/0")
    return with_redis_password(url)


def redis_url_if_set() -> str | None:
    """The same; None where HEADRACE_REDIS_URL is not set."""
    return redis_url() if os.environ.get("HEADRACE_REDIS_URL") else None


def with_redis_password(url: str) -> str:
    """`url` with HEADRACE_REDIS_PASSWORD, whatever characters that has; one in `url` itself goes first."""
    password = os.environ.get("HEADRACE_REDIS_PASSWORD", "")
    return with_password(url, password) if password else url


def coordinator() -> str:
    """HEADRACE_COORDINATOR, `host:port` of the sync coordinator."""
    return _required("HEADRACE_COORDINATOR", "give the sync coordinator's host:port")


def run_dir() -> Path:
    """HEADRACE_RUN_DIR, where checkpoints and metrics go."""
    return Path(_required("HEADRACE_RUN_DIR", "give the run's directory"))


def run_dir_if_set() -> Path | None:
    """The same; None where HEADRACE_RUN_DIR is not set."""
    return run_dir() if os.environ.get("HEADRACE_RUN_DIR") else None


def token() -> str:
    """HEADRACE_TOKEN. Empty turns authentication off, which only suits a loopback address.

    Several tokens, separated by commas, are all accepted and the first is sent: a token is replaced without
    a pause by `new,old` everywhere, then `new`. (The first step itself is two: `old,new`, then `new,old`.)
    """
    return os.environ.get("HEADRACE_TOKEN", "").strip()


class NoToken(ValueError):
    """A port that strangers can reach, and nothing that keeps them out."""


def token_to_listen(host: str) -> str:
    """The token of a service that listens on `host`. NoToken where others could reach it without one."""
    found = token()
    if not _tokens(found) and not is_loopback(host):
        raise NoToken(
            f"HEADRACE_TOKEN is empty, and {host} is no loopback address: whoever reaches the port could "
            "take part in the run; set it (in a cluster: the key `token` of the release's Secret)"
        )
    return found


def accepted_tokens() -> list[str]:
    """All of HEADRACE_TOKEN, the one that is sent first; empty where there is none."""
    return _tokens(token())


def _tokens(secret: str) -> list[str]:
    return [one for part in secret.split(",") if (one := part.strip())]


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carries the token."""
    return tuple(("authorization", f"Bearer {one}") for one in _tokens(secret)[:1])


def token_matches(header: str | None, secret: str) -> bool:
    """Whether an Authorization header carries the token; compared in constant time."""
    given = (header or "").encode()
    return not secret or any(hmac.compare_digest(given, f"Bearer {one}".encode()) for one in _tokens(secret))
