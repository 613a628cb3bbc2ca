"""The decoders of dtypes that NumPy lacks, against torch, for every bit pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt.diff import decode


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_eight_bit_float(dtype: str) -> None:
    raw = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = raw.view(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(decode(dtype, raw.numpy()), expected)


def test_every_bfloat16() -> None:
    raw = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    expected = raw.view(torch.bfloat16).double().numpy()
    decoded = decode("bfloat16", raw.view(torch.uint8).numpy())
    np.testing.assert_array_equal(decoded, expected)
