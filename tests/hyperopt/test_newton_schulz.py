"""Newton-Schulz against its definition in float64, and the refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyperopt.newton_schulz import (
    ALGORITHMS,
    ASYM5,
    DTYPES,
    LEGACY,
    POLAR_EXPRESS,
    orthogonalize,
    resolve_coefficients,
    step_groups,
    uses_gram,
)
from tests.reference.newton_schulz import newton_schulz as reference
from tests.reference.polar_express import polar_express

CUSTOM = ((3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
TABLES: list[tuple[str, int, Any]] = [
    ("legacy", 1, None),
    ("legacy", 7, None),
    ("asym5", 1, None),
    ("asym5", 4, None),
    ("asym5", 5, None),
    ("polar_express", 5, None),
    ("polar_express", 8, None),
    ("custom", 2, CUSTOM),
]
SHAPES = [(8, 8), (6, 30), (30, 6), (4, 80), (80, 4), (3, 5, 9), (3, 9, 5), (2, 3, 4, 70), (2, 7)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conditioned(rows: int, columns: int, condition: float) -> Tensor:
    """A matrix, rows <= columns, whose singular values go geometrically from 1 to 1/condition."""
    left, _ = torch.linalg.qr(gaussian(rows, rows))
    right, _ = torch.linalg.qr(gaussian(columns, rows, seed=1))
    return (left * torch.tensor(condition).pow(-torch.linspace(0, 1, rows))) @ right.T


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


# ----------------------------------------------------------------------------------------- accuracy


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("variant", "steps", "coefficients"), TABLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_and_float64_follow_the_definition(
    shape: tuple[int, ...], variant: str, steps: int, coefficients: Any, algorithm: str
) -> None:
    matrix = gaussian(*shape)
    table = resolve_coefficients(variant, steps, coefficients)
    options: dict[str, Any] = {
        "steps": steps,
        "variant": variant,
        "coefficients": coefficients,
        "algorithm": algorithm,
    }
    flat = matrix.reshape(-1, *shape[-2:])
    single = reference(flat.float().double(), table).reshape(shape)
    result = orthogonalize(matrix.float(), dtype=torch.float32, **options)
    torch.testing.assert_close(result.double(), single, rtol=0, atol=1e-5)
    exact = orthogonalize(matrix, dtype=torch.float64, **options)
    torch.testing.assert_close(exact, reference(flat, table).reshape(shape), rtol=0, atol=1e-11)


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (24, 1024)], ids=str)
def test_bfloat16_error_is_bounded_and_gram_adds_little(
    shape: tuple[int, int], condition: float
) -> None:
    matrix = conditioned(*shape, condition).bfloat16()
    expected = reference(matrix, ASYM5)
    standard = relative_error(orthogonalize(matrix, algorithm="standard"), expected)
    gram = relative_error(orthogonalize(matrix, algorithm="gram"), expected)
    assert standard < 0.25
    assert gram < 1.1 * standard + 0.01  # at condition 1 both are below 0.01


@pytest.mark.parametrize("shape", [(256, 768), (256, 1024), (768, 256), (24, 1024)], ids=str)
def test_auto_takes_the_gram_form_where_it_is_as_exact(shape: tuple[int, int]) -> None:
    assert uses_gram(*shape, ASYM5, torch.bfloat16, "auto")
    standard, auto = [], []
    for condition in (1.0, 10.0, 1e2, 1e4, 1e6):
        matrix = conditioned(min(shape), max(shape), condition).bfloat16()
        matrix = matrix.T if shape[0] > shape[1] else matrix
        expected = reference(matrix, ASYM5)
        standard.append(relative_error(orthogonalize(matrix, algorithm="standard"), expected))
        auto.append(relative_error(orthogonalize(matrix), expected))
        assert auto[-1] <= 1.1 * standard[-1] + 2**-8
    assert max(auto) <= 1.1 * max(standard)


def test_auto_is_standard_where_gram_was_not_as_exact() -> None:
    assert not uses_gram(64, 256, ASYM5, torch.bfloat16, "auto")
    assert not uses_gram(512, 1024, ASYM5, torch.bfloat16, "auto")
    assert not uses_gram(512, 2048, ASYM5, torch.float32, "auto")
    assert not uses_gram(512, 2048, POLAR_EXPRESS[:5], torch.bfloat16, "auto")
    assert uses_gram(24, 1024, ASYM5, torch.bfloat16, "auto")


@pytest.mark.parametrize("shape", [(32, 32), (32, 100), (100, 32)], ids=str)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    for variant, low, high in (("legacy", 0.6, 1.3), ("asym5", 0.7, 1.2)):
        values = torch.linalg.svdvals(
            orthogonalize(gaussian(*shape), variant=variant, dtype=torch.float64)
        )
        assert float(values.min()) > low or shape == (32, 32)  # a square one may be near singular
        assert float(values.max()) < high


def test_float16() -> None:
    matrix = conditioned(32, 96, 10.0).half()
    result = orthogonalize(matrix, dtype=torch.float16)
    assert result.dtype == torch.float16
    assert relative_error(result, reference(matrix, ASYM5)) < 3e-3


# ------------------------------------------------------------------------------------ special cases


@pytest.mark.parametrize("epsilon", [0.0, 1e-10, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_gives_zero_and_leaves_its_batch_alone(dtype: torch.dtype, epsilon: float) -> None:
    batch = gaussian(3, 4, 9)
    batch[1] = 0
    result = orthogonalize(batch, dtype=dtype, epsilon=epsilon)
    assert torch.equal(result[1], torch.zeros(4, 9, dtype=dtype))
    assert bool(result[0].any())
    assert bool(result[2].isfinite().all())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rank_deficient(algorithm: str) -> None:
    matrix = gaussian(8, 2) @ gaussian(2, 20, seed=1)
    result = orthogonalize(matrix.float(), dtype=torch.float32, algorithm=algorithm)
    expected = reference(matrix.float().double(), ASYM5)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-5)
    assert torch.linalg.matrix_rank(result, atol=1e-3) == 2


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 3, 4), (2, 0, 4)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    result = orthogonalize(torch.empty(shape))
    assert result.shape == shape
    assert result.dtype == torch.bfloat16


def test_input_stays_and_result_is_new_and_contiguous() -> None:
    base = gaussian(12, 40).float()
    views = [base, base.T, base[::2, 1::3], base.reshape(4, 3, 40).transpose(0, 1), base[:1]]
    for view in views:
        before = base.clone()
        result = orthogonalize(view, dtype=torch.float32)
        assert torch.equal(base, before)
        assert result.is_contiguous()
        assert torch.equal(result, orthogonalize(view.contiguous(), dtype=torch.float32))


def test_a_gradient_needing_matrix_leaves_no_graph() -> None:
    matrix = torch.nn.Parameter(gaussian(4, 6).float())
    assert not orthogonalize(matrix).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(40, 16, 300), (40, 300, 16), (3, 400, 500)], ids=str)
def test_a_batch_equals_its_matrices(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also where the batch or a matrix is larger than a cache block."""
    batch = gaussian(*shape)
    one_by_one = torch.stack([orthogonalize(matrix, dtype=dtype) for matrix in batch])
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(
        orthogonalize(batch, dtype=dtype), one_by_one, rtol=0, atol=tolerance
    )


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    exponent=st.integers(-12, 12),
    algorithm=st.sampled_from(ALGORITHMS),
)
def test_scale_of_the_input_does_not_matter(
    rows: int, columns: int, exponent: int, algorithm: str
) -> None:
    matrix = gaussian(rows, columns).float()
    options: dict[str, Any] = {"epsilon": 0.0, "dtype": torch.float32, "algorithm": algorithm}
    scaled = orthogonalize(matrix * 2.0**exponent, **options)
    torch.testing.assert_close(scaled, orthogonalize(matrix, **options), rtol=0, atol=1e-6)


