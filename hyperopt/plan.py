"""The plan of a step: who owns what, who computes what, and what travels together. Pure data.

Made once (`hyperopt.planning`) from shapes, placements, mesh sizes and hosts, identical on every
rank of a mesh, and compared by digest. Nothing here touches a process group or a tensor's values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from hyperopt.layout import Layout
from hyperopt.ownership import Matrices, OwnedSlot, Ownership
from hyperopt.sharing import (
    EVERY_OWNER,
    divided_slots,
    part_rows,
)

Gather = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Limits of a plan.

    `unit_bytes`: wire bytes of one unit per replica; a larger slot is a unit of its own.
    `units`: of matrices, units at least, where each then has 16 MiB (`hyperopt.planning`): with a
    single one nothing overlaps.
    `gather`: how matrices travel to their compute rank: `all_to_all`, which sends nothing twice, or
    `all_gather`, for clusters on which all-to-all exhausts connections.
    `divide_bytes`: an element-wise parameter of at least this size may be divided by rows over the
    replicas that share its state, where whole ones cannot be balanced (one large embedding).
    `check_replicas_every`: after every n-th step compare the replicas' parameters bit for bit, and
    give those that differ the first replica's values, with a warning; 0 never.
    `compile`: run Muon's local mathematics through `torch.compile` (`hyperopt.compiled`), which
    takes some seconds a kernel at first. AdamW has torch's fused kernel and is not compiled.
    """

    unit_bytes: int = 512 * 2**20
    gather: Gather = "all_to_all"
    check_replicas_every: int = 0
    divide_bytes: int = 2**20
    units: int = 4
    compile: bool = False

    def __post_init__(self) -> None:
        every = self.check_replicas_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"PlanConfig.check_replicas_every must be 0 or more, got {every!r}")
        if self.gather not in ("all_to_all", "all_gather"):
            raise ValueError(
                f"PlanConfig.gather must be all_to_all or all_gather, got {self.gather!r}"
            )
        if not isinstance(self.compile, bool):
            raise ValueError(f"PlanConfig.compile must be True or False, got {self.compile!r}")
        for option in ("unit_bytes", "divide_bytes", "units"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"PlanConfig.{option} must be a positive integer, got {value!r}")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """What planning knows of one parameter. `layout` and `group` are indices; `cost` is in flops
    (matrix rules) or bytes (element-wise rules); `wire` names the dtype of payloads, `dtype` the
    parameter's; `matrices` is what a matrix rule sees in it, for people."""

    fqn: str
    shape: tuple[int, ...]
    layout: int
    group: int
    cost: float
    wire: str
    wire_itemsize: int
    dtype: str
    matrices: Matrices | None = None


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A layout and its replica sub-groups. `ranks[replica][shard]` are global ranks; consecutive
    `replica_count` replicas form a sub-group that holds one full copy of the state."""

    layout: Layout
    ranks: tuple[tuple[int, ...], ...]
    replica_count: int

    def __post_init__(self) -> None:
        for row in (*self.ranks, *zip(*self.ranks, strict=True)):
            if list(row) != sorted(row):
                raise ValueError(
                    f"ranks must ascend along every mesh dim, found {list(row)}: build the mesh "
                    "with init_device_mesh or order its ranks"
                )

    @property
    def replicas(self) -> int:
        """Number of replicas of the parameter."""
        return len(self.ranks)

    @property
    def shards(self) -> int:
        """Number of shards of one replica."""
        return len(self.ranks[0])

    def seat(self, rank: int) -> tuple[int, int] | None:
        """`(replica, shard)` of a global rank, or None if it is not part of the layout."""
        if self.layout.mesh is None:
            return 0, 0
        for replica, row in enumerate(self.ranks):
            if rank in row:
                return replica, row.index(rank)
        return None

    def shard_group(self, replica: int) -> tuple[int, ...]:
        """Global ranks of one replica, by shard."""
        return self.ranks[replica]

    def replica_group(self, replica: int, shard: int) -> tuple[int, ...]:
        """Global ranks of the replica's sub-group that hold this shard, by replica coordinate."""
        first = replica - replica % self.replica_count
        return tuple(self.ranks[first + i][shard] for i in range(self.replica_count))

    def all_ranks(self) -> tuple[int, ...]:
        """All global ranks, ascending."""
        return tuple(sorted(rank for row in self.ranks for rank in row))

    def has(self, ranks: Iterable[int]) -> bool:
        """Whether all these ranks are part of the layout; of what is on no mesh, any rank is."""
        return self.layout.mesh is None or set(ranks) <= {r for row in self.ranks for r in row}


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter, or an owner's part of a divided one, inside a unit: its owner replica, the
    shard that orthogonalizes it (None where every shard works on what it holds), and the elements
    that each shard holds of it.

    A divided parameter has one slot per owner: owner o has part o of the rows that a shard holds
    (`hyperopt.sharing.part_rows`).
    """

    parameter: int
    owner: int
    compute: int | None
    elements: tuple[int, ...]
    divided: bool = False

    def part_of(self, local: Tensor, owners: int) -> Tensor:
        """The part of a shard's local tensor that this slot covers: a view of its rows, or all."""
        if not self.divided:
            return local
        start, stop = part_rows(local.shape[0], self.owner, owners)
        return local[start:stop]


