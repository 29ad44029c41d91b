"""Names of a run's Redis keys. Scripts derive every key from the first one, so all share one hash tag."""

from __future__ import annotations

import re

NAME = "1 to 256 printable ASCII characters without spaces"
"""What the ledger accepts as the name of an owner, a request or a reason (`lua/_accept.lua`)."""


def is_name(text: str) -> bool:
    return re.fullmatch(r"[!-~]{1,256}", text) is not None


def prefix(run: str) -> str:
    return f"headrace:{{{run}}}:"


def meta(run: str) -> str:
    """The key that every script is called with."""
    return prefix(run) + "meta"


def seen(run: str, text: str) -> str:
    """A pseudo-key that holds nothing. Its name tells a script what the caller has seen (`marks`)."""
    return prefix(run) + "seen:" + text


def sample_id(issue: int) -> str:
    """Ten digits, so that ids sort in order of issue."""
    return f"{issue:010d}"
