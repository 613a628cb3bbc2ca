"""The manifest: what a checkpoint holds, as JSON that any tool can read. No torch, no pickle.

`manifest.json` is written last and makes a checkpoint committed; it carries its own SHA-256.
`index-NNNNN.json`, one per writer, says where each chunk lies and gives its checksums.

Canonical form of a manifest: UTF-8 JSON without insignificant whitespace, members in the order of
the schema, `sha256` last. That digest is taken over the same bytes without the `sha256` member,
so that it can be checked before anything is parsed, and no changed byte goes unnoticed.

`python -m ckpt.manifest` prints the JSON Schema.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from ckpt.errors import CorruptError, IncompatibleError, UsageError
from ckpt.manifest_checks import check_index, check_manifest
from ckpt.schema import (
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    METADATA_NAME,
    ChunkEntry,
    FileEntry,
    GroupEntry,
    Index,
    Manifest,
    Mesh,
    OwnershipEntry,
    Parent,
    SlotEntry,
    TensorEntry,
    Topology,
)

if TYPE_CHECKING:
    from ckpt.storage import Storage

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "MAX_JSON_BYTES",
    "METADATA_NAME",
    "ChunkEntry",
    "FileEntry",
    "GroupEntry",
    "Index",
    "Manifest",
    "Mesh",
    "OwnershipEntry",
    "Parent",
    "SlotEntry",
    "TensorEntry",
    "Topology",
    "check_index",
    "check_manifest",
    "decode_index",
    "decode_manifest",
    "encode_index",
    "encode_manifest",
    "manifest_schema",
    "read_index",
    "read_manifest",
    "write_index",
]

MAX_JSON_BYTES = 256 * 2**20
"""Largest manifest or index that is read: 100,000 tensors need about 20 MiB, so this leaves room
for a million, and a planted file of any size is refused before a byte of it is read."""

_T = TypeVar("_T")

_DIGEST_TAIL = len(',"sha256":""}') + 64


class _Header(msgspec.Struct, frozen=True):
    """The two members that every version of the format has."""

    format: str
    format_version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """The file contents, with `sha256` filled in. UsageError for what JSON cannot hold, or for
    parts that do not fit together: a checkpoint that could not be read back is never written."""
    try:
        check_manifest(manifest, MANIFEST_NAME)
    except CorruptError as error:
        raise UsageError(f"cannot write this manifest: {error}") from None
    data = msgspec.json.encode(msgspec.structs.replace(manifest, sha256=""))
    body = data[: -len(',"sha256":""}')]
    return b'%s,"sha256":"%s"}' % (body, _digest(body).encode())


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check a manifest; `where` names it in errors.

    CorruptError if it is not the bytes that were written, or its parts do not fit together;
    IncompatibleError if it is of another format version.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CorruptError(_too_large(where, len(data)))
    body, tail = data[:-_DIGEST_TAIL], data[-_DIGEST_TAIL:]
    intact = tail == b',"sha256":"%s"}' % _digest(body).encode()
    _check_version(data, where, intact)
    if not intact:
        raise CorruptError(f"{where}: its SHA-256 does not match; the file was damaged or edited")
    manifest = _decode(data, Manifest, where)
    check_manifest(manifest, where)
    return manifest


def _digest(body: bytes) -> str:
    """SHA-256 of the canonical form whose open-ended part is `body`."""
    return hashlib.sha256(body + b"}").hexdigest()


def _check_version(data: bytes, where: str, intact: bool) -> None:
    header = _decode(data, _Header, where)
    if header.format == FORMAT_NAME and header.format_version == FORMAT_VERSION:
        return
    damaged = "" if intact else "; or the file is damaged: its SHA-256 does not match"
    raise IncompatibleError(
        f"{where}: format {header.format!r} version {header.format_version}, but this program "
        f"reads {FORMAT_NAME!r} version {FORMAT_VERSION}: use a matching version{damaged}"
    )


def _decode(data: bytes, kind: type[_T], where: str) -> _T:
    # RecursionError: JSON nested deeper than the parser goes.
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{where}: not a valid {kind.__name__.strip('_')}: {error}") from None


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of the checkpoint in `storage`. NotFoundError if there is none; else as
    `decode_manifest`."""
    return decode_manifest(_read_small(storage, MANIFEST_NAME), f"{storage.url}/{MANIFEST_NAME}")


def _read_small(storage: Storage, name: str) -> bytes:
    size = storage.size(name)
    if size > MAX_JSON_BYTES:
        raise CorruptError(_too_large(f"{storage.url}/{name}", size))
    try:
        return storage.read(name)
    except IsADirectoryError:
        raise CorruptError(
            f"{storage.url}/{name}: is a directory, where a checkpoint has a file"
        ) from None


def _too_large(where: str, size: int) -> str:
    return f"{where}: {size} bytes is more than any checkpoint needs ({MAX_JSON_BYTES})"


def encode_index(index: Index) -> bytes:
    """The contents of an index file."""
    return msgspec.json.encode(index)


def decode_index(data: bytes, where: str) -> Index:
    """Parse an index file. CorruptError if it is none; `check_index` compares it to a manifest."""
    if len(data) > MAX_JSON_BYTES:
        raise CorruptError(_too_large(where, len(data)))
    return _decode(data, Index, where)


def write_index(storage: Storage, name: str, index: Index) -> FileEntry:
    """Write an index file, and return its entry for the manifest."""
    data = encode_index(index)
    with storage.create(name) as writer:
        writer.write(data)
    return FileEntry(name, len(data), xxhash.xxh3_128_hexdigest(data))


def read_index(storage: Storage, entry: FileEntry) -> Index:
    """Read an index file and compare size and XXH3-128. CorruptError, NotFoundError."""
    where = f"{storage.url}/{entry.name}"
    size = storage.size(entry.name)
    if size != entry.size:
        raise CorruptError(f"{where}: {size} bytes, but the manifest says {entry.size}")
    data = _read_small(storage, entry.name)
    if xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128:
        raise CorruptError(f"{where}: its XXH3-128 does not match the manifest; it was damaged")
    return decode_index(data, where)


def manifest_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `manifest.json` and, under `$defs.Index`, of the index files."""
    (manifest, _), definitions = msgspec.json.schema_components(
        (Manifest, Index), ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{FORMAT_NAME} manifest, format version {FORMAT_VERSION}",
        **manifest,
        "$defs": dict(sorted(definitions.items())),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(manifest_schema(), indent=2) + "\n")
