"""Text of others that may hold what UTF-8 cannot: halves of a surrogate pair, as a JSON escape leaves them.

Protobuf, Redis and files refuse such text. Standard library only: processes that run users' functions import
this.
"""

from __future__ import annotations


def encodable(text: str) -> str:
    """`text` with each lone surrogate written out, such as `\\ud83d`."""
    return text.encode("utf-8", "backslashreplace").decode()
