"""Finds out what a checkpoint without a manifest is, and makes a manifest and indexes for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from ckpt.errors import UsageError
from ckpt.formats.dcp_objects import full_manifest, with_model_name
from ckpt.formats.dcp_reader import read_foreign, read_indexes
from ckpt.formats.ranks import is_file_name, read_ranks
from ckpt.formats.safetensors import INDEX_SUFFIX, SUFFIX
from ckpt.formats.safetensors_reader import read_safetensors
from ckpt.formats.target import TORCH_SUFFIXES, FormatName
from ckpt.formats.torch_reader import read_torch
from ckpt.manifest import METADATA_NAME, Index, Manifest
from ckpt.storage import Storage
from hyperopt.ownership import MeshSpec


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a checkpoint of another program does not say: the names of parameters that optimizers
    number, in that order, and the mesh on which per-rank files were written."""

    parameter_order: tuple[str, ...] = ()
    mesh: MeshSpec | None = None


def parse_parameter_order(text: str, where: str) -> tuple[str, ...]:
    """Names of parameters: a JSON list, or one a line. UsageError for anything else."""
    if text.lstrip().startswith("["):
        try:
            names = msgspec.json.decode(text, type=list[str])
        except msgspec.MsgspecError as error:
            raise UsageError(f"{where}: not a JSON list of names: {error}") from None
    else:
        names = [line.strip() for line in text.splitlines() if line.strip()]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None or not names:
        what = "names nothing" if twice is None else f"names {twice!r} twice"
        raise UsageError(f"{where}: {what}; give every parameter once, in the optimizer's order")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A checkpoint without a manifest: its format, and what a manifest would say. Where its chunks
    lie is read when it is asked for; checksums of files are empty, unknown ones of chunks too."""

    format: FormatName
    manifest: Manifest
    read_indexes: Callable[[], Iterable[Index]]


def open_foreign(
    storage: Storage, options: SourceOptions, only: str | None = None
) -> ForeignCheckpoint | None:
    """The checkpoint of another program in `storage`, or of its file `only`; None if there is none.

    A `.metadata` means torch.distributed.checkpoint; `*.safetensors` and their index, safetensors;
    one file of `TORCH_SUFFIXES` a state dict, several one a rank. Errors as the readers'.
    """
    names = [only] if only is not None else _files(storage)
    if METADATA_NAME in names:
        return _open_dcp(storage)
    if any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        chosen = [name for name in names if name.endswith((SUFFIX, INDEX_SUFFIX))]
        manifest, indexes = read_safetensors(storage, chosen)
        return ForeignCheckpoint("safetensors", manifest, lambda: indexes)
    files = [name for name in names if name.endswith(TORCH_SUFFIXES)]
    if not files:
        return None
    if len(files) == 1 and not is_file_name(files[0]):
        manifest, indexes = read_torch(storage, files[0], options.parameter_order)
        return ForeignCheckpoint("torch", manifest, lambda: indexes)
    manifest, indexes = read_ranks(storage, files, options.parameter_order, options.mesh)
    return ForeignCheckpoint("ranks", manifest, lambda: indexes)


def _files(storage: Storage) -> list[str]:
    return [file.name for file in storage.list() if not file.is_directory]


def _open_dcp(storage: Storage) -> ForeignCheckpoint:
    foreign = with_model_name(read_foreign(storage))
    manifest = full_manifest(storage, foreign)
    return ForeignCheckpoint("dcp", manifest, lambda: read_indexes(storage, foreign))