@dataclass(frozen=True, slots=True)
class Unit:
    """Slots whose communication goes together. `owned[o]` are those of owner `o`, gathered ones
    first and by compute shard: the order in which they lie in every packed buffer."""

    layout: int
    wire: str
    dtype: str
    owned: tuple[tuple[Slot, ...], ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that all ranks of a mesh must agree on before a step."""

    parameters: tuple[ParameterSpec, ...]
    layouts: tuple[LayoutPlan, ...]
    slots: tuple[Slot, ...]
    units: tuple[Unit, ...]
    gather: Gather
    compile: bool = False

    def digest(self, ranks: Sequence[int] = ()) -> bytes:
        """32 bytes that differ when any part of the plan does that these ranks share.

        That is what lies on meshes with all of them. Of other meshes, such as the data-parallel
        ones inside a mesh with tensor parallelism, each rank knows its own only.
        """
        shared = [layout.has(ranks) for layout in self.layouts]
        plan = self if all(shared) else self._part(shared)
        return hashlib.blake2b(repr(_compact(plan)).encode(), digest_size=32).digest()

    def _part(self, chosen: Sequence[bool]) -> StepPlan:
        """The plan of some of the layouts, numbered as if there were no others: of those a rank may
        have its own, such as experts with names of its own."""
        layouts = _numbers(chosen)
        kept = [p.layout in layouts for p in self.parameters]
        numbers = _numbers(kept)

        def renumbered(slot: Slot) -> Slot:
            return replace(slot, parameter=numbers[slot.parameter])

        return replace(
            self,
            parameters=tuple(
                replace(p, layout=layouts[p.layout])
                for p, ours in zip(self.parameters, kept, strict=True)
                if ours
            ),
            layouts=tuple(x for x, ours in zip(self.layouts, chosen, strict=True) if ours),
            slots=tuple(renumbered(s) for s in self.slots if s.parameter in numbers),
            units=tuple(
                replace(
                    unit,
                    layout=layouts[unit.layout],
                    owned=tuple(tuple(map(renumbered, part)) for part in unit.owned),
                )
                for unit in self.units
                if unit.layout in layouts
            ),
        )

    def owned_slots(self) -> list[tuple[OwnedSlot, ...]]:
        """Owners and costs of every parameter, in their order; with row ranges where divided."""
        out: list[list[OwnedSlot]] = [[] for _ in self.parameters]
        for slot in self.slots:
            spec = self.parameters[slot.parameter]
            if not slot.divided:
                owned = OwnedSlot(spec.fqn, slot.owner, spec.cost, matrices=spec.matrices)
                out[slot.parameter].append(owned)
            elif slot.owner == 0:
                out[slot.parameter] += self._row_ranges(spec)
        return [tuple(slots) for slots in out]

    def _row_ranges(self, spec: ParameterSpec) -> list[OwnedSlot]:
        layout = self.layouts[spec.layout]
        boxes = layout.layout.shard_boxes(spec.shape)
        return divided_slots(spec.fqn, spec.cost, spec.shape, boxes, layout.replica_count)

    def owners(self) -> list[int]:
        """The owner of every parameter, or `EVERY_OWNER` for divided ones."""
        out = [0] * len(self.parameters)
        for slot in self.slots:
            out[slot.parameter] = EVERY_OWNER if slot.divided else slot.owner
        return out

    def ownership(self) -> list[Ownership]:
        """The owner maps, for people, checkpoints and resharding: one per replica count, because
        owner numbers mean different replicas where counts differ."""
        by_count: dict[int, list[OwnedSlot]] = {}
        for spec, slots in zip(self.parameters, self.owned_slots(), strict=True):
            by_count.setdefault(self.layouts[spec.layout].replica_count, []).extend(slots)
        return [Ownership("", count, tuple(by_count[count])) for count in sorted(by_count)]

    def summary(self) -> str:
        """One line for the log."""
        shards = max((x.shards for x in self.layouts), default=1)
        shared = ", ".join(
            f"{len({slot.fqn for slot in owners.slots})} by {owners.replica_count} replicas "
            f"(imbalance {owners.imbalance:.3f})"
            for owners in self.ownership()
        )
        return (
            f"{len(self.parameters)} parameters on up to {shards} shards, in {len(self.units)} "
            f"units; state shared: {shared}"
        )


def _numbers(chosen: Sequence[bool]) -> dict[int, int]:
    """New numbers of the chosen places, by old ones."""
    places = [i for i, ours in enumerate(chosen) if ours]
    return {old: new for new, old in enumerate(places)}


def _compact(plan: StepPlan) -> tuple[object, ...]:
    """A plan with each slot, and each row of elements per shard, written once. On thousands of
    shards the rows are nearly all of it, and they repeat with every parameter of a shape."""
    rows: dict[tuple[int, ...], int] = {}
    slots: dict[tuple[Slot, int], int] = {}

    def number(slot: Slot) -> int:
        row = rows.setdefault(slot.elements, len(rows))
        return slots.setdefault((replace(slot, elements=()), row), len(slots))

    order = [number(slot) for slot in plan.slots]
    units = [
        (replace(unit, owned=()), [[number(slot) for slot in part] for part in unit.owned])
        for unit in plan.units
    ]
    return replace(plan, slots=(), units=()), list(rows), list(slots), order, units
