"""Newton-Schulz orthogonalization: a matrix to (nearly) its nearest semi-orthogonal one.

For `X = U S V'`, divided by its Frobenius norm, a few odd matrix polynomials
`X <- aX + bAX + cA²X` with `A = XX'` move every singular value towards 1, so that the result is
close to `U V'` without a decomposition. All work is matrix products on the short side.

Two forms compute the same polynomials:

* `standard`  three products a step; `20n²m + 10n³` flops for five steps on n × m, n <= m;
* `gram`      works on the n × n Gram matrix and touches the long side only at the ends and at
  restarts after steps 1 and 3: `12n²m + 22n³` (with other tables than `asym5` after steps 1, 2, 4,
  6). Without restarts it drifts: rounded once, the small singular values of the Gram matrix, which
  are squares, are lost for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from hyperopt.symmetric import symmetric_product

Coefficients = tuple[tuple[float, float, float], ...]
"""One triple `(a, b, c)` a step: `X <- aX + (bA + cA²)X`."""

BlockKernel = Callable[[Tensor, Tensor, tuple[Coefficients, ...], float, torch.dtype], None]
"""Fills the second tensor with the orthogonalized first one: see `orthogonalize_block`."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ALGORITHMS = ("auto", "standard", "gram")

# Jordan et al. 2024, 'Muon: An optimizer for hidden layers in neural networks'
# (kellerjordan.github.io/posts/muon): steepest slope at 0; values end between 0.7 and 1.2.
LEGACY = (3.4445, -4.7750, 2.0315)

# Found by You Jiacheng (2025) by optimizing five steps together; since the public NanoGPT speedrun
# records it is the usual table where steps differ.
ASYM5: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel, Persson, Musco, Gower 2025, 'The Polar Express' (arXiv 2505.16932), table for singular
# values from 1e-3 to 1: each step is the minimax polynomial for what the steps before it leave.
# `tests/reference/polar_express.py` derives it. The last row is the fixed point (15/8, -10/8, 3/8).
_POLAR_EXPRESS_EXACT: Coefficients = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# The paper's margin against rounding: every step but the last treats X as if divided by 1.01, so
# that a singular value rounded to just above the interval does not leave it for good.
_POLAR_EXPRESS_SAFETY = 1.01
POLAR_EXPRESS: Coefficients = (
    *(
        (a / _POLAR_EXPRESS_SAFETY, b / _POLAR_EXPRESS_SAFETY**3, c / _POLAR_EXPRESS_SAFETY**5)
        for a, b, c in _POLAR_EXPRESS_EXACT[:-1]
    ),
    _POLAR_EXPRESS_EXACT[-1],
)

TABLES: dict[str, Coefficients] = {"asym5": ASYM5, "polar_express": POLAR_EXPRESS}
VARIANTS = ("legacy", "asym5", "polar_express", "custom")

# `auto` takes the Gram form where it was measured to be faster, and as exact: over conditions 1 to
# 1e6 its worst error against float64 is at most 1.1 times standard's, and at each condition it is
# at most that plus one unit of bfloat16 (2^-8); `python -m benchmarks.step` prints both. It is the
# default table in bfloat16, from an aspect ratio (long side over short side) of 3 on. Below a short
# side of 256 roundings average out less. In float32 the error is up to 1.7 times standard's.
GRAM_ASPECT = 3.0
GRAM_MIN_SHORT_SIDE = 256
# From this aspect ratio on, n × n matrices are such a small part of the work that the Gram form
# keeps them in float32, whatever the short side.
GRAM_WIDE_ASPECT = 16.0

# Float32 products on a CPU run at cache speed as long as the iterate stays in the second-level
# cache, so a batch is walked in blocks of about this many bytes. In bfloat16 the products are so
# much faster that the cost of a call decides, and the whole batch is one block.
_CPU_BLOCK_BYTES = 1 << 19

# From the third group on singular values are mostly near 1 (see `_pair`).
_FIRST_SHIFTED_GROUP = 2


# ------------------------------------------------------------------------------------------ options


