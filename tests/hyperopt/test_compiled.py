"""Compiled mathematics equals the eager one, and is compiled a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyperopt import Muon, PlanConfig
from hyperopt.compiled import CompiledMath
from hyperopt.newton_schulz import ASYM5, DTYPES, newton_schulz
from tests.distributed import run_ranks
from tests.hyperopt.worlds import local, make_parameters, set_gradients


class Counting:
    """A backend that runs what was captured as it is, and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch puts what it compiles: not among what it keeps between runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def orthogonalized(matrix: Tensor, math: CompiledMath | None, *, gram: bool) -> Tensor:
    return newton_schulz(
        matrix,
        ASYM5 if gram else ASYM5[:1],
        epsilon=1e-10,
        dtype=matrix.dtype,
        algorithm="gram" if gram else "standard",
        kernel=None if math is None else math.orthogonalize_block,
    )


# ----------------------------------------------------------------------------------- Newton-Schulz


def test_newton_schulz_is_the_eager_one_compiled_once_a_kind() -> None:
    backend = Counting()
    math = CompiledMath(backend)
    kinds = {
        "wide": ((6, 20), (9, 40)),
        "tall": ((20, 6), (40, 9)),
        "square": ((7, 7), (5, 5)),
        "one row": ((1, 9), (1, 3)),
        "batch": ((3, 6, 20), (6, 6, 20), (6, 20, 6, 20)),
    }
    for number, shapes in enumerate(kinds.values()):
        for seed, shape in enumerate(shapes):
            matrix = gaussian(*shape, seed=seed)
            compiled = orthogonalized(matrix, math, gram=False)
            assert torch.equal(compiled, orthogonalized(matrix, None, gram=False))
        assert backend.graphs == len(math.kernels) == number + 1


def test_gram_form_in_bfloat16() -> None:
    """Eager execution normalises 16-bit matrices on a CPU by rows: one rounding more."""
    backend = Counting()
    math = CompiledMath(backend)
    for seed, shape in enumerate(((6, 20), (9, 30))):
        matrix = gaussian(*shape, seed=seed).bfloat16()
        compiled = orthogonalized(matrix, math, gram=True)
        torch.testing.assert_close(
            compiled, orthogonalized(matrix, None, gram=True), rtol=0, atol=2**-6
        )
    assert backend.graphs == 1


def test_newton_schulz_stays_eager_on_a_cpu() -> None:
    math = CompiledMath()
    assert math.block_kernel(torch.device("cpu")) is None
    assert math.block_kernel(torch.device("cuda")) == math.orthogonalize_block


# ------------------------------------------------------------------------------------ element-wise


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_momentum(dtype: torch.dtype, nesterov: bool) -> None:
    backend = Counting()
    math = CompiledMath(backend)
    for m1, m2 in ((0.95, 0.95), (0.9, 0.8), (0.0, 0.0)):
        for size in (0, 1, 5, 1000):
            g, b = gaussian(size).to(dtype), gaussian(size, seed=1).to(dtype)
            expected_buffer = g.double() + m2 * b.double()
            ahead = g.double() + m1 * b.double()
            expected = g.double() + m1 * ahead if nesterov else ahead
            out = torch.empty(size, dtype=torch.bfloat16)
            math.momentum_into([out], [g], [b], (m1, m2), nesterov=nesterov)
            rounding = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
            torch.testing.assert_close(b, expected_buffer.to(dtype), **rounding)
            torch.testing.assert_close(out, expected.bfloat16(), rtol=2**-7, atol=1e-6)
    assert backend.graphs == 2  # one element is a kind of its own


