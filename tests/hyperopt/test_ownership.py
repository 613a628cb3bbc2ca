"""The vocabulary of ownership against slow oracles, and its sharding arithmetic against torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from hyperopt.ownership import (
    Box,
    MeshSpec,
    OwnedSlot,
    Ownership,
    ParameterPlacement,
    Placement,
    assign_owners,
    held_boxes,
    imbalance,
    loads,
    local_boxes,
    newton_schulz_cost,
    ravel,
    replica_index,
    replicate_dims,
    shard_index,
    unravel,
)
from tests.distributed import run_ranks
from tests.reference.sharding import assemble, best_makespan, local_shard, numbered, take

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
WHOLE_COSTS = st.lists(st.integers(0, 40).map(float), max_size=7)


@st.composite
def layouts(
    draw: st.DrawFn, strided: bool = True
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """A shape, mesh sizes, and one placement per mesh dim."""
    shape, mesh = draw(SHAPES), draw(MESHES)
    factors = st.integers(1, 3 if strided else 1)
    sharded = st.builds(Placement, st.integers(0, max(len(shape) - 1, 0)), factors)
    placement = st.just(Placement()) | sharded if shape else st.just(Placement())
    return shape, mesh, tuple(draw(placement) for _ in mesh)


def boxes_within(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    """Boxes inside a shape, empty ones included."""
    ends = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in shape]
    return st.tuples(*ends).map(
        lambda spans: Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
    )


PAIRS_OF_BOXES = st.lists(st.integers(1, 5), max_size=3).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)), boxes_within(tuple(shape)), boxes_within(tuple(shape))
    )
)


# --------------------------------------------------------------------------------- boxes and meshes


@given(PAIRS_OF_BOXES)
def test_intersection_is_the_set_of_common_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, first, second = case
    tensor = numbered(shape)
    common = set(take(tensor, first).flatten().tolist()) & set(
        take(tensor, second).flatten().tolist()
    )
    found = first.intersection(second)
    assert found == second.intersection(first)
    assert (found is None) == (common == set())
    assert common == (set() if found is None else set(take(tensor, found).flatten().tolist()))


def test_boxes_of_different_rank_do_not_intersect_silently() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (1,)).intersection(Box((0, 0), (1, 1)))


def test_the_whole_box_of_a_scalar_has_one_element() -> None:
    assert Box.whole(()).elements == 1
    assert Box.whole((3, 0)).elements == 0
    assert Box.whole((3, 4)) == Box((0, 0), (3, 4))


@given(MESHES)
def test_coordinates_follow_the_order_of_ranks(sizes: tuple[int, ...]) -> None:
    ranks = tuple(reversed(range(10, 10 + math.prod(sizes))))
    mesh = MeshSpec(tuple("abc"[: len(sizes)]), sizes, ranks)
    grid = torch.tensor(ranks).reshape(sizes)
    assert [mesh.coordinate(rank) for rank in ranks] == mesh.coordinates()
    assert all(int(grid[at]) == rank for at, rank in zip(mesh.coordinates(), ranks, strict=True))
    assert mesh.coordinate(9) is None


@given(MESHES)
def test_unravel_inverts_ravel(sizes: tuple[int, ...]) -> None:
    found = [unravel(index, sizes) for index in range(math.prod(sizes))]
    assert found == list(itertools.product(*map(range, sizes)))
    assert [ravel(at, sizes) for at in found] == list(range(len(found)))


@pytest.mark.parametrize(
    ("names", "sizes", "ranks", "message"),
    [
        (("a",), (2, 2), (0, 1, 2, 3), "1 dim names but 2 sizes"),
        (("a", "b"), (2, 2), (0, 1, 2), "cannot hold 3 ranks"),
        (("a",), (2,), (1, 1), "a rank twice"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    names: tuple[str, ...], sizes: tuple[int, ...], ranks: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MeshSpec(names, sizes, ranks)


# -------------------------------------------------------------------------------------- placements


@given(st.just(Placement()) | st.builds(Placement, st.integers(0, 20), st.integers(1, 20)))
def test_placement_text_round_trip(placement: Placement) -> None:
    assert Placement.parse(str(placement)) == placement


def test_placement_texts() -> None:
    texts = ["R", "S(0)", "S(12)", "_S(0,2)", "_S(3,16)"]
    assert [str(Placement.parse(text)) for text in texts] == texts


@pytest.mark.parametrize(
    "text",
    ["", "r", "P", "S", "S()", "S(-1)", "S(0) ", " R", "R\n", "S(0,2)", "_S(0)", "_S(0,0)", "S(٣)"],
)
def test_other_texts_are_no_placements(text: str) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        Placement.parse(text)


@pytest.mark.parametrize(("dim", "factor"), [(-1, 1), (0, 0), (1, -2), (None, 2)])
def test_impossible_placements_are_refused(dim: int | None, factor: int) -> None:
    with pytest.raises(ValueError, match="not a placement"):
        Placement(dim, factor)


# ------------------------------------------------------------------------------------------ shards


@given(layouts())
def test_local_boxes_are_what_chunking_gives(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    tensor = numbered(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        boxes = local_boxes(shape, mesh, placements, coordinate)
        expected = local_shard(tensor, mesh, placements, coordinate)
        assert all(box.elements > 0 for box in boxes)
        assert assemble(tensor, boxes).flatten().tolist() == expected.flatten().tolist()


@given(layouts(strided=False))
def test_an_ordinary_shard_is_one_box(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    for coordinate in itertools.product(*map(range, mesh)):
        assert len(local_boxes(shape, mesh, placements, coordinate)) <= 1


@given(layouts())
def test_replica_and_shard_index_split_a_coordinate(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = layout
    pairs = set()
    boxes_of: dict[int, tuple[Box, ...]] = {}
    for coordinate in itertools.product(*map(range, mesh)):
        shard = shard_index(mesh, placements, coordinate)
        pairs.add((replica_index(mesh, placements, coordinate), shard))
        boxes = local_boxes(shape, mesh, placements, coordinate)
        assert boxes_of.setdefault(shard, boxes) == boxes
    replicas = {replica for replica, _ in pairs}
    assert pairs == set(itertools.product(range(len(replicas)), range(len(boxes_of))))
    assert len(pairs) == math.prod(mesh)


def test_replicate_dims_leave_out_dims_of_size_one() -> None:
    placements = (Placement(), Placement(0), Placement(), Placement(1, 2))
    assert replicate_dims((1, 2, 3, 4), placements) == (2,)


TORCH_SHAPES = [(8, 4), (7, 5), (5,), (3, 2), (1, 6), (2, 9, 3), (0, 3), (16,)]
TORCH_LAYOUTS: list[tuple[tuple[int, ...], tuple[TorchPlacement, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Replicate(),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(0), Replicate())),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (Replicate(), _StridedShard(0, split_factor=3))),
    ((1, 4), (Shard(0), Shard(0))),
]
TORCH_LAYOUTS_2D: list[tuple[tuple[int, ...], tuple[TorchPlacement, ...]]] = [
    ((4,), (Shard(1),)),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (_StridedShard(1, split_factor=2), Shard(0))),
]


def _from_torch(placement: TorchPlacement) -> Placement:
    if isinstance(placement, _StridedShard):
        return Placement(placement.dim, int(placement.split_factor))
    return Placement(placement.dim) if isinstance(placement, Shard) else Placement()


def _differences(tensor: torch.Tensor, distributed: DTensor) -> list[str]:
    """Where our boxes of a DTensor are not what this rank really holds."""
    mesh = distributed.device_mesh
    placements = [_from_torch(placement) for placement in distributed.placements]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    boxes = local_boxes(tensor.shape, mesh.shape, placements, coordinate)
    ours, theirs = assemble(tensor, boxes).flatten(), distributed.to_local().flatten()
    if ours.tolist() == theirs.tolist():
        return []
    return [f"{tuple(tensor.shape)} {distributed.placements} at {coordinate}: {ours} {theirs}"]


def _compare_with_distribute_tensor() -> tuple[int, list[str]]:
    """How many DTensors were compared, and the differences."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {
        sizes: init_device_mesh("cpu", sizes) for sizes in ((4,), (2, 2), (1, 4))
    }
    cases = [
        (shape, *layout)
        for shape in TORCH_SHAPES
        for layout in TORCH_LAYOUTS + (TORCH_LAYOUTS_2D if len(shape) > 1 else [])
    ]
    differences: list[str] = []
    for shape, sizes, placements in cases:
        tensor = numbered(shape)
        distributed = distribute_tensor(tensor, meshes[sizes], placements, src_data_rank=None)
        differences += _differences(tensor, distributed)
    return len(cases), differences


