"""A hook that fails or answers wrongly on one rank raises on every rank.

Rank 2 of four is the odd one. The cases run one after the other in one world with a short time
limit; where ranks hung, the limit would end the world with the stack of each rank. After each case
the ranks must still be in step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from hyperopt import NSInputTransform, PlanConfig
from hyperopt.preflight import StepError
from tests.distributed import run_ranks
from tests.hyperopt.setups import (
    DIMS,
    LIMIT,
    ODD,
    Place,
    Setup,
    chain_of,
    run_cases,
    single,
    square,
)


def fail(*args: Any, **kwargs: Any) -> Any:
    """Any hook."""
    if dist.get_rank() == ODD:
        raise KeyError("no such head")
    return None


def fail_zeropower(matrices: Tensor, *, steps: int) -> Tensor:
    fail()
    return matrices.sign()


def fail_momentum(
    gradients: list[Tensor], buffers: list[Tensor], m1: float, m2: float, nesterov: bool
) -> list[Tensor]:
    fail()
    return [g.clone() for g in gradients]


def failing_restore(fqn: str, update: Tensor) -> NSInputTransform:
    def restore(updates: list[Tensor], out: Tensor) -> None:
        fail()
        out.copy_(updates[0])

    return NSInputTransform([update.clone()], restore)


def odd_answer(answer: Any) -> Callable[..., Any]:
    """A hook that gives a wrong answer on the odd rank, and none elsewhere."""

    def hook(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs) if dist.get_rank() == ODD else None

    return hook


def odd_zeropower(answer: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda m, *, steps: answer(m) if dist.get_rank() == ODD else m.sign()


def odd_momentum(answer: Callable[[list[Tensor]], Any]) -> Callable[..., Any]:
    return lambda g, b, m1, m2, n: answer(g) if dist.get_rank() == ODD else [x.clone() for x in g]


HOOKS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "zeropower_fn raises": ("zeropower_fn", fail_zeropower, "no such head"),
    "momentum_update_fn raises": ("momentum_update_fn", fail_momentum, "no such head"),
    "reshape_fn raises": ("reshape_fn", fail, "no such head"),
    "ns_transform_fn raises": ("ns_transform_fn", fail, "no such head"),
    "restore raises": ("ns_transform_fn", failing_restore, "no such head"),
    "post_update_fn raises": ("post_update_fn", fail, "no such head"),
    "zeropower_fn returns another shape": (
        *("zeropower_fn", odd_zeropower(lambda m: m[..., :1])),
        "zeropower_fn returned shape",
    ),
    "zeropower_fn returns nothing": (
        *("zeropower_fn", odd_zeropower(lambda m: None)),
        "zeropower_fn must return a tensor, got NoneType",
    ),
    "zeropower_fn returns integers": (
        *("zeropower_fn", odd_zeropower(lambda m: m.int())),
        "zeropower_fn returned torch.int32",
    ),
    "momentum_update_fn returns too few": (
        *("momentum_update_fn", odd_momentum(lambda g: g[1:])),
        "momentum_update_fn returned",
    ),
    "momentum_update_fn returns nothing": (
        *("momentum_update_fn", odd_momentum(lambda g: None)),
        "momentum_update_fn must return a list of updates, got NoneType",
    ),
    "momentum_update_fn returns another shape": (
        *("momentum_update_fn", odd_momentum(lambda g: [x[None] for x in g])),
        "momentum_update_fn returned shape",
    ),
    "momentum_update_fn returns numbers": (
        *("momentum_update_fn", odd_momentum(lambda g: [0.0 for _ in g])),
        "momentum_update_fn returned a float",
    ),
    "reshape_fn returns a tensor": (
        *("reshape_fn", odd_answer(lambda fqn, update: update)),
        "reshape_fn must return a list of views",
    ),
    "reshape_fn returns too few": (
        *("reshape_fn", odd_answer(lambda fqn, update: [update[:1]])),
        "tile the update exactly once",
    ),
    "ns_transform_fn returns a list": (
        *("ns_transform_fn", odd_answer(lambda fqn, update: [update])),
        "must return NSInputTransform or None",
    ),
    "ns_transform_fn returns numbers": (
        *("ns_transform_fn", odd_answer(lambda fqn, u: NSInputTransform([1.0], print))),  # type: ignore[list-item]
        "returned float, expected tensors",
    ),
}


def many_matrices(chained: bool, **options: Any) -> Setup:
    """So many that every rank owns and computes some; small units, so that failures come early."""
    where = (square(), DIMS)
    rows: list[tuple[tuple[int, ...], Place]] = [((8, 8), where)] * 16
    plan = PlanConfig(unit_bytes=256)
    return (chain_of if chained else single)(rows, plan=plan, **options)


def failing_hook(option: str, hook: Callable[..., Any], chained: bool) -> str:
    setup = many_matrices(chained, **{option: hook})
    setup.set_gradients()
    with pytest.raises(StepError) as caught:
        setup.optimizer.step()
    return str(caught.value)


def hook_family() -> dict[Any, str]:
    return run_cases(
        {
            (case, chained): partial(failing_hook, option, hook, chained)
            for case, (option, hook, _) in HOOKS.items()
            for chained in (False, True)
        }
    )


@pytest.fixture(scope="module")
def told_by_hooks() -> list[dict[tuple[str, bool], str]]:
    return run_ranks(hook_family, 4, timeout=LIMIT)


@pytest.mark.parametrize("case", HOOKS)
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "chain"])
def test_a_hook_that_fails_on_one_rank_raises_everywhere(
    case: str, chained: bool, told_by_hooks: list[dict[tuple[str, bool], str]]
) -> None:
    for told in told_by_hooks:
        assert "rank 2: " in told[case, chained]
        assert HOOKS[case][2] in told[case, chained]
