"""The part of `benchmarks.checkpoint` that needs ranks: saving and loading on an HSDP mesh."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.report import Result, measure_pairs
from ckpt import CheckpointManager, SaveHandle, load, save
from ckpt.coordinator import Coordinator, open_coordinator
from ckpt.state.capture import PlanCache, PlannedWrite, capture_state
from ckpt.state.tensors import blocks
from hyperopt import DistributedAdamW

WORLD = 4
MIB = 2**20

STALL_SECONDS = 0.01
"""What a save in the background may take besides copying: agreeing with all ranks."""


class Training:
    """A model of square layers on 2 replicas x 2 shards, with owner-only AdamW state.

    Every save goes into a directory of its own below `directory`, as a training's does.
    """

    def __init__(self, directory: Path, layers: int, width: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.directory = directory
        self.unique_bytes = 4 * layers * (3 * width * width + 1)
        """Bytes of all tensors, each element once: parameters, two moments, a step each."""
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(self.model, mesh=mesh)
        self.optimizer = DistributedAdamW(self.model.named_parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.coordinator: Coordinator = open_coordinator()
        self.manager = CheckpointManager(directory / "run")
        self._turn = 0

    @property
    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self.model, "optimizer": self.optimizer}

    def writes(self) -> tuple[PlannedWrite, ...]:
        """What this rank writes in a save: live tensors."""
        return capture_state(self.state, self.coordinator, PlanCache()).writes

    def fresh(self, kind: str) -> Path:
        """A path that does not exist."""
        self._turn += 1
        return self.directory / f"{kind}-{self._turn}"

    # ------------------------------------------------------------------------------------- contests

    def save(self) -> float:
        """Ours, in a training's steady state: one manager for all saves."""
        self._turn += 1
        step = self._turn
        path = self.directory / "run" / f"step-{step:08d}"
        return timed(lambda: self.manager.save(step, **self.state), path)

    def stall(self) -> float:
        """How long a save in the background keeps training waiting, less `STALL_SECONDS`."""
        self._turn += 1
        step = self._turn
        handles: list[SaveHandle] = []
        seconds = timed(lambda: handles.append(self.manager.async_save(step, **self.state)))
        handles[0].wait()
        remove(self.directory / "run" / f"step-{step:08d}")
        return seconds - STALL_SECONDS

    def save_stock(self) -> float:
        """`dcp.save` of the same content, with fsync. Torch's state dict has the whole state on
        every replica, so collecting it from the owners is part of the time."""
        path = self.fresh("stock")
        return timed(lambda: self.stock_save_to(path), path)

    def stock_save_to(self, path: Path) -> None:
        """What a user of plain DCP calls."""
        dcp_save(self.stock_state(), storage_writer=FileSystemWriter(path, sync_files=True))

    def stock_state(self) -> dict[str, Any]:
        """Model and optimizer as torch gives them to DCP."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def write_raw(self, views: list[memoryview]) -> float:
        """The same bytes, by the same ranks: one `write` a tensor into one file, and fsync."""
        path = self.fresh("raw")

        def work() -> None:
            path.mkdir(exist_ok=True)
            file = os.open(path / f"{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            for view in views:
                part = view
                while part:
                    part = part[os.write(file, part) :]
            os.fsync(file)
            os.close(file)

        return timed(work, path)

    # ------------------------------------------------------------------------------------- measures

    def save_results(self, pairs: int, where: str) -> list[Result]:
        """Blocking saves against the disk and against stock."""
        views = [view for write in self.writes() for view in blocks(write.tensor)]
        raw = measure_pairs(self.save, lambda: self.write_raw(views), pairs, 1)
        stock = measure_pairs(self.save, self.save_stock, pairs, 1)
        measure = f"save {self.unique_bytes / MIB:.0f} MiB, {where}"
        return [
            raw.result(measure, "raw write + fsync", speedup=True, reach=0.9, unit="s"),
            stock.result(
                measure, "state_dict + dcp.save + fsync", speedup=True, reach=1.0, unit="s"
            ),
        ]

    def stall_results(self, pairs: int) -> list[Result]:
        """Saves in the background against all ranks copying the same bytes to warm memory."""
        live = [write.tensor for write in self.writes()]
        copies = [torch.empty_like(tensor) for tensor in live]

        def copy() -> None:
            for target, source in zip(copies, live, strict=True):
                target.copy_(source)

        stalls = measure_pairs(self.stall, lambda: timed(copy), pairs, 2)
        measure = (
            f"async stall less {STALL_SECONDS * 1e3:.0f} ms, {self.unique_bytes / MIB:.0f} MiB"
        )
        return [stalls.result(measure, "copy by all ranks", speedup=False, reach=1.3)]

    def load_results(self, pairs: int, where: str) -> list[Result]:
        """Loads into live objects, against `dcp.load` into a state dict that is ready for it."""
        ours, theirs = self.fresh("ours"), self.fresh("stock")
        save(ours, coordinator=self.coordinator, **self.state)
        self.stock_save_to(theirs)
        state = self.stock_state()
        loads = measure_pairs(
            lambda: timed(lambda: load(ours, coordinator=self.coordinator, **self.state)),
            lambda: timed(lambda: dcp_load(state, storage_reader=FileSystemReader(theirs))),
            pairs,
            1,
        )
        measure = f"load {self.unique_bytes / MIB:.0f} MiB, {where}"
        return [loads.result(measure, "dcp.load", speedup=True, reach=None, unit="s")]


def timed(work: Callable[[], Any], leftover: Path | None = None) -> float:
    """Seconds until every rank is done; what it left is removed afterwards, untimed."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    seconds = time.perf_counter() - started
    if leftover is not None:
        remove(leftover)
    return seconds


def remove(path: Path) -> None:
    """Remove a directory, on all ranks together."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def timed_results(
    directory: Path, nbytes: int, pairs: int, where: str, only: frozenset[str]
) -> list[Result]:
    """Runs on four ranks: what of `save`, `async` and `load` is in `only`."""
    width = 1024
    layers = max(1, round(nbytes / (3 * 4 * width * width)))
    training = Training(directory, layers, width)
    results: list[Result] = []
    if "save" in only:
        results += training.save_results(pairs, where)
    if "async" in only:
        results += training.stall_results(pairs)
    if "load" in only:
        results += training.load_results(pairs, where)
    return results
