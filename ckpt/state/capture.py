"""From objects on all ranks to one state: what there is, who writes what, what each rank keeps.

After `capture_state`, all ranks know the same layout and the same plan; only digests have
travelled, unless ranks hold different things. No file has been touched.
"""

from __future__ import annotations

import gc
import hashlib
import io
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ckpt.app_state import open_parts
from ckpt.commit import Destination
from ckpt.coordinator import LEADER, Coordinator, everywhere, gather_distinct, together
from ckpt.errors import CheckpointError, IncompatibleError, UsageError
from ckpt.planner import PlannedChunk, WritePlan, plan_writes, table_digest
from ckpt.state.merge import Layout, Records, merge_layouts, merge_records
from ckpt.state.objects import tensor_digest
from ckpt.state.part import PER_RANK, Snapshot
from ckpt.state.rng import capture_rng
from ckpt.state.tensors import LocalTensor, Piece, TensorReader, local_part, sub_box
from ckpt.state.values import tagged
from ckpt.topology import PlacedTensor
from hyperopt.ownership import MeshSpec, ParameterPlacement, Placement

log = logging.getLogger(__name__)

PRIVATE_FORMAT = 1


def _same_table(one: dict[str, PlacedTensor], other: dict[str, PlacedTensor]) -> bool:
    """Equal, in equal order; quick where the values are the same objects."""
    return list(one) == list(other) and list(one.values()) == list(other.values())


class PlannedWrite(NamedTuple):
    """One chunk that this rank writes, and its live data."""

    chunk: PlannedChunk
    dtype: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class CapturedState:
    """A state that is ready to be written: what all ranks know, and what this rank contributes.

    `token` identifies this save on all ranks. `names` are those under which the objects were
    passed. `private` is this rank's private file: its generators and the values of objects that
    differ between ranks.
    """

    token: str
    names: tuple[str, ...]
    layout: Layout
    records: Records
    extras: dict[str, Any]
    writes: tuple[PlannedWrite, ...]
    private: bytes


@dataclass(slots=True)
class PlanCache:
    """What one save can take over from earlier ones: descriptions of tensors, and layouts and plans
    by the digests of all ranks' layouts (with what narrows them down). It keeps no tensor alive."""

    limit: int = 4
    reader: TensorReader = field(default_factory=TensorReader)
    _known: dict[tuple[bytes, ...], tuple[Layout, WritePlan]] = field(default_factory=dict)
    _last: dict[str, tuple[dict[str, PlacedTensor], bytes]] = field(default_factory=dict)

    def digest(self, part: str, placed: dict[str, PlacedTensor], world_size: int) -> bytes:
        """`table_digest`, which need not be computed again for the part's table of the last save
        ('': that of all modules and optimizers)."""
        known = self._last.get(part)
        if known is None or not _same_table(known[0], placed):
            known = self._last[part] = (placed, table_digest(placed, world_size))
        return known[1]

    def get(self, digests: tuple[bytes, ...]) -> tuple[Layout, WritePlan] | None:
        """What was made for the same layouts."""
        return self._known.get(digests)

    def put(self, digests: tuple[bytes, ...], made: tuple[Layout, WritePlan]) -> None:
        """Remember; the oldest is forgotten."""
        self._known[digests] = made
        while len(self._known) > self.limit:
            del self._known[next(iter(self._known))]


Stage = Callable[[tuple[PlannedWrite, ...]], tuple[PlannedWrite, ...]]
"""Puts something in place of live tensors: the same chunks, with copies of their data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """`require_finite`: refuse infinities and NaN. `first` is called before anything else; what it
    raises on any rank is raised on all. `destination`: where the state will go, so that rank 0 can
    see whether it is free and has room. `stage`: what happens to the planned writes."""

    require_finite: bool = False
    first: Callable[[], None] = lambda: None
    destination: Destination | None = None
    stage: Stage = lambda writes: writes


_DEFAULTS = CaptureOptions()


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """What goes on here makes many small objects and no cycles; looking for cycles in between, as
    Python does, takes longer than all the rest."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_cycle_search()
