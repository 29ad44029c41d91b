"""The shared token, and its replacement without a pause."""

from __future__ import annotations

import pytest

from headrace.environment import bearer, token_matches


def sent(secret: str) -> str | None:
    return dict(bearer(secret)).get("authorization")


def test_a_token_is_asked_for_where_one_is_set() -> None:
    assert token_matches(None, "")
    assert token_matches("Bearer anything", "")
    assert token_matches(sent("right"), "right")
    for header in (None, "", "Bearer", "Bearer ", "Bearer wrong", "right", "Bearer right "):
        assert not token_matches(header, "right")


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
