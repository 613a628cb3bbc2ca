"""The manifest that a file of another format carries as text, and a manifest for what carries none.

A converted checkpoint has its own `manifest.json`; the record is for its files when they are moved
without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from ckpt.errors import CorruptError
from ckpt.manifest import FileEntry, GroupEntry, Manifest, TensorEntry, Topology, decode_manifest
from ckpt.storage import Storage


def decode_record(text: str, where: str) -> Manifest:
    """The inverse of `ckpt.formats.target.encode_record`. CorruptError if it is damaged."""
    record = decode_manifest(text.encode(), where)
    return msgspec.structs.replace(record, sha256="")


def foreign_files(storage: Storage, names: Iterable[str]) -> tuple[FileEntry, ...]:
    """Entries of files whose checksums nobody knows."""
    return tuple(FileEntry(name, storage.size(name), "") for name in names)


def modified(storage: Storage, name: str) -> str:
    """When a file was last written, as a manifest says it."""
    directory, _, last = name.rpartition("/")
    found = next(file for file in storage.list(directory) if file.name == last)
    return datetime.fromtimestamp(found.modified, UTC).isoformat(timespec="seconds")


def with_parameter_shapes(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The same with the parameter's shape where that of its state differs (a 0-D `step`): that of
    the tensor of its name, or of another state that has dims."""
    shapes = {key.partition(".")[2]: e.shape for key, e in tensors.items() if e.parameter is None}
    for entry in tensors.values():
        if entry.parameter is not None and entry.shape:
            shapes.setdefault(entry.parameter, entry.shape)
    return {key: _with_shape(entry, shapes) for key, entry in tensors.items()}


def _with_shape(entry: TensorEntry, shapes: Mapping[str, tuple[int, ...]]) -> TensorEntry:
    shape = shapes.get(entry.parameter or "", entry.shape)
    if entry.parameter is None or shape == entry.shape:
        return entry
    return msgspec.structs.replace(entry, parameter_shape=shape)


def made_manifest(
    producer: str,
    created: str,
    tensors: Mapping[str, TensorEntry],
    files: tuple[FileEntry, ...],
    record: Manifest | None = None,
    groups: tuple[GroupEntry, ...] = (),
    extras: Mapping[str, Any] | None = None,
) -> Manifest:
    """A manifest for files without one. With the record that they carry, what that says; the
    tensors must then be the ones it lists (CorruptError names the first that is missing)."""
    if record is None:
        return Manifest(
            created=created,
            producer={producer: ""},
            topology=Topology(1, ()),
            tensors=with_parameter_shapes(tensors),
            files=files,
            indexes=(),
            groups=groups,
            extras=dict(extras or {}),
        )
    for key, entry in record.tensors.items():
        found = tensors.get(key)
        if found is None:
            raise CorruptError(f"tensor {key!r} is recorded, but in none of the files")
        if (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise CorruptError(
                f"tensor {key!r} is recorded as {entry.dtype} of {entry.shape}, but stored as "
                f"{found.dtype} of {found.shape}"
            )
    return msgspec.structs.replace(record, files=files, indexes=())
