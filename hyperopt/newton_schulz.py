"""Newton-Schulz orthogonalization: a matrix to (nearly) its nearest semi-orthogonal one.

For `X = U S V'`, divided by its Frobenius norm, a few odd matrix polynomials
`X <- aX + bAX + cA²X` with `A = XX'` move every singular value towards 1, so that the result is
close to `U V'` without a decomposition. All work is matrix products on the short side.

Two forms compute the same polynomials:

* `standard`  three products a step; `20n²m + 10n³` flops for five steps on n × m, n <= m;
* `gram`      works on the n × n Gram matrix and touches the long side only at the ends and at
  restarts: `12n²m + 22n³`. In low precision it drifts without restarts, because the Gram matrix of
  the product is then never the product of what was rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]
"""One triple `(a, b, c)` a step: `X <- aX + (bA + cA²)X`."""

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

# `auto` takes the Gram form from this aspect ratio (long side over short side) on.
GRAM_ASPECT = 3.0

# Float32 products on a CPU run at cache speed as long as the iterate stays in the second-level
# cache, so a batch is walked in blocks of about this many bytes. In bfloat16 the products are so
# much faster that the cost of a call decides, and the whole batch is one block.
_CPU_BLOCK_BYTES = 1 << 19


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
) -> Tensor:
    """`orthogonalize` for options that were validated before: one matrix or a batch."""
    rows, columns = matrices.shape[-2:]
    result = torch.empty(matrices.shape, dtype=dtype, device=matrices.device)
    if not result.numel():
        return result
    source, target = matrices.reshape(-1, rows, columns), result.view(-1, rows, columns)
    groups = step_groups(coefficients, gram=uses_gram(rows, columns, algorithm))
    size = _block_length(target)
    for start in range(0, len(target), size):
        block = slice(start, start + size)
        _orthogonalize_block(source[block], target[block], groups, epsilon)
    return result


def uses_gram(rows: int, columns: int, algorithm: str) -> bool:
    """Whether a matrix of this shape goes through the Gram form."""
    if algorithm == "auto":
        return max(rows, columns) >= GRAM_ASPECT * min(rows, columns)
    return algorithm == "gram"


def step_groups(coefficients: Coefficients, *, gram: bool) -> tuple[Coefficients, ...]:
    """Steps between two looks at the long side: one by one, or, in the Gram form, the first and
    then pairs (restarts after steps 1, 3, 5, …). Small singular values grow most in the first
    step, and an error there would stay, so it is a group of its own."""
    if not gram:
        return tuple((step,) for step in coefficients)
    pairs = (coefficients[i : i + 2] for i in range(1, len(coefficients), 2))
    return (coefficients[:1], *pairs)


# ---------------------------------------------------------------------------------------- iteration


def _block_length(batch: Tensor) -> int:
    """How many matrices of a batch are worked on together."""
    if batch.device.type != "cpu" or batch.element_size() < 4:
        return len(batch)
    return max(1, _CPU_BLOCK_BYTES // (batch[0].numel() * batch.element_size()))


def _orthogonalize_block(
    source: Tensor, target: Tensor, groups: tuple[Coefficients, ...], epsilon: float
) -> None:
    """Fill `target` [B, rows, columns]. Two buffers take turns; the last one written is `target`.

    Tall matrices are multiplied from the right by the polynomial of X'X, which gives the transpose
    of what their transposes would give, and saves two transposing copies.
    """
    count, rows, columns = target.shape
    tall, n = rows > columns, min(rows, columns)
    spare = torch.empty_like(target)
    x, y = (spare, target) if len(groups) % 2 else (target, spare)
    small = target.new_empty(4 if max(map(len, groups)) > 1 else 2, count, n, n)
    _normalize(source, epsilon, out=x)
    for group in groups:
        torch.bmm(x.mT, x, out=small[0]) if tall else torch.bmm(x, x.mT, out=small[0])
        factor, polynomial = _polynomial(group, small)
        left, right = (x, polynomial) if tall else (polynomial, x)
        torch.baddbmm(x, left, right, beta=factor, out=y)
        x, y = y, x


def _normalize(source: Tensor, epsilon: float, *, out: Tensor) -> None:
    """`source`, rounded to the dtype of `out`, over its Frobenius norm. The norm and the quotient
    are computed in float32 at least: a norm rounded to bfloat16 is off by up to 0.4 %. Through a
    wide copy, since mixed-dtype norms and quotients are three to six times slower on a CPU."""
    wide = source.to(out.dtype).to(torch.promote_types(out.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    norm.add_(epsilon)
    norm.masked_fill_(norm == 0, 1.0)
    if wide.dtype == out.dtype:
        torch.div(wide, norm, out=out)
    else:
        out.copy_(wide.div_(norm))


def _polynomial(group: Coefficients, small: Tensor) -> tuple[float, Tensor]:
    """`(q, E)` such that the one or two steps of `group` map X to `qX + EX`.

    `small` is scratch; `small[0]` holds the Gram matrix R = XX'. The multiple of the identity is
    kept apart, because in low precision it would drown the digits of E on the diagonal.
    """
    (a, b, c), *later = group
    gram, first = small[0], small[1]
    torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=first)
    if not later:
        return a, first
    ((d, e, f),) = later
    half, second = small[2], small[3]
    torch.baddbmm(gram, first, gram, beta=a, out=half)
    torch.baddbmm(half, first, half, beta=a, out=gram)  # (a + E)R(a + E), after the first step
    torch.baddbmm(gram, gram, gram, beta=e, alpha=f, out=second)
    torch.mul(first, d, out=half).add_(second, alpha=a)
    torch.baddbmm(half, second, first, out=gram)  # (d + F)(a + E) - da
    return a * d, gram
