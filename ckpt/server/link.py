"""What a manager holds of a server: reports on rank 0, and a sign of life from every rank."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from ckpt.errors import NotFoundError, ReplacedError, TryAgainError, UsageError
from ckpt.heartbeat import Heartbeat as Beating
from ckpt.lease import BEATS_PER_LEASE
from ckpt.server.client import Client
from ckpt.server.messages import NAME_PATTERN, Heartbeat
from ckpt.server.reporter import ServerReporter
from ckpt.storage import Storage

log = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """This start of the program, to the server: run, attempt, and which of its ranks this is."""

    run: str
    attempt: str
    rank: int


class ServerLink:
    """One rank's connection to the server. `reporter` is None on all ranks but the first."""

    def __init__(self, client: Client, job: Job, root: Storage, lease_seconds: float) -> None:
        self._client = client
        self._job = job
        self.reporter = ServerReporter(client, root, job.run) if job.rank == 0 else None
        interval = lease_seconds / BEATS_PER_LEASE
        self._beating = Beating(f"telling {client.url} of rank {job.rank}", self._beat, interval)
        self._started = False

    def start(self) -> None:
        """Give signs of life from now on, until `close`. Again, it does nothing."""
        if not self._started:
            self._started = True
            self._beating.start()

    def _beat(self) -> bool:
        """A sign of life; False when another job has taken over."""
        job = self._job
        try:
            self._client.heartbeat(job.run, job.attempt, Heartbeat(rank=job.rank))
        except ReplacedError as error:
            log.error("%s", error)
            return False
        except (TryAgainError, NotFoundError, UsageError) as error:
            # It is down, or has not heard of this job yet: the reporter sees to both.
            log.debug("no sign of life: %s", error)
        return True

    def close(self) -> None:
        """The job ends."""
        self._beating.stop()
        if self.reporter is not None:
            self.reporter.close()
        else:
            self._client.close()


def open_link(
    server: str | Client, run: str | None, root: Storage, job: tuple[str, int], lease_seconds: float
) -> ServerLink:
    """Connect a rank to a server, which need not answer. `job` is its attempt and rank.

    UsageError for a URL or a name of a run that cannot be.
    """
    name = run_name(root) if run is None else run
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise UsageError(
            f"run={name!r}: a run's name has letters, digits, '.', '_' and '-' only, at most 128, "
            "and begins with a letter or digit"
        )
    client = Client(server, timeout=REQUEST_SECONDS, tries=1) if isinstance(server, str) else server
    return ServerLink(client, Job(name, *job), root, lease_seconds)


def run_name(root: Storage) -> str:
    """What a run is called if nobody says: the last part of its root."""
    return root.url.rstrip("/").rpartition("/")[2]
