"""The replica guard finds and heals a single flipped bit, in any replica and sub-group."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hyperopt
from hyperopt.guard import fingerprint
from tests.distributed import run_ranks
from tests.hyperopt.worlds import make_parameters, set_gradients, whole

DIMS = (None, 0)


def flip(kind: str, replica_count: Any, every: int) -> tuple[list[str], list[str], bool]:
    """Flip the lowest bit of one element on rank 3, which is replica 1, shard 1."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((6, 4), (5, 8), (1, 3)), mesh, DIMS)
    config = hyperopt.PlanConfig(check_replicas_every=every)
    optimizer = getattr(hyperopt, kind)(parameters, hsdp_replica_count=replica_count, plan=config)
    set_gradients(parameters, 0, mesh, DIMS)
    optimizer.step()
    assert optimizer.check_replicas() == []
    with torch.no_grad():
        if dist.get_rank() == 3:
            parameters[1][1].to_local().view(torch.int32)[1, 2] ^= 1
    found = optimizer.check_replicas()
    if every:
        for _, parameter in parameters:
            parameter.grad = None
        optimizer.step()
    else:
        optimizer.check_replicas(heal=True)
    again = optimizer.check_replicas()
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, [whole(p) for _, p in parameters])
    same = all(torch.equal(a, b) for row in gathered for a, b in zip(row, gathered[0], strict=True))
    return found, again, same


@pytest.mark.parametrize(("replica_count", "every"), [("auto", 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_one_flipped_bit_is_named_and_healed(kind: str, replica_count: Any, every: int) -> None:
    results = run_ranks(flip, 4, kind, replica_count, every)
    # Ranks 1 and 3 hold the shard that differs; the others' shards agree.
    assert [found for found, _, _ in results] == [[], ["layer1.weight"]] * 2
    assert all(again == [] and same for _, again, same in results)


def test_one_process_has_nothing_to_compare(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = hyperopt.Muon(make_parameters(((4, 4),), None, ()))
    with caplog.at_level(logging.WARNING):
        assert optimizer.check_replicas(heal=True) == []
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fingerprint_sees_bits_and_places(dtype: torch.dtype) -> None:
    value = torch.arange(1.0, 101.0).to(dtype)
    first = int(fingerprint(value))
    assert int(fingerprint(value.clone())) == first
    swapped = value.clone()
    swapped[3], swapped[7] = value[7], value[3]
    assert int(fingerprint(swapped)) != first
    negative_zero, zero = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    negative_zero[1] = -0.0
    assert int(fingerprint(negative_zero)) != int(fingerprint(zero))
