"""What `benchmarks.checkpoint` counts, and the planning of many tensors; all of it on ranks."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.checkpoint_ranks import MIB, Training, timed
from benchmarks.report import Result
from ckpt import load, open_checkpoint, save
from ckpt.coordinator import open_coordinator
from ckpt.state.capture import PlanCache, capture_state

UNCHANGED = 5
"""How often the planning of an unchanged state is timed."""


class CountingReader(FileSystemReader):
    """Stock's reader; `count` is how many bytes `read` has returned."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _CountingFiles()

    @property
    def count(self) -> int:
        """Bytes so far, of data files."""
        assert isinstance(self.fs, _CountingFiles)
        return self.fs.count


class _CountingFiles(FileSystem):
    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def create_stream(
        self, path: str | PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with _CountingFile(path, mode) as file:
            yield io.BufferedReader(file) if Path(path).suffix == ".distcp" else file
            self.count += file.count if Path(path).suffix == ".distcp" else 0


class _CountingFile(io.FileIO):
    count = 0

    def readinto(self, buffer: Any) -> int:
        done = super().readinto(buffer) or 0
        self.count += done
        return done


def byte_results(directory: Path, nbytes: int) -> list[Result]:
    """Bytes on disk, and bytes of optimizer state that a load reads. Runs on four ranks."""
    width = 1024
    training = Training(directory, max(1, round(nbytes / (3 * 4 * width * width))), width)
    ours, theirs = training.fresh("ours"), training.fresh("stock")
    save(ours, coordinator=training.coordinator, **training.state)
    training.stock_save_to(theirs)
    files = open_checkpoint(ours).manifest.files
    data = sum(file.size for file in files if file.name.endswith(".distcp"))
    report = load(ours, coordinator=training.coordinator, optimizer=training.optimizer)
    reader = CountingReader(theirs)
    dcp_load({"optimizer": training.stock_state()["optimizer"]}, storage_reader=reader)
    stock_read = training.coordinator.all_gather_object(reader.count)
    return [
        _count("data files", data, training.unique_bytes, "unique tensor bytes", 1.01),
        _count("optimizer bytes read, R = 2", sum(report.bytes_read), sum(stock_read), "dcp", 0.5),
        *metadata_results(directory),
    ]


def _count(measure: str, ours: int, rival: int, name: str, reach: float) -> Result:
    ratio = round(ours / rival, 4)
    return Result(measure, ours / MIB, rival / MIB, name, "MiB", ratio, "lower", reach)


def metadata_results(directory: Path) -> list[Result]:
    """200 AdamW parameters on 2 x 2: bytes that are not tensor data, and of the group table."""
    training = Training(directory / "many", 200, 8)
    path = training.fresh("many")
    save(path, coordinator=training.coordinator, **training.state)
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    data = sum(file.stat().st_size for file in path.glob("*.distcp"))
    private = sum(file.stat().st_size for file in (path / "extra").iterdir())
    groups = len(msgspec.json.encode(open_checkpoint(path).manifest.groups))
    return [
        _limit("metadata of 200 AdamW parameters", (total - data - private) / 1000, 600, "kB"),
        _limit("their group table", groups / 1000, 5, "kB"),
    ]


def planning_results(count: int) -> list[Result]:
    """Agreeing on who writes what of `count` DTensors, at first and when nothing has changed. Runs
    on four ranks."""
    torch.set_num_threads(1)
    coordinator, cache = open_coordinator(), PlanCache()
    state = {"model": _many_tensors(count)}

    def plan() -> float:
        return timed(lambda: capture_state(state, coordinator, cache))

    first = plan()
    again = median([plan() for _ in range(UNCHANGED)])
    return [
        _limit(f"planning {count:,} tensors", first, 10, "s"),
        _limit(f"planning {count:,} unchanged tensors", again, 1, "s"),
    ]


def _many_tensors(count: int) -> nn.Module:
    """A module of small matrices, sharded by rows on 2 replicas x 2 shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = nn.Module()
    placements = (Replicate(), Shard(0))
    for number, local in enumerate(torch.zeros(count, 4, 8).unbind()):
        tensor = DTensor.from_local(local, mesh, placements, run_check=False)
        module.register_parameter(f"weight{number}", nn.Parameter(tensor, requires_grad=False))
    dist.barrier()
    return module


def _limit(measure: str, value: float, limit: float, unit: str) -> Result:
    ratio = round(value / limit, 4)
    return Result(measure, round(value, 4), limit, "limit", unit, ratio, "lower", 1.0)
