"""Which process something belongs to, and whether that process has certainly ended. No torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

_ENDED = frozenset("ZXx")
"""States of a process that has ended and that its parent has not asked about."""


class Process(msgspec.Struct, frozen=True):
    """One process, so that no other one is taken for it.

    `machine` is the kernel's boot and the namespace of process ids, since only there `pid` means
    something; `started` the kernel's time of its start, as process ids are used again. Both are
    empty where the system does not tell.
    """

    host: str
    pid: int
    machine: str = ""
    started: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """The calling process."""
    pid = os.getpid()
    return Process(platform.node(), pid, _machine(), _stat(pid)[1])


def is_gone(process: Process) -> bool:
    """Whether a process has ended for certain. False where that cannot be known: on another machine
    or in another container, or without /proc."""
    if not process.machine or process.machine != _machine():
        return False
    state, started = _stat(process.pid)
    return state in _ENDED or started != process.started


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, str]:
    """State and start time of a process of this machine; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
