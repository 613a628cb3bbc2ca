"""Tensors as a checkpoint sees them: where each lies, this rank's pieces, and their bytes."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from ckpt.dtypes import DTYPES
from ckpt.errors import IncompatibleError, UsageError
from ckpt.topology import PlacedTensor
from hyperopt.ownership import Box, MeshSpec, ParameterPlacement, Placement, local_boxes

BLOCK_BYTES = 16 * 1024 * 1024
"""How much of a tensor on a device is copied to the host at a time."""


# Both are made anew for every tensor in every save, and a named tuple is made several times faster
# than a frozen dataclass.


class Piece(NamedTuple):
    """One box of a global tensor and this rank's live data for it (a view of any strides)."""

    box: Box
    tensor: torch.Tensor


class LocalTensor(NamedTuple):
    """A tensor's description, and this rank's part of it: a whole or sharded `tensor`, of which it
    holds `boxes`; or, where `tensor` is None, `owned` pieces.

    `is_copy`: a plain tensor, of which every rank is taken to have the same copy (which saving
    checks); copies of a buffer may differ, as in data-parallel training, where the lowest rank's
    counts.
    """

    name: str
    placed: PlacedTensor
    tensor: torch.Tensor | None
    boxes: tuple[Box, ...] = ()
    owned: tuple[Piece, ...] = ()
    is_copy: bool = False
    is_buffer: bool = False

    def pieces(self) -> tuple[Piece, ...]:
        """This rank's live data. Raises IncompatibleError, naming the tensor, where its shape is
        not what mesh and placements say."""
        if self.tensor is None:
            return self.owned
        return split_local(self.name, local_part(self.tensor), self.boxes)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor, for reading and writing in place."""
    if torch.is_grad_enabled():  # entering `no_grad` costs as much as all the rest
        with torch.no_grad():
            return local_part(tensor)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises IncompatibleError where torch here has no such dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise IncompatibleError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return found


@dataclass(slots=True)
class TensorMemory:
    """Remembers what was read of named tensors for as long as they stay what they are. It keeps no
    tensor alive. Comparing is many times faster than reading."""

    _names: Sequence[str] = ()
    _tensors: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _forms: tuple[list[Any], ...] = ()
    _places: list[int] = field(default_factory=list)
    _columns: list[list[Any]] = field(default_factory=list)

    def recall(self, names: Sequence[str], tensors: Sequence[Any]) -> dict[str, LocalTensor] | None:
        """What was read, if these are the same tensors under the same names, none of which has got
        another dtype, shape or placement in place. None where something else is among them."""
        if len(tensors) != len(self._tensors) or names != self._names or not tensors:
            return None
        known = [reference() for reference in self._tensors]
        if not all(map(is_, known, tensors)) or _forms(tensors) != self._forms:
            return None
        keys, placed, boxes, owned, copies, buffers = self._columns
        live = map(tensors.__getitem__, self._places)
        rows = zip(keys, placed, live, boxes, owned, copies, buffers, strict=True)
        # What `LocalTensor._make` does, without a Python call for each.
        made: Iterable[LocalTensor] = map(tuple.__new__, repeat(LocalTensor), rows)
        return dict(zip(keys, made, strict=True))

    def keep(
        self,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        read: Mapping[str, LocalTensor],
    ) -> None:
        """Remember what was read of some of these tensors, instead of what was remembered."""
        place = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._names = names
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._forms = _forms(tensors)
        self._places = [place[id(local.tensor)] for local in read.values()]
        read_by = read.values()
        self._columns = [
            list(read),
            [local.placed for local in read_by],
            [local.boxes for local in read_by],
            [local.owned for local in read_by],
            [local.is_copy for local in read_by],
            [local.is_buffer for local in read_by],
        ]


def _forms(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
    """What may change about tensors in place."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    return (
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.placements for tensor in sharded],
        [tensor.device_mesh for tensor in sharded],
    )


