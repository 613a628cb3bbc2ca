"""What two checkpoints do not share: manifests as pure data, values streamed in bounded blocks.

Neither torch nor the checkpoints' topologies matter: values are compared by global coordinates, box
against box, so a checkpoint can be compared with a resharded copy of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.checkpoint import Checkpoint
from ckpt.dtypes import DTYPES
from ckpt.manifest import ChunkEntry, GroupEntry, Manifest, TensorEntry
from ckpt.storage import Storage
from ckpt.summary import tensor_bytes
from hyperopt.ownership import Box

BLOCK_BYTES = 8 << 20
"""The largest part of a tensor that is compared at a time."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs: its kind (`step`, `topology`, `tensor`, `dtype`, `shape`,
    `placements`, `group`, `absent`), where it is, and both sides (None: not there)."""

    kind: str
    where: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A tensor whose values differ: how many elements do, and the largest absolute difference (NaN
    if one side alone is NaN; None for a dtype whose values cannot be decoded here)."""

    tensor: str
    elements: int
    largest: float | None


# ---------------------------------------------------------------------------------------- manifests


def compare_manifests(a: Manifest, b: Manifest) -> list[Change]:
    """Everything that differs between two manifests, apart from how files are cut."""
    changes = [
        *_changed("step", "", a.step, b.step),
        *_changed("topology", "", _topology(a), _topology(b)),
        *_compare_tensors(a.tensors, b.tensors),
        *_compare_groups(a.groups, b.groups),
    ]
    for key in sorted(set(a.absent) ^ set(b.absent)):
        sides = ("absent" if key in side.absent else None for side in (a, b))
        changes.append(Change("absent", key, *sides))
    return changes


def _changed(kind: str, where: str, a: object, b: object) -> Iterator[Change]:
    if a != b:
        yield Change(kind, where, *(None if side is None else str(side) for side in (a, b)))


def _topology(manifest: Manifest) -> str:
    meshes = (
        ", ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.sizes, strict=True))
        for mesh in manifest.topology.meshes
    )
    replicas = sorted({entry.replica_count for entry in manifest.ownership})
    return (
        f"{'; '.join(meshes) or 'no mesh'}; world size {manifest.topology.world_size}; "
        f"replica count {', '.join(map(str, replicas)) or 'none'}"
    )


def _compare_tensors(
    a: Mapping[str, TensorEntry], b: Mapping[str, TensorEntry]
) -> Iterator[Change]:
    for key in sorted(a.keys() | b.keys()):
        first, second = a.get(key), b.get(key)
        if first is None or second is None:
            yield from _changed("tensor", key, _described(first), _described(second))
            continue
        yield from _changed("dtype", key, first.dtype, second.dtype)
        yield from _changed("shape", key, list(first.shape), list(second.shape))
        yield from _changed("placements", key, *(" ".join(e.placements) for e in (first, second)))


def _described(entry: TensorEntry | None) -> str | None:
    return None if entry is None else f"{entry.dtype} {list(entry.shape)}"


def _compare_groups(a: Sequence[GroupEntry], b: Sequence[GroupEntry]) -> Iterator[Change]:
    first, second = _by_name(a), _by_name(b)
    for name in sorted(first.keys() | second.keys()):
        left, right = first.get(name), second.get(name)
        if left is None or right is None:
            yield from _changed("group", name, left and "there", right and "there")
            continue
        yield from _changed("group", f"{name}: step", left.step, right.step)
        yield from _changed("group", f"{name}: parameters", *_only_in_each(left.fqns, right.fqns))
        yield from _compare_values_of(name, left.hyperparameters, right.hyperparameters)


def _by_name(groups: Sequence[GroupEntry]) -> dict[str, GroupEntry]:
    return {f"{group.optimizer}: {group.name}": group for group in groups}


def _only_in_each(a: Sequence[str], b: Sequence[str]) -> tuple[str, str]:
    """The names that only one side has; two equal texts where only the order differs or nothing."""
    return (
        ", ".join(sorted(set(a) - set(b))) or "no others",
        ", ".join(sorted(set(b) - set(a))) or "no others",
    )


