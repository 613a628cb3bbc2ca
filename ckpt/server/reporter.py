"""Tells the server how saves go, from a thread of its own, so that training never waits for it.

Requests are sent in order. While the server does not answer they are kept beside the run (see
`ckpt.server.outbox`) and sent when it does, by this job or by the next one. Only one answer counts:
that another job has taken the run over, which keeps a save from being committed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence

from ckpt.commit import SAVE_ID
from ckpt.errors import (
    CheckpointError,
    NotFoundError,
    ReplacedError,
    TryAgainError,
    UsageError,
)
from ckpt.manifest import Manifest, Parent
from ckpt.reporting import RankReceipt, SaveStart, SaveTimes
from ckpt.runs import scan
from ckpt.server.client import Client
from ckpt.server.messages import (
    AttemptIn,
    CommitIn,
    FailIn,
    Message,
    ParentMessage,
    Receipt,
    ReceiptsIn,
    RunIn,
    SaveIn,
)
from ckpt.server.outbox import Letter, Outbox
from ckpt.server.summaries import summary_of
from ckpt.storage import Storage

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
"""How long a commit waits for the server's word, while the server answers at all."""

CLOSE_SECONDS = 5.0
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0)
MAX_PROBLEM = 4000


class ServerReporter:
    """Reports the saves of one run to one server.

    `client` should not retry by itself; `retry_seconds` are the pauses after which a server that
    does not answer is asked again, the last one for good.
    """

    def __init__(
        self,
        client: Client,
        root: Storage,
        run: str,
        retry_seconds: Sequence[float] = RETRY_SECONDS,
    ) -> None:
        self._client = client
        self._root = root
        self._run = run
        self._retry_seconds = retry_seconds
        self._outbox = Outbox(root)
        self._queue: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._start: SaveStart | None = None
        self._thread: threading.Thread | None = None
        self._answered: dict[str, threading.Event] = {}
        self._replaced: ReplacedError | None = None
        self._failures = 0
        self._waiting = False
        self._retry_at = 0.0

    # ------------------------------------------------------------- called by whoever saves

    def begin(self, start: SaveStart) -> None:
        """A save begins."""
        if self._start is None:
            self._register(start)
        self._answered = {start.token: threading.Event()}
        body = SaveIn(
            attempt=start.claim.attempt,
            epoch=start.claim.epoch,
            step=start.step,
            name=start.name,
            absent=True,  # the save has looked
        )
        self._put("PUT", self._save_path(start.token), body)

    def _register(self, start: SaveStart) -> None:
        self._start = start
        self._put("PUT", f"/v1/runs/{self._run}", RunIn(root=self._root.url))
        claim = start.claim
        body = AttemptIn(
            epoch=claim.epoch,
            host=claim.process.host[:256],
            pid=claim.process.pid,
            world_size=start.world_size,
            lease_seconds=min(max(claim.lease_seconds, 1.0), 86_400.0),
            resumed_from=_parent(start.parent),
        )
        self._put("PUT", f"/v1/runs/{self._run}/attempts/{claim.attempt}", body)
        self._thread = threading.Thread(target=self._work, name="ckpt server", daemon=True)
        self._thread.start()

    def written(self, token: str, receipts: Sequence[RankReceipt]) -> None:
        """All ranks have written their files."""
        rows = tuple(
            Receipt(rank=r.rank, bytes=r.bytes, files=r.files, seconds=r.seconds) for r in receipts
        )
        body = ReceiptsIn(epoch=self._epoch, receipts=rows)
        self._put("POST", f"{self._save_path(token)}/receipts", body)

    def permit(self, token: str) -> None:
        """ReplacedError if another job has taken over. Waits for the server's word on the
        reservation only while it answers, and not for long."""
        answered = self._answered.get(token)
        if answered is not None and not answered.wait(PATIENCE_SECONDS):
            log.warning("%s has not answered; the save goes on without it", self._client.url)
        if self._replaced is not None:
            raise ReplacedError(str(self._replaced))

    def committed(self, token: str, manifest: Manifest, times: SaveTimes) -> None:
        """The checkpoint is in place."""
        body = CommitIn(
            epoch=self._epoch,
            summary=summary_of(manifest),
            finite=times.finite,
            save_seconds=times.save_seconds,
            stall_seconds=times.stall_seconds,
        )
        self._put("POST", f"{self._save_path(token)}/commit", body)

    def failed(self, token: str, problem: str) -> None:
        """The save has failed."""
        if self._start is None:
            return
        body = FailIn(epoch=self._epoch, problem=problem[:MAX_PROBLEM])
        self._put("POST", f"{self._save_path(token)}/fail", body)

    def close(self) -> None:
        """The job ends. Waits a little for what is still to be told; the rest is kept."""
        start, thread = self._start, self._thread
        if start is not None and thread is not None:
            path = f"/v1/runs/{self._run}/attempts/{start.claim.attempt}/end"
            self._queue.put(Letter("POST", path, {}))
            self._queue.put(None)
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                log.warning("%s is slow; what it was not told, a later job tells", self._client.url)
                return
            self._start = self._thread = None
        self._client.close()

    @property
    def _epoch(self) -> int:
        return 0 if self._start is None else self._start.claim.epoch

    def _save_path(self, token: str) -> str:
        return f"/v1/runs/{self._run}/saves/{token}"

    def _put(self, method: str, path: str, body: Message) -> None:
        self._queue.put(Letter(method, path, body.model_dump(mode="json", exclude_none=True)))

    # ------------------------------------------------------------------------ on the thread

    def _work(self) -> None:
        try:
            self._waiting = next(self._outbox.waiting(), None) is not None
            self._send_waiting()
            self._fetch_letters()
        except Exception:  # the thread must say why it ends: nobody waits for it
            log.exception("%s is told no more about %s", self._client.url, self._root.url)
        finally:
            self._release_saves()

    def _fetch_letters(self) -> None:
        while True:
            pause = max(self._retry_at - time.monotonic(), 0.01) if self._waiting else None
            try:
                letter = self._queue.get(timeout=pause)
            except queue.Empty:
                self._send_waiting()
                continue
            if letter is None:
                self._retry_at = 0.0
                self._send_waiting()
                return
            self._deliver(letter)

    def _deliver(self, letter: Letter) -> None:
        """Send a request, or keep it behind those that wait."""
        try:
            if self._waiting:
                self._send_waiting()
            if self._waiting or not self._sent(letter):
                self._keep(letter)
        finally:
            self._release_saves(letter)

    def _keep(self, letter: Letter) -> None:
        try:
            self._outbox.add(letter)
            self._waiting = True
        except (OSError, CheckpointError) as error:
            log.warning("a message to %s is lost: %s", self._client.url, error)

    def _release_saves(self, letter: Letter | None = None) -> None:
        """Let commits go on that wait for the answer to a letter, or for any."""
        for token, answered in list(self._answered.items()):
            if letter is None or letter.path == self._save_path(token):
                answered.set()

    def _send_waiting(self) -> None:
        """Send what waits beside the run, if it is time to try again, until the server fails."""
        if not self._waiting or time.monotonic() < self._retry_at:
            return
        for name, letter in self._outbox.waiting():
            if letter is not None and not self._sent(letter):
                return
            self._outbox.remove(name)
        self._waiting = False
        self._reconcile()

    def _sent(self, letter: Letter) -> bool:
        """Send one request; False if the server does not answer. What it refuses is given up,
        unless it has forgotten the run."""
        try:
            self._client.request(letter.method, letter.path, body=letter.body)
        except TryAgainError as error:
            pauses = self._retry_seconds
            pause = pauses[min(self._failures, len(pauses) - 1)]
            if not self._failures:
                log.warning("%s; what it should know is kept beside the run", error)
            self._failures += 1
            self._retry_at = time.monotonic() + pause
            return False
        except (NotFoundError, UsageError) as error:
            self._refused(letter, error)
        except ReplacedError as error:
            self._note_replaced(letter, error)
        except CheckpointError as error:
            log.warning("%s refuses %s: %s", self._client.url, letter.path, error)
        if self._failures:
            log.info("%s answers again", self._client.url)
        self._failures = 0
        if letter.path == self._attempt_path:
            self._reconcile()
        return True

    @property
    def _attempt_path(self) -> str:
        attempt = "" if self._start is None else self._start.claim.attempt
        return f"/v1/runs/{self._run}/attempts/{attempt}"

    def _note_replaced(self, letter: Letter, error: ReplacedError) -> None:
        """Letters of earlier jobs may come too late; only what this one sent counts."""
        own = letter.path == self._attempt_path or letter.body.get("epoch") == self._epoch
        if own:
            log.error("%s", error)
            self._replaced = error
        else:
            log.info("%s of an earlier job came too late: %s", letter.path, error)

    def _refused(self, letter: Letter, error: CheckpointError) -> None:
        """The server may have lost its catalogue: tell it again who we are and what there is."""
        if not self._introduced_again(letter):
            log.warning("%s refuses %s: %s", self._client.url, letter.path, error)

    def _introduced_again(self, letter: Letter) -> bool:
        start = self._start
        if start is None or letter.path in (f"/v1/runs/{self._run}", self._attempt_path):
            return False
        if not all(self._told(again) for again in self._introduction(start)):
            return False
        self._reconcile()
        # Of a save that it never heard of it needs the reservation; the rest comes from the files.
        return not letter.path.startswith(f"/v1/runs/{self._run}/saves/") or (
            letter.method == "POST" or self._told(letter)
        )

    def _introduction(self, start: SaveStart) -> Iterator[Letter]:
        yield Letter("PUT", f"/v1/runs/{self._run}", {"root": self._root.url})
        claim = start.claim
        body = {"epoch": claim.epoch, "host": claim.process.host, "pid": claim.process.pid}
        yield Letter("PUT", self._attempt_path, {**body, "world_size": start.world_size})

    def _told(self, letter: Letter) -> bool:
        """Send a request; whether it was accepted."""
        try:
            self._client.request(letter.method, letter.path, body=letter.body)
        except CheckpointError as error:
            log.warning("%s refuses %s: %s", self._client.url, letter.path, error)
            return False
        return True

    def _reconcile(self) -> None:
        """Tell of committed checkpoints in the files that the server does not know."""
        start = self._start
        if start is None or self._replaced is not None:
            return
        try:
            rows = self._client.checkpoints(self._run)
            known = {row.save for row in rows if row.summary is not None}
            for entry in scan(self._root):
                token = entry.manifest and entry.manifest.producer.get(SAVE_ID)
                if entry.manifest is not None and token and token not in known:
                    self._tell_of(start, entry.name, token, entry.manifest)
        except (CheckpointError, OSError) as error:
            log.warning("%s could not be told of all checkpoints: %s", self._client.url, error)

    def _tell_of(self, start: SaveStart, name: str, token: str, manifest: Manifest) -> None:
        claim = start.claim
        reserve = SaveIn(
            attempt=claim.attempt,
            epoch=claim.epoch,
            step=manifest.step or 0,
            name=name,
            absent=True,
        )
        self._client.reserve(self._run, token, reserve)
        commit = CommitIn(epoch=claim.epoch, summary=summary_of(manifest))
        self._client.commit(self._run, token, commit)


def _parent(parent: Parent | None) -> ParentMessage | None:
    if parent is None:
        return None
    return ParentMessage(path=parent.path, step=parent.step, sha256=parent.sha256)
