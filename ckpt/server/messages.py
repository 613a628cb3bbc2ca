"""What client and server say to each other: the bodies of requests and answers. No torch, no HTTP.

Times are UTC. Sizes are bytes, durations seconds. What a client says about time is for people only;
the server decides by its own clock.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints

CheckpointState = Literal[
    "reserved", "writing", "committed", "verified", "failed", "trashed", "deleted"
]
JobKind = Literal["verify", "reshard", "prune"]
JobState = Literal["queued", "running", "done", "failed", "cancelled"]
Role = Literal["reader", "writer", "operator", "admin"]
VerifyLevel = Literal["metadata", "sample", "full"]

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
TOKEN_PATTERN = r"^[A-Za-z0-9-]{1,64}$"
MAX_INTEGER = 2**53 - 1
"""The largest integer that every reader of JSON gets exactly."""

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Token = Annotated[str, StringConstraints(pattern=TOKEN_PATTERN)]
Text = Annotated[str, StringConstraints(max_length=4096)]
ShortText = Annotated[str, StringConstraints(max_length=256)]
Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Message(BaseModel):
    """Immutable, and refuses what it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


# ---------------------------------------------------------------------------------- runs, attempts


class RunIn(Message):
    """Where the checkpoints of a run lie: a local path or URL inside an allowed root."""

    root: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    description: Text = ""


class RunOut(Message):
    """A run. `epoch` is that of its newest attempt; `writing` whether that gives signs of life."""

    name: str
    root: str
    description: str
    created_at: AwareDatetime
    epoch: int
    writing: bool
    checkpoints: int
    bytes: int
    latest_good_step: int | None


class ParentMessage(Message):
    """The checkpoint that an attempt resumed from, as a manifest names it."""

    path: Text
    step: Count | None = None
    sha256: Sha256 | None = None


class AttemptIn(Message):
    """One start of a job. `epoch` is the one it claimed the run with (`.run/writer`); without, the
    server gives the next one."""

    epoch: Annotated[int, Field(ge=1, le=MAX_INTEGER)] | None = None
    host: ShortText = ""
    pid: Count = 0
    world_size: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    lease_seconds: Annotated[float, Field(ge=1, le=86_400)] = 60.0
    resumed_from: ParentMessage | None = None


class AttemptOut(Message):
    """One start of a job, as the server knows it."""

    attempt: str
    run: str
    epoch: int
    host: str
    pid: int
    world_size: int
    lease_seconds: float
    started_at: AwareDatetime
    heartbeat_at: AwareDatetime
    ended_at: AwareDatetime | None
    ranks_seen: int
    resumed_from: ParentMessage | None


class Heartbeat(Message):
    """A sign of life of one rank. `epoch`: that of the attempt, if the rank knows it. `step` is
    where training is; `save` the save in flight."""

    epoch: Count | None = None
    rank: Annotated[int, Field(ge=0, le=999_999)] = 0
    step: Count | None = None
    save: Token | None = None


# ------------------------------------------------------------------------------------------- saves


class SaveIn(Message):
    """Reserve the checkpoint `name` of a step. The save's token is in the address; the manifest has
    it too (`producer.save`), so that files and catalogue find each other. `absent`: the writer has
    looked, and there is no checkpoint of this name in the files, whatever the catalogue says."""

    attempt: Token
    epoch: Count
    step: Count
    name: Name
    absent: bool = False


class Receipt(Message):
    """What one rank wrote."""

    rank: Annotated[int, Field(ge=0, le=999_999)]
    bytes: Count
    files: Count = 1
    seconds: Seconds = 0.0


class ReceiptsIn(Message):
    """All ranks' receipts, in one request."""

    epoch: Count
    receipts: Annotated[tuple[Receipt, ...], Field(min_length=1, max_length=100_000)]
    stall_seconds: Seconds | None = None


class MeshMessage(Message):
    """A device mesh: names and sizes of its dims."""

    names: Annotated[tuple[ShortText, ...], Field(max_length=32)]
    sizes: Annotated[tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...], Field(max_length=32)]


class OwnerMessage(Message):
    """What one owner replica carries: slots, and its share of the cost, 0 to 1."""

    owner: Count
    slots: Count
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Summary(Message):
    """What the catalogue keeps of a manifest (`ckpt.server.summaries.summary_of` makes it)."""

    sha256: Sha256
    created: ShortText
    bytes: Count
    tensors: Count
    files: Count
    world_size: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    meshes: Annotated[tuple[MeshMessage, ...], Field(max_length=1024)] = ()
    replica_count: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    imbalance: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    owners: Annotated[tuple[OwnerMessage, ...], Field(max_length=4096)] = ()
    producer: dict[ShortText, Text] = {}
    parent: ParentMessage | None = None
    metrics: dict[ShortText, float] = {}


class CommitIn(Message):
    """The manifest is in place. `finite`: whether all floating state was checked to be finite."""

    epoch: Count
    summary: Summary
    finite: bool | None = None
    save_seconds: Seconds | None = None
    stall_seconds: Seconds | None = None


class FailIn(Message):
    """A save has failed, and why."""

    epoch: Count
    problem: Text


class CheckpointOut(Message):
    """A checkpoint, from reserved to deleted. `good`: it can be relied on; else `why_not` says what
    is missing. `trust` falls from 1 at the last full verification towards 0."""

    id: str
    run: str
    name: str
    step: int | None
    save: str
    state: CheckpointState
    good: bool
    why_not: tuple[str, ...]
    attempt: str | None
    epoch: int | None
    reserved_at: AwareDatetime
    committed_at: AwareDatetime | None
    verified_at: AwareDatetime | None
    verified_level: VerifyLevel | None
    trust: float
    finite: bool | None
    problem: str | None
    save_seconds: float | None
    stall_seconds: float | None
    summary: Summary | None
    pinned: bool
    pin_reason: str
    aliases: tuple[str, ...]
    trashed_at: AwareDatetime | None
    delete_after: AwareDatetime | None


class VerificationIn(Message):
    """What a verification found: no problems, or the first ones (file, offset and tensor in each).
    `finite` is None where the level does not read the data."""

    level: VerifyLevel
    problems: Annotated[tuple[Text, ...], Field(max_length=100)] = ()
    finite: bool | None = None
    bytes: Count = 0
    seconds: Seconds = 0.0


class VerificationOut(VerificationIn):
    """One entry of a checkpoint's integrity history."""

    at: AwareDatetime
    by: str
    ok: bool


# ------------------------------------------------------------------------------------------ events


class EventOut(Message):
    """One audited event. Ids grow in the order in which events became visible."""

    id: int
    at: AwareDatetime
    kind: str
    actor: str
    run: str | None
    checkpoint: str | None
    job: str | None
    detail: dict[str, Any]


class RunPage(Message):
    """A page of runs. Pass `next_cursor` as `cursor` for the next one; None at the end."""

    items: tuple[RunOut, ...]
    next_cursor: str | None


class CheckpointPage(Message):
    """A page of checkpoints, newest first."""

    items: tuple[CheckpointOut, ...]
    next_cursor: str | None


class EventPage(Message):
    """A page of events, newest first."""

    items: tuple[EventOut, ...]
    next_cursor: str | None


class Problem(BaseModel):
    """RFC 9457: the kind of error as `type`; what, where, what to do as `detail`."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
