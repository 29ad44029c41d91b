"""Sizes of the number formats that weights are kept in."""

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""
