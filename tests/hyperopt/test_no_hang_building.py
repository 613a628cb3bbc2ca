"""What one rank builds otherwise, or cannot build, raises on every rank.

Rank 2 of four is the odd one. The cases run one after the other in one world with a short time
limit; where ranks hung, the limit would end the world with the stack of each rank. After each case
the ranks must still be in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hyperopt
from hyperopt import DistributedAdamW, Muon, PlanConfig
from tests.distributed import run_ranks
from tests.hyperopt.setups import (
    DIMS,
    LIMIT,
    ODD,
    Bag,
    hsdp,
    line,
    run_cases,
    square,
)
from tests.hyperopt.worlds import make_parameters


def named(count: int = 3) -> list[tuple[str, nn.Parameter]]:
    return make_parameters(((5, 4), (6, 8), (3, 3))[:count], square(), DIMS)


def many() -> list[tuple[str, nn.Parameter]]:
    return make_parameters(((8, 8),) * 16, square(), DIMS)


def idle(*args: Any) -> None:
    """Any hook."""


def exploding() -> Iterator[Any]:
    yield from named(1)
    raise OSError("no such file")


def plain() -> list[tuple[str, nn.Parameter]]:
    return make_parameters(((5, 4), (6, 8), (3, 3)), None, ())


def groups(order: int) -> list[dict[str, Any]]:
    first, *rest = named()
    return [{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}][::order]


def other_mesh() -> list[tuple[str, nn.Parameter]]:
    """The same ranks, but not the same replicas."""
    return make_parameters(((5, 4), (6, 8), (3, 3)), line(), (0,))


Build = Callable[[], Any]

BUILDS: dict[str, tuple[Build, Build, str]] = {
    "unit_bytes": (
        lambda: Muon(many()),
        lambda: Muon(many(), plan=PlanConfig(unit_bytes=256)),
        "ranks [2] differ from rank 0",
    ),
    "gather": (
        lambda: Muon(named()),
        lambda: Muon(named(), plan=PlanConfig(gather="all_gather")),
        "ranks [2] differ from rank 0",
    ),
    "check_replicas_every": (
        lambda: DistributedAdamW(named()),
        lambda: DistributedAdamW(named(), plan=PlanConfig(check_replicas_every=1)),
        "ranks [2] differ from rank 0",
    ),
    "group order": (
        lambda: Muon(groups(1)),
        lambda: Muon(groups(-1)),
        "ranks [2] differ from rank 0",
    ),
    "replica count": (
        lambda: Muon(named()),
        lambda: Muon(named(), hsdp_replica_count=1),
        "ranks [2] differ from rank 0",
    ),
    "a hook on one rank": (
        lambda: Muon(named()),
        lambda: Muon(named(), reshape_fn=idle),
        "ranks [2] differ from rank 0",
    ),
    "a hook that changes what travels": (
        lambda: Muon(named(), reshape_fn=idle),
        lambda: Muon(named(), post_update_fn=idle),
        "ranks [2] differ from rank 0",
    ),
    "another optimizer": (
        lambda: Muon(named()),
        lambda: DistributedAdamW(named()),
        "ranks [2] differ from rank 0",
    ),
    "one parameter less": (
        lambda: Muon(named()),
        lambda: Muon(named(2)),
        "{0: 3, 1: 3, 2: 2, 3: 3}",
    ),
    "no parameters": (
        lambda: Muon(named()),
        lambda: Muon([]),
        "empty parameter list",
    ),
    "plain parameters": (
        lambda: Muon(named()),
        lambda: Muon(plain()),
        "ranks [0, 1, 3] have parameters on a mesh of 4 ranks",
    ),
    "other placements": (
        lambda: Muon(named()),
        lambda: Muon(other_mesh()),
        "ranks [2] differ from rank 0",
    ),
    "bad option": (
        lambda: Muon(named()),
        lambda: Muon(named(), lr=-1.0),
        "lr must be finite",
    ),
    "bad hook": (
        lambda: Muon(named()),
        lambda: Muon(named(), reshape_fn=3),  # type: ignore[arg-type]
        "reshape_fn must be callable",
    ),
    "bad plan": (
        lambda: Muon(named()),
        lambda: Muon(named(), plan=3),  # type: ignore[arg-type]
        "plan must be a PlanConfig",
    ),
    "bad replica count": (
        lambda: Muon(named()),
        lambda: Muon(named(), hsdp_replica_count="some"),  # type: ignore[arg-type]
        "hsdp_replica_count must be",
    ),
    "a bias": (
        lambda: Muon(named()),
        lambda: Muon([*named(2), ("bias", nn.Parameter(torch.ones(3)))]),
        "give these to AdamW: ['bias']",
    ),
    "the same name twice": (
        lambda: Muon(named()),
        lambda: Muon([("same", p) for _, p in named()]),
        "same name",
    ),
    "parameters that raise": (
        lambda: Muon(named()),
        lambda: Muon(exploding()),
        "no such file",
    ),
    "build_optimizer": (
        lambda: hyperopt.build_optimizer(Bag(named())),
        lambda: hyperopt.build_optimizer(Bag(named()), muon={"ns_steps": 0}),
        "ns_steps must be",
    ),
}


def refused_build(usual: Build, odd: Build) -> str:
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        (odd if dist.get_rank() == ODD else usual)()
    assert Muon(named()).preflight().active == (False,) * 3  # ranks are still in step
    return str(caught.value)


def build_family() -> dict[Any, str]:
    square(), line()  # made by all ranks: what the odd one builds may need no mesh
    return run_cases(
        {case: partial(refused_build, usual, odd) for case, (usual, odd, _) in BUILDS.items()}
    )


@pytest.fixture(scope="module")
def told_in_builds() -> list[dict[str, str]]:
    return run_ranks(build_family, 4, timeout=LIMIT)


@pytest.mark.parametrize("case", BUILDS)
def test_what_one_rank_builds_otherwise_raises_everywhere(
    case: str, told_in_builds: list[dict[str, str]]
) -> None:
    for rank, told in enumerate(told_in_builds):
        assert BUILDS[case][2] in told[case]
        assert rank == ODD or "2" in told[case]


def parameters_with_state_gone() -> str:
    """Planning again is collective as well."""
    setup = hsdp()
    setup.set_gradients()
    setup.optimizer.step()
    group = setup.optimizer.param_groups[0]
    kept, names = group["params"], group["param_names"]
    if dist.get_rank() == ODD:
        group["params"], group["param_names"] = kept[:1], names[:1]
    with pytest.raises(ValueError) as caught:
        setup.optimizer.reset_optimizer_parameters()
    group["params"], group["param_names"] = kept, names
    setup.optimizer.step()
    return str(caught.value)


def test_planning_again_without_a_parameter_raises_everywhere() -> None:
    for message in run_ranks(parameters_with_state_gone, 4, timeout=LIMIT):
        assert "no longer in any group: ['layer1.weight']" in message