def test_local_boxes_are_what_dtensor_holds() -> None:
    expected = len(TORCH_SHAPES) * len(TORCH_LAYOUTS) + 6 * len(TORCH_LAYOUTS_2D)
    assert run_ranks(_compare_with_distribute_tensor, 4) == [(expected, [])] * 4


def _compare_with_fully_shard() -> tuple[list[str], list[str]]:
    """FSDP2 over tensor parallelism: the placements, and the differences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    layer = torch.nn.Linear(4, 12, bias=False)
    values = numbered((12, 4)).float()
    with torch.no_grad():
        layer.weight.copy_(values)
    parallelize_module(layer, mesh["tensor"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["data"])
    weight = layer.weight
    assert isinstance(weight, DTensor)
    placements = [str(_from_torch(placement)) for placement in weight.placements]
    return placements, _differences(values, weight)


def test_local_boxes_are_what_fsdp_over_tensor_parallelism_holds() -> None:
    assert run_ranks(_compare_with_fully_shard, 4) == [(["_S(0,2)", "S(0)"], [])] * 4


# ------------------------------------------------------------------------------------------ owners


@given(WHOLE_COSTS, st.integers(1, 4))
def test_owners_are_within_four_thirds_of_the_optimum(costs: list[float], count: int) -> None:
    largest = max(loads(costs, assign_owners(costs, count), count))
    assert largest <= (4 / 3 - 1 / (3 * count)) * best_makespan(costs, count) + 1e-9


@given(WHOLE_COSTS, st.lists(st.integers(0, 60).map(float), min_size=1, max_size=4))
def test_owners_take_initial_loads_into_account(costs: list[float], initial: list[float]) -> None:
    """The bound of list scheduling: the last job on the fullest owner found it below the mean."""
    count = len(initial)
    owners = assign_owners(costs, count, initial)
    total = [a + b for a, b in zip(initial, loads(costs, owners, count), strict=True)]
    last = (1 - 1 / count) * max(costs, default=0.0)
    assert max(total) <= max(max(initial), sum(total) / count + last) + 1e-9


@given(WHOLE_COSTS, st.integers(1, 4))
def test_owners_depend_on_nothing_but_the_costs(costs: list[float], count: int) -> None:
    owners = assign_owners(costs, count)
    assert owners == assign_owners(tuple(costs), count, [0.0] * count)
    assert all(0 <= owner < count for owner in owners)
    assert len(owners) == len(costs)


def test_ties_go_to_the_lower_owner_in_the_given_order() -> None:
    assert assign_owners([1.0, 1.0, 1.0, 1.0], 3) == [0, 1, 2, 0]
    assert assign_owners([1.0, 2.0, 2.0], 2) == [0, 0, 1]
    assert assign_owners([1.0, 1.0], 2, [5.0, 0.0]) == [1, 1]


@pytest.mark.parametrize(
    ("count", "initial", "message"),
    [(0, None, "0 owners"), (2, [], "0 initial loads"), (2, [1.0] * 3, "3 initial loads")],
)
def test_owners_that_do_not_fit_are_refused(
    count: int, initial: list[float] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assign_owners([1.0], count, initial)


def test_imbalance_is_largest_over_mean() -> None:
    slots = tuple(OwnedSlot(f"p{i}", owner, 3.0) for i, owner in enumerate([0, 0, 1]))
    ownership = Ownership("muon", 2, slots)
    assert ownership.loads() == (6.0, 3.0)
    assert ownership.imbalance == pytest.approx(6 / 4.5)
    assert imbalance([]) == imbalance([0.0, 0.0]) == 1.0


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (5, 3), (4, 4)])
def test_newton_schulz_cost_counts_the_flops_of_the_products(rows: int, columns: int) -> None:
    n, m = min(rows, columns), max(rows, columns)
    gram, square, last = 2 * n * m * n, 2 * n * n * n, 2 * n * n * m
    assert newton_schulz_cost(7, rows, columns, 5) == 7 * 5 * (gram + square + last)


# ------------------------------------------------------------------------------------------- held


@st.composite
def owned_placements(draw: st.DrawFn) -> tuple[ParameterPlacement, int]:
    """A parameter on a mesh (or on none), its rows divided among owners, and the world size."""
    rows = draw(st.integers(1, 9))
    shape = (rows, *draw(st.lists(st.integers(1, 4), max_size=2)))
    if draw(st.booleans()):
        sizes, world = draw(MESHES), 1
        sharded = st.builds(Placement, st.integers(0, len(shape) - 1), st.integers(1, 2))
        placements = tuple(draw(st.just(Placement()) | sharded) for _ in sizes)
        # The mesh is in the middle of the world, so that some ranks are not part of it.
        ranks = tuple(range(1, 1 + math.prod(sizes)))
        mesh, world = MeshSpec(tuple("abc"[: len(sizes)]), sizes, ranks), len(ranks) + 2
    else:
        mesh, placements, world = None, (), draw(st.integers(1, 4))
    replicas = _replicas(mesh, placements, world)
    count = draw(st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0]))
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    edges = list(itertools.pairwise([0, *cuts, rows]))
    owner = st.integers(0, count - 1)
    slots = tuple(OwnedSlot("p", draw(owner), 1.0, span if cuts else None) for span in edges)
    chosen = draw(st.sampled_from([slots, tuple(reversed(slots)), None]))
    return ParameterPlacement(shape, mesh, placements, chosen, count), world


def _replicas(mesh: MeshSpec | None, placements: Sequence[Placement], world: int) -> int:
    if mesh is None:
        return world
    pairs = zip(mesh.sizes, placements, strict=True)
    return math.prod(size for size, placement in pairs if placement.dim is None)


def _copies(placement: ParameterPlacement, world: int) -> int:
    """How many ranks should hold each element of the state."""
    replicas = _replicas(placement.mesh, placement.placements, world)
    return replicas if placement.slots is None else replicas // placement.replica_count


@given(owned_placements())
def test_ranks_together_hold_every_element_as_often_as_there_are_copies(
    case: tuple[ParameterPlacement, int],
) -> None:
    placement, world = case
    tensor = numbered(placement.shape)
    held: Counter[int] = Counter()
    for rank in range(world):
        boxes = held_boxes(placement, placement.shape, rank, world)
        mine = [int(x) for box in boxes for x in take(tensor, box).flatten()]
        assert len(set(mine)) == len(mine)
        held.update(mine)
    assert held == dict.fromkeys(range(tensor.numel()), _copies(placement, world))


@given(owned_placements())
def test_each_row_lies_with_the_owner_of_its_slot(case: tuple[ParameterPlacement, int]) -> None:
    placement, world = case
    for rank in range(world):
        replica = _replica_of(placement, rank, world)
        for box in held_boxes(placement, placement.shape, rank, world):
            for row in range(box.offsets[0], box.offsets[0] + box.sizes[0]):
                assert placement.slots is None or _owner_of_row(placement.slots, row) == replica


@given(owned_placements())
def test_a_scalar_lies_whole_with_every_owner_of_a_part(
    case: tuple[ParameterPlacement, int],
) -> None:
    placement, world = case
    for rank in range(world):
        replica = _replica_of(placement, rank, world)
        owners = None if placement.slots is None else {slot.owner for slot in placement.slots}
        holds = replica is not None and (owners is None or replica in owners)
        assert held_boxes(placement, (), rank, world) == ((Box.whole(()),) if holds else ())


def _replica_of(placement: ParameterPlacement, rank: int, world: int) -> int | None:
    """The replica of a rank modulo the replica count, or None outside the mesh."""
    if placement.mesh is None:
        return rank % placement.replica_count
    grid = torch.tensor(placement.mesh.ranks).reshape(placement.mesh.sizes)
    where = (grid == rank).nonzero().tolist()
    if not where:
        return None
    index = 0
    for size, at, on in zip(placement.mesh.sizes, where[0], placement.placements, strict=True):
        index = index * size + at if on.dim is None else index
    return index % placement.replica_count


def _owner_of_row(slots: Sequence[OwnedSlot], row: int) -> int:
    (owner,) = [s.owner for s in slots if s.rows is None or s.rows[0] <= row < s.rows[1]]
    return owner


def test_a_scalar_parameter_is_held_by_its_owner() -> None:
    placement = ParameterPlacement((), None, (), (OwnedSlot("p", 1, 1.0),), 2)
    held = [held_boxes(placement, (), rank, 2) for rank in range(2)]
    assert held == [(), (Box.whole(()),)]