def capture_state(
    state: Mapping[str, Any],
    coordinator: Coordinator,
    cache: PlanCache,
    options: CaptureOptions = _DEFAULTS,
) -> CapturedState:
    """Agree with all ranks on what is saved and by whom. Two collectives, more where ranks hold
    different things.

    Raises on every rank where any rank cannot save something, ranks hold contradictory things,
    `require_finite` finds an infinity or NaN in floating state, or the destination is taken or has
    no room.
    """
    rng = capture_rng()  # first, since what follows may use them
    taken: list[_Taken] = []

    def take() -> _Claim:
        options.first()
        if options.destination is not None and coordinator.rank == LEADER:
            options.destination.check()
        taken.append(_take(state, cache, coordinator.world_size))
        return taken[0].claim

    claims = together(coordinator, "save", take)
    own = taken[0]
    private = _private_names(own.objects, claims)
    objects = {name: snapshot for name, snapshot in own.objects.items() if name not in private}
    tensors = _tensors([*own.shared.values(), *objects.values()])
    tables = tuple(claim.table(objects) for claim in claims)
    layout, plan = _agree_on_layout(
        lambda: _layout(own.shared, tensors), tables, coordinator, cache
    )
    records = _agree_on_records(own.records, [claim.records for claim in claims], coordinator)
    differing = _differing_copies(own.copies, [claim.copies for claim in claims], coordinator)
    if differing:
        plan = _without_copies(layout, differing, tables, cache)

    def contribute() -> tuple[tuple[PlannedWrite, ...], bytes]:
        if options.destination is not None and coordinator.rank == LEADER:
            options.destination.check_room(sum(plan.bytes_per_rank))
        writes = planned_writes(plan.ranks[coordinator.rank], tensors, coordinator.rank)
        if options.require_finite:
            check_finite(writes)
        blob = _private_file(rng, private)
        return options.stage(writes), blob

    writes, blob = everywhere(coordinator, "save", contribute)
    extras = {
        **records.values,
        **{name: snapshot.values for name, snapshot in objects.items()},
        **{name: tagged(PER_RANK) for name in private},
    }
    return CapturedState(claims[LEADER].token, tuple(state), layout, records, extras, writes, blob)


# ---------------------------------------------------------------------------------- what there is

Snapshots = dict[str, Snapshot]

Copies = dict[str, tuple[bytes, bool]]
"""Plain tensors by key: a digest of the contents, and whether it is a buffer."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a rank tells all others before a save: names, and digests of everything else.

    Objects that are no modules or optimizers have two: of all their values (None where these must
    stay with their rank), and of where their tensors lie.
    """

    token: str
    shared: tuple[str, ...]
    objects: dict[str, tuple[bytes | None, bytes]]
    layout: bytes
    records: bytes
    copies: bytes

    def table(self, objects: Iterable[str]) -> bytes:
        """Identifies where everything lies, of objects only those of these names."""
        return hashlib.sha256(
            b"".join([self.layout, *(self.objects[name][1] for name in objects)])
        ).digest()


@dataclass(frozen=True, slots=True)
class _Taken:
    """What this rank holds: snapshots of modules and optimizers, and of all other objects."""

    shared: Snapshots
    objects: Snapshots
    records: Records
    copies: Copies
    claim: _Claim


def _take(state: Mapping[str, Any], cache: PlanCache, world_size: int) -> _Taken:
    parts = [(part, part.capture()) for part in open_parts(state, cache.reader)]
    shared = {part.name: snapshot for part, snapshot in parts if part.is_shared}
    objects = {part.name: snapshot for part, snapshot in parts if not part.is_shared}
    records = _records(shared)
    tensors = _tensors(shared.values())
    copies = _copies(tensors) if world_size > 1 else {}
    tables = {name: _placed(snapshot.tensors) for name, snapshot in objects.items()}
    claim = _Claim(
        token=uuid.uuid4().hex[:16],
        shared=tuple(sorted(shared)),
        objects={
            name: (snapshot.fingerprint, cache.digest(name, tables[name], world_size))
            for name, snapshot in objects.items()
        },
        layout=cache.digest("", _placed(tensors), world_size),
        records=records.digest(),
        copies=hashlib.sha256(repr(copies).encode()).digest(),
    )
    return _Taken(shared, objects, records, copies, claim)


