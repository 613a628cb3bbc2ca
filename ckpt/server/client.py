"""Talking to the server. Its errors come back as those of `ckpt.errors`. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import stamina
from pydantic import TypeAdapter, ValidationError

from ckpt.errors import CheckpointError, TryAgainError, UsageError
from ckpt.server.messages import (
    AttemptIn,
    AttemptOut,
    CheckpointOut,
    CheckpointPage,
    CommitIn,
    EventOut,
    EventPage,
    FailIn,
    Heartbeat,
    Message,
    Problem,
    ReceiptsIn,
    RunIn,
    RunOut,
    RunPage,
    SaveIn,
    VerificationIn,
    VerificationOut,
)
from ckpt.server.problems import MEDIA_TYPE, error_of

TOKEN_VARIABLE = "HYPEROPT_CKPT_TOKEN"
TIMEOUT_SECONDS = 30.0
TRIES = 4

T = TypeVar("T")


class Client:
    """One server. `token`: its bearer token, by default what `HYPEROPT_CKPT_TOKEN` holds. `tries`:
    how often a request is sent at most while the server does not answer (every request here may be
    repeated)."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = TIMEOUT_SECONDS,
        tries: int = TRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"server {url!r}: give a URL, such as http://127.0.0.1:8321")
        token = os.environ.get(TOKEN_VARIABLE) if token is None else token
        self.url = url.rstrip("/")
        self._tries = tries
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)),
            transport=transport,
            follow_redirects=False,  # a token goes nowhere else
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

    # ----------------------------------------------------------------------------------- requests

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Message | Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> Any:
        """Send one request and return the JSON of its answer (None if it has none).

        Raises the error that the server tells of; TryAgainError if it does not answer.
        """
        for attempt in stamina.retry_context(on=TryAgainError, attempts=self._tries, timeout=None):
            with attempt:
                return self._once(method, path, body, query)
        raise AssertionError("the context above returns or raises")

    def _once(
        self,
        method: str,
        path: str,
        body: Message | Mapping[str, Any] | None,
        query: Mapping[str, Any] | None,
    ) -> Any:
        content = body.model_dump(mode="json") if isinstance(body, Message) else body
        wanted = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            answer = self._http.request(method, path, json=content, params=wanted)
        except httpx.HTTPError as error:
            raise TryAgainError(f"{self.url} does not answer: {error or type(error)}") from error
        if answer.is_success:
            return answer.json() if answer.content else None
        raise self._error(answer)

    def _error(self, answer: httpx.Response) -> CheckpointError:
        if answer.headers.get("content-type", "").startswith(MEDIA_TYPE):
            try:
                return error_of(Problem.model_validate_json(answer.content))
            except ValidationError:
                pass  # not from this server: told by its status below
        text = f"{self.url} answers with HTTP status {answer.status_code}"
        if answer.status_code >= 500 or answer.status_code == 429:
            return TryAgainError(text)
        return CheckpointError(f"{text}: is it the server of hyperopt-ckpt?")

    def ask(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        body: Message | Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> T:
        """Send one request and return its answer. CheckpointError if that is no such message."""
        answer = self.request(method, path, body=body, query=query)
        try:
            return TypeAdapter(kind).validate_python(answer, strict=False)
        except ValidationError as error:
            raise CheckpointError(
                f"{self.url}{path}: an answer that this program does not know "
                f"({error.error_count()} differences): is the server of another version?"
            ) from error

    # --------------------------------------------------------------------------- runs and attempts

    def put_run(self, run: str, body: RunIn) -> RunOut:
        """Register a run."""
        return self.ask(RunOut, "PUT", f"/v1/runs/{run}", body=body)

    def run(self, run: str) -> RunOut:
        """One run."""
        return self.ask(RunOut, "GET", f"/v1/runs/{run}")

    def runs(self, search: str = "") -> Iterator[RunOut]:
        """All runs, by name."""
        cursor: str | None = None
        while True:
            query = {"cursor": cursor, "search": search}
            page = self.ask(RunPage, "GET", "/v1/runs", query=query)
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def put_attempt(self, run: str, attempt: str, body: AttemptIn) -> AttemptOut:
        """Register one start of the job."""
        return self.ask(AttemptOut, "PUT", f"/v1/runs/{run}/attempts/{attempt}", body=body)

    def end_attempt(self, run: str, attempt: str) -> AttemptOut:
        """The job has ended."""
        return self.ask(AttemptOut, "POST", f"/v1/runs/{run}/attempts/{attempt}/end")

    def attempts(self, run: str) -> tuple[AttemptOut, ...]:
        """The newest attempts of a run, newest first."""
        return self.ask(tuple[AttemptOut, ...], "GET", f"/v1/runs/{run}/attempts")

    def heartbeat(self, run: str, attempt: str, body: Heartbeat) -> None:
        """A sign of life of one rank."""
        self.request("POST", f"/v1/runs/{run}/attempts/{attempt}/heartbeat", body=body)

    # --------------------------------------------------------------------------------------- saves

    def reserve(self, run: str, save: str, body: SaveIn) -> CheckpointOut:
        """Reserve a checkpoint for a save."""
        return self.ask(CheckpointOut, "PUT", f"/v1/runs/{run}/saves/{save}", body=body)

    def receipts(self, run: str, save: str, body: ReceiptsIn) -> CheckpointOut:
        """What the ranks of a save wrote."""
        return self.ask(CheckpointOut, "POST", f"/v1/runs/{run}/saves/{save}/receipts", body=body)

    def commit(self, run: str, save: str, body: CommitIn) -> CheckpointOut:
        """The manifest is in place."""
        return self.ask(CheckpointOut, "POST", f"/v1/runs/{run}/saves/{save}/commit", body=body)

    def fail(self, run: str, save: str, body: FailIn) -> CheckpointOut:
        """The save has failed."""
        return self.ask(CheckpointOut, "POST", f"/v1/runs/{run}/saves/{save}/fail", body=body)

    # --------------------------------------------------------------------------------- checkpoints

    def checkpoints(self, run: str, state: str | None = None) -> Iterator[CheckpointOut]:
        """The checkpoints of a run, those of the highest steps first."""
        cursor: str | None = None
        while True:
            query = {"cursor": cursor, "state": state, "limit": 500}
            page = self.ask(CheckpointPage, "GET", f"/v1/runs/{run}/checkpoints", query=query)
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def checkpoint(self, checkpoint: str) -> CheckpointOut:
        """One checkpoint."""
        return self.ask(CheckpointOut, "GET", f"/v1/checkpoints/{checkpoint}")

    def latest(
        self, run: str, *, good: bool = True, before: int | None = None, mesh: str | None = None
    ) -> CheckpointOut:
        """The newest good checkpoint of a run (that can be resumed on a mesh)."""
        query = {"good": good, "before": before, "mesh": mesh}
        return self.ask(CheckpointOut, "GET", f"/v1/runs/{run}/latest", query=query)

    def add_verification(self, checkpoint: str, body: VerificationIn) -> CheckpointOut:
        """What a verification found."""
        path = f"/v1/checkpoints/{checkpoint}/verifications"
        return self.ask(CheckpointOut, "POST", path, body=body)

    def verifications(self, checkpoint: str) -> tuple[VerificationOut, ...]:
        """The integrity history of a checkpoint."""
        path = f"/v1/checkpoints/{checkpoint}/verifications"
        return self.ask(tuple[VerificationOut, ...], "GET", path)

    def audit(
        self, run: str | None = None, checkpoint: str | None = None, kind: str | None = None
    ) -> Iterator[EventOut]:
        """Events, newest first."""
        cursor: str | None = None
        while True:
            query = {"run": run, "checkpoint": checkpoint, "kind": kind, "cursor": cursor}
            page = self.ask(EventPage, "GET", "/v1/audit", query={**query, "limit": 500})
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return
