"""The part of `benchmarks.checkpoint` that needs ranks: saving and loading on an HSDP mesh."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.report import Result, measure_pairs
from ckpt import load, open_checkpoint, save
from ckpt.coordinator import Coordinator, open_coordinator
from hyperopt import DistributedAdamW

WORLD = 4
WIDTH = 1024
BLOCK_BYTES = 16 * 2**20
MIB = 2**20


@dataclass(slots=True)
class Training:
    """A model of width x width layers on 2 replicas x 2 shards, with owner-only AdamW state.

    `turn` numbers the saves; every one goes into a directory of its own, as a training's does.
    """

    directory: Path
    layers: int
    width: int
    model: nn.Module = field(init=False)
    optimizer: DistributedAdamW = field(init=False)
    coordinator: Coordinator = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(self.width, self.width, bias=False) for _ in range(self.layers))
        self.model = nn.Sequential(*layers)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = DistributedAdamW(self.model.named_parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.coordinator = open_coordinator()

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def unique_bytes(self) -> int:
        """Bytes of all tensors, each element once: parameters, two moments, a step each."""
        elements = self.layers * self.width * self.width
        return 4 * (3 * elements + self.layers)

    def fresh(self, kind: str) -> Path:
        """A path that does not exist."""
        self.turn += 1
        return self.directory / f"{kind}-{self.turn}"

    # ------------------------------------------------------------------------------------- contests

    def timed(self, work: Callable[[], Any], leftover: Path | None = None) -> float:
        """Seconds until every rank is done; what it left is removed afterwards, untimed."""
        dist.barrier()
        started = time.perf_counter()
        work()
        dist.barrier()
        seconds = time.perf_counter() - started
        if leftover is not None and dist.get_rank() == 0:
            shutil.rmtree(leftover)
        dist.barrier()
        return seconds

    def save(self) -> float:
        """Ours, in a training's steady state: one coordinator for all saves."""
        path = self.fresh("ours")
        work = lambda: save(path, coordinator=self.coordinator, **self.state)  # noqa: E731
        return self.timed(work, path)

    def save_stock(self) -> float:
        """`dcp.save` of the same content, with fsync. Its state dict has every replica's state, so
        collecting it from the owners is part of the time."""
        path = self.fresh("stock")

        def work() -> None:
            writer = FileSystemWriter(path, sync_files=True)
            dcp_save(self.stock_state(), storage_writer=writer)

        return self.timed(work, path)

    def stock_state(self) -> dict[str, Any]:
        """Model and optimizer as a plain user of DCP would pass them."""
        named = self.optimizer.named_state_dict(flatten=False)
        return {"model": self.model.state_dict(), "optimizer": named["state"]}

    def write_raw(self) -> float:
        """A quarter of the bytes by each rank, into one file, with fsync."""
        path = self.fresh("raw")
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        block = memoryview(os.urandom(MIB)).cast("B")
        data = memoryview(bytearray(bytes(block) * (BLOCK_BYTES // MIB)))
        nbytes = self.unique_bytes // WORLD

        def work() -> None:
            file = os.open(path / f"{dist.get_rank()}", os.O_WRONLY | os.O_CREAT)
            for start in range(0, nbytes, len(data)):
                part = data[: min(len(data), nbytes - start)]
                while part:
                    part = part[os.write(file, part) :]
            os.fsync(file)
            os.close(file)

        return self.timed(work, path)

    def load(self, path: Path) -> float:
        """Ours."""
        return self.timed(lambda: load(path, coordinator=self.coordinator, **self.state))

    def load_stock(self, path: Path) -> float:
        """`dcp.load` into the same state dict."""
        state = self.stock_state()
        return self.timed(lambda: dcp_load(state, storage_reader=FileSystemReader(path)))

    # ------------------------------------------------------------------------------------- measures

    def results(self, pairs: int, where: str) -> list[Result]:
        """Save and load against their rivals; then counts, which are exact."""
        raw = measure_pairs(self.save, self.write_raw, pairs, 1)
        stock = measure_pairs(self.save, self.save_stock, pairs, 1)
        ours, theirs = self.fresh("ours"), self.fresh("stock")
        save(ours, coordinator=self.coordinator, **self.state)
        writer = FileSystemWriter(theirs, sync_files=True)
        dcp_save(self.stock_state(), storage_writer=writer)
        loads = measure_pairs(lambda: self.load(ours), lambda: self.load_stock(theirs), pairs, 1)
        size = f"{self.unique_bytes / MIB:.0f} MiB"
        timed = [
            raw.result(
                f"save {size}, {where}", "raw write + fsync", speedup=True, reach=0.9, unit="s"
            ),
            stock.result(
                f"save {size}, {where}", "dcp.save + fsync", speedup=True, reach=1.0, unit="s"
            ),
            loads.result(f"load {size}, {where}", "dcp.load", speedup=True, reach=None, unit="s"),
        ]
        return [*timed, *self.counts(ours)]

    def counts(self, path: Path) -> list[Result]:
        """Bytes on disk, and bytes of optimizer state read at two replicas."""
        manifest = open_checkpoint(path).manifest
        data = sum(f.size for f in manifest.files if f.name.endswith(".distcp"))
        report = load(path, coordinator=self.coordinator, rng=False, optimizer=self.optimizer)
        read, state = sum(report.bytes_read), 2 * self.unique_bytes // 3
        return [
            _count("data files over tensors", data, self.unique_bytes, "unique bytes", 1.01),
            _count("optimizer bytes read, R = 2", read, 2 * state, "every replica", 0.51),
        ]


def _count(measure: str, ours: int, rival: int, name: str, reach: float) -> Result:
    scaled = (round(ours / MIB, 3), round(rival / MIB, 3))
    return Result(measure, *scaled, name, "MiB", round(ours / rival, 4), "lower", reach)


def distributed_results(directory: Path, nbytes: int, pairs: int, where: str) -> list[Result]:
    """Runs on four ranks."""
    torch.set_num_threads(1)
    layers = max(1, round(nbytes / (3 * 4 * WIDTH * WIDTH)))
    return Training(directory, layers, WIDTH).results(pairs, where)


def metadata_of_many(directory: Path) -> list[Result]:
    """Runs on four ranks: 200 AdamW parameters on 2 x 2; bytes that are no tensor data."""
    training = Training(directory, 200, 8)
    path = training.fresh("many")
    save(path, coordinator=training.coordinator, **training.state)
    total = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    data = sum(f.stat().st_size for f in path.glob("*.distcp"))
    private = sum(f.stat().st_size for f in (path / "extra").iterdir())
    return [
        Result(
            "metadata of 200 AdamW parameters",
            (total - data - private) / 1000,
            600,
            "limit",
            "kB",
            round((total - data - private) / 600_000, 4),
            "lower",
            1.0,
        )
    ]