def test_epsilon_is_added_to_the_norm() -> None:
    matrix = gaussian(5, 8)
    result = orthogonalize(matrix, dtype=torch.float64, epsilon=float(matrix.norm()))
    torch.testing.assert_close(result, reference_of_half(matrix))


def reference_of_half(matrix: Tensor) -> Tensor:
    """From `matrix / (2 · norm)`, by a matrix of twice the norm: one more, orthogonal row block."""
    filler = torch.zeros(1, matrix.shape[1] + 1, dtype=matrix.dtype)
    filler[0, -1] = 3**0.5 * matrix.norm()
    padded = torch.nn.functional.pad(matrix, (0, 1))
    return reference(torch.cat([padded, filler]), ASYM5, 0.0)[:-1, :-1]


# ------------------------------------------------------------------------------------------- tables


def test_polar_express_table_is_what_the_paper_constructs() -> None:
    derived = polar_express(1e-3, 8, 0.02407327424182761)
    table = [(a * 1.01, b * 1.01**3, c * 1.01**5) for a, b, c in POLAR_EXPRESS[:-1]]
    torch.testing.assert_close(
        torch.tensor([*table, POLAR_EXPRESS[-1]], dtype=torch.float64),
        torch.tensor(derived, dtype=torch.float64),
        rtol=0,
        atol=1e-8,
    )