def _private_names(objects: Snapshots, claims: Sequence[_Claim]) -> dict[str, Any]:
    """The objects whose values cannot be shared between ranks, with this rank's."""
    first = claims[0]
    for rank, claim in enumerate(claims):
        if claim.shared != first.shared or set(claim.objects) != set(first.objects):
            raise UsageError(
                f"ranks save different things: rank {rank} "
                f"{sorted([*claim.shared, *claim.objects])}, "
                f"rank 0 {sorted([*first.shared, *first.objects])}"
            )
    return {
        name: snapshot.raw
        for name, snapshot in objects.items()
        if None in (found := {claim.objects[name][0] for claim in claims}) or len(found) > 1
    }


def _tensors(snapshots: Iterable[Snapshot]) -> dict[str, LocalTensor]:
    tensors: dict[str, LocalTensor] = {}
    for snapshot in snapshots:
        tensors.update(snapshot.tensors)
    return tensors


def _placed(tensors: Mapping[str, LocalTensor]) -> dict[str, PlacedTensor]:
    return {key: local.placed for key, local in tensors.items()}


def _layout(shared: Snapshots, tensors: Mapping[str, LocalTensor]) -> Layout:
    states = {key: of for s in shared.values() for key, of in s.states.items()}
    return Layout(_placed(tensors), states)


def _records(shared: Snapshots) -> Records:
    return Records(
        tuple(group for snapshot in shared.values() for group in snapshot.groups),
        tuple(entry for snapshot in shared.values() for entry in snapshot.ownership),
        tuple(key for snapshot in shared.values() for key in snapshot.absent),
        {name: s.values for name, s in shared.items() if s.values is not None},
    )


def _copies(tensors: Mapping[str, LocalTensor]) -> Copies:
    return {
        key: (tensor_digest(local), local.is_buffer)
        for key, local in tensors.items()
        if local.is_copy
    }


# -------------------------------------------------------------------------------------- agreement


def _agree_on_layout(
    describe: Callable[[], Layout],
    tables: tuple[bytes, ...],
    coordinator: Coordinator,
    cache: PlanCache,
) -> tuple[Layout, WritePlan]:
    """The layout that all ranks together have, and its plan; `describe` gives this rank's, where it
    is needed. A collective where digests differ and are new."""
    world_size = coordinator.world_size
    known = cache.get(tables)
    if known is None:
        layout = describe()
        if len(set(tables)) > 1:
            layout = merge_layouts(gather_distinct(coordinator, tables, layout))
        known = (layout, plan_writes(layout.placed, world_size))
        cache.put(tables, known)
    return known


def _agree_on_records(own: Records, digests: Sequence[bytes], coordinator: Coordinator) -> Records:
    """The records that all ranks together have. A collective where digests differ."""
    if len(set(digests)) == 1:
        return own
    return merge_records(gather_distinct(coordinator, digests, own))


def _differing_copies(
    own: Copies, digests: Sequence[bytes], coordinator: Coordinator
) -> dict[str, int]:
    """Check that all copies of plain tensors are equal. A collective where digests differ.

    Buffers may differ: the lowest rank's copy is the one to be written, and a warning says so.
    Anything else is an error, since one copy would silently stand for all. Returns the keys of
    differing buffers, each with that rank.
    """
    if len(set(digests)) == 1:
        return {}
    differing = _differing(gather_distinct(coordinator, digests, own))
    if coordinator.rank == LEADER:
        for key, rank in differing.items():
            log.warning("%s: copies differ between ranks; that of rank %d is saved", key, rank)
    return differing


def _without_copies(
    layout: Layout, differing: Mapping[str, int], tables: tuple[bytes, ...], cache: PlanCache
) -> WritePlan:
    """The plan in which some tensors have no holder but the rank that is given."""
    name = (*tables, repr(sorted(differing.items())).encode())
    known = cache.get(name)
    if known is None:
        narrowed = {key: _held_by(layout.placed[key], rank) for key, rank in differing.items()}
        known = (layout, plan_writes({**layout.placed, **narrowed}, len(tables)))
        cache.put(name, known)
    return known[1]


