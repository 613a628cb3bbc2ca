"""Reads plain torch.distributed.checkpoint checkpoints without torch, and without trusting them.

Their `.metadata` is a pickle: it is read inertly, against an allow-list of torch's metadata
classes, and everything in it is checked. Their data files are rows of `torch.save` archives, so the
raw bytes and the CRC-32 of each chunk are found in the archives' headers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ckpt.dtypes import DTYPES
from ckpt.errors import CorruptError, IncompatibleError
from ckpt.formats.inert_pickle import Record, load
from ckpt.formats.torch_archive import TorchArchive
from ckpt.manifest import (
    METADATA_NAME,
    ChunkEntry,
    FileEntry,
    Index,
    Manifest,
    TensorEntry,
    Topology,
)
from ckpt.names import name_problem
from ckpt.storage import Storage

MAX_METADATA_BYTES = 2**30
"""Largest `.metadata` that is read; stock torch needs about 1 kB for each chunk of a tensor."""

_CLASSES = "torch.distributed.checkpoint.metadata."
_OLDER_CLASSES = "torch.distributed._shard.sharded_tensor.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"

ALLOWED_GLOBALS = frozenset(
    {
        *(f"torch.{name}" for name in DTYPES),
        *(
            _CLASSES + name
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        _OLDER_CLASSES + "TensorProperties",
        _OLDER_CLASSES + "MEM_FORMAT_ENCODING",
        _STORAGE_INFO,
        "torch.Size",
        "torch.serialization._get_layout",
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        ),
    }
)
"""Every global that a `.metadata` may name: torch's metadata classes, sizes, dtypes, paths."""

_FLAT_STATE = re.compile(r"(?:([^.]+)\.)?state\.(.+)\.([^.]+)")

ObjectPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """One tensor of a foreign checkpoint: its chunks by offset, with their sizes."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Mapping[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Where a chunk is stored, or an object that is no tensor (whose `offsets` are None)."""

    key: str
    offsets: tuple[int, ...] | None
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ForeignMetadata:
    """What a `.metadata` says. `objects` are the keys that are no tensors; `paths` tell for each
    key where in a nested state dict it was (empty if that was not recorded)."""

    tensors: Mapping[str, ForeignTensor]
    objects: tuple[str, ...]
    entries: tuple[StoredEntry, ...]
    paths: Mapping[str, ObjectPath]


def read_foreign(storage: Storage) -> ForeignMetadata:
    """Read `.metadata`. NotFoundError without one; CorruptError if it is damaged, inconsistent, or
    names anything that a checkpoint has no use for; nothing it names is run or imported."""
    where = f"{storage.url}/{METADATA_NAME}"
    size = storage.size(METADATA_NAME)
    if size > MAX_METADATA_BYTES:
        raise CorruptError(f"{where}: {size} bytes is more than any checkpoint needs")
    content = load(storage.read(METADATA_NAME), ALLOWED_GLOBALS, where)
    try:
        return _parse(content)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptError(f"{where}: not the metadata of a checkpoint: {error!r}") from error


def _parse(content: Any) -> ForeignMetadata:
    state = _state(content, "Metadata")
    tensors, objects = {}, []
    for key, value in _dict(state["state_dict_metadata"]).items():
        if value.kind == _CLASSES + "BytesStorageMetadata":
            objects.append(_text(key))
        else:
            tensors[_text(key)] = _parse_tensor(value)
    stored = _dict(state["storage_data"]).items()
    entries = tuple(_parse_entry(index, info) for index, info in stored)
    paths = {_text(k): _path(v) for k, v in (_dict(state.get("planner_data") or {})).items()}
    metadata = ForeignMetadata(tensors, tuple(objects), entries, paths)
    _check_complete(metadata)
    return metadata


def _parse_tensor(value: Any) -> ForeignTensor:
    state = _state(value, "TensorStorageMetadata")
    properties = state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    chunks = {}
    for chunk in state["chunks"]:
        box = _state(chunk, "ChunkStorageMetadata")
        chunks[_size(box["offsets"])] = _size(box["sizes"])
    if len(chunks) != len(state["chunks"]):
        raise ValueError("two chunks of a tensor at one place")
    return ForeignTensor(dtype.kind.removeprefix("torch."), _size(state["size"]), chunks)


def _parse_entry(index: Any, info: Any) -> StoredEntry:
    where = _state(index, "MetadataIndex")
    place = info.state
    if info.kind != _STORAGE_INFO or not isinstance(place, dict):
        raise ValueError(f"{_what(info)} where a place in a file should be")
    if place.get("transform_descriptors"):
        raise IncompatibleError(
            f"{where['fqn']!r} was written through {place['transform_descriptors']}; "
            "load the checkpoint with torch, and save it without stream transforms"
        )
    file = _text(place["relative_path"])
    problem = name_problem(file)
    if problem is not None:
        raise ValueError(f"file name {file!r} {problem}")
    offsets = where.get("offset")
    return StoredEntry(
        _text(where["fqn"]),
        None if offsets is None else _size(offsets),
        file,
        _count(place["offset"]),
        _count(place["length"]),
    )


def _check_complete(metadata: ForeignMetadata) -> None:
    """Every chunk that is announced is stored."""
    stored = {(entry.key, entry.offsets) for entry in metadata.entries}
    for key, tensor in metadata.tensors.items():
        for offsets in tensor.chunks:
            if (key, offsets) not in stored:
                raise ValueError(f"chunk {offsets} of tensor {key!r} is stored nowhere")


