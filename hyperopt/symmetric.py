"""Matrix products whose result is known to be symmetric: one triangle computed, the other mirrored.

`XX'`, and polynomials of such a matrix. BLAS has this as `syrk`; torch does not, so the lower
triangle is computed in panels of columns, each from its diagonal block down, and copied across.
That saves up to half of the flops and costs a transposing copy of n² elements, so it pays where
both the matrix and the inner dimension are large. Measurements are in docs/decisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_SIZE, MIN_ELEMENTS = 512, 1 << 19
"""Smallest n, and n times the inner dimension, in 32 and 64 bits."""
NARROW_MIN_SIZE, NARROW_MIN_ELEMENTS = 1024, 1 << 22
"""In 16 bits products are some six times as fast, and copies are not."""


def symmetric_product(
    left: Tensor,
    right: Tensor,
    *,
    out: Tensor,
    add: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """`out = beta·add + alpha·left·right`, which must be symmetric but for rounding.

    By panels the result is symmetric to the last bit. Elsewhere (small matrices, devices, inside
    torch.compile) it is torch's plain batched product.

    Args:
        left: `[B, n, k]`.
        right: `[B, k, n]`.
        out: `[B, n, n]`; shares no memory with `left` or `right`.
        add: `[B, n, n]`, symmetric; may be `out`. None: nothing is added.
        beta: factor of `add`.
        alpha: factor of the product.

    Returns:
        `out`.
    """
    if pays(out.shape[-1], left.shape[-1], out.dtype, out.device):
        for i, target in enumerate(out):
            _by_panels(left[i], right[i], target, None if add is None else add[i], beta, alpha)
        return out
    if add is None:
        return torch.baddbmm(out, left, right, beta=0, alpha=alpha, out=out)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)


def pays(size: int, inner: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether panels were measured to be faster for `[size, inner] x [inner, size]`."""
    if torch.compiler.is_compiling() or device.type != "cpu":
        return False
    narrow = dtype.itemsize < 4
    least, elements = (NARROW_MIN_SIZE, NARROW_MIN_ELEMENTS) if narrow else (MIN_SIZE, MIN_ELEMENTS)
    return size >= least and size * inner >= elements


def panel_columns(size: int, dtype: torch.dtype) -> int:
    """Width of a panel: a narrow one saves more flops, a wide one has fewer and faster calls."""
    return 128 if dtype.itemsize >= 4 and size <= 1024 else 256


def _by_panels(
    left: Tensor, right: Tensor, out: Tensor, add: Tensor | None, beta: float, alpha: float
) -> None:
    """One matrix. A panel is computed outside of `out`, where its rows lie densely: copies of
    blocks with a stride of a power of two bytes are several times slower."""
    size = len(out)
    width = panel_columns(size, out.dtype)
    for start in range(0, size, width):
        stop = min(start + width, size)
        rows, columns = left[start:], right[:, start:stop]
        below = (out if add is None else add)[start:, start:stop]
        panel = torch.addmm(below, rows, columns, beta=0.0 if add is None else beta, alpha=alpha)
        _mirror_lower(panel[: stop - start])
        out[start:, start:stop] = panel
        out[start:stop, stop:] = panel[stop - start :].mT


def _mirror_lower(block: Tensor) -> None:
    """Give a square block its lower triangle's mirror image as the upper one."""
    upper = block.mT.clone(memory_format=torch.contiguous_format).triu_(1)
    block.tril_().add_(upper)
