"""Decode token ids with a model's own tokenizer, including special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


def decoder(directories: Sequence[Path], trust_remote_code: bool = False) -> Decode | None:
    """The decoder of the first of `directories` with a readable tokenizer; None if there is none."""
    for directory in directories:
        found = _fast(directory / "tokenizer.json") or _slow(directory, trust_remote_code)
        if found is not None:
            return found
    return None


def _fast(file: Path) -> Decode | None:
    """Load the tokenizer without transformers, which takes seconds to import."""
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises a bare Exception, and may be missing
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _slow(directory: Path, trust_remote_code: bool) -> Decode | None:
    if not directory.is_dir():
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception:  # not installed, or any error over odd files
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def shown(ids: Sequence[int], decode: Decode | None) -> str:
    """The ids as text, or the ids themselves if they cannot be decoded."""
    if decode is None:
        return " ".join(map(str, ids))
    try:
        return decode(ids)
    except Exception:  # an id that the tokenizer does not know
        return " ".join(map(str, ids))
