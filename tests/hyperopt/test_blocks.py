"""Block-wise passes equal whole-tensor ones, at sizes around the block length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyperopt.blocks import BLOCK_ELEMENTS, decay_and_add, fits, momentum_into

SIZES = (0, 1, 1000, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 3 * BLOCK_ELEMENTS + 7)


def random(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum(dtype: torch.dtype, nesterov: bool) -> None:
    gradients = [random(n, n, dtype) for n in SIZES]
    buffers = [random(n, n + 1, dtype) for n in SIZES]
    expected_buffers = [torch.add(g, b, alpha=0.9) for g, b in zip(gradients, buffers, strict=True)]
    payload = [torch.empty(n, dtype=torch.bfloat16) for n in SIZES]
    momentum_into(payload, gradients, buffers, 0.9, nesterov=nesterov)
    for out, g, b, expected in zip(payload, gradients, buffers, expected_buffers, strict=True):
        # A bfloat16 kernel may round in between, and the sum may cancel: one unit of its terms.
        tolerance = {"rtol": 1e-6, "atol": 0} if dtype.itemsize == 4 else {"rtol": 0, "atol": 0.02}
        torch.testing.assert_close(b, expected, **tolerance)
        ahead = torch.add(g, b, alpha=0.9) if nesterov else b
        torch.testing.assert_close(out, ahead.bfloat16(), rtol=0.01, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("update_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("factor", [-0.1, 0.0, 1.0])
def test_decay_and_add(
    dtype: torch.dtype, update_dtype: torch.dtype, decay: float, factor: float
) -> None:
    parameters = [random(n, n, dtype) for n in SIZES]
    updates = [random(n, n + 1, update_dtype) for n in SIZES]
    factors = [factor * (i + 1) for i in range(len(SIZES))]
    expected = [
        (1 - decay) * p.double() + f * u.double()
        for p, u, f in zip(parameters, updates, factors, strict=True)
    ]
    decay_and_add(parameters, updates, factors, decay)
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for p, e, f in zip(parameters, expected, factors, strict=True):
        # Terms of up to five standard deviations, rounded a few times.
        torch.testing.assert_close(p.double(), e, rtol=0, atol=20 * unit * (1 + abs(f)))


def test_strided_tensors_do_not_fit() -> None:
    assert fits([torch.zeros(3, 4)], [torch.zeros(0)])
    assert not fits([torch.zeros(3, 4)], [torch.zeros(4, 3).T])
    assert not fits([torch.zeros(2, device="meta")])
