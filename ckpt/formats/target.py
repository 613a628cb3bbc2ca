"""What a format must say so that a checkpoint can be written in it: its files, and their writers.

The rewriting engine moves boxes of tensors; a format decides which boxes go into which file and in
what order, and how a file is framed. Beside the files of any format lie `manifest.json` and the
index files, so that every command reads all formats alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ckpt.data_file import ChunkWriter, DataFileWriter
from ckpt.manifest import Manifest, encode_manifest
from ckpt.planner import PlannedChunk, plan_writes
from ckpt.storage import Writer
from ckpt.topology import PlacedTensor, StateOf, Target

FormatName = Literal["dcp", "ranks", "torch", "safetensors"]
FORMATS: tuple[FormatName, ...] = ("dcp", "ranks", "torch", "safetensors")

RECORD_NAME = "hyperopt-ckpt"
"""Under this name a file of a foreign format carries the manifest, without files, as text."""

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""By these a file is taken for one that `torch.save` wrote."""

SINGLE_FILE_SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
"""By these a path names a file of a known format rather than a directory."""

OpenFile = Callable[[Writer, str], ChunkWriter]
"""Makes a format's writer for a fresh file, given the file's name inside the checkpoint."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One data file of a target: who writes it, all its tensors in order (also those without
    elements), and the chunks of their data in the same order. `copies` are chunks that another
    file has too and that the index lists there."""

    name: str
    writer: int
    tensors: tuple[str, ...]
    chunks: tuple[PlannedChunk, ...]
    copies: frozenset[PlannedChunk] = frozenset()


@dataclass(frozen=True, slots=True)
class Contents:
    """What is to be written: the tensors on the target, and which of them are optimizer state."""

    target: Target
    states: Mapping[str, StateOf]


class TargetFormat(Protocol):
    """A format as a target."""

    @property
    def name(self) -> FormatName:
        """Its name."""

    def order(self, placed: Mapping[str, PlacedTensor]) -> list[str]:
        """The order in which tensors lie in files."""

    def plan(self, contents: Contents) -> tuple[PlannedFile, ...]:
        """The files. Raises UsageError or IncompatibleError for what the format cannot hold."""

    def opener(self, file: PlannedFile, record: Manifest) -> OpenFile:
        """How one of these files is written. `record` is the new manifest, still without files.
        What is large is made when the file opens: all files are known long before they are open."""

    def companions(
        self, files: Iterable[PlannedFile], record: Manifest, names: Mapping[str, str]
    ) -> Mapping[str, bytes]:
        """Small files beside the data: name and contents. `names` gives the final names of the
        planned files."""


@dataclass(frozen=True, slots=True)
class DcpFormat:
    """The format that `save` writes: one `.distcp` file a rank, in load order."""

    name: FormatName = "dcp"

    def order(self, placed: Mapping[str, PlacedTensor]) -> list[str]:
        """As they come."""
        return list(placed)

    def plan(self, contents: Contents) -> tuple[PlannedFile, ...]:
        """What each rank of the target would have written."""
        target = contents.target
        writes = plan_writes(target.placed, target.world_size)
        return tuple(
            PlannedFile(f"r{rank:05d}-0.distcp", rank, tensors_of(chunks), chunks)
            for rank, chunks in enumerate(writes.ranks)
            if chunks
        )

    def opener(self, file: PlannedFile, record: Manifest) -> OpenFile:
        """Archives need nothing but their own chunk."""
        return DataFileWriter

    def companions(
        self, files: Iterable[PlannedFile], record: Manifest, names: Mapping[str, str]
    ) -> Mapping[str, bytes]:
        """None: `.metadata` is written at the commit."""
        return {}


def tensors_of(chunks: Iterable[PlannedChunk]) -> tuple[str, ...]:
    """The tensors of chunks, each once, in order."""
    return tuple(dict.fromkeys(chunk.key for chunk in chunks))


def encode_record(record: Manifest) -> str:
    """A manifest without files as text, for a file of another format to carry."""
    return encode_manifest(record).decode()
