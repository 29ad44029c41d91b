"""Signed control messages between ranks. Messages without a signature by the run's token are not read.

Ranks meet at a store and at Gloo listeners, neither of which checks credentials. Anyone who reaches them can
impersonate a rank and send anything. A forged tensor is only numbers. A forged message can name a checkpoint
to load, for example. A pickle, which torch's object collectives send, is code, so none is written or read.

Messages are signed with the first of the run's tokens and accepted with any, so that a token can be replaced
node by node.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from torch.distributed import distributed_c10d

_DIGEST = hashlib.sha256
_SIZE = _DIGEST().digest_size


class Unsigned(RuntimeError):
    """A message that no rank of this launch has signed."""


class Signatures:
    def __init__(self, tokens: Sequence[str], launch: str) -> None:
        """`launch`: id of this launch; messages signed in another one are not accepted.

        Without a token anybody could sign. That is acceptable only for ranks that nobody else can reach.
        """
        self._keys = [f"{launch} {token}".encode() for token in tokens or [""]]

    def sign(self, words: bytes) -> bytes:
        return hmac.digest(self._keys[0], words, _DIGEST) + words

    def read(self, message: bytes) -> bytes:
        """The payload of a signed message. Raises Unsigned."""
        given, words = message[:_SIZE], message[_SIZE:]
        if not any(hmac.compare_digest(given, hmac.digest(key, words, _DIGEST)) for key in self._keys):
            raise Unsigned(
                "a message that came over the ranks' group is not signed with the run's token "
                "(HEADRACE_TOKEN): whoever sent it is no rank of this launch, or has another token"
            )
        return words


class _Refused:
    def __init__(self, *_: Any) -> None:
        raise Unsigned(
            "torch's object collectives send pickles, which are code: ranks tell each other JSON "
            "(Ranks.share, Ranks.gather_all)"
        )


def forbid_objects() -> None:
    """Stop torch's object collectives from pickling or unpickling anything in this process."""
    # torch's object collectives pickle through these two names, and nothing else in torch uses them.
    distributed_c10d._pickler = _Refused  # type: ignore[assignment]
    distributed_c10d._unpickler = _Refused  # type: ignore[assignment]
