"""Makes untrusted text encodable as UTF-8: JSON escapes can produce lone surrogates.

Protobuf, Redis and files refuse them. Standard library only, because processes that run user functions import
this.
"""

from __future__ import annotations


def encodable(text: str) -> str:
    """Return `text` with each lone surrogate escaped, as in `\\ud83d`."""
    return text.encode("utf-8", "backslashreplace").decode()
