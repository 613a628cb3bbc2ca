"""`.metadata` as torch's own classes and pickler write it, to compare `dcp_writer` with."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping
from functools import cache

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.dtypes import DTYPES
from ckpt.manifest import Index, TensorEntry


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
    return pickle.dumps(metadata, protocol=4)


def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, DTYPES[dtype].name))


def _path(key: str, entry: TensorEntry, names: Collection[str]) -> tuple[str, ...]:
    """Where a tensor lies in the nested state dict that was saved."""
    if entry.optimizer is not None and entry.parameter is not None and entry.state_key is not None:
        return (entry.optimizer, "state", entry.parameter, entry.state_key)
    name, dot, fqn = key.partition(".")
    return (name, fqn) if dot and name in names else (key,)
