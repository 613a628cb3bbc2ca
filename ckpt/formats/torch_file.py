"""One `torch.save` file with a whole state dict, written in one pass and without torch.

Everything but the tensors' data is known before the first byte of it: the pickle comes first, then
the records of the data, each streamed, and the directory last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isal import isal_zlib

from ckpt.data_file import SummedFile
from ckpt.dtypes import DTYPES
from ckpt.formats.pickle_writer import StoredTensor, encode
from ckpt.formats.state_tree import OptimizerKeys, state_tree
from ckpt.formats.target import (
    RECORD_NAME,
    Contents,
    FormatName,
    OpenFile,
    PlannedFile,
    encode_record,
)
from ckpt.formats.zip_records import (
    Record,
    data_descriptor,
    data_header,
    directory,
    small_record,
)
from ckpt.manifest import ChunkEntry, FileEntry, Manifest, TensorEntry
from ckpt.planner import PlannedChunk
from ckpt.storage import Writer
from ckpt.topology import PlacedTensor
from hyperopt.ownership import Box

FILE_NAME = "checkpoint.pt"

LAYOUT_NAME = f"{RECORD_NAME}.layout"
"""Beside the record, in a file that holds a rank's part: which part that is."""

_PREFIX = b"archive/"


@dataclass(frozen=True, slots=True)
class StoredData:
    """A record of tensor data: its size in bytes, and of how many chunks it is made."""

    number: int
    size: int
    chunks: int


class TorchFileWriter:
    """Writes one `torch.save` file: `pickle` first, then `data` in order, chunk after chunk."""

    def __init__(
        self, writer: Writer, name: str, pickle: bytes, data: Sequence[StoredData]
    ) -> None:
        self._file = SummedFile(writer, name)
        self._records: list[Record] = []
        self._data = iter([item for item in data if item.chunks])
        self._open: StoredData | None = None
        self._begun = self._left = self._crc32 = 0
        for part, content in (
            (b"data.pkl", pickle),
            (b"byteorder", b"little"),
            (b"version", b"3\n"),
        ):
            self._put_small(part, content)
        for item in data:
            if not item.chunks:
                self._put_small(b"data/%d" % item.number, b"")

    def _put_small(self, name: bytes, content: bytes) -> None:
        framed, record = small_record(_PREFIX + name, content, self._file.size)
        self._file.put(framed)
        self._records.append(record)

    def begin(self, key: str, box: Box, dtype: str) -> None:
        """Start a chunk: its data follows by `write`, then `end`."""
        if self._open is None:
            self._open = next(self._data)
            self._begun, self._left, self._crc32 = self._file.size, self._open.chunks, 0
            name = _PREFIX + b"data/%d" % self._open.number
            self._file.put(data_header(self._begun, name, self._open.size))
        self._file.begin(key, box, dtype)

    def write(self, block: bytes | memoryview) -> None:
        """Append data to the chunk that was begun."""
        self._file.write(block)

    def end(self) -> ChunkEntry:
        """Finish the chunk, and its record if it was the last in it."""
        entry, item = self._file.end(), self._open
        if item is None or entry.crc32 is None:
            raise ValueError(f"{self._file.name}: no chunk was begun")
        self._crc32 = isal_zlib.crc32_combine(self._crc32, entry.crc32, entry.byte_length)
        self._left -= 1
        if self._left == 0:
            self._file.put(data_descriptor(item.size, self._crc32))
            name = _PREFIX + b"data/%d" % item.number
            self._records.append(Record(name, item.size, self._crc32, self._begun, streamed=True))
            self._open = None
        return entry

    def finish(self) -> FileEntry:
        """Write the directory; the file's entry for the manifest."""
        self._file.put(directory(self._records, self._file.size))
        return self._file.finish()


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """What a file holds of a tensor: sizes of the local tensor, and its chunks, whose data follow
    one another in it."""

    key: str
    dtype: str
    sizes: tuple[int, ...]
    boxes: tuple[Box, ...]


def open_torch_file(
    writer: Writer,
    name: str,
    tensors: Sequence[LocalTensor],
    record: Manifest,
    keys: OptimizerKeys,
    layout: Mapping[str, Any] | None = None,
) -> TorchFileWriter:
    """Begin a file with these tensors; it carries the record, and the layout."""
    leaves, data = {}, []
    for number, tensor in enumerate(tensors):
        leaves[tensor.key] = StoredTensor(number, tensor.dtype, tensor.sizes)
        size = math.prod(tensor.sizes) * DTYPES[tensor.dtype].itemsize
        data.append(StoredData(number, size, len(tensor.boxes)))
    tree = state_tree(record, leaves, keys)
    notes = {RECORD_NAME: encode_record(record), **({LAYOUT_NAME: layout} if layout else {})}
    return TorchFileWriter(writer, name, encode({**tree, **notes}), data)


@dataclass(frozen=True, slots=True)
class TorchFormat:
    """One file as a target; `keys` says how optimizer state names its parameters."""

    keys: OptimizerKeys = "fqn"
    name: FormatName = "torch"

    def order(self, placed: Mapping[str, PlacedTensor]) -> list[str]:
        """As they come."""
        return list(placed)

    def plan(self, contents: Contents) -> tuple[PlannedFile, ...]:
        """Everything in one file."""
        placed = contents.target.placed
        chunks = tuple(
            PlannedChunk(key, Box.whole(tensor.shape))
            for key, tensor in placed.items()
            if math.prod(tensor.shape)
        )
        return (PlannedFile(FILE_NAME, 0, tuple(placed), chunks),)

    def opener(self, file: PlannedFile, record: Manifest) -> OpenFile:
        """Whole tensors."""

        def open_file(writer: Writer, name: str) -> TorchFileWriter:
            tensors = [_whole(key, record.tensors[key]) for key in file.tensors]
            return open_torch_file(writer, name, tensors, record, self.keys)

        return open_file

    def companions(
        self, files: Iterable[PlannedFile], record: Manifest, names: Mapping[str, str]
    ) -> Mapping[str, bytes]:
        """None."""
        return {}


def _whole(key: str, entry: TensorEntry) -> LocalTensor:
    boxes = (Box.whole(entry.shape),) if math.prod(entry.shape) else ()
    return LocalTensor(key, entry.dtype, entry.shape, boxes)
