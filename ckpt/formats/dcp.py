"""Stock torch.distributed.checkpoint, both ways: `.metadata` files that it reads, and its own."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping
from functools import cache

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.dtypes import DTYPES
from ckpt.errors import IncompatibleError
from ckpt.formats.dcp_reader import ForeignMetadata, read_foreign, read_indexes
from ckpt.manifest import METADATA_NAME, Index, TensorEntry
from ckpt.storage import Storage

__all__ = ["METADATA_NAME", "encode_metadata", "foreign_indexes", "read_metadata"]

_PROTOCOL = 4
"""Pickle protocol of `.metadata`: every Python that torch supports reads it."""


def encode_metadata(
    tensors: Mapping[str, TensorEntry], indexes: Iterable[Index], names: Collection[str] = ()
) -> bytes:
    """The contents of `.metadata`, with which stock `torch.distributed.checkpoint` reads the
    checkpoint: no values, only where each chunk lies.

    `names` are those under which objects were saved ('model', 'optimizer'): torch's tools that
    rebuild a nested state dict (`dcp_to_torch_save`) then nest below them as it was saved.
    """
    size, properties = cache(torch.Size), cache(_properties)
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in tensors}
    stored = {}
    for index in indexes:
        for chunk in index.chunks:
            offsets = size(chunk.offsets)
            place = MetadataIndex(chunk.key, offsets, len(chunks[chunk.key]))
            chunks[chunk.key].append(ChunkStorageMetadata(offsets, size(chunk.sizes)))
            stored[place] = _StorageInfo(chunk.file, chunk.entry_offset, chunk.entry_length)
    state: dict[str, STORAGE_TYPES] = {
        key: TensorStorageMetadata(properties(entry.dtype), size(entry.shape), chunks[key])
        for key, entry in tensors.items()
    }
    paths = {key: _path(key, entry, names) for key, entry in tensors.items()}
    metadata = Metadata(state, paths, stored, StorageMeta(), CURRENT_DCP_VERSION)
    return pickle.dumps(metadata, protocol=_PROTOCOL)


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, DTYPES[dtype].name))


def _path(key: str, entry: TensorEntry, names: Collection[str]) -> tuple[str, ...]:
    """Where a tensor lies in the nested state dict that was saved."""
    if entry.optimizer is not None and entry.parameter is not None and entry.state_key is not None:
        return (entry.optimizer, "state", entry.parameter, entry.state_key)
    name, dot, fqn = key.partition(".")
    return (name, fqn) if dot and name in names else (key,)


def read_metadata(storage: Storage) -> Metadata:
    """`.metadata` as torch's own classes, built from the checked content of the pickle, which is
    never unpickled as such. Of a tensor's properties only the dtype is kept; torch has deprecated
    the others. Errors as `ckpt.formats.dcp_reader.read_foreign`."""
    foreign = read_foreign(storage)
    state: dict[str, STORAGE_TYPES] = {key: BytesStorageMetadata() for key in foreign.objects}
    for key, tensor in foreign.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in tensor.chunks.items()
        ]
        properties = TensorProperties(dtype=_dtype(key, tensor.dtype))
        state[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    stored = {
        MetadataIndex(entry.key, entry.offsets): _StorageInfo(
            entry.file, entry.offset, entry.length
        )
        for entry in foreign.entries
    }
    return Metadata(state, dict(foreign.paths), stored, StorageMeta(), CURRENT_DCP_VERSION)


def _dtype(key: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise IncompatibleError(f"tensor {key!r} has dtype {name!r}, which is not supported")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def foreign_indexes(storage: Storage, foreign: ForeignMetadata | None = None) -> list[Index]:
    """Where the chunks of a checkpoint without manifest lie; see `dcp_reader.read_indexes`."""
    return list(read_indexes(storage, foreign or read_foreign(storage)))
