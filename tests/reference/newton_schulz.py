"""Newton-Schulz as its definition says, in float64, one matrix at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def newton_schulz(
    matrix: Tensor,
    coefficients: Sequence[Sequence[float]],
    epsilon: float = 1e-10,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`X <- aX + bAX + cA²X`, `A = XX'`, from `matrix / (norm + epsilon)`, in `dtype`."""
    if matrix.dim() > 2:
        parts = [newton_schulz(part, coefficients, epsilon, dtype) for part in matrix]
        return torch.stack(parts) if parts else torch.zeros(matrix.shape, dtype=dtype)
    x = matrix.to(dtype)
    if not x.any():
        return torch.zeros_like(x)
    x = x / (x.pow(2).sum().sqrt() + epsilon)
    if x.shape[0] > x.shape[1]:
        return _iterate(x.T, coefficients).T
    return _iterate(x, coefficients)


def _iterate(x: Tensor, coefficients: Sequence[Sequence[float]]) -> Tensor:
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def by_singular_values(matrix: Tensor, coefficients: Sequence[Sequence[float]]) -> Tensor:
    """The same by a decomposition, without epsilon: polynomials act on singular values alone."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    norm = values.norm(dim=-1, keepdim=True)
    values = values / torch.where(norm == 0, 1.0, norm)
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    result: Tensor = (left * values.unsqueeze(-2)) @ right
    return result


def polar(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix `UV'`, where every singular value is 1."""
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    result: Tensor = left @ right
    return result