def resolve_coefficients(
    variant: str, steps: int, coefficients: Sequence[Sequence[float]] | None = None
) -> Coefficients:
    """The triples of `steps` Newton-Schulz steps.

    Args:
        variant: `legacy` (one triple, repeated), `asym5` (up to 5 steps), `polar_express` (up to
            8), or `custom`.
        steps: number of steps, at least 1.
        coefficients: for `custom` only: at least `steps` triples of finite numbers.

    Raises:
        ValueError: naming `ns_variant`, `ns_steps` or `ns_coefficients`.
    """
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(f"ns_variant must be one of {', '.join(VARIANTS)}; got {variant!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"ns_steps must be an integer of at least 1, got {steps!r}")
    if variant != "custom" and coefficients is not None:
        raise ValueError(f"ns_coefficients need ns_variant='custom', got ns_variant={variant!r}")
    if variant == "legacy":
        return tuple(repeat(LEGACY, steps))
    table = TABLES[variant] if variant != "custom" else _custom_table(coefficients)
    if steps > len(table):
        raise ValueError(
            f"ns_steps={steps}, but the table of ns_variant={variant!r} ends after {len(table)}"
        )
    return table[:steps]


def _custom_table(coefficients: Any) -> Coefficients:
    if coefficients is None:
        raise ValueError("ns_variant='custom' needs ns_coefficients: three numbers a step")
    if not isinstance(coefficients, Sequence) or isinstance(coefficients, str):
        raise ValueError(f"ns_coefficients must be three numbers a step, got {coefficients!r}")
    return tuple(_triple(step, row) for step, row in enumerate(coefficients))


def _triple(step: int, row: Any) -> tuple[float, float, float]:
    if not isinstance(row, Sequence) or len(row) != 3 or not all(map(_is_finite, row)):
        raise ValueError(f"ns_coefficients[{step}] must be three finite numbers, got {row!r}")
    a, b, c = map(float, row)
    return a, b, c


def _is_finite(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _check_options(matrix: Tensor, epsilon: float, dtype: torch.dtype, algorithm: str) -> None:
    if matrix.dim() < 2:
        raise ValueError(f"a matrix has two dims or more, got shape {tuple(matrix.shape)}")
    if not matrix.is_floating_point():
        raise ValueError(f"a real floating-point matrix is needed, got {matrix.dtype}")
    if not _is_finite(epsilon) or epsilon < 0:
        raise ValueError(f"ns_epsilon must be finite and not negative, got {epsilon!r}")
    if dtype not in DTYPES:
        raise ValueError(f"ns_dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype!r}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"ns_algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")


# ------------------------------------------------------------------------------------------- public


def orthogonalize(
    matrix: Tensor,
    *,
    steps: int = 5,
    variant: str = "asym5",
    coefficients: Sequence[Sequence[float]] | None = None,
    epsilon: float = 1e-10,
    dtype: torch.dtype = torch.bfloat16,
    algorithm: str = "auto",
) -> Tensor:
    """The semi-orthogonal matrix near `matrix`, as Muon computes it.

    Args:
        matrix: one matrix `[rows, columns]`, or a batch `[..., rows, columns]`; not changed.
        steps: Newton-Schulz steps.
        variant: coefficient table: `asym5`, `legacy`, `polar_express` or `custom`.
        coefficients: three numbers a step, for `custom`.
        epsilon: added to the Frobenius norm by which each matrix is divided.
        dtype: dtype of the iteration and of the result.
        algorithm: `standard`, `gram` (fewer flops for long matrices), or `auto`.

    Returns:
        A new contiguous tensor of the same shape, in `dtype`. Zero matrices give zero.

    Raises:
        ValueError: naming the option that cannot work.
    """
    _check_options(matrix, epsilon, dtype, algorithm)
    table = resolve_coefficients(variant, steps, coefficients)
    return newton_schulz(matrix, table, epsilon=epsilon, dtype=dtype, algorithm=algorithm)


@torch.no_grad()
def newton_schulz(
    matrices: Tensor,
    coefficients: Coefficients,
    *,
    epsilon: float,
    dtype: torch.dtype,
    algorithm: str,
    kernel: BlockKernel | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`orthogonalize` for options that were validated before: one matrix or a batch. `kernel`
    stands for `orthogonalize_block`. `out`: a contiguous tensor of the same shape in `dtype` for
    the result; it may be `matrices`, unless there is a kernel."""
    rows, columns = matrices.shape[-2:]
    result = (
        torch.empty(matrices.shape, dtype=dtype, device=matrices.device) if out is None else out
    )
    if not result.numel():
        return result
    source, target = matrices.reshape(-1, rows, columns), result.view(-1, rows, columns)
    gram = uses_gram(rows, columns, coefficients, dtype, algorithm)
    groups = step_groups(coefficients, gram=gram)
    small_dtype = _small_dtype(rows, columns, dtype, groups)
    run = kernel if kernel is not None else orthogonalize_block
    size = _block_length(target)
    for start in range(0, len(target), size):
        block = slice(start, start + size)
        run(source[block], target[block], groups, epsilon, small_dtype)
    return result


def uses_gram(
    rows: int, columns: int, coefficients: Coefficients, dtype: torch.dtype, algorithm: str
) -> bool:
    """Whether matrices of this shape go through the Gram form."""
    if algorithm != "auto":
        return algorithm == "gram"
    if dtype != torch.bfloat16 or coefficients != ASYM5:
        return False
    short, aspect = min(rows, columns), _aspect(rows, columns)
    return aspect >= GRAM_WIDE_ASPECT or (aspect >= GRAM_ASPECT and short >= GRAM_MIN_SHORT_SIDE)


def step_groups(coefficients: Coefficients, *, gram: bool) -> tuple[Coefficients, ...]:
    """Steps between two looks at the long side: one by one, or, in the Gram form, single ones first
    and then pairs. Small singular values grow most in the first step, and an error there would
    stay, so it is a group of its own. Of the tables only `asym5` bears a pair of steps 2 and 3:
    with Polar Express in bfloat16 one matrix in ten then diverges at conditions of 30 to 300."""
    if not gram:
        return tuple((step,) for step in coefficients)
    alone = 1 if coefficients == ASYM5[: len(coefficients)] else 2
    singles = tuple((step,) for step in coefficients[:alone])
    pairs = (coefficients[i : i + 2] for i in range(alone, len(coefficients), 2))
    return (*singles, *pairs)


# ---------------------------------------------------------------------------------------- iteration


def _aspect(rows: int, columns: int) -> float:
    return max(rows, columns) / min(rows, columns)


def _small_dtype(
    rows: int, columns: int, dtype: torch.dtype, groups: tuple[Coefficients, ...]
) -> torch.dtype:
    """The dtype of the n × n matrices."""
    wide = _has_pairs(groups) and _aspect(rows, columns) >= GRAM_WIDE_ASPECT
    return torch.promote_types(dtype, torch.float32) if wide else dtype


def _has_pairs(groups: tuple[Coefficients, ...]) -> bool:
    return any(len(group) > 1 for group in groups)


def _block_length(batch: Tensor) -> int:
    """How many matrices of a batch are worked on together."""
    if batch.device.type != "cpu" or batch.element_size() < 4:
        return len(batch)
    return max(1, _CPU_BLOCK_BYTES // (batch[0].numel() * batch.element_size()))


def orthogonalize_block(
    source: Tensor,
    target: Tensor,
    groups: tuple[Coefficients, ...],
    epsilon: float,
    small_dtype: torch.dtype,
) -> None:
    """Fill `target` [B, rows, columns] from `source`, of any dtype, which may be `target`, as it is
    read before the first product. n × n matrices are kept in `small_dtype`. Two buffers take turns;
    the last one written is `target`.

    Tall matrices are multiplied from the right by the transposed polynomial of X'X: the transpose
    of what is done for their transposes, without two transposing copies.
    """
    count, rows, columns = target.shape
    tall, n = rows > columns, min(rows, columns)
    spare = torch.empty_like(target)
    x, y = (spare, target) if len(groups) % 2 else (target, spare)
    small = target.new_empty(3 if _has_pairs(groups) else 2, count, n, n, dtype=small_dtype)
    _normalize(source, epsilon, out=x)
    for i, group in enumerate(groups):
        shift = int(len(group) > 1 and i >= _FIRST_SHIFTED_GROUP)
        _gram_matrix(x.mT if tall else x, shift, out=small[0])
        factor, polynomial = _polynomial(group, small, shift)
        polynomial = polynomial.to(x.dtype)
        torch.baddbmm(x, *((x, polynomial.mT) if tall else (polynomial, x)), beta=factor, out=y)
        x, y = y, x


def _gram_matrix(x: Tensor, shift: int, *, out: Tensor) -> None:
    """`XX' - shift`, rounded once, to the dtype of X."""
    fits = out.dtype == x.dtype
    gram = out if fits else torch.empty_like(out, dtype=x.dtype)
    if shift:
        gram.zero_().diagonal(dim1=-2, dim2=-1).fill_(-shift)
        symmetric_product(x, x.mT, out=gram, add=gram)
    else:
        symmetric_product(x, x.mT, out=gram)
    if not fits:
        out.copy_(gram)


def _normalize(source: Tensor, epsilon: float, *, out: Tensor) -> None:
    """`source`, rounded to the dtype of `out`, over its Frobenius norm. The norm and the quotient
    are computed in float32 at least: a norm rounded to bfloat16 is off by up to 0.4 %."""
    rounded = source.to(out.dtype).contiguous()  # strides would decide the order of the sum
    fused = torch.compiler.is_compiling() or out.device.type != "cpu"
    if out.element_size() < 4 and not fused:
        _normalize_by_rows(rounded, epsilon, out=out)
        return
    wide = torch.promote_types(out.dtype, torch.float32)
    norm = torch.linalg.vector_norm(rounded, dim=(-2, -1), keepdim=True, dtype=wide)
    torch.div(rounded, _divisor(norm, epsilon), out=out)


def _divisor(norm: Tensor, epsilon: float) -> Tensor:
    """`norm + epsilon`, or 1 where that is zero."""
    total = norm + epsilon
    return total.masked_fill_(total == 0, 1.0)


def _normalize_by_rows(rounded: Tensor, epsilon: float, *, out: Tensor) -> None:
    """The same for 16-bit dtypes on a CPU, where torch would widen whole tensors for each of the
    two operations. Here blocks of rows are widened, and stay in the cache."""
    count, rows, columns = out.shape
    flat, target = rounded.reshape(-1, columns), out.view(-1, columns)
    length = max(1, _CPU_BLOCK_BYTES // (4 * columns))
    wide = torch.empty(min(length, len(flat)), columns)
    norms = torch.empty(len(flat))
    blocks = [slice(at, at + length) for at in range(0, len(flat), length)]
    for block in blocks:
        part = wide[: len(flat[block])].copy_(flat[block])
        torch.linalg.vector_norm(part, dim=-1, out=norms[block])
    norm = torch.linalg.vector_norm(norms.view(count, rows), dim=-1, keepdim=True)
    factors = _divisor(norm, epsilon).reciprocal_().expand(count, rows).reshape(-1, 1)
    for block in blocks:
        part = wide[: len(flat[block])].copy_(flat[block])
        target[block] = part.mul_(factors[block])


def _polynomial(group: Coefficients, small: Tensor, shift: int) -> tuple[float, Tensor]:
    """`(q, E)` such that the one or two steps of `group` map X to `qX + EX`; `small[0]` is the Gram
    matrix less `shift`, and scratch like the others."""
    if len(group) > 1:
        return _pair(group, small, shift)
    ((a, b, c),) = group
    gram, step = small[0], small[1]
    return a, symmetric_product(gram, gram, out=step, add=gram, beta=b, alpha=c)


def _pair(group: Coefficients, small: Tensor, shift: int) -> tuple[float, Tensor]:
    """`(s, E)` with s = `shift`, such that two steps map X to `sX + EX`; `small[0]` is `XX' - s`.

    Matrices that are near s times the identity are kept as the difference from it. With s = 1, once
    singular values are near 1, what is rounded is small, which is worth three bits.
    The first polynomial is rounded before both of its uses, so that the second step sees, and
    corrects, what its rounding did.
    """
    gram, first, second = small
    constant = _step_polynomial(group[0], gram, shift, out=first)
    first.diagonal(dim1=-2, dim2=-1).add_(constant - shift)
    _compose(first, shift, gram, shift, out=second)
    _compose(second, shift, first, shift, out=gram)  # XX' - s, one step later
    constant = _step_polynomial(group[1], gram, shift, out=second)
    _compose(second, constant, first, shift, out=gram)
    return float(shift), gram


def _step_polynomial(
    step: tuple[float, float, float], gram: Tensor, shift: int, *, out: Tensor
) -> float:
    """`a + bR + cR²` from `gram` = `R - s`, rewritten in powers of `R - s`. The constant term is
    returned, the others go to `out`."""
    a, b, c = step
    torch.baddbmm(gram, gram, gram, beta=b + 2 * c * shift, alpha=c, out=out)
    return a + (b + c) * shift


def _compose(p: Tensor, constant: float, q: Tensor, shift: int, *, out: Tensor) -> None:
    """`(p + constant)(q + s) - s`, for s 0 or 1. Symmetric but for rounding, and it must not be
    made so: what the later step corrects of the earlier one's rounding stands on one side only."""
    if not shift:
        torch.baddbmm(q, p, q, beta=constant, out=out)
        return
    torch.add(p, q, alpha=constant, out=out).baddbmm_(p, q)
    if constant != 1:
        out.diagonal(dim1=-2, dim2=-1).add_(constant - 1)
