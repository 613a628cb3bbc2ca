"""safetensors: model weights under their FQNs, so that every tool of that world opens them.

A checkpoint becomes two sets of files: `model*.safetensors`, whose names are the model's own, and
`state*.safetensors` for all other tensors, under their checkpoint keys. A set that is larger than
a shard is split, with a `….safetensors.index.json` as Hugging Face tools write it. What is no
tensor travels in `__metadata__` of the first file.

    8 bytes: length of the header, little-endian
    header: JSON, padded with spaces
    data, tensor after tensor, larger elements first so that each is aligned

The format has no complex numbers in general use, nor two of torch's 8-bit floats: complex tensors
are written as pairs of reals (one more dim of size 2), others as bytes, and `__metadata__` says
which tensors these are.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt.data_file import SummedFile
from ckpt.dtypes import DTYPES
from ckpt.errors import UsageError
from ckpt.formats.target import (
    RECORD_NAME,
    Contents,
    FormatName,
    OpenFile,
    PlannedFile,
    encode_record,
)
from ckpt.manifest import ChunkEntry, FileEntry, Manifest, TensorEntry
from ckpt.planner import PlannedChunk
from ckpt.storage import Writer
from ckpt.topology import PlacedTensor
from hyperopt.ownership import Box

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

MAX_HEADER_BYTES = 100_000_000
"""Largest header, as in the safetensors library: what is larger is read by nobody."""

PREFIX_NAME = f"{RECORD_NAME}.prefix"
"""In `__metadata__`: what stands in front of the names of a file in the checkpoint's keys."""

DTYPES_NAME = f"{RECORD_NAME}.dtypes"
"""In `__metadata__`: JSON of the torch dtypes of tensors that the format itself cannot name."""

DEFAULT_SHARD_BYTES = 5 * 2**30

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""How the format calls the dtypes that it has."""

_REAL = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}

_ALIGNMENT = 64


def stored_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The format's code and shape for a tensor: pairs of reals for complex ones, bytes for what it
    has no code for."""
    if dtype in _REAL:
        return CODES[_REAL[dtype]], (*shape, 2)
    return CODES.get(dtype, "U8"), shape


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The header of a file, length included: names with their dtype and shape, in file order.
    Raises UsageError where it would be too large to be read."""
    exotic = {name: dtype for name, (dtype, _) in tensors.items() if dtype not in CODES}
    notes = {**metadata, **({DTYPES_NAME: json.dumps(exotic)} if exotic else {})}
    header: dict[str, object] = {"__metadata__": {"format": "pt", **notes}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        code, stored = stored_form(dtype, shape)
        end = position + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": code, "shape": stored, "data_offsets": (position, end)}
        position = end
    data = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    data += b" " * (-(len(data) + 8) % _ALIGNMENT)
    if len(data) > MAX_HEADER_BYTES:
        raise UsageError(
            f"a safetensors header of {len(tensors)} tensors needs {len(data)} bytes, but readers "
            f"stop at {MAX_HEADER_BYTES}: write smaller shards (--max-shard-size)"
        )
    return struct.pack("<Q", len(data)) + data


class SafetensorsWriter:
    """Writes one file: the header at once, then the tensors' data in the order of the header."""

    def __init__(self, writer: Writer, name: str, header: bytes) -> None:
        self._file = SummedFile(writer, name)
        self._file.put(header)

    def begin(self, key: str, box: Box, dtype: str) -> None:
        """Start a tensor: its data follows by `write`, then `end`."""
        self._file.begin(key, box, dtype)

    def write(self, block: bytes | memoryview) -> None:
        """Append data to the tensor that was begun."""
        self._file.write(block)

    def end(self) -> ChunkEntry:
        """Finish the tensor."""
        return self._file.end()

    def finish(self) -> FileEntry:
        """The file's entry for the manifest."""
        return self._file.finish()