@pytest.mark.parametrize("negated", [True, False])
@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decay_and_add(dtype: torch.dtype, cautious: bool, negated: bool) -> None:
    backend = Counting()
    math = CompiledMath(backend)
    sign = -1.0 if negated else 1.0
    for factor, decay in ((-0.02, 0.25), (-0.5, 0.0), (1.0, 0.5)):
        shapes = ((4, 5), (0, 3), (900,), (2, 3, 4))
        parameters = [gaussian(*shape).to(dtype) for shape in shapes]
        packed = gaussian(20 + 900 + 24, seed=1).bfloat16()
        parts = torch.split(packed, [20, 0, 900, 24])
        updates = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        expected = []
        for p, u in zip(parameters, updates, strict=True):
            wide, update = p.double(), u.double()
            shrinks = (sign * wide * update > 0) | torch.tensor(not cautious)
            expected.append(wide - decay * wide * shrinks + factor * update)
        math.decay_and_add(
            parameters, updates, [factor] * 4, decay, cautious=cautious, negated=negated
        )
        for p, e in zip(parameters, expected, strict=True):
            torch.testing.assert_close(p, e.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert backend.graphs == 1


def test_more_kinds_than_torch_recompiles_a_function() -> None:
    """torch gives up on the ninth variant of one function."""
    backend = Counting()
    math = CompiledMath(backend)
    for parameter_dtype in DTYPES:
        for update_dtype in DTYPES[:3]:
            p, u = gaussian(9).to(parameter_dtype), gaussian(9, seed=1).to(update_dtype)
            expected = 0.9 * p.double() - 0.5 * u.double()
            math.decay_and_add([p], [u], [-0.5], 0.1, cautious=False, negated=False)
            rounding = torch.finfo(parameter_dtype).eps
            torch.testing.assert_close(
                p.double(), expected, rtol=rounding, atol=max(1e-6, rounding)
            )
    assert backend.graphs == 12


# ------------------------------------------------------------------------------------------- steps


def compiled_and_eager(mesh: DeviceMesh | None) -> list[list[Tensor]]:
    """Training with and without compilation; this rank's parameters, both ways."""
    results = []
    for plan in (PlanConfig(compile=True), PlanConfig()):
        parameters = make_parameters(((4, 6), (18, 6), (3, 5, 4)), mesh, (None,))
        optimizer = Muon(parameters, plan=plan, ns_dtype=torch.float32, lr=0.05)
        for step in range(3):
            set_gradients(parameters, step, mesh, (None,))
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
            optimizer.step()
        results.append([local(p) for _, p in parameters])
    return results


def test_step_is_near_the_eager_one() -> None:
    """The kernels in their places, run by torch."""
    with torch.compiler.set_stance("force_eager"):
        compiled, eager = compiled_and_eager(None)
    for a, b in zip(compiled, eager, strict=True):
        assert not torch.equal(a, b), "the same roundings: were the kernels used?"
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def two_replicas() -> list[list[Tensor]]:
    with config.patch(compile_threads=1):
        return compiled_and_eager(init_device_mesh("cpu", (2,)))


@pytest.mark.soak
def test_replicas_stay_equal_to_the_bit(cache: Path) -> None:
    """Compiled the whole way to machine code, which takes half a minute."""
    first, second = run_ranks(two_replicas, 2, timeout=280)
    for a, b, eager in zip(first[0], second[0], first[1], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, eager, rtol=1e-5, atol=1e-6)
    assert list(cache.rglob("*.so")), "nothing was compiled"


def differing_plans() -> str:
    parameters = make_parameters(((4, 6),), init_device_mesh("cpu", (2,)), (None,))
    with pytest.raises(ValueError, match="different parameters, groups or options") as caught:
        Muon(parameters, plan=PlanConfig(compile=dist.get_rank() == 0))
    return str(caught.value)


def test_ranks_that_differ_in_compilation_are_refused() -> None:
    assert len(run_ranks(differing_plans, 2)) == 2


def test_option_is_true_or_false() -> None:
    with pytest.raises(ValueError, match=r"PlanConfig\.compile"):
        PlanConfig(compile="inductor")  # type: ignore[arg-type]