def test_resolved_tables() -> None:
    assert resolve_coefficients("legacy", 9) == (LEGACY,) * 9
    assert resolve_coefficients("asym5", 3) == ASYM5[:3]
    assert resolve_coefficients("custom", 1, [[1, -2, 0.5], [9, 9, 9]]) == ((1.0, -2.0, 0.5),)


def test_restarts_of_the_gram_form() -> None:
    assert [len(group) for group in step_groups(ASYM5, gram=True)] == [1, 2, 2]
    assert [len(group) for group in step_groups(POLAR_EXPRESS, gram=True)] == [1, 1, 2, 2, 2]
    assert [len(group) for group in step_groups((LEGACY,) * 5, gram=True)] == [1, 1, 2, 1]
    assert [len(group) for group in step_groups(ASYM5[:1], gram=True)] == [1]
    for table in (ASYM5[:1], ASYM5[:2], ASYM5, POLAR_EXPRESS):
        for gram in (False, True):
            assert sum(step_groups(table, gram=gram), ()) == table


# --------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"variant": "jordan"}, "ns_variant"),
        ({"variant": None}, "ns_variant"),
        ({"steps": 0}, "ns_steps"),
        ({"steps": True}, "ns_steps"),
        ({"steps": 2.0}, "ns_steps"),
        ({"steps": 6}, "ns_steps=6"),
        ({"variant": "polar_express", "steps": 9}, "ends after 8"),
        ({"variant": "custom"}, "ns_coefficients"),
        ({"variant": "custom", "steps": 3, "coefficients": CUSTOM}, "ends after 2"),
        ({"coefficients": CUSTOM}, "ns_variant='custom'"),
        ({"variant": "legacy", "coefficients": ASYM5}, "ns_variant='custom'"),
        ({"variant": "custom", "steps": 1, "coefficients": 3.0}, "ns_coefficients"),
        ({"variant": "custom", "steps": 1, "coefficients": "abc"}, "ns_coefficients"),
        ({"variant": "custom", "steps": 1, "coefficients": [(1, 2)]}, r"ns_coefficients\[0\]"),
        (
            {"variant": "custom", "steps": 1, "coefficients": [(1, 2, 3), (1, 2, float("nan"))]},
            r"ns_coefficients\[1\]",
        ),
        ({"variant": "custom", "steps": 1, "coefficients": [(1, "2", 3)]}, r"ns_coefficients\[0\]"),
        ({"epsilon": -1e-9}, "ns_epsilon"),
        ({"epsilon": float("inf")}, "ns_epsilon"),
        ({"dtype": torch.int32}, "ns_dtype"),
        ({"algorithm": "fast"}, "ns_algorithm"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match=option):
        orthogonalize(torch.eye(2), **options)


@pytest.mark.parametrize("matrix", [torch.ones(3), torch.eye(2).int(), torch.eye(2).cfloat()])
def test_what_is_no_real_matrix_is_refused(matrix: Tensor) -> None:
    with pytest.raises(ValueError, match=r"matrix"):
        orthogonalize(matrix)
