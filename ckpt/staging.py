"""Host memory that takes a copy of what a save writes, kept from one save to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt.state.capture import PlannedWrite

ALIGNMENT = 64
"""Copies begin at multiples of this many bytes, which suits every dtype and vector unit."""

_Form = tuple[torch.dtype, torch.Size]


class HostBuffer:
    """One buffer for all chunks of a rank, and a view of it for each.

    The first save allocates it; a later one of the same chunks allocates nothing, and one that
    needs more space replaces it. It is pinned where tensors are on a device with memory of its own,
    since only then a copy from there runs at full speed. The next `stage` overwrites what was
    staged.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._forms: list[_Form] = []
        self._views: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """The size of the buffer."""
        return self._buffer.nbytes

    def stage(self, writes: Sequence[PlannedWrite]) -> tuple[PlannedWrite, ...]:
        """Copy the data of all writes, each byte once; returns the same writes of the copies.

        When it returns, the copies are complete: the tensors may change.
        """
        devices = {write.tensor.device for write in writes if write.tensor.device.type != "cpu"}
        pinned = any(device.type != "mps" for device in devices)
        self._fit([(write.tensor.dtype, write.tensor.shape) for write in writes], pinned)
        for view, write in zip(self._views, writes, strict=True):
            view.copy_(write.tensor, non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return tuple(
            PlannedWrite(write.chunk, write.dtype, view)
            for write, view in zip(writes, self._views, strict=True)
        )

    def _fit(self, forms: list[_Form], pinned: bool) -> None:
        """Have a view for each dtype and shape."""
        if forms == self._forms and pinned == self._pinned:
            return
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in forms]
        needed = sum(_aligned(size) for size in sizes)
        # The views go first, so that two buffers never exist at a time.
        self._forms, self._views = [], []
        if needed > self._buffer.nbytes or pinned != self._pinned:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
            self._pinned = pinned
        start = 0
        for (dtype, shape), size in zip(forms, sizes, strict=True):
            self._views.append(self._buffer[start : start + size].view(dtype).view(shape))
            start += _aligned(size)
        self._forms = forms


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
