"""Reads safetensors files: one, or several with a Hugging Face index. Without torch, checked.

There are no checksums in the format, so what is read here is taken as it is; `adopt` computes some.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, NotFoundError
from ckpt.formats.record import decode_record, foreign_files, made_manifest, modified
from ckpt.formats.safetensors import (
    CODES,
    DTYPES_NAME,
    INDEX_SUFFIX,
    MAX_HEADER_BYTES,
    PREFIX_NAME,
    SUFFIX,
    stored_form,
)
from ckpt.formats.target import RECORD_NAME
from ckpt.manifest import ChunkEntry, Index, Manifest, TensorEntry
from ckpt.names import name_problem
from ckpt.storage import Storage

MAX_INDEX_BYTES = 100_000_000

_DTYPES = {code: dtype for dtype, code in CODES.items()} | {"C64": "complex64"}
_Length = Annotated[int, Meta(ge=0, le=2**62)]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a header."""

    dtype: str
    shape: Annotated[tuple[_Length, ...], Meta(max_length=64)]
    data_offsets: tuple[_Length, _Length]


class _HfIndex(msgspec.Struct, frozen=True):
    """`….safetensors.index.json`."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file's header: chunks of whole tensors, without checksums, and the metadata."""

    chunks: tuple[ChunkEntry, ...]
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(storage: Storage, name: str) -> SafetensorsFile:
    """Read and check a file's header. Keys are the names in the file with the recorded prefix, or
    `model.` where none is recorded. CorruptError, naming file and tensor, for anything unsound."""
    where = f"{storage.url}/{name}"
    size = storage.size(name)
    if size < 8:
        raise CorruptError(f"{where}: {size} bytes are no safetensors file")
    length = int.from_bytes(storage.read(name, 0, 8), "little")
    if length > MAX_HEADER_BYTES or length > size - 8:
        raise CorruptError(f"{where}: a header of {length} bytes in a file of {size}: refused")
    try:
        raw = msgspec.json.decode(storage.read(name, 8, length), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
        found = {key: msgspec.json.decode(value, type=_Tensor) for key, value in raw.items()}
        exotic = msgspec.json.decode(metadata.get(DTYPES_NAME, "{}"), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{where}: its header is not that of safetensors: {error}") from None
    return _checked(name, where, 8 + length, size, found, metadata, exotic)


def _checked(
    name: str,
    where: str,
    start: int,
    size: int,
    found: Mapping[str, _Tensor],
    metadata: Mapping[str, str],
    exotic: Mapping[str, str],
) -> SafetensorsFile:
    _check_places(where, found, size - start)
    prefix = metadata.get(PREFIX_NAME, "model.")
    chunks, tensors = [], {}
    for short, tensor in found.items():
        entry = _entry(f"{where}: tensor {short!r}", tensor, exotic.get(short))
        key = prefix + short
        begin, end = tensor.data_offsets
        tensors[key] = entry
        offset, length = start + begin, end - begin
        if length:
            chunks.append(
                ChunkEntry(
                    key, (0,) * len(entry.shape), entry.shape, name,
                    offset, length, offset, length, None, "",
                )
            )  # fmt: skip
    return SafetensorsFile(tuple(chunks), tensors, metadata)


def _check_places(where: str, found: Mapping[str, _Tensor], size: int) -> None:
    """Data lies inside the file, and no byte belongs to two tensors: a small file stays small."""
    places = sorted((*tensor.data_offsets, name) for name, tensor in found.items())
    for begin, end, name in places:
        if not begin <= end <= size:
            raise CorruptError(
                f"{where}: tensor {name!r} has bytes {begin} to {end} of {size} bytes of data"
            )
    for (_, end, name), (begin, _, other) in pairwise(p for p in places if p[0] < p[1]):
        if begin < end:
            raise CorruptError(f"{where}: tensors {name!r} and {other!r} share bytes")


def _entry(what: str, tensor: _Tensor, exotic: str | None) -> TensorEntry:
    """A tensor as a manifest has it; `exotic` is the dtype that the format cannot name."""
    dtype = exotic or _DTYPES.get(tensor.dtype)
    if dtype is None or dtype not in DTYPES:
        raise CorruptError(f"{what} has dtype {exotic or tensor.dtype!r}, which is not supported")
    shape = tensor.shape
    if exotic is not None and stored_form(dtype, ())[1]:
        shape = shape[:-1]  # pairs of reals
    if exotic is not None and stored_form(dtype, shape) != (tensor.dtype, tensor.shape):
        raise CorruptError(f"{what} is not how {dtype} is stored: {tensor.dtype} {tensor.shape}")
    begin, end = tensor.data_offsets
    if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise CorruptError(f"{what} has {end - begin} bytes for {dtype} of shape {shape}")
    return TensorEntry(dtype, shape)


def read_safetensors(storage: Storage, names: Iterable[str]) -> tuple[Manifest, list[Index]]:
    """A checkpoint of safetensors files: of all of them, or of those that an index names.

    CorruptError where they contradict each other, NotFoundError where a shard is missing.
    """
    shards = list(_shards(storage, sorted(names)))
    tensors: dict[str, TensorEntry] = {}
    indexes = []
    record = None
    for number, name in enumerate(shards):
        file = read_header(storage, name)
        twice = next((key for key in file.tensors if key in tensors), None)
        if twice is not None:
            raise CorruptError(f"{storage.url}/{name}: tensor {twice!r} is in another file too")
        tensors.update(file.tensors)
        indexes.append(Index(number, file.chunks))
        if RECORD_NAME in file.metadata:
            where = f"{storage.url}/{name}: {RECORD_NAME}"
            record = decode_record(file.metadata[RECORD_NAME], where)
    created = modified(storage, shards[0])
    files = foreign_files(storage, shards)
    try:
        return made_manifest("safetensors", created, tensors, files, record), indexes
    except CorruptError as error:
        raise CorruptError(f"{storage.url}: {error}; is a file missing?") from None


def _shards(storage: Storage, names: list[str]) -> Iterator[str]:
    """The data files; those that an index lists must all be there."""
    data = [name for name in names if name.endswith(SUFFIX)]
    for index in (name for name in names if name.endswith(INDEX_SUFFIX)):
        for name in _listed(storage, index):
            if name not in data:
                raise NotFoundError(f"{storage.url}/{index}: shard {name!r} is missing")
    yield from data


def _listed(storage: Storage, index: str) -> list[str]:
    where = f"{storage.url}/{index}"
    if storage.size(index) > MAX_INDEX_BYTES:
        raise CorruptError(f"{where}: more than {MAX_INDEX_BYTES} bytes for an index; refused")
    try:
        content = msgspec.json.decode(storage.read(index), type=_HfIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{where}: not an index of safetensors: {error}") from None
    names = sorted(set(content.weight_map.values()))
    for name in names:
        problem = name_problem(name)
        if problem is not None:
            raise CorruptError(f"{where}: file name {name!r} {problem}")
    return names
