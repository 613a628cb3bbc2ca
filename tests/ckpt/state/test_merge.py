"""What ranks know together, where each knows something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt.errors import IncompatibleError
from ckpt.manifest import GroupEntry
from ckpt.planner import plan_writes
from ckpt.state.merge import Layout, Records, merge_layouts, merge_records
from ckpt.topology import PlacedTensor, StateOf
from hyperopt.ownership import MeshSpec, OwnedSlot, ParameterPlacement, Placement

S, R = Placement(0), Placement()


def placed(
    ranks: tuple[int, ...] | None, placements: tuple[Placement, ...] = (S,), slots: bool = False
) -> PlacedTensor:
    mesh = None if ranks is None else MeshSpec(("shard",), (len(ranks),), ranks)
    owners = (OwnedSlot("w", 0, 1.0),) if slots else None
    where = ParameterPlacement((8, 2), mesh, placements if mesh else (), owners, 1)
    return PlacedTensor("float32", (8, 2), where)


def layout(**tensors: PlacedTensor) -> Layout:
    return Layout(tensors, {key: StateOf("opt", key, "m") for key in tensors if key == "m"})


def records(**changes: object) -> Records:
    return replace(Records((), (), (), {}), **changes)  # type: ignore[arg-type]


def test_pipeline_stages_are_joined() -> None:
    first, last = layout(a=placed((0, 1))), layout(b=placed((2, 3)), m=placed((2, 3)))
    merged = merge_layouts([first, first, last, last])
    assert merged.placed == {**first.placed, **last.placed}
    assert merged.states == {"m": StateOf("opt", "m", "m")}


def test_a_plain_tensor_of_some_ranks_is_written_by_one_of_them() -> None:
    merged = merge_layouts([layout(), layout(a=placed(None)), layout(a=placed(None)), layout()])
    mesh = merged.placed["a"].placement.mesh
    assert mesh is not None
    assert mesh.ranks == (1, 2)
    plan = plan_writes(merged.placed, 4)
    assert [len(chunks) for chunks in plan.ranks] in ([0, 1, 0, 0], [0, 0, 1, 0])


def test_equal_sub_meshes_become_one_mesh() -> None:
    one, other = layout(a=placed((0, 1))), layout(a=placed((2, 3)))
    merged = merge_layouts([one, one, other, other]).placed["a"].placement
    assert merged.mesh == MeshSpec(("copy", "shard"), (2, 2), (0, 1, 2, 3))
    assert merged.placements == (R, S)
    assert sum(map(len, plan_writes(merge_layouts([one, one, other, other]).placed, 4).ranks)) == 2


def test_a_tensor_that_ranks_of_its_mesh_lack_is_an_error() -> None:
    with pytest.raises(IncompatibleError, match="a: exists on ranks 0 but not on 1 of the same"):
        merge_layouts([layout(a=placed((0, 1))), layout()])


def test_contradictions_are_named() -> None:
    with pytest.raises(IncompatibleError, match="a: ranks disagree about this tensor: ranks 0"):
        merge_layouts([layout(a=placed((0,))), layout(a=placed((1,), (R,)))])
    with pytest.raises(IncompatibleError, match="disagree"):
        merge_layouts([layout(a=placed(None)), layout(a=replace(placed(None), dtype="int8"))])


def test_groups_of_stages_are_joined_and_steps_compared() -> None:
    group = GroupEntry("opt", "0", ("a",), {"lr": 1.0}, 3)
    other = GroupEntry("opt", "0", ("b",), {"lr": 1.0}, 3)
    merged = merge_records([records(groups=(group,)), records(groups=(group, other))])
    assert merged.groups == (group, other)
    late = GroupEntry("opt", "0", ("a",), {"lr": 1.0}, 4)
    with pytest.raises(
        IncompatibleError, match=r"group '0' differs.*rank 0 has step 3.*rank 1 has"
    ):
        merge_records([records(groups=(group,)), records(groups=(late,))])


def test_values_are_joined_by_name() -> None:
    one, other = records(values={"model": {"a": 1}}), records(values={"model": {"b": 2}})
    assert merge_records([one, other]).values == {"model": {"a": 1, "b": 2}}
    with pytest.raises(IncompatibleError, match=r"model\.a: rank 1 has the value 2, others 1"):
        merge_records([one, records(values={"model": {"a": 2}})])


def test_digests_tell_records_apart() -> None:
    assert records(absent=("a",)).digest() == records(absent=("a",)).digest()
    assert records(absent=("a",)).digest() != records(absent=("b",)).digest()
