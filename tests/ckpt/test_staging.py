"""Staging copies each byte once, and allocates nothing the second time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.planner import PlannedChunk
from ckpt.staging import ALIGNMENT, HostBuffer
from ckpt.state.capture import PlannedWrite
from ckpt.state.tensors import dtype_name
from hyperopt.ownership import Box


def write_of(tensor: torch.Tensor) -> PlannedWrite:
    chunk = PlannedChunk("t", Box.whole(tuple(tensor.shape)))
    return PlannedWrite(chunk, dtype_name(tensor.dtype), tensor)


def sample(seed: int) -> list[PlannedWrite]:
    """Several dtypes, an empty tensor, a scalar, strided and conjugated views."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 10, generator=generator)
    tensors = [
        base,
        base.T,
        base[1:5, ::3],
        base.to(torch.bfloat16),
        base.to(torch.float8_e4m3fn),
        base > 0,
        torch.view_as_complex(base.reshape(6, 5, 2)).conj(),
        torch.tensor(seed),
        torch.empty(0, 4),
    ]
    return [write_of(tensor) for tensor in tensors]


class Operations(TorchDispatchMode):
    """Records every operation, with the bytes that a copy writes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        if func.overloadpacket.__name__ == "copy_":
            self.copied += args[0].nbytes
        return func(*args, **(kwargs or {}))


def assert_copies(staged: tuple[PlannedWrite, ...], writes: list[PlannedWrite]) -> None:
    for copy, write in zip(staged, writes, strict=True):
        assert (copy.chunk, copy.dtype) == (write.chunk, write.dtype)
        assert copy.tensor.is_contiguous()
        assert copy.tensor.data_ptr() % ALIGNMENT == 0
        original = write.tensor.resolve_conj().contiguous()
        assert torch.equal(copy.tensor.reshape(-1).view(torch.uint8), bytes_of(original))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_copies_are_exact_and_independent() -> None:
    writes = sample(1)
    staged = HostBuffer().stage(writes)
    assert_copies(staged, writes)
    before = [copy.tensor.clone() for copy in staged]
    writes[0].tensor.fill_(7.0)
    for copy, then in zip(staged, before, strict=True):
        assert torch.equal(bytes_of(copy.tensor), bytes_of(then))


def test_from_the_second_save_on_there_is_one_copy_a_byte_and_no_allocation() -> None:
    buffer = HostBuffer()
    first = buffer.stage(sample(1))
    writes = sample(2)
    with Operations() as operations:
        second = buffer.stage(writes)
    assert operations.names == ["copy_"] * len(writes)
    assert operations.copied == sum(write.tensor.nbytes for write in writes)
    assert_copies(second, writes)
    assert [a.tensor.data_ptr() for a in first] == [b.tensor.data_ptr() for b in second]


def test_the_buffer_grows_and_is_kept_where_less_is_needed() -> None:
    buffer = HostBuffer()
    small, large = sample(1), [*sample(2), write_of(torch.rand(1000))]
    buffer.stage(small)
    nbytes = buffer.nbytes
    assert_copies(buffer.stage(large), large)
    assert buffer.nbytes > nbytes
    nbytes = buffer.nbytes
    assert_copies(buffer.stage(small), small)
    assert buffer.nbytes == nbytes


@pytest.mark.device
def test_from_a_device_into_pinned_memory() -> None:
    buffer = HostBuffer()
    tensors = [torch.rand(1000, 1000, device="cuda"), torch.rand(7, 3, device="cuda").T]
    writes = [write_of(tensor) for tensor in tensors]
    staged = buffer.stage(writes)
    for tensor in tensors:
        tensor.zero_()
    torch.cuda.synchronize()
    assert all(copy.tensor.is_pinned() for copy in staged)
    assert all(float(copy.tensor.sum()) > 0 for copy in staged)
