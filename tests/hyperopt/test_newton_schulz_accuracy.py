"""Every variant, form and dtype against decompositions in float64, and what must not depend on
how matrices lie: transposition, batches, neighbours that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperopt.newton_schulz import Coefficients, newton_schulz, resolve_coefficients
from tests.reference.newton_schulz import by_singular_values, polar
from tests.reference.newton_schulz import newton_schulz as textbook

CUSTOM = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
TABLES: dict[str, Coefficients] = {
    "legacy": resolve_coefficients("legacy", 5),
    "asym5": resolve_coefficients("asym5", 5),
    "polar_express": resolve_coefficients("polar_express", 8),
    "custom": resolve_coefficients("custom", 2, CUSTOM),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = ("standard", "gram", "auto")
CONDITIONS = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conditioned(rows: int, columns: int, condition: float) -> Tensor:
    """A matrix whose singular values go geometrically from 1 to 1/condition."""
    short = min(rows, columns)
    left = torch.linalg.qr(gaussian(rows, short)).Q
    right = torch.linalg.qr(gaussian(columns, short, seed=1)).Q
    exponents = torch.linspace(0, 1, short, dtype=torch.float64)
    return (left * torch.tensor(condition).pow(-exponents)) @ right.T


def examples() -> dict[str, Tensor]:
    """Wide, tall, square, with one row or column, batches, deficient in rank."""
    matrices = {
        f"{rows} x {columns}, condition {condition:.0e}": conditioned(rows, columns, condition)
        for rows, columns in ((40, 40), (24, 96), (96, 24), (8, 160))
        for condition in CONDITIONS
    }
    matrices["one row"], matrices["one column"] = gaussian(1, 40), gaussian(40, 1)
    matrices["one element"] = gaussian(1, 1)
    matrices["batch"] = gaussian(3, 2, 12, 30)
    matrices["tall batch"] = gaussian(3, 30, 12)
    matrices["rank 2 of 8"] = gaussian(8, 2) @ gaussian(2, 20, seed=1)
    matrices["rank 1 of 9"] = gaussian(9, 1) @ gaussian(1, 9, seed=1)
    return matrices


EXAMPLES = examples()


def run(matrix: Tensor, table: Coefficients, dtype: torch.dtype, form: str) -> Tensor:
    return newton_schulz(matrix, table, epsilon=1e-10, dtype=dtype, algorithm=form)


def error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


# ----------------------------------------------------------------------------------------- accuracy


def test_oracles_agree() -> None:
    """The definition by products and by singular values: two ways, one result."""
    for table in TABLES.values():
        for name, matrix in EXAMPLES.items():
            by_products = textbook(matrix, table, epsilon=0.0)
            assert error(by_products, by_singular_values(matrix, table)) < 1e-11, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", TABLES)
def test_no_less_exact_than_the_textbook_in_the_same_dtype(
    variant: str, dtype: torch.dtype
) -> None:
    """The textbook iteration in this dtype is the yardstick: what it loses, any would, give or take
    the order in which a processor's kernels sum. The Gram form may lose up to twice as much; where
    `auto` takes it there is a test of its own."""
    table, unit = TABLES[variant], torch.finfo(dtype).eps
    for name, example in EXAMPLES.items():
        matrix = example.to(dtype)
        exact = by_singular_values(matrix, table)
        yardstick = error(textbook(matrix, table, dtype=dtype), exact)
        standard = run(matrix, table, dtype, "standard")
        assert standard.dtype == dtype
        assert error(standard, exact) <= 1.5 * yardstick + 4 * unit, name
        assert error(run(matrix, table, dtype, "gram"), exact) <= 2 * yardstick + 4 * unit, name


@pytest.mark.parametrize("form", FORMS)
def test_polar_express_converges_to_the_polar_factor(form: str) -> None:
    """Eight steps of the table for singular values, relative to the norm, from 1e-3."""
    for rows, columns in ((24, 96), (96, 24), (40, 40)):
        matrix = conditioned(rows, columns, 50.0)
        result = run(matrix, TABLES["polar_express"], torch.float32, form)
        assert error(result, polar(matrix)) < 1e-5


@pytest.mark.parametrize("steps", [5, 8])
def test_the_gram_form_of_polar_express_does_not_diverge(steps: int) -> None:
    """Pairing its second and third step, it did for one in ten of such matrices."""
    table = resolve_coefficients("polar_express", steps)
    for seed in range(12):
        left = torch.linalg.qr(gaussian(24, 24, seed=seed)).Q
        right = torch.linalg.qr(gaussian(96, 24, seed=100 + seed)).Q
        values = torch.tensor(30.0).pow(-torch.linspace(0, 1, 24, dtype=torch.float64))
        matrix = ((left * values) @ right.T).bfloat16()
        exact = by_singular_values(matrix, table)
        standard = error(run(matrix, table, torch.bfloat16, "standard"), exact)
        gram = error(run(matrix, table, torch.bfloat16, "gram"), exact)
        assert gram <= 1.5 * standard + 2**-7


# --------------------------------------------------------------------------------------- transposes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", TABLES)
def test_transposes_are_as_exact(variant: str, form: str, dtype: torch.dtype) -> None:
    """Tall matrices go through the transposed products, which round in the same way."""
    table, unit = TABLES[variant], torch.finfo(dtype).eps
    for condition in CONDITIONS:
        matrix = conditioned(24, 96, condition).to(dtype)
        exact = by_singular_values(matrix, table)
        wide = error(run(matrix, table, dtype, form), exact)
        tall = error(run(matrix.mT, table, dtype, form), exact.mT)
        assert abs(tall - wide) <= 0.2 * wide + unit / 4


# ---------------------------------------------------------------------------------------- isolation


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4, 6, 100), (4, 100, 6), (3, 200, 300)], ids=str)
def test_a_matrix_does_not_touch_its_neighbours(
    shape: tuple[int, int, int], form: str, dtype: torch.dtype, value: float
) -> None:
    batch = gaussian(*shape).to(dtype)
    clean = run(batch, TABLES["asym5"], dtype, form)
    spoilt = batch.clone()
    spoilt[1].fill_(value)
    result = run(spoilt, TABLES["asym5"], dtype, form)
    for i in range(shape[0]):
        if i != 1:
            assert torch.equal(result[i], clean[i])
    if value == 0:
        assert not result[1].any()
    elif value != 1e30:
        assert bool(result[1].isnan().all())


class Allocations(TorchDispatchMode):
    """Bytes of all storages that operations make. Each is kept, so that no address comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = storage
        return result

    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_more_steps_need_no_more_memory(dtype: torch.dtype, form: str) -> None:
    """Two long buffers and two or three small ones take turns; normalising has a little of its own
    in 16 bits."""
    matrix = gaussian(32, 96).to(dtype)
    needed = []
    for steps in (3, 5):
        with Allocations() as allocations:
            run(matrix, TABLES["asym5"][:steps], dtype, form)
        needed.append(allocations.bytes())
    assert needed[0] == needed[1]
    buffers = (3 * 32 * 96 + 3 * 32 * 32) * dtype.itemsize  # the source's storage counts
    assert needed[0] <= buffers + (4 * 32 * 96 + 1024 if dtype == torch.bfloat16 else 64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_and_zero(dtype: torch.dtype, form: str) -> None:
    for shape in ((0, 5), (5, 0), (2, 0, 4), (0, 3, 3)):
        result = run(torch.empty(shape), TABLES["asym5"], dtype, form)
        assert (result.shape, result.dtype) == (torch.Size(shape), dtype)
    for shape in ((1, 1), (4, 70), (70, 4), (2, 3, 3)):
        assert not run(torch.zeros(shape), TABLES["asym5"], dtype, form).any()