def _compare_values_of(where: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for name in sorted(a.keys() | b.keys()):
        yield from _changed("group", f"{where}: {name}", a.get(name), b.get(name))


# ------------------------------------------------------------------------------------------- values


def common_bytes(a: Manifest, b: Manifest) -> int:
    """Bytes of the tensors that `compare_values` compares, counted once."""
    return sum(tensor_bytes(key, a.tensors[key]) for key in _comparable(a, b))


def _comparable(a: Manifest, b: Manifest) -> list[str]:
    return [
        key
        for key, entry in a.tensors.items()
        if (other := b.tensors.get(key)) is not None
        and (entry.dtype, entry.shape) == (other.dtype, other.shape)
    ]


def compare_values(
    a: Checkpoint, b: Checkpoint, progress: Callable[[int], None] | None = None
) -> list[ValueChange]:
    """Compare the values of every tensor that both hold with one dtype and shape.

    Reads about `BLOCK_BYTES` of each side at a time. `progress` is told the bytes compared, of one
    side. Raises CorruptError where data is missing.
    """
    changes = []
    for key in _comparable(a.manifest, b.manifest):
        change = _compare_tensor(a, b, key, progress)
        if change is not None:
            changes.append(change)
    return changes


def _compare_tensor(
    a: Checkpoint, b: Checkpoint, key: str, progress: Callable[[int], None] | None
) -> ValueChange | None:
    entry = a.manifest.tensors[key]
    itemsize = DTYPES[entry.dtype].itemsize
    count, largest = 0, 0.0
    decodable = entry.dtype in _DECODERS
    for ours in a.chunks(key):
        for theirs in b.chunks(key):
            shared = _box(ours).intersection(_box(theirs))
            for block in _blocks(shared, itemsize, BLOCK_BYTES) if shared else ():
                left = read_box(a.storage, ours, block, itemsize)
                right = read_box(b.storage, theirs, block, itemsize)
                count += _elements_that_differ(left, right, itemsize)
                if decodable:
                    largest = _larger(largest, _largest_difference(left, right, entry.dtype))
                if progress is not None:
                    progress(left.size)
    return ValueChange(key, count, largest if decodable else None) if count else None


def _box(chunk: ChunkEntry) -> Box:
    return Box(chunk.offsets, chunk.sizes)


def _blocks(box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """Cut a box, along its leading dims, into boxes of at most `limit` bytes (one element at
    least)."""
    if box.elements * itemsize <= limit or box.elements == 1:
        yield box
        return
    dim = next(i for i, size in enumerate(box.sizes) if size > 1)
    slice_bytes = box.elements // box.sizes[dim] * itemsize
    step = max(limit // slice_bytes, 1)
    for start in range(0, box.sizes[dim], step):
        size = min(step, box.sizes[dim] - start)
        offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
        part = Box(offsets, (*box.sizes[:dim], size, *box.sizes[dim + 1 :]))
        yield from _blocks(part, itemsize, limit)


def read_box(storage: Storage, chunk: ChunkEntry, box: Box, itemsize: int) -> Bytes:
    """The bytes of `box`, row-major, out of a chunk that contains it.

    Reads the span from the box's first to its last byte at once; memory is that span's.
    """
    inner = tuple(at - start for at, start in zip(box.offsets, chunk.offsets, strict=True))
    strides = _strides(chunk.sizes, itemsize)
    first = sum(at * stride for at, stride in zip(inner, strides, strict=True))
    last = sum((n - 1) * stride for n, stride in zip(box.sizes, strides, strict=True)) + itemsize
    span = np.frombuffer(storage.read(chunk.file, chunk.byte_offset + first, last), np.uint8)
    view = np.lib.stride_tricks.as_strided(
        span, (*box.sizes, itemsize), (*strides, 1), writeable=False
    )
    return np.ascontiguousarray(view).reshape(-1)


def _strides(sizes: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    strides = [itemsize]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[: len(sizes)]


def _elements_that_differ(a: Bytes, b: Bytes, itemsize: int) -> int:
    if np.array_equal(a, b):
        return 0
    return int((a.reshape(-1, itemsize) != b.reshape(-1, itemsize)).any(axis=1).sum())


def _largest_difference(a: Bytes, b: Bytes, dtype: str) -> float:
    """The largest absolute difference, NaN where one side alone is NaN (0 where both are)."""
    if np.array_equal(a, b):
        return 0.0
    left, right = decode(dtype, a), decode(dtype, b)
    # Equal infinities would give NaN when subtracted, and so would two NaNs of different bits.
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        difference = np.abs(left - right)
    return float(np.max(np.where(same, 0.0, difference)))


def _larger(a: float, b: float) -> float:
    """The larger of two, NaN above all."""
    return float(np.maximum(a, b))


def decode(dtype: str, raw: Bytes) -> npt.NDArray[Any]:
    """The numbers that little-endian bytes stand for, as float64 (complex128 for complex dtypes).
    Raises KeyError for a dtype that has no numbers here."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other
        return _DECODERS[dtype](raw)


def _native(dtype: str) -> Callable[[Bytes], npt.NDArray[Any]]:
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    return lambda raw: raw.view(dtype).astype(wide)


def _decode_bfloat16(raw: Bytes) -> npt.NDArray[Any]:
    """bfloat16 is the upper half of a float32."""
    return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


def _decode_float8_e5m2(raw: Bytes) -> npt.NDArray[Any]:
    """float8_e5m2 is the upper half of a float16."""
    return (raw.astype("<u2") << 8).view("<f2").astype(np.float64)


def _decode_float8_e4m3fn(raw: Bytes) -> npt.NDArray[Any]:
    """Sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinities, one NaN per sign."""
    exponent, mantissa = (raw >> 3 & 15).astype(np.int64), (raw & 7).astype(np.float64)
    subnormal = np.ldexp(mantissa, -9)
    normal = np.ldexp(8 + mantissa, exponent - 10)
    value = np.where(exponent == 0, subnormal, normal)
    value = np.where(raw & 0x7F == 0x7F, np.nan, value)
    return np.where(raw & 0x80, -value, value)


_NATIVE = (
    *("float64", "float32", "float16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_DECODERS: Mapping[str, Callable[[Bytes], npt.NDArray[Any]]] = {
    **{name: _native(name) for name in _NATIVE},
    "bfloat16": _decode_bfloat16,
    "float8_e5m2": _decode_float8_e5m2,
    "float8_e4m3fn": _decode_float8_e4m3fn,
}
