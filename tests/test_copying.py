"""Large copies take another way, and copy the same."""

import pytest
import torch
from oracle import DTYPES, bits, value

from spmd.kernels import copying


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_both_ways(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: int) -> None:
    monkeypatch.setattr(copying, "LARGE_BYTES", limit)
    source = value(dtype, (33, 5), 0, 0)
    whole = torch.zeros(200, dtype=dtype)
    out = whole[7 : 7 + 165].view(33, 5)
    assert copying.copy(out, source) is out
    assert bits(out) == bits(source)
    assert not whole[:7].any() and not whole[172:].any()
