"""Write plans: every element once, by a holder, evenly, the same for everybody."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.dtypes import DTYPES
from ckpt.errors import IncompatibleError
from ckpt.planner import WritePlan, plan_writes, table_digest
from ckpt.topology import PlacedTensor
from hyperopt.ownership import (
    Box,
    MeshSpec,
    OwnedSlot,
    ParameterPlacement,
    Placement,
    assign_owners,
    held_boxes,
    replicate_dims,
)

PROPERTY = settings(max_examples=150, derandomize=True, deadline=None)
R = Placement()


def shard(dim: int, split_factor: int = 1) -> Placement:
    return Placement(dim, split_factor)


def mesh(**sizes: int) -> MeshSpec:
    return MeshSpec(tuple(sizes), tuple(sizes.values()), tuple(range(math.prod(sizes.values()))))


def placed(
    shape: tuple[int, ...],
    at: MeshSpec | None = None,
    placements: tuple[Placement, ...] = (),
    dtype: str = "float32",
    slots: tuple[OwnedSlot, ...] | None = None,
    replica_count: int = 1,
    own_shape: tuple[int, ...] | None = None,
) -> PlacedTensor:
    where = ParameterPlacement(shape, at, placements, slots, replica_count)
    return PlacedTensor(dtype, shape if own_shape is None else own_shape, where)


def assert_exact(plan: WritePlan, table: Mapping[str, PlacedTensor], world_size: int) -> None:
    """Count writes per element, and check that writers hold what they write."""
    counts = {key: np.zeros(tensor.shape, np.int64) for key, tensor in table.items()}
    for rank, chunks in enumerate(plan.ranks):
        nbytes = 0
        for chunk in chunks:
            tensor = table[chunk.key]
            held = held_boxes(tensor.placement, tensor.shape, rank, world_size)
            assert any(box.intersection(chunk.box) == chunk.box for box in held), (rank, chunk)
            where = zip(chunk.box.offsets, chunk.box.sizes, strict=True)
            counts[chunk.key][tuple(slice(a, a + n) for a, n in where)] += 1
            nbytes += chunk.box.elements * DTYPES[tensor.dtype].itemsize
        assert nbytes == plan.bytes_per_rank[rank]
    for key, count in counts.items():
        assert (count == 1).all(), key


# --------------------------------------------------------------------------------------- examples


def test_plain_tensors_are_spread() -> None:
    table = {f"p{i}": placed((1000,)) for i in range(8)}
    plan = plan_writes(table, 4)
    assert plan.bytes_per_rank == (8000, 8000, 8000, 8000)
    assert_exact(plan, table, 4)


def test_a_large_replicated_tensor_is_cut_into_rows() -> None:
    table = {"embedding": placed((4096, 64)), "norm": placed((64,))}
    plan = plan_writes(table, 4)
    assert plan.imbalance < 1.01
    assert [len([c for c in chunks if c.key == "embedding"]) for chunks in plan.ranks] == [1] * 4
    assert_exact(plan, table, 4)


def test_a_tensor_with_a_leading_one_is_cut_on_its_next_dim() -> None:
    table = {"w": placed((1, 512, 256))}
    plan = plan_writes(table, 2)
    assert plan.ranks[0][0].box == Box((0, 0, 0), (1, 256, 256))
    assert_exact(plan, table, 2)


def test_small_tensors_are_not_cut() -> None:
    table = {f"p{i}": placed((16, 16)) for i in range(5)}
    plan = plan_writes(table, 4)
    assert sum(map(len, plan.ranks)) == 5


def test_owners_write_their_state_and_replicated_tensors_fill_up() -> None:
    at = mesh(replicate=2, shard=1)
    slots = (OwnedSlot("w", 1, 1.0),)
    table = {
        "model.w": placed((1024, 256), at, (R, shard(0))),
        "opt.state.w.momentum_buffer": placed(
            (1024, 256), at, (R, shard(0)), slots=slots, replica_count=2
        ),
    }
    plan = plan_writes(table, 2)
    assert [c.key for c in plan.ranks[0]] == ["model.w"]
    assert [c.key for c in plan.ranks[1]] == ["opt.state.w.momentum_buffer"]


def test_sub_groups_share_the_writing_of_their_copies() -> None:
    at = mesh(replicate=4, shard=1)
    table = {
        f"s{i}": placed(
            (1000,), at, (R, shard(0)), slots=(OwnedSlot(f"p{i}", i % 2, 1.0),), replica_count=2
        )
        for i in range(8)
    }
    plan = plan_writes(table, 4)
    assert plan.bytes_per_rank == (8000, 8000, 8000, 8000)
    assert_exact(plan, table, 4)


def test_a_step_counter_is_written_once() -> None:
    at = mesh(replicate=2, shard=2)
    slots = (OwnedSlot("w", 0, 1.0, (4, 9)), OwnedSlot("w", 1, 1.0, (0, 4)))
    table = {
        "step": placed((9, 2), at, (R, shard(0)), slots=slots, replica_count=2, own_shape=()),
        "exp_avg": placed((9, 2), at, (R, shard(0)), slots=slots, replica_count=2),
    }
    plan = plan_writes(table, 4)
    assert_exact(plan, table, 4)
    writers = [r for r, chunks in enumerate(plan.ranks) for c in chunks if c.key == "step"]
    assert writers in ([2], [3])


def test_tensors_without_elements_have_no_chunk() -> None:
    table = {"none": placed((0, 5)), "scalar": placed(())}
    plan = plan_writes(table, 3)
    assert [c.key for chunks in plan.ranks for c in chunks] == ["scalar"]


def test_no_tensors() -> None:
    assert plan_writes({}, 2) == WritePlan(((), ()), (0, 0))


def test_rows_without_an_owner_are_an_error() -> None:
    slots = (OwnedSlot("w", 0, 1.0, (0, 3)),)
    table = {"opt.state.w.m": placed((4, 4), mesh(r=2), (R,), slots=slots, replica_count=2)}
    with pytest.raises(IncompatibleError, match=r"opt\.state\.w\.m: no rank holds some of its 16"):
        plan_writes(table, 2)


def test_rows_with_two_owners_are_an_error() -> None:
    slots = (OwnedSlot("w", 0, 1.0, (0, 3)), OwnedSlot("w", 1, 1.0, (2, 4)))
    table = {"opt.state.w.m": placed((4, 4), mesh(r=2), (R,), slots=slots, replica_count=2)}
    with pytest.raises(IncompatibleError, match="overlapping parts"):
        plan_writes(table, 2)


# -------------------------------------------------------------------------------------- realistic


def decoder(blocks: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, width)}
    for i in range(blocks):
        block = {
            "norm1.weight": (width,),
            "attention.qkv.weight": (3 * width, width),
            "attention.out.weight": (width, width),
            "norm2.weight": (width,),
            "mlp.up.weight": (4 * width, width),
            "mlp.down.weight": (width, 4 * width),
        }
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return shapes | {"norm.weight": (width,), "head.weight": (vocabulary, width)}


def training_state(
    shapes: Mapping[str, tuple[int, ...]], at: MeshSpec, replica_count: int
) -> dict[str, PlacedTensor]:
    """A model in HSDP with AdamW state on owners."""
    owners = assign_owners([float(math.prod(s)) for s in shapes.values()], replica_count)
    where = (R, shard(0))
    table = {f"model.{fqn}": placed(shape, at, where) for fqn, shape in shapes.items()}
    for (fqn, shape), owner in zip(shapes.items(), owners, strict=True):
        slots = (OwnedSlot(fqn, owner, float(math.prod(shape))),)
        for key in ("exp_avg", "exp_avg_sq"):
            table[f"optimizer.state.{fqn}.{key}"] = placed(
                shape, at, where, slots=slots, replica_count=replica_count
            )
    return table


@pytest.mark.parametrize(
    ("replicas", "shards", "replica_count"), [(2, 2, 2), (4, 1, 4), (4, 2, 2), (1, 4, 1), (4, 8, 4)]
)
def test_writers_are_even_on_a_decoder(replicas: int, shards: int, replica_count: int) -> None:
    table = training_state(
        decoder(24, 2048, 50_304), mesh(replicate=replicas, shard=shards), replica_count
    )
    plan = plan_writes(table, replicas * shards)
    assert plan.imbalance <= 1.05
    chunks = sum(map(len, plan.ranks))
    assert chunks <= 1.3 * len(table) * shards  # cutting is for balance, not a habit


def test_writers_are_even_in_ddp() -> None:
    table = {f"model.{n}": placed(s) for n, s in decoder(12, 768, 50_257).items()}
    for world_size in (2, 3, 8):
        assert plan_writes(table, world_size).imbalance <= 1.05


# --------------------------------------------------------------------------------------- property


@st.composite
def placed_tables(draw: st.DrawFn) -> tuple[dict[str, PlacedTensor], int]:
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    meshes = draw(st.lists(_meshes(world_size), min_size=1, max_size=3))
    count = draw(st.integers(1, 12))
    tensors = {
        f"t{i}": draw(_tensors(draw(st.sampled_from([None, *meshes])))) for i in range(count)
    }
    return tensors, world_size


@st.composite
def _meshes(draw: st.DrawFn, world_size: int) -> MeshSpec:
    """A mesh over some ranks of the world, in some order."""
    size = draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    ranks = draw(st.permutations(range(world_size)))[:size]
    return MeshSpec(("a", "b"), (first, size // first), tuple(ranks))


@st.composite
def _tensors(draw: st.DrawFn, at: MeshSpec | None) -> PlacedTensor:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 33, 300]), max_size=3)))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int64", "bool"]))
    if at is None:
        return placed(shape, dtype=dtype)
    dims = range(len(shape))
    options = [R, *(shard(d) for d in dims), *(shard(d, 2) for d in dims)]
    placements = tuple(draw(st.sampled_from(options)) for _ in at.sizes)
    group = math.prod(at.sizes[i] for i in replicate_dims(at.sizes, placements))
    replica_count = draw(st.sampled_from([n for n in range(1, group + 1) if group % n == 0]))
    slots = draw(st.one_of(st.none(), _slots(shape, replica_count)))
    own_shape = draw(st.sampled_from([shape, ()]))
    return placed(shape, at, placements, dtype, slots, replica_count, own_shape)


@st.composite
def _slots(draw: st.DrawFn, shape: tuple[int, ...], replica_count: int) -> tuple[OwnedSlot, ...]:
    owner = st.integers(0, replica_count - 1)
    if not shape or shape[0] < 2:
        return (OwnedSlot("p", draw(owner), 1.0),)
    cuts = sorted(draw(st.sets(st.integers(1, shape[0] - 1), max_size=3)))
    edges = zip([0, *cuts], [*cuts, shape[0]], strict=True)
    return tuple(OwnedSlot("p", draw(owner), 1.0, rows) for rows in edges)


@PROPERTY
@given(placed_tables())
def test_every_element_is_written_once_by_a_holder(
    case: tuple[dict[str, PlacedTensor], int],
) -> None:
    table, world_size = case
    plan = plan_writes(table, world_size)
    assert_exact(plan, table, world_size)
    assert plan == plan_writes(dict(table), world_size)
    for chunks in plan.ranks:
        order = [(list(table).index(c.key), c.box.offsets) for c in chunks]
        assert order == sorted(order)


@PROPERTY
@given(placed_tables(), st.data())
def test_digests_tell_tables_apart(
    case: tuple[dict[str, PlacedTensor], int], data: st.DataObject
) -> None:
    table, world_size = case
    assert table_digest(table, world_size) == table_digest(dict(table), world_size)
    assert table_digest(table, world_size) != table_digest(table, world_size + 1)
    other = data.draw(placed_tables())[0]
    same = list(other.items()) == list(table.items())
    if not same and not _differ_in_slot_names_only(table, other):
        assert table_digest(table, world_size) != table_digest(other, world_size)


def _differ_in_slot_names_only(
    one: Mapping[str, PlacedTensor], other: Mapping[str, PlacedTensor]
) -> bool:
    """Costs and names of slots do not decide who writes."""

    def essence(table: Mapping[str, PlacedTensor]) -> list[object]:
        return [
            (
                key,
                tensor.dtype,
                tensor.shape,
                at.shape,
                at.mesh,
                at.placements,
                at.replica_count,
                None if at.slots is None else [(slot.owner, slot.rows) for slot in at.slots],
            )
            for key, tensor in table.items()
            for at in [tensor.placement]
        ]

    return essence(one) == essence(other)


def test_a_hundred_thousand_tensors() -> None:
    """Nothing in planning grows with the square of the number of tensors."""
    at = mesh(replicate=2, shard=2)
    table = {
        f"t{i}": placed(
            (8 + i % 5000, 64),
            at,
            (R, shard(0)),
            slots=(OwnedSlot(f"t{i}", i % 2, 1.0),) if i % 2 else None,
            replica_count=2,
        )
        for i in range(100_000)
    }
    plan = plan_writes(table, 4)
    assert plan.imbalance < 1.01
    assert sum(map(len, plan.ranks)) <= 200_010
