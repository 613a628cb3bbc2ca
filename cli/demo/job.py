"""What the demo's processes are told, and what they say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Job:
    """What one run does. `mesh` is (replicate, shard), or None for one process without a mesh;
    `end` the number of updates after which the run stops. It starts from the checkpoint
    `resume_from`, if any, and saves one in the run directory `save_to` after `save_at` updates."""

    mesh: tuple[int, int] | None
    end: int
    resume_from: Path | None = None
    save_to: Path | None = None
    save_at: int | None = None

    def __post_init__(self) -> None:
        if (self.save_to is None) != (self.save_at is None):
            raise ValueError("save_to and save_at go together")

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.mesh[0] * self.mesh[1] if self.mesh else 1

    @property
    def topology(self) -> str:
        """`2×2`, replicate × shard; `1` for one process."""
        return "×".join(map(str, self.mesh)) if self.mesh else "1"


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank reports at the end: a digest of all parameters, the bytes of optimizer state that
    it holds, and the bytes it read from the checkpoint."""

    parameters: str
    state_bytes: int
    bytes_read: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """Sent by rank 0: the loss over the global batch after `step` updates."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class RankFailed:
    """Sent by a rank that raises, before it ends."""

    traceback: str


Message = StepDone | RankResult | RankFailed
