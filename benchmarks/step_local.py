"""The part of `benchmarks.step` that needs one thread only: Newton-Schulz by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Result, measure_pairs
from hyperopt.newton_schulz import ASYM5, newton_schulz
from tests.reference.newton_schulz import by_singular_values, polar

WIDTH = 512
CONDITIONS = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)

Work = Callable[[], Any]


def orthogonalized(matrices: Tensor, algorithm: str = "auto") -> Tensor:
    """Newton-Schulz with Muon's default options."""
    return newton_schulz(matrices, ASYM5, epsilon=1e-10, dtype=matrices.dtype, algorithm=algorithm)


def local_results(count: int) -> Iterator[Result]:
    """Newton-Schulz by itself, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    wide = torch.randn(WIDTH, 4 * WIDTH).bfloat16()
    yield measure_pairs(
        timed(lambda: orthogonalized(wide)), timed(lambda: orthogonalized(wide, "standard")), count
    ).result(
        f"Newton-Schulz {WIDTH} x {4 * WIDTH}, bfloat16: Gram form",
        "standard",
        speedup=True,
        reach=1.25,
        accuracy=accuracy(WIDTH, 4 * WIDTH, wide.dtype),
    )
    for shape, dtype, reach in (
        ((74, 24, 1024), torch.bfloat16, 5.0),
        ((74, 24, 1024), torch.float32, None),
        ((1, 1024, 1024), torch.float32, None),
    ):
        many = torch.randn(shape).to(dtype)
        yield measure_pairs(timed(batched(many)), timed(textbook_loop(many)), count).result(
            f"Newton-Schulz of {shape[0]} x {shape[1]} x {shape[2]}, {_name(dtype)}",
            "looped 2-D calls",
            speedup=True,
            reach=reach,
            accuracy=accuracy(*shape[1:], dtype),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def timed(work: Work) -> Callable[[], float]:
    """Seconds of one call."""

    def measure() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return measure


def batched(matrices: Tensor) -> Work:
    """All matrices at once."""
    return lambda: orthogonalized(matrices)


def textbook_loop(matrices: Tensor) -> Work:
    """One matrix after the other, as most implementations do."""

    def one(x: Tensor) -> Tensor:
        x = x / (x.norm() + 1e-10)
        for a, b, c in ASYM5:
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        return x

    return lambda: [one(matrix) for matrix in matrices]


def accuracy(rows: int, columns: int, dtype: torch.dtype) -> str:
    """Relative errors by condition, against the same polynomials of the singular values in float64:
    of what `auto` takes and of `standard`. After a semicolon the distance of `auto`'s result from
    the polar factor, and, for comparison, that of the exact polynomials."""
    parts, worst = [], [0.0, 0.0]
    for condition, matrix in conditioned(rows, columns, dtype):
        exact, nearest = by_singular_values(matrix, ASYM5), polar(matrix)
        result = orthogonalized(matrix)
        errors = [relative_error(r, exact) for r in (result, orthogonalized(matrix, "standard"))]
        distances = [relative_error(r.double(), nearest) for r in (result, exact)]
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
        parts.append(
            f"{condition:.0e}: {errors[0]:.2g} / {errors[1]:.2g}; "
            f"{distances[0]:.2g} / {distances[1]:.2g}"
        )
    return (
        "condition: error auto / standard; distance from the polar factor auto / exact: "
        f"{', '.join(parts)}. Worst error over worst {worst[0] / worst[1]:.2f}"
    )


def conditioned(rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[float, Tensor]]:
    """Matrices of every condition, their singular values in a geometric series."""
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64)).Q
    for condition in CONDITIONS:
        values = torch.tensor(condition).pow(-torch.linspace(0, 1, rows, dtype=torch.float64))
        yield condition, ((left * values) @ right.T).to(dtype)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm."""
    return float((result.double() - exact).norm() / exact.norm())
