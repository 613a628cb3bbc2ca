"""What is asymmetric in a step raises on every rank, with rank and cause; nobody hangs.

Rank 2 of four is the odd one. The cases run one after the other in one world with a short time
limit; where ranks hung, the limit would end the world with the stack of each rank. After each case
the ranks must still be in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hyperopt.preflight import PreflightError
from tests.distributed import run_ranks
from tests.hyperopt.setups import (
    LIMIT,
    ODD,
    SETUPS,
    Setup,
    run_cases,
)


def nothing() -> float:
    return 0.0


@contextmanager
def lacking(setup: Setup, index: int = -1) -> Iterator[Any]:
    setup.parameters[index][1].grad = None
    yield nothing


@contextmanager
def wrong_dtype(setup: Setup, dtype: torch.dtype) -> Iterator[Any]:
    """Torch lets a gradient have another dtype once `grad_dtype` is None."""
    parameter = setup.parameters[-1][1]
    parameter.grad_dtype = None
    assert parameter.grad is not None
    parameter.grad = parameter.grad.to(dtype)
    yield nothing
    parameter.grad = None
    parameter.grad_dtype = torch.float32


@contextmanager
def complex_gradient(setup: Setup) -> Iterator[Any]:
    with wrong_dtype(setup, torch.complex64) as closure:
        yield closure


@contextmanager
def narrow_gradient(setup: Setup) -> Iterator[Any]:
    with wrong_dtype(setup, torch.bfloat16) as closure:
        yield closure


@contextmanager
def scheduled_rate(setup: Setup) -> Iterator[Any]:
    """A scheduler that only this rank steps."""
    group = setup.optimizer.param_groups[-1]
    before = group["lr"]
    group["lr"] = before * 0.5
    yield nothing
    group["lr"] = before


@contextmanager
def impossible_rate(setup: Setup) -> Iterator[Any]:
    group = setup.optimizer.param_groups[-1]
    before = group["lr"]
    group["lr"] = float("nan")
    yield nothing
    group["lr"] = before


@contextmanager
def failing_closure(setup: Setup) -> Iterator[Any]:
    def fail() -> float:
        raise KeyError("no such batch")

    yield fail


@contextmanager
def sparse_gradient(setup: Setup) -> Iterator[Any]:
    """Only plain tensors can have one: it takes the first parameter that is plain."""
    index = next(i for i, (mesh, _) in enumerate(setup.places) if mesh is None)
    parameter = setup.parameters[index][1]
    parameter.grad = torch.ones(parameter.shape).to_sparse()
    yield nothing


SPOILERS: dict[str, tuple[Callable[[Setup], Any], str]] = {
    "missing gradient": (lacking, "none on ranks [2]"),
    "complex gradient": (complex_gradient, "rank 2: {last} has a gradient of torch.complex64"),
    "other gradient dtype": (narrow_gradient, "gradients of different dtypes"),
    "other rate": (scheduled_rate, "lr of group"),
    "impossible rate": (impossible_rate, "rank 2: lr must be finite"),
    "closure raises": (failing_closure, "rank 2: the closure raised KeyError: 'no such batch'"),
    "sparse gradient": (sparse_gradient, "has a sparse gradient"),
}


def refused_step(name: str, spoil: Callable[[Setup], Any]) -> str:
    """Step with one odd rank; return what this rank was told. The next step then works."""
    setup = SETUPS[name]()
    setup.set_gradients()
    before = setup.snapshot()
    odd = dist.get_rank() == ODD
    own = KeyError if odd and spoil is failing_closure else PreflightError
    with spoil(setup) if odd else lacking_nothing(setup) as closure, pytest.raises(own) as caught:
        setup.optimizer.step(closure)
    after = setup.snapshot()
    assert all(torch.equal(a, b) for a, b in zip(after[0], before[0], strict=True))
    assert after[1] == before[1]
    setup.set_gradients(1)
    setup.optimizer.step()
    return str(caught.value)


@contextmanager
def lacking_nothing(setup: Setup) -> Iterator[Any]:
    yield nothing


def applies(setup: str, spoiler: str) -> bool:
    return spoiler != "sparse gradient" or setup in ("ddp", "two meshes")


STEP_CASES = [(s, c) for s in SETUPS for c in SPOILERS if applies(s, c)]


def step_family() -> dict[Any, str]:
    return run_cases(
        {(name, case): partial(refused_step, name, SPOILERS[case][0]) for name, case in STEP_CASES}
    )


@pytest.fixture(scope="module")
def told_in_steps() -> list[dict[tuple[str, str], str]]:
    return run_ranks(step_family, 4, timeout=LIMIT)


@pytest.mark.parametrize(("setup", "case"), STEP_CASES)
def test_a_step_that_one_rank_cannot_make_raises_everywhere(
    setup: str, case: str, told_in_steps: list[dict[tuple[str, str], str]]
) -> None:
    expected = SPOILERS[case][1]
    for rank, told in enumerate(told_in_steps):
        message = told[setup, case]
        if case == "closure raises" and rank == ODD:
            assert message == "'no such batch'"
            continue
        cause, _, detail = expected.partition("{last}")
        assert cause in message
        assert detail in message
        assert "ranks [2]" in message or "rank 2" in message or case == "other gradient dtype"


def not_a_number() -> dict[str, list[str]]:
    """NaN on one rank is no asymmetry. The replicas of a parameter that differ after a step."""
    found: dict[str, list[str]] = {}
    for name in ("hsdp", "empty shards", "two meshes"):
        setup = SETUPS[name]()
        setup.set_gradients()
        gradient = setup.parameters[-1][1].grad
        assert isinstance(gradient, DTensor)
        if dist.get_rank() == ODD:
            gradient.to_local().fill_(float("nan"))
        for _ in range(2):
            setup.optimizer.step()
        found[name] = setup.optimizer.check_replicas()
    return found


def test_nan_on_one_rank_steps_and_replicas_stay_equal() -> None:
    for found in run_ranks(not_a_number, 4, timeout=LIMIT):
        assert found == {"hsdp": [], "empty shards": [], "two meshes": []}
