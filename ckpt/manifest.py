"""The manifest: what a checkpoint holds, as JSON that any tool can read. No torch, no pickle.

`manifest.json` is written last and makes a checkpoint committed; it carries its own SHA-256.
`index-NNNNN.json`, one per writer, says where each chunk lies and gives its checksums.
"""

from __future__ import annotations

from typing import Any

import msgspec

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "hyperopt-ckpt"
FORMAT_VERSION = 1


class Mesh(msgspec.Struct, frozen=True, omit_defaults=True):
    """A device mesh. `ranks` are global ranks in row-major order; None means 0, 1, 2, ..."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] | None = None


class Topology(msgspec.Struct, frozen=True):
    """Where the checkpoint was written from."""

    world_size: int
    meshes: tuple[Mesh, ...]


class TensorEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor. `mesh` indexes `Topology.meshes` (None: a plain tensor, whole on every rank);
    `placements` are texts such as `R`, `S(0)`, `_S(0,2)`, one per mesh dim. Optimizer state also
    names its parameter and its state key, and, where it differs from `shape`, the parameter's shape
    (mesh and placements are the parameter's); its owners are found in the ownership map."""

    dtype: str
    shape: tuple[int, ...]
    mesh: int | None = None
    placements: tuple[str, ...] = ()
    optimizer: str | None = None
    parameter: str | None = None
    state_key: str | None = None
    parameter_shape: tuple[int, ...] | None = None


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a checkpoint: path inside it, size in bytes, XXH3-128 of all its bytes (hex)."""

    name: str
    size: int
    xxh3_128: str


class GroupEntry(msgspec.Struct, frozen=True):
    """One parameter group of the optimizer that was saved as `optimizer`."""

    optimizer: str
    name: str
    fqns: tuple[str, ...]
    hyperparameters: dict[str, Any]
    step: int | None = None


class SlotEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One parameter, or a half-open row range of it, its owner replica and its cost."""

    fqn: str
    owner: int
    cost: float
    rows: tuple[int, int] | None = None


class OwnershipEntry(msgspec.Struct, frozen=True):
    """The owner map of one distributed optimizer. Advice: loading never needs it."""

    optimizer: str
    member: str
    replica_count: int
    slots: tuple[SlotEntry, ...]


class Parent(msgspec.Struct, frozen=True):
    """The checkpoint that this run resumed from."""

    path: str
    step: int | None
    sha256: str | None


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole manifest. Tensor keys are '<name>.<FQN>' for what was saved as `name`, and
    '<name>.state.<FQN>.<state key>' for optimizer state: nested dicts flattened by dots, as
    torch.distributed.checkpoint does it."""

    format: str = FORMAT_NAME
    format_version: int = FORMAT_VERSION
    step: int | None = None
    created: str
    producer: dict[str, str]
    topology: Topology
    tensors: dict[str, TensorEntry]
    files: tuple[FileEntry, ...]
    indexes: tuple[FileEntry, ...]
    groups: tuple[GroupEntry, ...] = ()
    ownership: tuple[OwnershipEntry, ...] = ()
    absent: tuple[str, ...] = ()
    extras: dict[str, Any] = {}
    parent: Parent | None = None
    sha256: str = ""


class ChunkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One box of one tensor in one file. `byte_offset`/`byte_length` locate the raw row-major
    little-endian data; `entry_offset`/`entry_length` the zip entry (a whole `torch.save` archive)
    around it. `crc32` (of the raw data; also in the zip entry) can be combined over ranges,
    `xxh3_128` (hex) is the strong check."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    byte_offset: int
    byte_length: int
    entry_offset: int
    entry_length: int
    crc32: int
    xxh3_128: str


class Index(msgspec.Struct, frozen=True):
    """`index-NNNNN.json`: the chunks that one writer wrote."""

    writer: int
    chunks: tuple[ChunkEntry, ...]
