"""`.metadata` of stock torch.distributed.checkpoint as its own classes, without unpickling."""

from __future__ import annotations

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
from ckpt.manifest import METADATA_NAME, Index
from ckpt.storage import Storage

__all__ = ["METADATA_NAME", "foreign_indexes", "read_metadata"]


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
