"""Checkpoints in a directory of a local or network file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import io
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt.errors import CorruptError, NotAuthorisedError, NotFoundError, UsageError
from ckpt.names import name_problem
from ckpt.storage.protocol import Storage, StoredFile, Writer

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_FICLONE = 0x40049409
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS}
_CANNOT_CLONE = {errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOTSUP, errno.ENOSYS, errno.EPERM}
_CANNOT_SYNC_DIRECTORY = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
_BUFFER = 1 << 16
_WRITEBACK_BYTES = 8 << 20
"""So much is written before the kernel is told to start bringing it to the disk."""
_SYNC_FILE_RANGE_WRITE = 2


class LocalWriter:
    """A new file. Small writes are gathered into blocks of 64 KiB, larger ones go straight through.

    Errors of the file system carry the path, so that a failed save can name it. The disk starts
    while the file is still being written, so that less is left for the fsync at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unstarted = 0
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        self._file = io.BufferedWriter(io.FileIO(descriptor, "wb"), _BUFFER)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Raises OSError with the path; the buffered file never writes short."""
        with _naming(self._path):
            self._file.write(data)
            self._unstarted += memoryview(data).nbytes
            if self._unstarted >= _WRITEBACK_BYTES:
                self._unstarted = 0
                _start_writeback(self._file.fileno())

    def finish(self) -> None:
        """Flush, make durable, close."""
        with _naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Remove the file, after a failure that is on its way to the caller."""
        self._path.unlink(missing_ok=True)
        # Closing flushes what is buffered, and fails as the write before did: that error is known.
        with contextlib.suppress(OSError):
            self._file.close()