@dataclass(slots=True)
class TensorReader:
    """Describes tensors. Remembers meshes, and descriptions by shape, dtype and placement, which
    many tensors share; never a tensor. `memory` has what was read of whole parts, by their names.
    """

    memory: defaultdict[str, TensorMemory] = field(
        default_factory=lambda: defaultdict(TensorMemory)
    )
    _meshes: dict[int, tuple[DeviceMesh, MeshSpec]] = field(default_factory=dict)
    _known: dict[object, tuple[PlacedTensor, tuple[Box, ...]]] = field(default_factory=dict)

    def read(self, name: str, tensor: torch.Tensor, is_buffer: bool = False) -> LocalTensor:
        """A DTensor's or plain tensor's description and local part.

        Raises UsageError, naming the tensor, for what cannot be saved: partial placements, sparse,
        quantized and meta tensors, unknown subclasses.
        """
        where = None
        if isinstance(tensor, DTensor):
            where = (id(tensor.device_mesh), tensor.placements)
        key = (type(tensor), tensor.layout, tensor.is_meta, tensor.dtype, tensor.shape, where)
        known = self._known.get(key)
        if known is None:
            _check(name, tensor)
            known = self._describe(name, tensor)
            self._known[key] = known
        placed, boxes = known
        return LocalTensor(name, placed, tensor, boxes, (), where is None, is_buffer)

    def _describe(self, name: str, tensor: torch.Tensor) -> tuple[PlacedTensor, tuple[Box, ...]]:
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        boxes: tuple[Box, ...]
        if not isinstance(tensor, DTensor):
            boxes = (Box.whole(shape),) if tensor.numel() else ()
            return PlacedTensor(dtype, shape, ParameterPlacement(shape, None, (), None, 1)), boxes
        mesh = self.mesh(tensor.device_mesh)
        placements = tuple(to_placement(name, at) for at in tensor.placements)
        coordinate = tensor.device_mesh.get_coordinate()
        boxes = () if coordinate is None else local_boxes(shape, mesh.sizes, placements, coordinate)
        where = ParameterPlacement(shape, mesh, placements, None, 1)
        return PlacedTensor(dtype, shape, where), boxes

    def mesh(self, mesh: DeviceMesh) -> MeshSpec:
        """A device mesh as data; unnamed dims are called dim0, dim1, ..."""
        if id(mesh) not in self._meshes:
            names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
            ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
            spec = MeshSpec(tuple(names), tuple(mesh.mesh.shape), ranks)
            # The mesh is kept, so that its id cannot be reused.
            self._meshes[id(mesh)] = (mesh, spec)
        return self._meshes[id(mesh)][1]


def _check(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor).__name__
    if not isinstance(tensor, DTensor) and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UsageError(f"{name}: a {kind} cannot be saved (plain tensors and DTensors can)")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(f"{name}: only dense tensors can be saved, this one is {tensor.layout}")
    if tensor.is_meta:
        raise UsageError(f"{name}: is on the meta device, without data; use to_empty() first")
    if dtype_name(tensor.dtype) not in DTYPES:
        raise UsageError(f"{name}: dtype {tensor.dtype} cannot be saved")


def to_placement(name: str, placement: TorchPlacement) -> Placement:
    """A torch placement as data. Raises UsageError, naming the tensor, for partial ones."""
    if isinstance(placement, Replicate):
        return Placement()
    if isinstance(placement, _StridedShard):
        return Placement(placement.dim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return Placement(placement.dim)
    raise UsageError(f"{name}: placement {placement} cannot be saved; redistribute it first")


def split_local(name: str, local: torch.Tensor, boxes: Sequence[Box]) -> tuple[Piece, ...]:
    """Cut a rank's local tensor into the boxes that it holds (several where shards are strided).

    The boxes are a product of intervals per dim, and the local tensor has those intervals side by
    side. Raises IncompatibleError where the local shape is another one.
    """
    if len(boxes) == 1 and tuple(local.shape) == boxes[0].sizes:
        return (Piece(boxes[0], local),)
    if not boxes and not local.numel():
        return ()
    starts = [_interval_starts(boxes, dim) for dim in range(local.ndim)]
    if not boxes or any(end != size for (_, end), size in zip(starts, local.shape, strict=True)):
        raise IncompatibleError(
            f"{name}: the local tensor has shape {list(local.shape)}, but mesh and placements give "
            f"this rank boxes of {[list(box.sizes) for box in boxes]}"
        )
    return tuple(Piece(box, _view(local, box, [start for start, _ in starts])) for box in boxes)


def _interval_starts(boxes: Sequence[Box], dim: int) -> tuple[dict[int, int], int]:
    """Where each interval of a dim begins in the local tensor, by its global offset; their sum."""
    starts: dict[int, int] = {}
    end = 0
    for offset, length in sorted({(box.offsets[dim], box.sizes[dim]) for box in boxes}):
        starts[offset] = end
        end += length
    return starts, end


def _view(local: torch.Tensor, box: Box, starts: Sequence[dict[int, int]]) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != local.shape[dim]:
            local = local.narrow(dim, starts[dim][offset], size)
    return local


def sub_box(piece: Piece, box: Box) -> torch.Tensor:
    """The part of a piece's tensor that covers `box`, which lies within it."""
    tensor = piece.tensor
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - piece.box.offsets[dim], size)
    return tensor


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writable where the tensor is."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    view: np.ndarray[tuple[int], np.dtype[np.uint8]] = flat.numpy()
    return view.data


def blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The row-major bytes of any tensor; devices are read `BLOCK_BYTES` at a time."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        yield host_bytes(tensor.contiguous())
        return
    flat = tensor.reshape(-1)
    step = max(1, BLOCK_BYTES // tensor.element_size())
    for start in range(0, flat.numel(), step):
        yield host_bytes(flat[start : start + step].cpu())
