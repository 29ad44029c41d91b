"""What ranks tell each other in words is signed with the run's token, and nothing else is read.

Ranks find each other at a store, and by listeners of Gloo, that know no credentials: whoever reaches those
may take a rank's place and send what he likes. In a tensor that is numbers. Words are more, such as the name
of a checkpoint to load. Pickles, which torch's object collectives send, are code: nobody makes or reads one.

Signed with the first of the run's tokens, accepted with each of them: a token is replaced node by node.
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
    """Words that came from no rank of this launch."""


class Signatures:
    def __init__(self, tokens: Sequence[str], launch: str) -> None:
        """`launch`: what was signed in another one is not accepted either.

        Without a token anybody could sign; that suits ranks that nobody else reaches.
        """
        self._keys = [f"{launch} {token}".encode() for token in tokens or [""]]

    def sign(self, words: bytes) -> bytes:
        return hmac.digest(self._keys[0], words, _DIGEST) + words

    def read(self, message: bytes) -> bytes:
        """The words of a signed message. Raises Unsigned."""
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
    """From now on no object collective of torch pickles or unpickles anything in this process."""
    # By these names torch pickles in its object collectives, and nowhere else.
    distributed_c10d._pickler = _Refused  # type: ignore[assignment]
    distributed_c10d._unpickler = _Refused  # type: ignore[assignment]
