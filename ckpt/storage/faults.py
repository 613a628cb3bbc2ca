"""What goes wrong between here and a store, as errors of this package that name the URL."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ckpt.errors import CheckpointError, NotAuthorisedError, NotFoundError, TryAgainError

_CLIENT_LIBRARIES = frozenset(
    {"aiohttp", "aiobotocore", "azure", "botocore", "gcsfs", "google", "requests", "urllib3"}
)
"""Their errors are no OSErrors, and mean a fault of network or store."""

_PASSING = {errno.EBUSY, errno.EREMOTEIO}
"""What s3fs makes of 'slow down', 'service unavailable' and 'internal error'."""


@contextlib.contextmanager
def store_errors(where: str) -> Iterator[None]:
    """Errors of fsspec and of the clients below it, with the URL `where`.

    NotFoundError and NotAuthorisedError where a store says so; TryAgainError for a connection that
    failed or a store that did not answer, after the client's own retries; OSError otherwise.
    """
    try:
        yield
    except (CheckpointError, FileExistsError):
        raise
    except FileNotFoundError:
        raise NotFoundError(f"{where}: no such object") from None
    except PermissionError as error:
        raise NotAuthorisedError(f"{where}: {error}") from error
    except OSError as error:
        raise _named(where, error) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENT_LIBRARIES:
            raise
        raise _of_client(where, error) from error


def _named(where: str, error: OSError) -> Exception:
    # gcsfs has no class of its own for HTTP status 403.
    if str(error).startswith("Forbidden"):
        return NotAuthorisedError(f"{where}: {error}")
    passing = isinstance(error, ConnectionError | TimeoutError) or error.errno in _PASSING
    if passing or type(error).__module__.partition(".")[0] in _CLIENT_LIBRARIES:
        return TryAgainError(f"{where}: {_described(error)}; see whether the store can be reached")
    text = f"{where}: {error.strerror or error}"
    return OSError(text) if error.errno is None else OSError(error.errno, text)


def _of_client(where: str, error: Exception) -> CheckpointError:
    """`code` is the HTTP status, where an error has one."""
    code = str(getattr(error, "code", ""))
    if code in ("401", "403") or "Credentials" in type(error).__name__:
        return NotAuthorisedError(f"{where}: {_described(error)}")
    if code.startswith("4") and code not in ("408", "429"):
        return CheckpointError(f"{where}: {_described(error)}")
    return TryAgainError(f"{where}: {_described(error)}; see whether the store can be reached")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