@dataclass(frozen=True, slots=True)
class SafetensorsFormat:
    """safetensors as a target. `weights` is the object whose tensors are the model's; files have at
    most `shard_bytes` of data, if no tensor is larger."""

    weights: str = "model"
    shard_bytes: int = DEFAULT_SHARD_BYTES
    name: FormatName = "safetensors"

    def __post_init__(self) -> None:
        if self.shard_bytes < 1:
            raise UsageError(f"a shard of {self.shard_bytes} bytes holds nothing")

    def order(self, placed: Mapping[str, PlacedTensor]) -> list[str]:
        """Larger elements first, so that every tensor is aligned to its elements."""
        return sorted(placed, key=lambda key: -_element_bytes(placed[key].dtype))

    def plan(self, contents: Contents) -> tuple[PlannedFile, ...]:
        """Whole tensors, the model's apart from the others, in shards."""
        placed = contents.target.placed
        order = {key: number for number, key in enumerate(self.order(placed))}
        weights = [key for key in placed if self._is_weight(key) and key not in contents.states]
        rest = [key for key in placed if key not in set(weights)]
        files: list[PlannedFile] = []
        for stem, keys in (("model", weights), ("state", rest)):
            shards = list(_shards(keys, placed, self.shard_bytes))
            for number, shard in enumerate(shards):
                own = tuple(sorted(shard, key=order.__getitem__))
                chunks = tuple(
                    PlannedChunk(key, Box.whole(placed[key].shape))
                    for key in own
                    if math.prod(placed[key].shape)
                )
                name = _shard_name(stem, number, len(shards))
                files.append(PlannedFile(name, len(files), own, chunks))
        return tuple(files)

    def _is_weight(self, key: str) -> bool:
        return key.startswith(f"{self.weights}.")

    def _prefix(self, file: PlannedFile) -> str:
        return f"{self.weights}." if file.name.startswith("model") else ""

    def opener(self, file: PlannedFile, record: Manifest) -> OpenFile:
        """The first file carries the record."""

        def open_file(writer: Writer, name: str) -> SafetensorsWriter:
            prefix = self._prefix(file)
            metadata = {PREFIX_NAME: prefix}
            if file.writer == 0:
                metadata[RECORD_NAME] = encode_record(record)
            own = {key.removeprefix(prefix): _form(record.tensors[key]) for key in file.tensors}
            return SafetensorsWriter(writer, name, encode_header(own, metadata))

        return open_file

    def companions(
        self, files: Iterable[PlannedFile], record: Manifest, names: Mapping[str, str]
    ) -> Mapping[str, bytes]:
        """An index for each set that has several shards."""
        sets: dict[str, list[PlannedFile]] = {}
        for file in files:
            sets.setdefault(file.name.split(".")[0].partition("-")[0], []).append(file)
        return {
            stem + INDEX_SUFFIX: self._index(shards, record, names)
            for stem, shards in sets.items()
            if len(shards) > 1
        }

    def _index(
        self, shards: Iterable[PlannedFile], record: Manifest, names: Mapping[str, str]
    ) -> bytes:
        weight_map = {}
        total = 0
        for shard in shards:
            file = names[shard.name].rpartition("/")[2]
            for key in shard.tensors:
                weight_map[key.removeprefix(self._prefix(shard))] = file
                total += _tensor_bytes(record.tensors[key])
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return json.dumps(content, indent=2, ensure_ascii=False).encode()


def _form(entry: TensorEntry) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, entry.shape


def _element_bytes(dtype: str) -> int:
    return DTYPES[_REAL.get(dtype, dtype)].itemsize


def _tensor_bytes(tensor: TensorEntry | PlacedTensor) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _shards(
    keys: Iterable[str], placed: Mapping[str, PlacedTensor], limit: int
) -> Iterable[list[str]]:
    """Keys in order, in groups of at most `limit` bytes; a larger tensor is alone."""
    shard: list[str] = []
    size = 0
    for key in keys:
        own = _tensor_bytes(placed[key])
        if shard and size + own > limit:
            yield shard
            shard, size = [], 0
        shard.append(key)
        size += own
    if shard:
        yield shard


def _shard_name(stem: str, number: int, count: int) -> str:
    """`model.safetensors`, or `model-00001-of-00003.safetensors`."""
    return f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}{SUFFIX}"
