"""The shared token, its replacement without a pause, and a password that comes by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.loading import ConfigError
from headrace.connections import variables
from headrace.connections.variables import NoToken, bearer, redis_url, token, token_matches, token_to_listen


def sent(secret: str) -> str | None:
    return dict(bearer(secret)).get("authorization")


def test_a_token_is_asked_for_where_one_is_set() -> None:
    assert token_matches(None, "")
    assert token_matches("Bearer anything", "")
    assert token_matches(sent("right"), "right")
    for header in (None, "", "Bearer", "Bearer ", "Bearer wrong", "right", "Bearer right "):
        assert not token_matches(header, "right")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "coordinator", ""])
def test_strangers_are_not_let_in_for_want_of_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for nothing in ("", " \n", ","):
        monkeypatch.setenv("HEADRACE_TOKEN", nothing)
        with pytest.raises(NoToken, match="HEADRACE_TOKEN is empty"):
            token_to_listen(host)
        for own in ("127.0.0.1", "127.0.0.3", "::1", "localhost"):
            token_to_listen(own)
    monkeypatch.setenv("HEADRACE_TOKEN", "right\n")  # as a file gives it
    assert token_to_listen(host) == token() == "right"


@pytest.mark.parametrize(
    ("server", "client"),
    [("old,new", "old"), ("old,new", "new,old"), ("new,old", "old,new"), ("new", "new,old")],
)
def test_each_step_of_a_replacement_fits_the_one_before(server: str, client: str) -> None:
    assert token_matches(sent(client), server)


@pytest.mark.parametrize(("server", "client"), [("new", "old"), ("new", "old,new"), (",", ""), ("a,b", "c")])
def test_a_token_that_is_gone_is_refused(server: str, client: str) -> None:
    assert not token_matches(sent(client), server)
    assert not token_matches("Bearer ", server)


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("redis://host:6379/3", "redis://:p%40s%2Fs%23@host:6379/3"),
        ("rediss://host/0?ssl_cert_reqs=required", "rediss://:p%40s%2Fs%23@host/0?ssl_cert_reqs=required"),
        ("redis://user@host:1", "redis://user:p%40s%2Fs%23@host:1"),
        ("redis://:mine@host:1", "redis://:mine@host:1"),
        ("redis://host?password=mine", "redis://host?password=mine"),
        ("http://host", "http://host"),
    ],
)
def test_the_password_may_come_by_itself(url: str, whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD", "p@s/s#")
    assert redis_url() == whole
    monkeypatch.delenv("HEADRACE_REDIS_PASSWORD")
    assert redis_url() == url


def test_a_secret_comes_from_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(" from the file\n")
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(file))
    assert variables.token() == "from the file"
    monkeypatch.setenv("HEADRACE_TOKEN", "from the variable")
    assert variables.token() == "from the variable"
    monkeypatch.setenv("HEADRACE_REDIS_URL", "redis://ours:6379/0")
    (tmp_path / "password").write_text("p@s/s\n")  # every byte counts
    monkeypatch.setenv("HEADRACE_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    monkeypatch.delenv("HEADRACE_REDIS_PASSWORD", raising=False)
    assert variables.redis_url() == "redis://:p%40s%2Fs%0A@ours:6379/0"
    secret = {*variables.SECRET_FILES, *variables.SECRET_FILES.values()}
    assert not secret & variables.without_secrets().keys()


def test_a_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)
    monkeypatch.setenv("HEADRACE_TOKEN_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"HEADRACE_TOKEN_FILE: .*nowhere cannot be read: "):
        variables.token()
