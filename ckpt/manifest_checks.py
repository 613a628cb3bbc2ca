"""Checks that the schema cannot express: how the parts of a manifest and of its indexes fit.

Each check returns None or raises CorruptError; messages name the file (`where`) and the member.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError
from ckpt.names import name_problem
from ckpt.schema import (
    MANIFEST_NAME,
    ChunkEntry,
    FileEntry,
    Index,
    Manifest,
    Mesh,
    OwnershipEntry,
    TensorEntry,
    Topology,
)
from hyperopt.ownership import Placement

MAX_DEPTH = 64
"""Deepest nesting of extras and hyperparameters."""

MAX_TENSOR_BYTES = 2**63 - 1


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise CorruptError for the first thing in a decoded manifest that does not fit the rest."""
    _check_files(manifest, where)
    for position, mesh in enumerate(manifest.topology.meshes):
        _check_mesh(mesh, manifest.topology.world_size, f"{where}: mesh {position}")
    for key, tensor in manifest.tensors.items():
        _check_tensor(key, tensor, manifest.topology, where)
    for owners in manifest.ownership:
        _check_ownership(owners, where)
    for name, value in _free_values(manifest):
        problem = json_problem(value)
        if problem is not None:
            raise CorruptError(f"{where}: {name}{problem}")


def _check_files(manifest: Manifest, where: str) -> None:
    entries = [*manifest.files, *manifest.indexes]
    for entry in entries:
        problem = name_problem(entry.name)
        if problem is not None:
            raise CorruptError(f"{where}: file name {entry.name!r} {problem}")
    names = Counter(entry.name for entry in entries)
    names[MANIFEST_NAME] += 1  # the manifest cannot list itself
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise CorruptError(f"{where}: file {twice!r} is listed twice")


def _check_mesh(mesh: Mesh, world_size: int, where: str) -> None:
    size = math.prod(mesh.sizes)
    if len(mesh.names) != len(mesh.sizes) or len(set(mesh.names)) != len(mesh.names):
        raise CorruptError(f"{where}: dim names {mesh.names} do not fit sizes {mesh.sizes}")
    if size > world_size:
        raise CorruptError(f"{where}: {size} ranks in a world of {world_size}")
    if mesh.ranks is None:
        return
    if len(mesh.ranks) != size or len(set(mesh.ranks)) != size or max(mesh.ranks) >= world_size:
        raise CorruptError(f"{where}: ranks do not fit sizes {mesh.sizes} and world {world_size}")


def _check_tensor(key: str, tensor: TensorEntry, topology: Topology, where: str) -> None:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CorruptError(f"{where}: tensor {key!r} has unknown dtype {tensor.dtype!r}")
    if math.prod(tensor.shape) * dtype.itemsize > MAX_TENSOR_BYTES:
        raise CorruptError(f"{where}: tensor {key!r} of shape {tensor.shape} is impossibly large")
    if tensor.mesh is None:
        if tensor.placements:
            raise CorruptError(f"{where}: tensor {key!r} has placements but no mesh")
        return
    if tensor.mesh >= len(topology.meshes):
        raise CorruptError(f"{where}: tensor {key!r} is on mesh {tensor.mesh}, which is not listed")
    _check_placements(key, tensor, len(topology.meshes[tensor.mesh].sizes), where)


def _check_placements(key: str, tensor: TensorEntry, mesh_dims: int, where: str) -> None:
    if len(tensor.placements) != mesh_dims:
        raise CorruptError(
            f"{where}: tensor {key!r} has {len(tensor.placements)} placements "
            f"on a mesh of {mesh_dims} dims"
        )
    # Placements of optimizer state are its parameter's, which may have more dims.
    placed = tensor.shape if tensor.parameter_shape is None else tensor.parameter_shape
    for text in tensor.placements:
        try:
            placement = Placement.parse(text)
        except ValueError as error:
            raise CorruptError(f"{where}: tensor {key!r}: {error}") from None
        if placement.dim is not None and placement.dim >= len(placed):
            raise CorruptError(
                f"{where}: tensor {key!r}: what has shape {placed} cannot be placed as {text}"
            )


