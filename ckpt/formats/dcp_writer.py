"""The `.metadata` file of stock torch.distributed.checkpoint, written without torch.

It is a pickle of torch's metadata classes. Importing torch only to write it would cost a tool that
needs torch for nothing else two seconds and two hundred megabytes, so the pickle is put together
here, by its opcodes. `ckpt.formats.dcp` has the same by torch's own classes; a test holds both
against each other.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping

from ckpt.formats.pickle_writer import pickle_integer
from ckpt.manifest import ChunkEntry, Index, TensorEntry

_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"

_NONE, _FALSE = b"N", b"\x89"
_EMPTY_DICT, _EMPTY_LIST, _EMPTY_TUPLE = b"}", b"]", b")"


def encode_metadata(
    tensors: Mapping[str, TensorEntry], indexes: Iterable[Index], names: Collection[str] = ()
) -> bytes:
    """The contents of `.metadata`, with which stock `torch.distributed.checkpoint` reads the
    checkpoint: no values, only where each chunk lies.

    `names` are those under which objects were saved ('model', 'optimizer'): torch's tools that
    rebuild a nested state dict then nest below them as it was saved.
    """
    chunks: dict[str, list[ChunkEntry]] = {key: [] for key in tensors}
    for index in indexes:
        for chunk in index.chunks:
            chunks[chunk.key].append(chunk)
    pickle = _Pickle()
    out = [b"\x80\x04", pickle.begin("Metadata"), pickle.text("state_dict_metadata")]
    out += [_EMPTY_DICT, b"("]
    for key, entry in tensors.items():
        out += [pickle.text(key), pickle.tensor(entry, chunks[key])]
    out += [b"u", pickle.text("planner_data"), _EMPTY_DICT, b"("]
    for key, entry in tensors.items():
        out += [pickle.text(key), b"(", *map(pickle.text, _path(key, entry, names)), b"t"]
    out += [b"u", pickle.text("storage_data"), _EMPTY_DICT, b"("]
    for own in chunks.values():
        out += [pickle.stored(chunk, number) for number, chunk in enumerate(own)]
    out += [b"u", pickle.text("storage_meta"), pickle.storage_meta()]
    out += [pickle.text("version"), pickle.text(_VERSION), b"ub."]
    return b"".join(out)


def _path(key: str, entry: TensorEntry, names: Collection[str]) -> tuple[str, ...]:
    """Where a tensor lies in the nested state dict that was saved."""
    if entry.optimizer is not None and entry.parameter is not None and entry.state_key is not None:
        return (entry.optimizer, "state", entry.parameter, entry.state_key)
    name, dot, fqn = key.partition(".")
    return (name, fqn) if dot and name in names else (key,)


class _Pickle:
    """Snippets of a pickle, in the order in which they are asked for.

    What occurs again (texts, classes, sizes) is written once and then referred to by its number, so
    snippets must be put into the pickle in that same order.
    """

    def __init__(self) -> None:
        self._known: dict[object, bytes] = {}

    def _shared(self, what: object, definition: bytes) -> bytes:
        """Write `definition` and number it; later, see `_recall`."""
        number = struct.pack("<I", len(self._known))
        self._known[what] = b"j" + number
        return definition + b"r" + number

    def text(self, text: str) -> bytes:
        """A text."""
        known = self._known.get(text)
        if known is not None:
            return known
        data = text.encode()
        return self._shared(text, b"X" + struct.pack("<I", len(data)) + data)

    def _named(self, module: str, name: str) -> bytes:
        """A class or function."""
        known = self._known.get((module, name))
        return known or self._shared((module, name), f"c{module}\n{name}\n".encode())

    def _size(self, sizes: tuple[int, ...]) -> bytes:
        """A torch.Size."""
        known = self._known.get(sizes)
        if known is not None:
            return known
        numbers = b"".join(map(pickle_integer, sizes))
        return self._shared(sizes, self._named("torch", "Size") + b"(" + numbers + b"t\x85R")

    def begin(self, kind: str, module: str = _METADATA) -> bytes:
        """An object without arguments, and the start of its attributes; they end with `ub`."""
        return self._named(module, kind) + _EMPTY_TUPLE + b"\x81" + _EMPTY_DICT + b"("

    def tensor(self, entry: TensorEntry, chunks: Iterable[ChunkEntry]) -> bytes:
        """A TensorStorageMetadata."""
        parts = [self.begin("TensorStorageMetadata"), self.text("properties")]
        parts += [self._properties(entry.dtype), self.text("size"), self._size(entry.shape)]
        parts += [self.text("chunks"), _EMPTY_LIST, b"("]
        for chunk in chunks:
            parts += [self.begin("ChunkStorageMetadata"), self.text("offsets")]
            parts += [self._size(chunk.offsets), self.text("sizes"), self._size(chunk.sizes), b"ub"]
        return b"".join([*parts, b"eub"])

    def _properties(self, dtype: str) -> bytes:
        """A TensorProperties: a strided tensor of a dtype, nothing else about it."""
        what = ("properties", dtype)
        known = self._known.get(what)
        if known is not None:
            return known
        parts = [self._named(_METADATA, "TensorProperties"), _EMPTY_TUPLE, b"\x81("]
        parts += [self._named("torch", dtype), self._named("torch.serialization", "_get_layout")]
        parts += [self.text("torch.strided"), b"\x85R", _FALSE]
        parts += [
            self._named(_METADATA, "_MEM_FORMAT_ENCODING"),
            pickle_integer(0),
            b"\x85R",
            _FALSE,
        ]
        return self._shared(what, b"".join([*parts, b"tb"]))

    def stored(self, chunk: ChunkEntry, number: int) -> bytes:
        """Where the `number`-th chunk of its tensor is stored: a MetadataIndex and its place."""
        parts = [self.begin("MetadataIndex"), self.text("fqn"), self.text(chunk.key)]
        parts += [self.text("offset"), self._size(chunk.offsets)]
        parts += [self.text("index"), pickle_integer(number), b"ub"]
        parts += [self.begin("_StorageInfo", _STORAGE), self.text("relative_path")]
        parts += [self.text(chunk.file), self.text("offset"), pickle_integer(chunk.entry_offset)]
        parts += [self.text("length"), pickle_integer(chunk.entry_length), b"ub"]
        return b"".join(parts)

    def storage_meta(self) -> bytes:
        """A StorageMeta that says nothing."""
        parts = [self.begin("StorageMeta")]
        for name in ("checkpoint_id", "save_id", "load_id"):
            parts += [self.text(name), _NONE]
        return b"".join([*parts, self.text("modules"), _EMPTY_LIST, b"ub"])
