"""The optimizers on a device: the CPU's results within rounding, and nothing that waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperopt
from hyperopt import PlanConfig
from hyperopt.newton_schulz import newton_schulz
from tests.hyperopt.test_newton_schulz_accuracy import EXAMPLES, FORMS, TABLES, error
from tests.hyperopt.worlds import tensors
from tests.reference.newton_schulz import by_singular_values

pytestmark = pytest.mark.device

SHAPES = ((64, 48), (48, 200), (7, 5), (0, 4), (6, 1, 5), (4, 30, 50), (300, 300))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.device_count() - 1)  # the current one is the first


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """An operation that makes the host wait for the device is an error."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", TABLES)
def test_newton_schulz_is_as_exact(
    variant: str, dtype: torch.dtype, form: str, device: torch.device
) -> None:
    """Sums in another order round otherwise: not the same bits, but errors of the same size."""
    table, unit = TABLES[variant], torch.finfo(dtype).eps
    options: dict[str, Any] = {"epsilon": 1e-10, "dtype": dtype, "algorithm": form}
    for name, example in EXAMPLES.items():
        matrix = example.to(dtype)
        exact = by_singular_values(matrix, table)
        on_cpu = newton_schulz(matrix, table, **options)
        moved = matrix.to(device)
        with no_waiting(device):
            there = newton_schulz(moved, table, **options)
        assert there.device == moved.device
        assert error(there.cpu(), exact) <= 1.5 * error(on_cpu, exact) + 4 * unit, name


def trained(
    kind: str, options: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Parameters after five steps on known gradients, none for one of them in two steps."""
    parameters = [
        (f"layer{i}.weight", nn.Parameter(value.to(device)))
        for i, value in enumerate(tensors(SHAPES, 7, dtype))
    ]
    optimizer = getattr(hyperopt, kind)(parameters, **options)
    for step in range(5):
        gradients = [g.to(device) for g in tensors(SHAPES, 100 + step, dtype)]
        for i, (_, parameter) in enumerate(parameters):
            parameter.grad = None if i == 1 and step in (0, 3) else gradients[i]
        with no_waiting(device):
            optimizer.step()
    return [p.detach().cpu() for _, p in parameters]


MUON: dict[str, Any] = {"lr": 0.05, "ns_dtype": torch.float32}
STEPS: dict[str, tuple[str, dict[str, Any], torch.dtype, float]] = {
    "Muon": ("Muon", MUON, torch.float32, 2e-5),
    "Muon, momentum pair, cautious": (
        "Muon",
        {**MUON, "momentum": (0.9, 0.8), "cautious_weight_decay": True},
        torch.float32,
        2e-5,
    ),
    "Muon, compiled": ("Muon", {**MUON, "plan": PlanConfig(compile=True)}, torch.float32, 2e-5),
    # One unit of bfloat16 of the largest parameters, which are near 4, after each of five steps.
    "Muon, bfloat16": ("Muon", {"lr": 0.05}, torch.bfloat16, 5 * 2**-6),
    "AdamW": ("DistributedAdamW", {"lr": 1e-2}, torch.float32, 1e-6),
    "AdamW, bfloat16": ("DistributedAdamW", {"lr": 1e-2}, torch.bfloat16, 5 * 2**-6),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_the_cpus_and_do_not_wait(name: str, device: torch.device) -> None:
    kind, options, dtype, tolerance = STEPS[name]
    here = trained(kind, {**options, "plan": PlanConfig()}, dtype, torch.device("cpu"))
    there = trained(kind, options, dtype, device)
    for ours, expected in zip(there, here, strict=True):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_newton_schulz_is_as_exact(
    dtype: torch.dtype, form: str, device: torch.device
) -> None:
    from hyperopt.compiled import CompiledMath

    math = CompiledMath()
    table, unit = TABLES["asym5"], torch.finfo(dtype).eps
    for shape in ((24, 96), (30, 150), (96, 24), (3, 24, 96)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact = by_singular_values(matrix, table)
        options: dict[str, Any] = {"epsilon": 1e-10, "dtype": dtype, "algorithm": form}
        eager = newton_schulz(matrix, table, **options)
        kernel = math.orthogonalize_block
        compiled = newton_schulz(matrix.to(device), table, kernel=kernel, **options)
        assert error(compiled.cpu(), exact) <= 1.5 * error(eager, exact) + 4 * unit
    assert len(math.kernels) == 3
