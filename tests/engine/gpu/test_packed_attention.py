"""The kernel for variable lengths against one call per sequence: what only a CUDA device can show."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace.models.packed_attention import _by_kernel, _kernel_takes, _one_sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ENDS = (0, 17, 22, 23, 150)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_is_each_sequence_alone(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 4, ENDS[-1], 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, ENDS[-1], 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert _kernel_takes(q, v)
    ends = torch.tensor(ENDS, device="cuda", dtype=torch.int32)
    found = _by_kernel(q, k, v, ends, 127, None, window)
    parts = [
        _one_sequence(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None, window, None)
        for a, b in itertools.pairwise(ENDS)
    ]
    wanted = torch.cat(parts, dim=2).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