def _check_ownership(entry: OwnershipEntry, where: str) -> None:
    for slot in entry.slots:
        if slot.owner >= entry.replica_count:
            raise CorruptError(
                f"{where}: owner {slot.owner} of {slot.fqn!r} in {entry.optimizer!r} "
                f"is not one of {entry.replica_count} replicas"
            )
        if slot.rows is not None and slot.rows[0] > slot.rows[1]:
            raise CorruptError(f"{where}: slot {slot.fqn!r} has rows {slot.rows}")


def _free_values(manifest: Manifest) -> Iterable[tuple[str, Any]]:
    """The parts of a manifest whose shape is the user's, with their names."""
    yield "extras", manifest.extras
    for group in manifest.groups:
        yield f"groups: {group.optimizer!r} group {group.name!r}", group.hyperparameters


def json_problem(value: Any, depth: int = 0) -> str | None:
    """Where and why a value is not plain JSON ('[key]: why'), or None.

    Refused although an encoder may take them, because they would come back as something else:
    keys that are not text, NaN and infinities, bytes, and numbers beyond 64 bits.
    """
    if depth > MAX_DEPTH:
        return f": nested deeper than {MAX_DEPTH} levels"
    if value is None or isinstance(value, bool | str):
        return None
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else f": {value} does not fit 64 bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else f": {value} has no JSON form"
    if isinstance(value, dict):
        return _mapping_problem(value, depth)
    if isinstance(value, list | tuple):
        return _first_problem(enumerate(value), depth)
    return f": a {type(value).__name__} is not plain JSON"


def _mapping_problem(value: dict[Any, Any], depth: int) -> str | None:
    wrong = next((key for key in value if not isinstance(key, str)), None)
    if wrong is not None:
        return f": key {wrong!r} is not text"
    return _first_problem(value.items(), depth)


def _first_problem(items: Iterable[tuple[Any, Any]], depth: int) -> str | None:
    for key, item in items:
        problem = json_problem(item, depth + 1)
        if problem is not None:
            return f"[{key!r}]{problem}"
    return None


def check_index(manifest: Manifest, index: Index, where: str) -> None:
    """Raise CorruptError for the first chunk that does not fit its tensor or its file."""
    files = {entry.name: entry for entry in manifest.files}
    for chunk in index.chunks:
        problem = _box_problem(chunk, manifest.tensors) or _bytes_problem(chunk, files)
        if problem is not None:
            raise CorruptError(f"{where}: chunk {chunk.offsets} of tensor {chunk.key!r} {problem}")


def _box_problem(chunk: ChunkEntry, tensors: Mapping[str, TensorEntry]) -> str | None:
    tensor = tensors.get(chunk.key)
    if tensor is None:
        return "belongs to no tensor of the manifest"
    shape = tensor.shape
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        return f"has another number of dims than shape {shape}"
    for offset, size, limit in zip(chunk.offsets, chunk.sizes, shape, strict=True):
        if offset + size > limit:
            return f"and sizes {chunk.sizes} reaches out of shape {shape}"
    if chunk.byte_length != math.prod(chunk.sizes) * DTYPES[tensor.dtype].itemsize:
        return f"has {chunk.byte_length} bytes for sizes {chunk.sizes} of {tensor.dtype}"
    return None


def _bytes_problem(chunk: ChunkEntry, files: Mapping[str, FileEntry]) -> str | None:
    entry = files.get(chunk.file)
    if chunk.crc32 is None:
        return "has no CRC-32"
    if entry is None:
        return f"lies in {chunk.file!r}, which the manifest does not list"
    start, stop = chunk.entry_offset, chunk.entry_offset + chunk.entry_length
    if stop > entry.size:
        return f"ends at byte {stop} of {chunk.file!r}, which has {entry.size}"
    if not start <= chunk.byte_offset <= stop - chunk.byte_length:
        return f"has its data outside its zip entry in {chunk.file!r}"
    return None
