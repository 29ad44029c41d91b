"""What ranks tell each other in words is signed with the run's token, and nothing else is read.

Ranks find each other at a store, and by listeners of Gloo, that know no credentials: whoever reaches those
may take a rank's place and send what he likes. In a tensor that is numbers. Words are more: the name of a
checkpoint to load, and the pickles of torch's object collectives (DCP sends them) are code.

Signed with the first of the run's tokens, accepted with each of them: a token is replaced node by node.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
from collections.abc import Sequence
from typing import Any, BinaryIO

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


def sign_objects(signatures: Signatures) -> None:
    """From now on, every object collective of torch in this process."""

    class Pickler:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            self._file.write(signatures.sign(pickle.dumps(value)))

    class Unpickler:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def load(self) -> Any:
            """Raises Unsigned, with nothing unpickled."""
            return pickle.Unpickler(io.BytesIO(signatures.read(self._file.read()))).load()

    # By these names torch pickles in its object collectives, and nowhere else.
    distributed_c10d._pickler = Pickler  # type: ignore[assignment]
    distributed_c10d._unpickler = Unpickler  # type: ignore[assignment]
