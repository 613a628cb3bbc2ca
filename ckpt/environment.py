"""Is this environment fit for checkpoints? What is installed, what hides what, what a place can do.

Every finding is `good`, a `note` or `bad`, with what to do. Places are tried out: in
a directory of its own, which is removed again. Torch is imported only to ask it.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import platform
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ckpt.errors import CheckpointError
from ckpt.storage import Storage, open_storage
from ckpt.storage.local import LocalStorage

Verdict = Literal["good", "note", "bad"]

DISTRIBUTION = "hyperopt-ckpt"
IMPORTS = ("hyperopt", "ckpt", "cli")
STORES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}

_NETWORK = {
    "nfs": "NFS: other hosts may see new names up to a minute later (acregmax); mount with "
    "lookupcache=positive, and without nolock",
    "nfs4": "NFS: other hosts may see new names up to a minute later (acregmax); mount with "
    "lookupcache=positive",
    "lustre": "Lustre: stripe large files over several targets (lfs setstripe -c 4); locks between "
    "hosts need the mount option flock",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: what, how it is, and the facts or the remedy."""

    what: str
    verdict: Verdict
    detail: str


def examine_installation() -> list[Finding]:
    """Python, torch and its backends, the stores' packages, and imports that others hide."""
    return [
        Finding("python", "good", f"{platform.python_version()} on {platform.system()}"),
        *_torch(),
        *(_store(name, package) for name, package in STORES.items()),
        *(_import(name) for name in IMPORTS),
    ]


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("torch", "note", "not installed: saving and loading need it, all else works")
        return
    import torch
    import torch.distributed as dist

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    yield Finding("torch", "good", f"{torch.__version__}, device {device}")
    if not dist.is_available():
        yield Finding("backends", "bad", "torch.distributed is not built in: several ranks need it")
        return
    tests = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available}
    there = [name for name, test in tests.items() if test()]
    verdict: Verdict = "good" if "gloo" in there else "bad"
    remedy = "" if "gloo" in there else "; checkpoints need gloo: install a torch that has it"
    yield Finding("backends", verdict, (", ".join(there) or "none") + remedy)


def _store(protocol: str, package: str) -> Finding:
    if importlib.util.find_spec(package) is None:
        return Finding(f"{protocol}://", "note", f"not available: pip install {package}")
    return Finding(f"{protocol}://", "good", f"{package} {metadata.version(package)}")


def _import(name: str) -> Finding:
    """Whether an import gets our package: other projects have packages of these names."""
    ours = Path(__file__).parents[1] / name
    spec = importlib.util.find_spec(name)
    found = Path(spec.origin).parent if spec is not None and spec.origin else None
    others = sorted(set(metadata.packages_distributions().get(name, ())) - {DISTRIBUTION})
    what = f"import {name}"
    if found is None or found.resolve() != ours.resolve():
        return Finding(what, "bad", f"comes from {found}, not from {ours}: remove or rename that")
    if others:
        return Finding(
            what, "bad", f"{', '.join(others)} installs a package of this name too: uninstall it"
        )
    return Finding(what, "good", str(ours))


# ------------------------------------------------------------------------------------------ a place


def examine_place(place: str) -> list[Finding]:
    """Try out a directory or URL, as checkpoints use it."""
    storage = open_storage(place)
    findings = [_space(storage)]
    if isinstance(storage, LocalStorage):
        findings.append(_file_system(storage.path))
    directory = f".doctor-{uuid.uuid4().hex[:12]}"
    trial = storage.child(directory)
    try:
        findings += [_try(what, test, trial) for what, test in _trials(storage)]
    finally:
        _clean(storage, directory, findings)
    return findings


def _clean(storage: Storage, directory: str, findings: list[Finding]) -> None:
    try:
        storage.remove(directory)
    except (OSError, CheckpointError) as error:
        findings.append(Finding("removing", "bad", f"{directory} was left behind: {error}"))


def _space(storage: Storage) -> Finding:
    free = storage.free_bytes()
    if free is None:
        return Finding("free space", "good", f"{storage.url} has no limit that could be read")
    return Finding("free space", "good" if free > 2**30 else "note", f"{free:,} bytes")


def _file_system(path: Path) -> Finding:
    kind = file_system_type(path)
    return Finding("file system", "note" if kind in _NETWORK else "good", _NETWORK.get(kind, kind))


def file_system_type(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that a path (which need not exist) is on; `unknown` without
    /proc."""
    there = next(p for p in (path, *path.parents) if p.exists()).resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return "unknown"
    points = [(line.split()[1].replace("\\040", " "), line.split()[2]) for line in lines]
    fitting = [(len(point), kind) for point, kind in points if there.is_relative_to(point)]
    # The last of equal mount points covers the earlier ones.
    return max(enumerate(fitting), key=lambda item: (item[1][0], item[0]))[1][1] if fitting else "?"


def _trials(storage: Storage) -> list[tuple[str, Callable[[Storage], str]]]:
    common: list[tuple[str, Callable[[Storage], str]]] = [
        ("writing and reading", _write),
        ("exclusive creation", _exclusive),
    ]
    if not storage.atomic_rename:
        return common
    return [*common, ("rename", _rename), ("fsync", _sync), ("hard links", _link), ("locks", _lock)]


def _try(what: str, test: Callable[[Storage], str], trial: Storage) -> Finding:
    try:
        return Finding(what, "good", test(trial))
    except _DetourError as note:
        return Finding(what, "note", str(note))
    except (OSError, CheckpointError) as error:
        return Finding(what, "bad", f"{type(error).__name__}: {error}")


class _DetourError(Exception):
    """Something does not work, and there is another way."""


def _write(trial: Storage) -> str:
    data = os.urandom(4096)
    with trial.create("data") as file:
        file.write(data)
    if trial.read("data") != data:
        raise OSError("what was read is not what was written")
    return "works"


def _exclusive(trial: Storage) -> str:
    trial.create_exclusive("once", b"first")
    try:
        trial.create_exclusive("once", b"second")
    except FileExistsError:
        return "the second of two writers is refused"
    raise OSError("a file was created twice: two jobs could both believe that they had committed")


def _rename(trial: Storage) -> str:
    for name in ("from", "onto"):
        trial.make_directory(name)
    with trial.create("onto/file") as file:
        file.write(b"x")
    try:
        trial.rename("from", "onto")
    except FileExistsError:
        trial.rename("from", "to")
        return "in one step, and never onto something"
    raise OSError("a directory was renamed onto another one")


def _sync(trial: Storage) -> str:
    trial.sync_directory()
    return "of files and directories"


def _link(trial: Storage) -> str:
    if trial.link(trial, "data", "linked"):
        return "work: a change of replicas only copies no data"
    raise _DetourError("do not exist: a change of replicas only copies all data")


def _lock(trial: Storage) -> str:
    if not isinstance(trial, LocalStorage):
        raise _DetourError("not tried")
    with (trial.path / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            raise _DetourError("not available; nothing here needs them") from None
    return "work (nothing here needs them)"
