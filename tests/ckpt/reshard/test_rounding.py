"""Rounding is torch's, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ckpt.reshard.rounding import FLOATS, rounded
from ckpt.state.tensors import host_bytes

PAIRS = list(itertools.permutations(FLOATS, 2))


def every_bit_pattern(dtype: str) -> torch.Tensor:
    """All patterns of 16 bits; of wider floats random ones, and those around ties and limits."""
    if dtype in ("float16", "bfloat16"):
        bits = torch.arange(2**16).to(torch.uint16)
        return bits.view(getattr(torch, dtype))
    generator = np.random.default_rng(1)
    unit, kind = (np.uint32, np.float32) if dtype == "float32" else (np.uint64, np.float64)
    bits = generator.integers(0, np.iinfo(unit).max, 50_000, unit, endpoint=True).view(kind)
    halves = np.arange(2**16, dtype=np.uint32) << 16
    near = [(halves + d).view(np.float32).astype(kind) for d in (0x7FFF, 0x8000, 0x8001)]
    small = np.float32(2) ** np.arange(-150, 128, dtype=np.float32)
    tiny = [sign * small * (1 + step) for sign in (1, -1) for step in (0, 2**-11, 3 * 2**-11)]
    return torch.from_numpy(np.concatenate([bits, *near, *(x.astype(kind) for x in tiny)]))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_bit_is_torchs(source: str, target: str) -> None:
    values = every_bit_pattern(source)
    expected = values.to(getattr(torch, target))
    data = b"".join(rounded(iter([host_bytes(values)]), source, target))
    found = torch.frombuffer(bytearray(data), dtype=getattr(torch, target))
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    as_bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[found.element_size()]
    assert torch.equal(found.view(as_bits)[~nan], expected.view(as_bits)[~nan])


def test_what_stays_is_handed_on_without_a_copy() -> None:
    view = memoryview(bytearray(8))
    assert next(rounded(iter([view]), "float32", "float32")) is view


def test_blocks_are_small() -> None:
    values = torch.randn(300_000)
    sizes = [view.nbytes for view in rounded(iter([host_bytes(values)]), "float32", "bfloat16")]
    assert sum(sizes) == 600_000
    assert max(sizes) <= 2 << 16
