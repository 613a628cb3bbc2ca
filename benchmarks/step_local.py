"""The part of `benchmarks.step` that needs one thread only: Newton-Schulz by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Result, measure_pairs
from hyperopt.newton_schulz import ASYM5, newton_schulz
from tests.reference.newton_schulz import newton_schulz as exact_newton_schulz

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
        accuracy=accuracy(WIDTH, 4 * WIDTH),
    )
    for dtype, reach in ((torch.bfloat16, 5.0), (torch.float32, None)):
        many = torch.randn(74, 24, 1024).to(dtype)
        yield measure_pairs(timed(batched(many)), timed(textbook_loop(many)), count).result(
            f"Newton-Schulz of 74 matrices 24 x 1024, {str(dtype).removeprefix('torch.')}",
            "looped 2-D calls",
            speedup=True,
            reach=reach,
            accuracy=accuracy(24, 1024) if reach else None,
        )


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


def accuracy(rows: int, columns: int) -> str:
    """Relative errors against float64 of what `auto` takes and of `standard`, by condition."""
    errors = [
        tuple(
            relative_error(orthogonalized(matrix, algorithm), exact)
            for algorithm in ("auto", "standard")
        )
        for matrix, exact in conditioned(rows, columns)
    ]
    parts = [
        f"{condition:.0e}: {auto:.2g} / {standard:.2g}"
        for condition, (auto, standard) in zip(CONDITIONS, errors, strict=True)
    ]
    worst = max(auto for auto, _ in errors) / max(standard for _, standard in errors)
    return f"error auto / standard by condition: {', '.join(parts)}; worst over worst {worst:.2f}"


def conditioned(rows: int, columns: int) -> Iterator[tuple[Tensor, Tensor]]:
    """bfloat16 matrices of every condition, with the same iteration in float64."""
    left = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64)).Q
    for condition in CONDITIONS:
        values = torch.tensor(condition).pow(-torch.linspace(0, 1, rows, dtype=torch.float64))
        matrix = ((left * values) @ right.T).bfloat16()
        yield matrix, exact_newton_schulz(matrix, ASYM5)


def relative_error(result: Tensor, exact: Tensor) -> float:
    """In the Frobenius norm."""
    return float((result.double() - exact).norm() / exact.norm())
