"""Meshes as text, the manifest's tensors as placements and back, and the rules of `retarget`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptError, IncompatibleError, UsageError
from ckpt.manifest import Manifest, Mesh, OwnershipEntry, SlotEntry, TensorEntry, Topology
from ckpt.topology import (
    PlacedTensor,
    describe_mesh,
    describe_topology,
    entries_from,
    make_mesh,
    ownership_entry,
    parse_mesh,
    placed_tensors,
    retarget,
    states_of,
)
from hyperopt.ownership import (
    Box,
    MeshSpec,
    OwnedSlot,
    Ownership,
    ParameterPlacement,
    Placement,
    assign_owners,
    held_boxes,
)


def make_manifest(
    tensors: dict[str, TensorEntry],
    *meshes: Mesh,
    world_size: int = 4,
    ownership: tuple[OwnershipEntry, ...] = (),
) -> Manifest:
    return Manifest(
        created="2026-01-01T00:00:00Z",
        producer={},
        topology=Topology(world_size, meshes),
        tensors=tensors,
        files=(),
        indexes=(),
        ownership=ownership,
    )


def state(shape: tuple[int, ...], parameter: str, key: str, **kwargs: Any) -> TensorEntry:
    return TensorEntry(
        "float32", shape, optimizer="optimizer", parameter=parameter, state_key=key, **kwargs
    )


HSDP = Mesh(("replicate", "shard"), (2, 2))
OWNERS = OwnershipEntry(
    "optimizer",
    "",
    2,
    (
        SlotEntry("a", 0, 40.0),
        SlotEntry("b", 1, 20.0, (0, 3)),
        SlotEntry("b", 0, 20.0, (3, 8)),
        SlotEntry("frozen", 1, 5.0),
    ),
)
WHOLE = OwnershipEntry(
    "optimizer",
    "",
    2,
    (SlotEntry("a", 0, 40.0), SlotEntry("b", 1, 40.0), SlotEntry("frozen", 1, 5.0)),
)


def hsdp_manifest() -> Manifest:
    at: dict[str, Any] = {"mesh": 0, "placements": ("R", "S(0)")}
    tensors = {
        "model.a": TensorEntry("bfloat16", (6, 4), **at),
        "model.b": TensorEntry("float32", (8,), **at),
        "model.scale": TensorEntry("float32", (), mesh=0, placements=("R", "R")),
        "model.steps": TensorEntry("int64", ()),
        "optimizer.state.a.momentum_buffer": state((6, 4), "a", "momentum_buffer", **at),
        "optimizer.state.b.exp_avg": state((8,), "b", "exp_avg", **at),
        "optimizer.state.b.step": state((), "b", "step", parameter_shape=(8,), **at),
    }
    return make_manifest(tensors, HSDP, ownership=(OWNERS,))


# ------------------------------------------------------------------------------------------- mesh


@pytest.mark.parametrize(
    ("text", "names", "sizes"),
    [
        ("replicate=2,shard=4", ("replicate", "shard"), (2, 4)),
        ("2x4", ("replicate", "shard"), (2, 4)),
        (" dp_shard = 8 ", ("dp_shard",), (8,)),
        ("pp=1,dp=2,tp=3", ("pp", "dp", "tp"), (1, 2, 3)),
    ],
)
def test_mesh_texts_are_read(text: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    assert parse_mesh(text) == make_mesh(names, sizes)
    assert parse_mesh(text).ranks == tuple(range(len(make_mesh(names, sizes).ranks)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not 'name=size'"),
        ("shard", "'shard' is not 'name=size'"),
        ("shard=two", "not 'name=size'"),
        ("shard=2,", "not 'name=size'"),
        ("2x3x4", "not 'name=size'"),
        ("replicate=2,shard=0", "size of 'shard' is 0"),
        ("shard=-2", "size of 'shard' is -2"),
        ("0x4", "size of 'replicate' is 0"),
        ("shard=2,shard=2", "'shard' is given twice"),
    ],
)
def test_bad_mesh_texts_are_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_mesh(text)


def test_meshes_are_described_for_people() -> None:
    assert describe_mesh(parse_mesh("2x4")) == "replicate 2 × shard 4"
    assert describe_topology(Topology(4, (HSDP, HSDP))) == "replicate 2 × shard 2"
    assert describe_topology(Topology(1, ())) == "1 rank, no mesh"
    assert describe_topology(Topology(3, ())) == "3 ranks, no mesh"


# ---------------------------------------------------------------------------- manifest <-> placed


def test_state_gets_its_parameters_owners_and_others_get_none() -> None:
    placed = placed_tensors(hsdp_manifest())
    b = placed["optimizer.state.b.exp_avg"].placement
    assert b.slots == (OwnedSlot("b", 1, 20.0, (0, 3)), OwnedSlot("b", 0, 20.0, (3, 8)))
    assert b.replica_count == 2
    assert placed["model.b"].placement.slots is None
    assert placed["model.steps"].placement.mesh is None


def test_a_step_is_held_by_every_owner_of_a_part_of_the_parameter() -> None:
    step = placed_tensors(hsdp_manifest())["optimizer.state.b.step"]
    assert step.placement.shape == (8,)
    held = [held_boxes(step.placement, step.shape, rank, 4) for rank in range(4)]
    assert held == [(Box((), ()),)] * 4
    whole = placed_tensors(make_manifest(dict(hsdp_manifest().tensors), HSDP, ownership=(WHOLE,)))
    step = whole["optimizer.state.b.step"]
    held = [held_boxes(step.placement, step.shape, rank, 4) for rank in range(4)]
    assert held == [(), (), (Box((), ()),), (Box((), ()),)]


def test_state_without_an_owner_map_is_on_every_replica() -> None:
    manifest = hsdp_manifest()
    plain = make_manifest(dict(manifest.tensors), HSDP)
    placement = placed_tensors(plain)["optimizer.state.a.momentum_buffer"].placement
    assert placement.slots is None
    assert placement.replica_count == 1


def test_translation_to_entries_inverts_reading() -> None:
    manifest = hsdp_manifest()
    topology, entries = entries_from(placed_tensors(manifest), states_of(manifest), 4)
    assert topology == manifest.topology
    assert entries == manifest.tensors
    assert list(entries) == list(manifest.tensors)


def test_equal_meshes_are_recorded_once_and_odd_ranks_kept() -> None:
    odd = MeshSpec(("shard",), (2,), (1, 3))
    meshes = [parse_mesh("2x2"), odd, parse_mesh("2x2")]
    placed = {
        f"model.{i}": PlacedTensor(
            "float32",
            (4,),
            ParameterPlacement((4,), mesh, (Placement(),) * len(mesh.sizes), None, 1),
        )
        for i, mesh in enumerate(meshes)
    }
    topology, entries = entries_from(placed, {}, 4)
    assert topology.meshes == (HSDP, Mesh(("shard",), (2,), (1, 3)))
    assert [entry.mesh for entry in entries.values()] == [0, 1, 0]
    assert placed_tensors(make_manifest(entries, *topology.meshes)) == placed


def test_an_owner_map_is_recorded_as_it_is() -> None:
    slots = tuple(OwnedSlot(s.fqn, s.owner, s.cost, s.rows) for s in OWNERS.slots)
    assert ownership_entry("optimizer", Ownership("", 2, slots)) == OWNERS


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (TensorEntry("float32", (4,), 1, ("R", "R")), "names mesh 1 of 1"),
        (TensorEntry("float32", (4,), 0, ("R", "S0")), "not a placement: 'S0'"),
        (TensorEntry("float32", (4,), 0, ("R",)), r"cannot have placements \(R\)"),
        (TensorEntry("float32", (4,), 0, ("R", "S(1)")), "of 1 dims cannot have"),
        (TensorEntry("float32", (), 0, ("R", "S(0)")), "of 0 dims cannot have"),
    ],
)
def test_records_that_do_not_fit_are_corrupt(entry: TensorEntry, told: str) -> None:
    with pytest.raises(CorruptError, match=told) as caught:
        placed_tensors(make_manifest({"model.w": entry}, HSDP))
    assert "'model.w'" in str(caught.value)


def test_a_mesh_whose_ranks_do_not_fit_is_corrupt() -> None:
    with pytest.raises(CorruptError, match="cannot hold 3 ranks"):
        placed_tensors(make_manifest({}, Mesh(("shard",), (2,), (0, 1, 2))))


# --------------------------------------------------------------------------------------- retarget


def placements(manifest: Manifest, mesh: str, key: str) -> str:
    placement = retarget(manifest, parse_mesh(mesh)).placed[key].placement
    return " ".join(map(str, placement.placements)) if placement.mesh else "plain"


def test_dims_of_the_same_name_keep_their_placement_on_another_size() -> None:
    target = retarget(hsdp_manifest(), parse_mesh("replicate=4,shard=3"))
    assert target.world_size == 12
    at = target.placed["model.a"].placement
    assert at.mesh == parse_mesh("4x3")
    assert [str(p) for p in at.placements] == ["R", "S(0)"]


def test_tensors_without_dims_or_mesh_stay_whole_beside_sharded_ones() -> None:
    manifest = hsdp_manifest()
    assert placements(manifest, "dp=4", "model.a") == "S(0)"
    assert placements(manifest, "dp=4", "model.scale") == "R"
    assert placements(manifest, "dp=4", "model.steps") == "plain"


@pytest.mark.parametrize("name", ["replicate", "dp_replicate", "ddp"])
def test_replica_names_replicate_what_one_process_saved(name: str) -> None:
    manifest = make_manifest({"w": TensorEntry("float32", (4,))}, world_size=1)
    assert placements(manifest, f"{name}=2,shard=2", "w") == "R S(0)"


def test_one_process_follows_the_rule_of_fsdp2() -> None:
    tensors = {"w": TensorEntry("float32", (4, 4)), "s": TensorEntry("int64", ())}
    manifest = make_manifest(tensors, world_size=1)
    assert placements(manifest, "fsdp=4", "w") == "S(0)"
    assert placements(manifest, "fsdp=4", "s") == "R"


def test_an_unknown_dim_is_named_with_what_is_known() -> None:
    with pytest.raises(UsageError, match=r"'tp'.*replicate, shard.*dp_replicate"):
        retarget(hsdp_manifest(), parse_mesh("replicate=2,tp=2"))
    with pytest.raises(UsageError, match=r"'tp'.*it has no mesh"):
        retarget(make_manifest({}, world_size=1), parse_mesh("tp=2"))


def test_a_dim_that_only_other_tensors_have_replicates() -> None:
    manifest = make_manifest(
        {
            "w": TensorEntry("float32", (8, 8), 0, ("S(0)", "S(1)")),
            "norm": TensorEntry("float32", (8,), 1, ("S(0)",)),
        },
        Mesh(("dp", "tp"), (2, 2)),
        Mesh(("dp",), (2,)),
    )
    assert placements(manifest, "dp=2,tp=4", "w") == "S(0) S(1)"
    assert placements(manifest, "dp=2,tp=4", "norm") == "S(0) R"


def test_the_stride_follows_the_targets_sizes() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2))
    strided = make_manifest({"w": TensorEntry("float32", (16, 4), 0, ("_S(0,2)", "S(0)"))}, mesh)
    assert placements(strided, "dp=2,tp=4", "w") == "_S(0,4) S(0)"
    assert placements(strided, "dp=4,tp=1", "w") == "S(0) S(0)"
    assert placements(strided, "dp=4", "w") == "S(0)"
    nested = make_manifest({"w": TensorEntry("float32", (16, 4), 0, ("S(0)", "S(0)"))}, mesh)
    assert placements(nested, "dp=2,tp=4", "w") == "S(0) S(0)"


def test_a_new_fsdp_dim_is_strided_over_tensor_parallelism() -> None:
    tensors = {"w": TensorEntry("float32", (16, 4), 0, ("S(0)",))}
    manifest = make_manifest(tensors, Mesh(("tp",), (2,)), world_size=2)
    assert placements(manifest, "fsdp=2,tp=2", "w") == "_S(0,2) S(0)"


# ----------------------------------------------------------------------------------------- owners


def test_owners_are_assigned_over_recorded_costs_and_order() -> None:
    manifest = make_manifest(dict(hsdp_manifest().tensors), HSDP, ownership=(WHOLE,))
    (entry,) = retarget(manifest, parse_mesh("4x2")).ownership
    assert entry.replica_count == 4
    assert [s.owner for s in entry.slots] == assign_owners([40.0, 40.0, 5.0], 4)
    assert [(s.fqn, s.rows, s.cost) for s in entry.slots] == [
        (s.fqn, s.rows, s.cost) for s in WHOLE.slots
    ]


def test_divided_parameters_are_divided_by_the_rows_of_the_targets_shards() -> None:
    target = retarget(hsdp_manifest(), parse_mesh("4x2"))
    (entry,) = target.ownership
    assert [(s.fqn, s.owner, s.rows, s.cost) for s in entry.slots] == [
        ("a", 0, None, 40.0),
        *(("b", row % 4, (row, row + 1), 5.0) for row in range(8)),
        ("frozen", 1, None, 5.0),
    ]
    b = target.placed["optimizer.state.b.exp_avg"].placement
    assert b.replica_count == 4
    assert b.slots == tuple(
        OwnedSlot(s.fqn, s.owner, s.cost, s.rows) for s in entry.slots if s.fqn == "b"
    )
    assert target.placed["model.b"].placement.slots is None


def test_a_replica_count_alone_keeps_every_box() -> None:
    source = placed_tensors(hsdp_manifest())
    target = retarget(hsdp_manifest(), replica_count=1)
    assert target.world_size == 4
    assert target.ownership[0].replica_count == 1
    for key, tensor in target.placed.items():
        assert tensor.placement.mesh == source[key].placement.mesh
        assert tensor.placement.placements == source[key].placement.placements


def test_without_mesh_and_count_nothing_changes() -> None:
    target = retarget(hsdp_manifest())
    assert target.placed == placed_tensors(hsdp_manifest())
    assert target.ownership == (OWNERS,)


@pytest.mark.parametrize("count", [0, -1, 3, 5, 8])
def test_a_count_that_does_not_divide_is_refused_with_the_possible_ones(count: int) -> None:
    with pytest.raises(IncompatibleError, match="possible counts: 1, 2, 4"):
        retarget(hsdp_manifest(), parse_mesh("4x2"), count)


def test_a_count_without_recorded_owners_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="records no owners"):
        retarget(make_manifest({"w": TensorEntry("float32", (4,))}), replica_count=2)


def test_the_replica_group_is_common_to_all_parameters() -> None:
    tensors = {
        "optimizer.state.a.m": state((8, 8), "a", "m", mesh=0, placements=("R", "S(0)")),
        "optimizer.state.b.m": state((8,), "b", "m", mesh=0, placements=("R", "R")),
    }
    manifest = make_manifest(tensors, Mesh(("dp_replicate", "tp"), (2, 3)), ownership=(OWNERS,))
    assert retarget(manifest, parse_mesh("dp_replicate=4,tp=3")).ownership[0].replica_count == 4
    with pytest.raises(IncompatibleError, match="possible counts: 1, 2, 4"):
        retarget(manifest, parse_mesh("dp_replicate=4,tp=3"), 12)


def test_data_parallel_replicas_are_the_whole_world() -> None:
    tensors = {"optimizer.state.a.m": state((8, 8), "a", "m")}
    manifest = make_manifest(tensors, world_size=4, ownership=(OWNERS,))
    assert retarget(manifest, replica_count=4).ownership[0].replica_count == 4
    with pytest.raises(IncompatibleError, match="possible counts: 1, 2, 4"):
        retarget(manifest, replica_count=3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    cut=st.integers(1, 8),
    count=st.integers(1, 3),
)
def test_owned_state_is_held_once_per_sub_group(
    shape: tuple[int, ...], sizes: tuple[int, int], cut: int, count: int
) -> None:
    """Over all ranks, every element of owned state is held by each sub-group's owner alone."""
    cut = min(cut, shape[0])
    slots = tuple(
        SlotEntry("p", 0, float(stop - start), (start, stop))
        for start, stop in [(0, cut), (cut, shape[0])]
    )
    ownership = (OwnershipEntry("optimizer", "", 1, slots),)
    manifest = make_manifest(
        {"optimizer.state.p.m": state(shape, "p", "m")}, world_size=1, ownership=ownership
    )
    mesh = make_mesh(("replicate", "shard"), sizes)
    if sizes[0] % count:
        with pytest.raises(IncompatibleError):
            retarget(manifest, mesh, count)
        return
    target = retarget(manifest, mesh, count)
    tensor = target.placed["optimizer.state.p.m"]
    held: dict[tuple[int, ...], int] = {}
    for rank in range(target.world_size):
        for box in held_boxes(tensor.placement, tensor.shape, rank, target.world_size):
            ranges = [range(at, at + n) for at, n in zip(box.offsets, box.sizes, strict=True)]
            for element in itertools.product(*ranges):
                held[element] = held.get(element, 0) + 1
    assert set(held) == set(itertools.product(*(range(n) for n in shape)))
    assert set(held.values()) == {sizes[0] // count}


@pytest.mark.parametrize("text", ["1000000x1", "99999999999999999999x2", "shard=65537"])
def test_absurd_meshes_are_refused_at_once(text: str) -> None:
    with pytest.raises(UsageError, match=r"ranks, at most 65,536"):
        parse_mesh(text)
