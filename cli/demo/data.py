"""Real text that is always there: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from ckpt.errors import NotFoundError

SEQUENCE_LENGTH = 64
GLOBAL_BATCH = 32
_LEAST_BYTES = 1 << 20


def standard_library_text() -> torch.Tensor:
    """All top-level modules of the standard library, end to end, as a uint8 tensor.

    Raises NotFoundError where Python ships without its source.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(directory.glob("*.py")))
    if len(text) < _LEAST_BYTES:
        raise NotFoundError(
            f"{directory}: the standard library's source is not here ({len(text)} bytes of *.py); "
            "run the demo with a Python that has it"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def global_batch(text: torch.Tensor, step: int) -> torch.Tensor:
    """The sequences of one step, `[GLOBAL_BATCH, SEQUENCE_LENGTH + 1]`, int64: inputs and, shifted
    by one, targets. A function of the step alone, so every topology trains on the same data."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - SEQUENCE_LENGTH - 1, (GLOBAL_BATCH,), generator=generator)
    return torch.stack([text[i : i + SEQUENCE_LENGTH + 1] for i in starts.tolist()]).long()


def rank_part(batch: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The rows of a global batch that one rank trains on: equal contiguous parts."""
    return batch.tensor_split(world_size)[rank]
