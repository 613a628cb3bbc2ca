"""The structs of `manifest.json` and of the index files, with the limits that decoding enforces.

`ckpt.manifest` encodes, decodes and checks them, and exports them all.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MANIFEST_NAME = "manifest.json"
METADATA_NAME = ".metadata"  # by which stock torch.distributed.checkpoint knows a checkpoint
FORMAT_NAME = "hyperopt-ckpt"
FORMAT_VERSION = 1

# Limits, enforced while decoding. They are part of the published schema.
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Dims = Annotated[tuple[Count, ...], Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=4096)]
Xxh3 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class Mesh(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device mesh. `ranks` are global ranks in row-major order; None means 0, 1, 2, ..."""

    names: Annotated[tuple[Text, ...], Meta(max_length=32)]
    sizes: Annotated[tuple[Positive, ...], Meta(max_length=32)]
    ranks: tuple[Count, ...] | None = None


class Topology(msgspec.Struct, frozen=True):
    """Where the checkpoint was written from."""

    world_size: Positive
    meshes: Annotated[tuple[Mesh, ...], Meta(max_length=1024)]


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor. `mesh` indexes `Topology.meshes` (None: a plain tensor, whole on every rank);
    `placements` are texts such as `R`, `S(0)`, `_S(0,2)`, one per mesh dim. Optimizer state also
    names its parameter and its state key, and, where it differs from `shape`, the parameter's shape
    (mesh and placements are the parameter's); its owners are found in the ownership map."""

    dtype: Text
    shape: Dims
    mesh: Count | None = None
    placements: Annotated[tuple[Text, ...], Meta(max_length=32)] = ()
    optimizer: Text | None = None
    parameter: Text | None = None
    state_key: Text | None = None
    parameter_shape: Dims | None = None


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a checkpoint: path inside it, size in bytes, XXH3-128 of all its bytes (hex)."""

    name: Text
    size: Count
    xxh3_128: Xxh3


class GroupEntry(msgspec.Struct, frozen=True):
    """One parameter group of the optimizer that was saved as `optimizer`."""

    optimizer: Text
    name: Text
    fqns: tuple[Text, ...]
    hyperparameters: dict[Text, Any]
    step: Count | None = None


class SlotEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One parameter, or a half-open row range of it, its owner replica and its cost."""

    fqn: Text
    owner: Count
    cost: float
    rows: tuple[Count, Count] | None = None


class OwnershipEntry(msgspec.Struct, frozen=True):
    """The owner map of one distributed optimizer. Advice: loading never needs it."""

    optimizer: Text
    member: Text
    replica_count: Positive
    slots: tuple[SlotEntry, ...]


class Parent(msgspec.Struct, frozen=True):
    """The checkpoint that this run resumed from."""

    path: Text
    step: Count | None
    sha256: Sha256 | None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole manifest. Tensor keys are '<name>.<FQN>' for what was saved as `name`, and
    '<name>.state.<FQN>.<state key>' for optimizer state: nested dicts flattened by dots, as
    torch.distributed.checkpoint does it."""

    format: Text = FORMAT_NAME
    format_version: Count = FORMAT_VERSION
    step: Count | None = None
    created: Text
    producer: dict[Text, Text]
    topology: Topology
    tensors: Annotated[dict[Text, TensorEntry], Meta(max_length=2_000_000)]
    files: Annotated[tuple[FileEntry, ...], Meta(max_length=1_000_000)]
    indexes: Annotated[tuple[FileEntry, ...], Meta(max_length=1_000_000)]
    groups: tuple[GroupEntry, ...] = ()
    ownership: tuple[OwnershipEntry, ...] = ()
    absent: tuple[Text, ...] = ()
    extras: dict[Text, Any] = {}
    parent: Parent | None = None
    sha256: str = ""


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One box of one tensor in one file. `byte_offset`/`byte_length` locate the raw row-major
    little-endian data; `entry_offset`/`entry_length` the zip entry (a whole `torch.save` archive)
    around it, or where there is none the data itself. `crc32` (of the raw data; also in the zip
    entry) can be combined over ranges, `xxh3_128` (hex) is the strong check. In memory, chunks of
    data that came without checksums have None and ''; a checkpoint with a manifest has both."""

    key: Text
    offsets: Dims
    sizes: Dims
    file: Text
    byte_offset: Count
    byte_length: Count
    entry_offset: Count
    entry_length: Count
    crc32: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None
    xxh3_128: Xxh3


class Index(msgspec.Struct, frozen=True):
    """`index-NNNNN.json`: the chunks that one writer wrote."""

    writer: Count
    chunks: tuple[ChunkEntry, ...]
