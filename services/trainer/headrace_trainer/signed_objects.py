"""Torch's object collectives are pickles. Here each carries a signature, and none without one is read.

Ranks find each other at a store, and by listeners of Gloo, that know no credentials: whoever reaches those
can take a rank's place and send whatever he likes. Tensors are numbers, but a pickle is code. So a rank reads
only what was made by a process that has the run's token. Torch's checkpoints (DCP) send such objects.

Signed with the first of the run's tokens, accepted with each of them: a token may be replaced node by node.
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
    """An object that came from no rank of this run."""


def sign_objects(tokens: Sequence[str], launch: str) -> None:
    """From now on, in this process. `launch`: what was signed in another is not accepted either.

    Without a token there is nothing to sign with, and ranks of several processes could be anybody's.
    """
    keys = [f"{launch} {token}".encode() for token in tokens] or [launch.encode()]

    def signature(key: bytes, data: bytes) -> bytes:
        return hmac.digest(key, data, _DIGEST)

    class Signed:
        """In place of pickle.Pickler."""

        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            data = pickle.dumps(value)
            self._file.write(signature(keys[0], data) + data)

    class Checked:
        """In place of pickle.Unpickler."""

        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def load(self) -> Any:
            """Raises Unsigned, with nothing unpickled."""
            given, data = self._file.read(_SIZE), self._file.read()
            if not any(hmac.compare_digest(given, signature(key, data)) for key in keys):
                raise Unsigned(
                    "an object that came over the ranks' group is not signed with the run's token "
                    "(HEADRACE_TOKEN): whoever sent it is no rank of this run, or has another token"
                )
            return pickle.Unpickler(io.BytesIO(data)).load()

    # By these names torch pickles in every object collective, and nowhere else.
    distributed_c10d._pickler = Signed  # type: ignore[assignment]
    distributed_c10d._unpickler = Checked  # type: ignore[assignment]