def _differing(gathered: Sequence[Copies]) -> dict[str, int]:
    """Buffers whose copies differ, each with the lowest rank that has one."""
    out: dict[str, int] = {}
    for key in dict.fromkeys(key for copies in gathered for key in copies):
        ranks = [rank for rank, copies in enumerate(gathered) if key in copies]
        if len({gathered[rank][key] for rank in ranks}) == 1:
            continue
        other = next(r for r in ranks if gathered[r][key] != gathered[ranks[0]][key])
        if not all(gathered[rank][key][1] for rank in ranks):
            raise IncompatibleError(
                f"{key}: ranks {ranks[0]} and {other} have different values of this plain tensor, "
                "of which one copy would be saved; shard it as a DTensor, give it another name "
                "on each rank, or make the copies equal"
            )
        out[key] = ranks[0]
    return out


def _held_by(tensor: PlacedTensor, rank: int) -> PlacedTensor:
    """The same tensor as if that rank alone had it."""
    mesh = MeshSpec(("rank",), (1,), (rank,))
    where = ParameterPlacement(tensor.placement.shape, mesh, (Placement(),), None, 1)
    return replace(tensor, placement=where)


# ------------------------------------------------------------------------------ this rank's share


def planned_writes(
    chunks: Iterable[PlannedChunk], tensors: Mapping[str, LocalTensor], rank: int
) -> tuple[PlannedWrite, ...]:
    """The live data of planned chunks. Raises CheckpointError, naming tensor and rank, where this
    rank does not have what its placement says."""
    with torch.no_grad():
        return tuple(
            PlannedWrite(chunk, local.placed.dtype, _data(chunk, local, rank))
            for chunk in chunks
            for local in [tensors[chunk.key]]
        )


def _data(chunk: PlannedChunk, local: LocalTensor, rank: int) -> torch.Tensor:
    if local.tensor is not None and local.boxes == (chunk.box,):  # the rule, so made quick
        data = local_part(local.tensor)
        if data.shape == chunk.box.sizes:
            return data
    pieces = local.pieces()
    if len(pieces) == 1 and pieces[0].box == chunk.box:
        return pieces[0].tensor
    holder = _holder(chunk, pieces)
    if holder is None:
        have = [(list(p.box.offsets), list(p.box.sizes)) for p in pieces]
        raise CheckpointError(
            f"{chunk.key}: rank {rank} should write offsets {list(chunk.box.offsets)} sizes "
            f"{list(chunk.box.sizes)}, but has {have}; its optimizer or mesh is not what it says"
        )
    return sub_box(holder, chunk.box)


def _holder(chunk: PlannedChunk, pieces: tuple[Piece, ...]) -> Piece | None:
    """The piece that covers a planned chunk."""
    return next((p for p in pieces if p.box.intersection(chunk.box) == chunk.box), None)


def check_finite(writes: Iterable[PlannedWrite]) -> None:
    """Raises CheckpointError for the first tensor with an infinity or NaN."""
    for write in writes:
        tensor = write.tensor
        if not tensor.is_floating_point():
            continue
        # Eight-bit floats have no isfinite of their own.
        finite = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)
        bad = tensor.numel() - int(finite.sum())
        if bad:
            raise CheckpointError(
                f"{write.chunk.key}: {bad} of {tensor.numel()} values are not finite, and "
                "require_finite is set; nothing was written"
            )


def _private_file(rng: dict[str, Any], values: Mapping[str, Any]) -> bytes:
    """This rank's private file, which `torch.load(weights_only=True)` reads."""
    sharded = [name for name, value in values.items() if value is None]
    if sharded:
        raise UsageError(
            f"the state of {' or '.join(sharded)} has sharded tensors, so the rest of it must be "
            "plain data that is equal on all ranks; keep what differs in an object of its own"
        )
    buffer = io.BytesIO()
    torch.save({"format": PRIVATE_FORMAT, "rng": rng, "values": dict(values)}, buffer)
    data = buffer.getvalue()
    if values:
        _check_readable(data, list(values))
    return data


def _check_readable(data: bytes, names: list[str]) -> None:
    """Find out now, not when it is needed, that a state cannot be read back safely."""
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(
            f"the state of {' or '.join(names)} cannot be saved, as it would not load without "
            f"running code from the checkpoint; return plain data and tensors: {error}"
        ) from error