class LocalStorage:
    """A directory tree (see `ckpt.storage.protocol.Storage`).

    Symbolic links may lead to the root, but names below it may not leave it. Nothing is mapped into
    memory: a file that shrinks while it is read is an error here, not a SIGBUS.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._url = os.fspath(root)
        self._root = Path(os.path.abspath(Path(root).expanduser()))  # noqa: PTH100 (no resolve)

    def __repr__(self) -> str:
        return f"LocalStorage({self._url!r})"

    @property
    def url(self) -> str:
        """The root as it was given."""
        return self._url

    @property
    def path(self) -> Path:
        """The root as an absolute path."""
        return self._root

    @property
    def atomic_rename(self) -> bool:
        """True: rename of a directory is one step of the file system."""
        return True

    def resolve(self, name: str) -> Path:
        """The absolute path of `name` ('' is the root). UsageError for a name that leaves it."""
        if not name:
            return self._root
        problem = name_problem(name)
        if problem is not None:
            raise UsageError(f"{self._url}: file name {name!r} {problem}")
        self._refuse_escape(name)
        return self._root / name

    def _refuse_escape(self, name: str) -> None:
        """Follow symbolic links, if there are any, and see that they stay below the root."""
        at = str(self._root)
        for part in name.split("/"):
            at = f"{at}/{part}"
            try:
                is_link = stat.S_ISLNK(os.lstat(at).st_mode)
            except (FileNotFoundError, NotADirectoryError):
                return
            if is_link and not Path(at).resolve().is_relative_to(self._root.resolve()):
                raise UsageError(
                    f"{self._url}: {name!r} leads out of the directory through the symbolic "
                    f"link {at!r}; give the real directory instead"
                )

    def child(self, name: str) -> LocalStorage:
        """The storage rooted at a sub-directory."""
        self.resolve(name)
        return LocalStorage(f"{self._url.rstrip('/')}/{name}")

    def make_directory(self, name: str) -> None:
        """Create a directory with its parents, each made durable in its own parent."""
        missing = []
        at = self.resolve(name)
        while not at.exists():
            missing.append(at)
            at = at.parent
        for path in reversed(missing):
            with self._errors(name):
                path.mkdir(exist_ok=True)
            _sync_directory(path.parent)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        """Write a new file; durable on a clean exit, removed after an exception."""
        path = self.resolve(name)
        self.make_directory(name.rpartition("/")[0])
        with self._errors(name):
            writer = LocalWriter(path)
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.discard()
            raise

    def create_exclusive(self, name: str, data: bytes) -> None:
        """Write a file under a passing name, then give it its own in one step that never replaces
        (`link` fails if the name is taken, on network file systems too)."""
        path = self.resolve(name)
        passing = f"{name}.{uuid.uuid4().hex}.tmp"
        with self.create(passing) as writer:
            writer.write(data)
        try:
            _rename_exclusive(self.resolve(passing), path)
        finally:
            self.remove(passing)
        _sync_directory(path.parent)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read a byte range; to the end by default."""
        if length is None:
            length = max(self.size(name) - offset, 0)
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`. CorruptError if the file ends before."""
        self.read_many(name, [(offset, buffer)])

    def read_many(self, name: str, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Fill several buffers, one after the other. CorruptError if the file ends before."""
        path = self.resolve(name)
        with self._errors(name):
            # O_NONBLOCK: a planted FIFO is an error then, not an endless wait.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            for offset, buffer in parts:
                _fill(descriptor, path, offset, buffer)
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        with self._errors(name):
            return self.resolve(name).stat().st_size

    def exists(self, name: str) -> bool:
        """Whether a file or directory (or a dangling link) is there."""
        return os.path.lexists(self.resolve(name))

    def list(self, name: str = "") -> list[StoredFile]:
        """Direct children, sorted. A symbolic link counts as a file: it is never walked into."""
        found = []
        with self._errors(name), os.scandir(self.resolve(name)) as entries:
            for entry in entries:
                # A file may vanish between the listing and the look at it.
                with contextlib.suppress(FileNotFoundError):
                    found.append(_stored_file(entry))
        return sorted(found, key=lambda file: file.name)

    def walk(self, name: str = "") -> Iterator[StoredFile]:
        """All files below, depth first, with names relative to `name`."""
        for file in self.list(name):
            path = f"{name}/{file.name}" if name else file.name
            if not file.is_directory:
                yield file
                continue
            for below in self.walk(path):
                yield StoredFile(f"{file.name}/{below.name}", below.size, False, below.modified)

    def rename(self, source: str, destination: str) -> None:
        """Rename in one step. FileExistsError if the destination exists, an empty directory too."""
        source_path, destination_path = self.resolve(source), self.resolve(destination)
        with self._errors(source):
            _rename_exclusive(source_path, destination_path)

    def link(self, source: Storage, source_name: str, name: str) -> bool:
        """Hard-link, or clone blocks where links are impossible; False where both are."""
        if not isinstance(source, LocalStorage):
            return False
        source_path, path = source.resolve(source_name), self.resolve(name)
        self.make_directory(name.rpartition("/")[0])
        try:
            os.link(source_path, path, follow_symlinks=False)
        except FileNotFoundError:
            raise NotFoundError(f"{source_path}: no such file") from None
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            return self._clone(source_path, name)
        return True

    def _clone(self, source_path: Path, name: str) -> bool:
        """Share the blocks of a file (FICLONE: Btrfs, XFS, bcachefs)."""
        try:
            with self.create(name), source_path.open("rb") as source:
                target = os.open(self.resolve(name), os.O_WRONLY | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(target, _FICLONE, source.fileno())
                finally:
                    os.close(target)
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file, a link (not its target) or a whole directory; nothing if missing."""
        if not name:
            raise UsageError(f"{self._url}: refusing to remove the root of a store")
        path = self.resolve(name)
        with self._errors(name), contextlib.suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, onerror=_unless_missing)
            else:
                path.unlink()

    def sync_directory(self, name: str = "") -> None:
        """Make the names in a directory durable."""
        with self._errors(name):
            _sync_directory(self.resolve(name))

    def free_bytes(self) -> int | None:
        """What the file system has left for this user; without a root yet, that of the directory in
        which it will be made. None where a file system does not count (some network mounts)."""
        at = self._root
        while not at.exists():
            at = at.parent
        with self._errors(""):
            info = os.statvfs(at)
        return info.f_bavail * info.f_frsize if info.f_blocks else None

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Missing files and refused access as errors of this package, with the path."""
        where = f"{self._url}/{name}" if name else self._url
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{where}: no such file or directory") from None
        except PermissionError as error:
            raise NotAuthorisedError(f"{where}: {error.strerror}") from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the path into OSErrors that come without one (write, fsync, read)."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def _fill(descriptor: int, path: Path, offset: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        with _naming(path):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise CorruptError(_short(path, offset, len(buffer), done))
        done += count


def _short(path: Path, offset: int, wanted: int, got: int) -> str:
    return (
        f"{path}: truncated: {wanted} bytes wanted at byte {offset}, "
        f"but the file ends after {got} of them"
    )


def _stored_file(entry: os.DirEntry[str]) -> StoredFile:
    info = entry.stat(follow_symlinks=False)
    is_directory = entry.is_dir(follow_symlinks=False)
    return StoredFile(entry.name, 0 if is_directory else info.st_size, is_directory, info.st_mtime)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _naming(path):
            os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no such call; their server keeps names durable.
        if error.errno not in _CANNOT_SYNC_DIRECTORY:
            raise
    finally:
        os.close(descriptor)


def _unless_missing(function: Callable[..., Any], path: str, info: Any) -> None:
    """For rmtree: what somebody else has removed meanwhile is no error."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _rename_exclusive(source: Path, destination: Path) -> None:
    """Rename without replacing. FileExistsError if the destination exists.

    `os.rename` would replace a file, and an empty directory, without a word. The kernel's
    RENAME_NOREPLACE does not; where a file system lacks it (NFS), files take the route of a hard
    link, which never replaces either. For directories `os.rename` remains: it refuses a directory
    that holds something, as every committed checkpoint does, so of two writers one still loses.
    """
    if _renameat2(source, destination):
        return
    if os.path.lexists(destination):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    if not source.is_dir():
        os.link(source, destination, follow_symlinks=False)
        source.unlink()
        return
    try:
        source.rename(destination)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination)) from None


def _renameat2(source: Path, destination: Path) -> bool:
    """One rename that never replaces; False where the system or file system has no such call."""
    call = _renameat2_function()
    if call is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination))
    if call(*arguments, _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(destination))


def _start_writeback(descriptor: int) -> None:
    """Have the kernel write out what a file has in the page cache, without waiting for it.

    A hint: what fails here fails again in fsync, which is what makes data durable and reports.
    """
    call = _sync_file_range_function()
    if call is not None:
        call(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range_function() -> Callable[..., int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    try:
        function = library.sync_file_range
    except AttributeError:  # macOS
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


@functools.cache
def _renameat2_function() -> Callable[..., int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    try:
        function = library.renameat2
    except AttributeError:  # musl, macOS
        return None
    function.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_uint,
    )
    function.restype = ctypes.c_int
    return function
