"""Products by panels against float64, and where they are taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hyperopt.newton_schulz import ASYM5, orthogonalize
from hyperopt.symmetric import panel_columns, pays, symmetric_product
from tests.reference.newton_schulz import newton_schulz as reference

CPU = torch.device("cpu")
# Sizes at, and one beyond, a whole number of panels; a batch; a last panel of one column.
LARGE = [(1, 512, 1024), (2, 513, 1024), (1, 600, 900), (1, 769, 769), (1, 1025, 520)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_gram_matrices(shape: tuple[int, int, int]) -> None:
    x = gaussian(*shape)
    out = torch.full((shape[0], shape[1], shape[1]), float("nan"))
    assert pays(shape[1], shape[2], x.dtype, CPU)
    assert symmetric_product(x, x.mT, out=out) is out
    exact = x.double() @ x.double().mT
    assert torch.equal(out, out.mT)
    assert error(out, exact) <= 1.05 * error(x @ x.mT, exact)


@pytest.mark.parametrize("in_place", [False, True])
def test_polynomials_of_a_gram_matrix(in_place: bool) -> None:
    x = gaussian(1, 777, 777) / 777**0.5
    gram = x @ x.mT
    gram = torch.maximum(gram, gram.mT)
    added = gram.clone()
    out = added if in_place else torch.empty_like(gram)
    symmetric_product(gram, gram, out=out, add=added, beta=-4.5, alpha=2.25)
    wide = gram.double()
    exact = -4.5 * wide + 2.25 * wide @ wide
    plain = torch.baddbmm(gram, gram, gram, beta=-4.5, alpha=2.25)
    assert torch.equal(out, out.mT)
    assert error(out, exact) <= 1.05 * error(plain, exact)
    assert in_place or torch.equal(added, gram)


def test_bfloat16_rounds_once() -> None:
    x = gaussian(1, 1024, 4096).bfloat16() / 64
    out = x.new_empty(1, 1024, 1024)
    assert pays(1024, 4096, x.dtype, CPU)
    symmetric_product(x, x.mT, out=out)
    assert torch.equal(out, out.mT)
    exact = x[0].double() @ x[0].double().mT
    assert error(out[0], exact) <= 1.05 * error(x[0] @ x[0].mT, exact)


@pytest.mark.parametrize("shape", [(3, 4, 9), (2, 511, 2048), (1, 512, 1023)], ids=str)
def test_small_products_are_torchs_own(shape: tuple[int, int, int]) -> None:
    x = gaussian(*shape)
    out = torch.full((shape[0], shape[1], shape[1]), float("nan"))
    assert not pays(shape[1], shape[2], x.dtype, CPU)
    symmetric_product(x, x.mT, out=out, alpha=0.5)
    torch.testing.assert_close(out, 0.5 * (x @ x.mT))


def test_panels_are_for_the_cpu_and_for_sizes_that_were_measured() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert pays(2048, 2048, dtype, CPU)
        assert not pays(1024, 2048, dtype, CPU)
        assert not pays(512, 16384, dtype, CPU)
        assert panel_columns(2048, dtype) == 256
    assert not pays(4096, 4096, torch.float32, torch.device("meta"))
    assert panel_columns(1024, torch.float32) == 128
    assert panel_columns(1025, torch.float32) == 256


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(520, 1100), (1100, 520)], ids=str)
def test_newton_schulz_by_panels(shape: tuple[int, int], algorithm: str) -> None:
    matrix = gaussian(*shape)
    result = orthogonalize(matrix, dtype=torch.float32, algorithm=algorithm)
    assert error(result, reference(matrix, ASYM5)) < 1e-5


def test_nan_stays_in_its_matrix() -> None:
    batch = gaussian(3, 520, 1100)
    batch[1, 7, 9] = float("nan")
    result = orthogonalize(batch, dtype=torch.float32)
    assert bool(result[1].isnan().all())
    for i in (0, 2):
        assert torch.equal(result[i], orthogonalize(batch[i], dtype=torch.float32))
