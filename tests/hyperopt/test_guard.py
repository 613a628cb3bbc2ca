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
from tests.hyperopt.tracing import Trace, recorded_collectives
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


class Messages(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


MESHES: dict[str, tuple[tuple[int, int], Any]] = {
    "sub-groups": ((4, 1), 2),
    "empty shards": ((2, 2), "auto"),
}
"""Four replicas of which two share state; one row on two shards."""


def flip_while_training(
    kind: str, mesh_shape: tuple[int, int], replica_count: Any, bad_rank: int
) -> tuple[list[int], list[str], bool]:
    """bfloat16, checked every third step; a bit of one replica's shard flips after the first."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((6, 4), (1, 3), (0, 4), (4, 8)), mesh, DIMS, torch.bfloat16)
    config = hyperopt.PlanConfig(check_replicas_every=3)
    optimizer = getattr(hyperopt, kind)(parameters, hsdp_replica_count=replica_count, plan=config)
    messages = Messages()
    logging.getLogger("hyperopt.distributed").addHandler(messages)
    warned: list[int] = []
    for step in range(1, 7):
        set_gradients(parameters, step, mesh, DIMS, without=[0])
        optimizer.step()
        if step == 1 and dist.get_rank() == bad_rank:
            with torch.no_grad():
                parameters[0][1].to_local().view(torch.int16)[1, 2] ^= 1
        warned += [step] * (len(messages.lines) - len(warned))
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, [whole(p) for _, p in parameters])
    same = all(torch.equal(a, b) for row in gathered for a, b in zip(row, gathered[0], strict=True))
    return warned, messages.lines, same


def flip_everywhere(kind: str) -> list[Any]:
    return [
        flip_while_training(kind, mesh_shape, count, rank)
        for mesh_shape, count in MESHES.values()
        for rank in range(4)
    ]


@pytest.mark.parametrize("kind", ["Muon", "DistributedAdamW"])
def test_a_flipped_bit_is_named_and_healed_within_n_steps(kind: str) -> None:
    """In whichever replica and sub-group; by all ranks that hold the shard, and once."""
    results = run_ranks(flip_everywhere, 4, kind)
    cases = [(shape, bad) for shape, _ in MESHES.values() for bad in range(4)]
    for rank, cases_of_rank in enumerate(results):
        for (mesh_shape, bad), (warned, lines, same) in zip(cases, cases_of_rank, strict=True):
            concerned = mesh_shape == (4, 1) or rank % 2 == bad % 2
            assert warned == ([3] if concerned else [])
            assert all("['layer0.weight']; took the first replica's" in line for line in lines)
            assert same


def guard_traffic() -> list[list[tuple[str, int]]]:
    """Collectives of the first check, of a second one, and of one that heals one parameter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    parameters = make_parameters(((6, 4),) * 5 + ((1, 3),), mesh, DIMS)
    optimizer = hyperopt.Muon(parameters)
    seen = []
    for check in range(3):
        if check == 2 and dist.get_rank() == 2:
            with torch.no_grad():
                parameters[1][1].to_local()[0, 0] += 1
        trace = Trace()
        with recorded_collectives(trace):
            optimizer.check_replicas(heal=True)
        seen.append([(e.op, e.nbytes) for e in trace.events if e.op != "all_gather_object"])
    return seen


def test_a_check_costs_one_small_all_reduce_and_what_it_heals() -> None:
    """Two numbers of eight bytes a parameter, whatever its size; then 3 × 4 floats on the ranks
    that hold the shard which differs."""
    check = [("all_reduce", 6 * 16)]
    healing = [*check, ("broadcast", 3 * 4 * 4)]
    assert [seen[1:] for seen in run_ranks(guard_traffic, 4)] == [[check, healing], [check] * 2] * 2


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


def test_small_differences_do_not_cancel_out() -> None:
    """Drift is of last bits, in opposite directions: a checksum that is linear would miss it."""
    value = torch.randn(16, generator=torch.Generator().manual_seed(1))
    bits = value.view(torch.int32)
    seen = {int(fingerprint(value))}
    patterns = torch.randint(-1, 2, (4000, 16), generator=torch.Generator().manual_seed(2))
    patterns = torch.unique(patterns[patterns.any(dim=1)], dim=0).to(torch.int32)
    for pattern in (*patterns, torch.tensor([3, -1] + [0] * 14, dtype=torch.int32)):
        seen.add(int(fingerprint((bits + pattern).view(torch.float32))))
    assert len(seen) == len(patterns) + 2


def test_the_fingerprint_is_the_same_on_every_machine() -> None:
    """Of words 1, 2, 3, computed with Python's integers."""
    total = 0
    for place, word in enumerate((1, 2, 3)):
        x = (place * 0x9E3779B97F4A7C15 + word) % 2**64
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ _arithmetic_shift(x, shift)) * factor) % 2**64
        total = (total + (x ^ _arithmetic_shift(x, 31))) % 2**64
    signed = total - 2**64 if total >= 2**63 else total
    assert int(fingerprint(torch.tensor([1, 2, 3], dtype=torch.int64))) == signed


def _arithmetic_shift(x: int, by: int) -> int:
    signed = x - 2**64 if x >= 2**63 else x
    return (signed >> by) % 2**64
