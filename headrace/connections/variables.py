"""Settings that a service takes from its environment: endpoints and the shared token. None are logged.

Secrets come in files that variables name (`HEADRACE_TOKEN_FILE`), under the local runner and in a cluster. A
variable would stay in `/proc/PID/environ` for the life of the process, and every child process could read
and print it. The plain variables are for interactive use and take precedence.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.config.loading import ConfigError
from headrace.config.redis_url import with_password
from headrace.connections.net import is_loopback

SECRET_FILES = {
    "HEADRACE_REDIS_URL": "HEADRACE_REDIS_URL_FILE",
    "HEADRACE_REDIS_PASSWORD": "HEADRACE_REDIS_PASSWORD_FILE",
    "HEADRACE_TOKEN": "HEADRACE_TOKEN_FILE",
}
"""Variables that are withheld from processes that run third-party code, and their `_FILE` forms."""


def without_secrets(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` without secrets, for a process that runs third-party code."""
    hidden = {*SECRET_FILES, *SECRET_FILES.values()}
    return {name: value for name, value in environ.items() if name not in hidden}


def secret(name: str) -> str:
    """Return the variable `name`, else the contents of the file that `name`_FILE names, else "".

    Raises ConfigError if the file cannot be read.
    """
    if value := os.environ.get(name):
        return value
    variable = SECRET_FILES.get(name, f"{name}_FILE")
    if not (file := os.environ.get(variable)):
        return ""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{variable}: {file} cannot be read: {error}"]) from None


def _required(name: str, what: str) -> str:
    value = secret(name) if name in SECRET_FILES else os.environ.get(name, "")
    if not value:
        raise ConfigError([f"{name} is not set: {what}"])
    return value


def redis_url() -> str:
    """Return HEADRACE_REDIS_URL, with the password from HEADRACE_REDIS_PASSWORD if that is set."""
    url = _required("HEADRACE_REDIS_URL", "give the Redis URL, e.g. redis://:password@host:6379/0")
    return with_redis_password(url)


def redis_url_if_set() -> str | None:
    """Like `redis_url`, but None if HEADRACE_REDIS_URL is not set."""
    return redis_url() if secret("HEADRACE_REDIS_URL") else None


def with_redis_password(url: str) -> str:
    """Return `url` with HEADRACE_REDIS_PASSWORD, quoted. A password in `url` itself takes precedence."""
    password = secret("HEADRACE_REDIS_PASSWORD")
    return with_password(url, password) if password else url


def coordinator() -> str:
    """HEADRACE_COORDINATOR: `host:port` of the sync coordinator, or `unix:` and its socket's path."""
    return _required("HEADRACE_COORDINATOR", "give the sync coordinator's host:port")


def run_dir() -> Path:
    """HEADRACE_RUN_DIR, where checkpoints and metrics go."""
    return Path(_required("HEADRACE_RUN_DIR", "give the run's directory"))


def run_dir_if_set() -> Path | None:
    """Like `run_dir`, but None if HEADRACE_RUN_DIR is not set."""
    return run_dir() if os.environ.get("HEADRACE_RUN_DIR") else None


def token() -> str:
    """HEADRACE_TOKEN. Empty turns authentication off, which only suits a loopback address.

    Of several tokens, separated by commas, the first is sent and all are accepted. To rotate a token without
    downtime, set `old,new` everywhere, then `new,old`, then `new`.
    """
    return secret("HEADRACE_TOKEN").strip()


class NoToken(ValueError):
    """A service would listen on a port that other machines can reach, without a token."""


def token_to_listen(host: str) -> str:
    """Return the token of a service on `host`. Raises NoToken if others could reach it without one."""
    found = token()
    if not _tokens(found) and not is_loopback(host):
        raise NoToken(
            f"HEADRACE_TOKEN is empty, and {host} is no loopback address: whoever reaches the port could "
            "take part in the run; set it (in a cluster: the key `token` of the release's Secret)"
        )
    return found


def accepted_tokens() -> list[str]:
    """Return all tokens of HEADRACE_TOKEN, beginning with the one that is sent; empty if there are none."""
    return _tokens(token())


def _tokens(secret: str) -> list[str]:
    return [one for part in secret.split(",") if (one := part.strip())]


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata that carries the token."""
    return tuple(("authorization", f"Bearer {one}") for one in _tokens(secret)[:1])


def token_matches(header: str | None, secret: str) -> bool:
    """Whether an Authorization header carries the token; compared in constant time."""
    given = (header or "").encode()
    return not secret or any(hmac.compare_digest(given, f"Bearer {one}".encode()) for one in _tokens(secret))
