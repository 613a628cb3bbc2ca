"""Small manifests and whole checkpoints, for tests to read and to damage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ckpt.commit import PendingCheckpoint, check_coverage
from ckpt.data_file import DataFileWriter
from ckpt.formats.dcp_writer import encode_metadata
from ckpt.manifest import (
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
    write_index,
)
from ckpt.storage import Storage
from hyperopt.ownership import Box

HASH = "0123456789abcdef" * 2


def sample_manifest() -> Manifest:
    """A 2x2 mesh with one sharded weight, its momentum, a 0-D step and a plain buffer."""
    state: dict[str, Any] = {
        "optimizer": "optimizer",
        "parameter": "w",
        "mesh": 0,
        "placements": ("R", "S(0)"),
    }
    return Manifest(
        step=7,
        created="2026-01-02T03:04:05Z",
        producer={"hyperopt-ckpt": "0.1.0"},
        topology=Topology(4, (Mesh(("replicate", "shard"), (2, 2)),)),
        tensors={
            "model.w": TensorEntry("float32", (4, 3), 0, ("R", "S(0)")),
            "model.mask": TensorEntry("bool", (2,)),
            "optimizer.state.w.momentum_buffer": TensorEntry(
                "float32", (4, 3), state_key="momentum_buffer", **state
            ),
            "optimizer.state.w.step": TensorEntry(
                "float32", (), state_key="step", parameter_shape=(4, 3), **state
            ),
        },
        files=(FileEntry("r00000-0.distcp", 4096, HASH), FileEntry("extra/rng.json", 2, HASH)),
        indexes=(FileEntry("index-00000.json", 100, HASH),),
        groups=(GroupEntry("optimizer", "0", ("w",), {"lr": 1e-3, "betas": [0.9, 0.95]}, 7),),
        ownership=(OwnershipEntry("optimizer", "", 2, (SlotEntry("w", 1, 12.0, (0, 4)),)),),
        extras={"tokens": 12},
        parent=Parent("s3://bucket/run-6/step-00000001", 1, None),
    )


def sample_index() -> Index:
    """One chunk of `model.w`: its last two rows."""
    chunk = ChunkEntry("model.w", (2, 0), (2, 3), "r00000-0.distcp", 576, 24, 0, 1100, 5, HASH)
    return Index(0, (chunk,))


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of one tensor, and who writes it."""

    key: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    writer: int = 0


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Little-endian row-major bytes of a tensor."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def sample_pieces() -> tuple[dict[str, torch.Tensor], list[Piece]]:
    """A few whole tensors of many kinds, and their pieces over three writers."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(8, 6, generator=generator)
    tensors = {
        "model.weight": weight,
        "model.bias": torch.randn(7, generator=generator).bfloat16(),
        "model.count": torch.tensor(2**40 + 1),
        "model.mask": torch.tensor([True, False, True]),
        "model.nothing": torch.zeros(0, 3),
        "model.bytes": torch.arange(200, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "optimizer.state.weight.step": torch.tensor(123.0),
        "optimizer.state.weight.momentum_buffer": torch.randn(8, 6, generator=generator),
    }
    momentum = tensors["optimizer.state.weight.momentum_buffer"]
    pieces = [
        Piece("model.weight", (0, 0), weight[:5], 0),
        Piece("model.weight", (5, 0), weight[5:, :2], 1),
        Piece("model.weight", (5, 2), weight[5:, 2:], 2),
        Piece("optimizer.state.weight.momentum_buffer", (0, 0), momentum[:, :3], 2),
        Piece("optimizer.state.weight.momentum_buffer", (0, 3), momentum[:, 3:], 1),
    ]
    whole = [key for key in tensors if key not in {piece.key for piece in pieces}]
    pieces += [Piece(k, (0,) * tensors[k].dim(), tensors[k], i % 3) for i, k in enumerate(whole)]
    return tensors, pieces


def tensor_entry(key: str, tensor: torch.Tensor) -> TensorEntry:
    """The manifest's entry of a whole tensor; optimizer state is known by its key."""
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    name, _, rest = key.partition(".state.")
    if not rest:
        return TensorEntry(dtype, shape)
    parameter, _, state_key = rest.rpartition(".")
    return TensorEntry(dtype, shape, optimizer=name, parameter=parameter, state_key=state_key)


def write_pieces(
    pending: PendingCheckpoint, pieces: list[Piece]
) -> tuple[list[Index], list[FileEntry], list[FileEntry]]:
    """Write data and index files as the writers would; their indexes, and the entries of both."""
    indexes, files, index_files = [], [], []
    for writer in sorted({piece.writer for piece in pieces}):
        name = pending.file_name(f"r{writer:05}-0.distcp")
        with pending.storage.create(name) as out:
            file = DataFileWriter(out, name)
            chunks = [
                file.add(
                    piece.key,
                    Box(piece.offsets, tuple(piece.tensor.shape)),
                    str(piece.tensor.dtype).removeprefix("torch."),
                    [raw_bytes(piece.tensor)],
                )
                for piece in pieces
                if piece.writer == writer
            ]
        files.append(file.finish())
        indexes.append(Index(writer, tuple(chunks)))
        index_name = pending.file_name(f"index-{writer:05}.json")
        index_files.append(write_index(pending.storage, index_name, indexes[-1]))
    return indexes, files, index_files


def write_checkpoint(
    root: Storage,
    name: str = "step-00000007",
    token: str = "t0",
    tensors: dict[str, torch.Tensor] | None = None,
    pieces: list[Piece] | None = None,
    producer: str = "test",
) -> Manifest:
    """A whole committed checkpoint below `root`, of `sample_pieces` by default."""
    if tensors is None or pieces is None:
        tensors, pieces = sample_pieces()
    pending = PendingCheckpoint.begin(root, name, token)
    indexes, files, index_files = write_pieces(pending, pieces)
    entries = {key: tensor_entry(key, tensor) for key, tensor in tensors.items()}
    check_coverage(entries, indexes)
    manifest = Manifest(
        step=7,
        created="2026-01-02T03:04:05Z",
        producer={"writer": producer},
        topology=Topology(3, ()),
        tensors=entries,
        files=tuple(files),
        indexes=tuple(index_files),
    )
    metadata = encode_metadata(entries, indexes, ("model", "optimizer"))
    return pending.commit(manifest, metadata)