def _state(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind != _CLASSES + name:
        raise TypeError(f"{_what(value)} where {name} should be")
    return _dict(value.state or {})


def _what(value: Any) -> str:
    """A value of unknown depth and size, for a message."""
    return value.kind if isinstance(value, Record) else f"a {type(value).__name__}"


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{_what(value)} where a dict should be")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_what(value)} where text should be")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{_what(value)} where a count should be")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Record) or value.kind != "torch.Size":
        raise TypeError(f"{_what(value)} where a size should be")
    (numbers,) = value.arguments or ((),)
    return tuple(_count(number) for number in numbers)


def _path(value: Any) -> ObjectPath:
    if not isinstance(value, tuple) or not all(isinstance(part, str | int) for part in value):
        raise TypeError(f"{_what(value)} where a path into a state dict should be")
    return value


# ---------------------------------------------------------------------------- as if it were ours


def foreign_manifest(storage: Storage, foreign: ForeignMetadata) -> Manifest:
    """A manifest of what is there: plain tensors, no topology, file checksums empty (unknown)."""
    listed = {file.name: file for file in storage.walk()}
    created = datetime.fromtimestamp(listed[METADATA_NAME].modified, UTC)
    # What is announced must be there; a file may hold more (an object, another writer's padding).
    sizes = {METADATA_NAME: listed[METADATA_NAME].size}
    for entry in foreign.entries:
        here = listed[entry.file].size if entry.file in listed else 0
        sizes[entry.file] = max(sizes.get(entry.file, here), entry.offset + entry.length)
    parameters = _possible_parameters(foreign.tensors)
    return Manifest(
        created=created.isoformat(timespec="seconds"),
        producer={"torch.distributed.checkpoint": ""},
        topology=Topology(1, ()),
        tensors={key: _tensor_entry(key, foreign, parameters) for key in foreign.tensors},
        files=tuple(FileEntry(name, size, "") for name, size in sorted(sizes.items())),
        indexes=(),
    )


def _tensor_entry(key: str, foreign: ForeignMetadata, parameters: Collection[str]) -> TensorEntry:
    tensor = foreign.tensors[key]
    optimizer, parameter, state_key = _optimizer_state(key, foreign.paths.get(key, ()), parameters)
    return TensorEntry(
        tensor.dtype,
        tensor.shape,
        optimizer=optimizer,
        parameter=parameter,
        state_key=state_key,
    )


def _possible_parameters(keys: Iterable[str]) -> set[str]:
    """What may be a parameter's FQN: every key, with and without the name it was saved under."""
    return {name for key in keys for name in (key, key.partition(".")[2]) if name}


def _optimizer_state(
    key: str, path: ObjectPath, parameters: Collection[str]
) -> tuple[str, str, str] | tuple[None, None, None]:
    """Optimizer, parameter and state key of a tensor, if it is optimizer state keyed by FQN.

    It is known by its place in the state dict, (name, 'state', FQN, state key); or, where the
    optimizer's own dict was flat, by its key, if that names one of the `parameters`.
    """
    if len(path) == 4 and path[1] == "state" and isinstance(path[2], str):
        return str(path[0]), path[2], str(path[3])
    match = _FLAT_STATE.fullmatch(key)
    if match is not None and match[2] in parameters:
        return match[1] or "optimizer", match[2], match[3]
    return None, None, None


def read_indexes(storage: Storage, foreign: ForeignMetadata) -> Iterator[Index]:
    """One index a data file, from the headers of its archives; XXH3-128 is empty (unknown).

    CorruptError for a damaged archive or one that is not what `.metadata` says; IncompatibleError
    for a tensor that is not stored in row-major order.
    """
    by_file: dict[str, list[StoredEntry]] = {}
    for entry in foreign.entries:
        if entry.key in foreign.tensors:
            by_file.setdefault(entry.file, []).append(entry)
    for writer, file in enumerate(sorted(by_file)):
        entries = sorted(by_file[file], key=lambda entry: entry.offset)
        yield Index(writer, tuple(read_chunk(storage, foreign, entry) for entry in entries))


def read_chunk(storage: Storage, foreign: ForeignMetadata, entry: StoredEntry) -> ChunkEntry:
    """One chunk of a tensor, from the headers of its archive. Errors as `read_indexes`."""
    tensor = foreign.tensors[entry.key]
    offsets = (0,) * len(tensor.shape) if entry.offsets is None else entry.offsets
    sizes = tensor.chunks.get(offsets)
    raw = TorchArchive(storage, entry.file, entry.offset, entry.length).tensor()
    if (raw.dtype, raw.sizes) != (tensor.dtype, sizes):
        raise CorruptError(
            f"{storage.url}/{entry.file}: archive at byte {entry.offset}: {raw.dtype} of sizes "
            f"{raw.sizes}, but {METADATA_NAME} says {tensor.dtype} of {sizes} for chunk "
            f"{offsets} of tensor {entry.key!r}"
        )
    return ChunkEntry(
        key=entry.key,
        offsets=offsets,
        sizes=raw.sizes,
        file=entry.file,
        byte_offset=raw.byte_offset,
        byte_length=raw.byte_length,
        entry_offset=entry.offset,
        entry_length=entry.length,
        crc32=raw.crc32,
        xxh3_128="",
    )


def foreign_objects(storage: Storage, foreign: ForeignMetadata) -> dict[str, Any]:
    """The values that are no tensors (hyperparameters, counters), by key.

    Plain data only: CorruptError, naming key and global, for a value that would need code to load.
    """
    values = {}
    for entry in foreign.entries:
        if entry.key not in foreign.tensors:
            try:
                archive = TorchArchive(storage, entry.file, entry.offset, entry.length)
                values[entry.key] = archive.value()
            except CorruptError as error:
                raise CorruptError(f"object {entry.key!r}: {error}") from error
    return values
