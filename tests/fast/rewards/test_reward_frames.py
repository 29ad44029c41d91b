"""The messages between a pool and its processes."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rewards.frames import LARGEST, Decoder, FrameError, encode

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(values, max_size=6), st.lists(st.integers(1, 40)))
def test_messages_arrive_whole_however_the_bytes_are_cut(messages: list[Any], cuts: list[int]) -> None:
    rest, decoder, found = b"".join(map(encode, messages)), Decoder(), []
    for cut in cuts:
        found += decoder.feed(rest[:cut])
        rest = rest[cut:]
    assert found + decoder.feed(rest) == messages


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waited_on(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        Decoder().feed(data)


def test_a_length_that_cannot_be() -> None:
    with pytest.raises(FrameError, match="was announced"):
        Decoder().feed(struct.pack(">I", LARGEST + 1))
