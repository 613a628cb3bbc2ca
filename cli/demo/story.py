"""The demo from start to end: which runs, in which order, and what each is to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CorruptError, NotFoundError
from ckpt.reshard import execute_reshard, plan_reshard
from ckpt.runs import latest
from ckpt.storage import open_storage
from ckpt.summary import summarize_owners
from ckpt.topology import parse_mesh
from ckpt.verify import verify_checkpoint
from cli.demo.job import Job, StepDone
from cli.demo.launch import Outcome, launch
from cli.demo.results import Run, Schedule
from cli.units import size_text, topology_text

ORIGINAL = (2, 2)
RESHARDED = ((1, 2), (4, 1))

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Story:
    """The runs that reached the end, the uninterrupted one first, and the losses of the one that
    was killed."""

    runs: tuple[Run, ...]
    killed: Outcome


@dataclass(frozen=True, slots=True)
class Teller:
    """Runs the stages in `directory`, which must be empty or missing, and says what each shows."""

    directory: Path
    schedule: Schedule
    say: Say

    def tell(self) -> Story:
        """Everything. Raises CheckpointError if a stage cannot be done; whether the results are
        good is for `judge`."""
        self.directory.mkdir(parents=True, exist_ok=True)
        root = self.directory / "run"
        reference = self._uninterrupted()
        killed = self._killed(root)
        original = self._examine(root)
        resharded = {mesh: self._reshard(original, mesh) for mesh in RESHARDED}
        runs = (
            self._resume("resumed, original", ORIGINAL, original, exact=True),
            *(self._resume("resumed, resharded", mesh, at) for mesh, at in resharded.items()),
            self._resume("resumed, original", None, original),
        )
        return Story((reference, *runs), killed)

    def _uninterrupted(self) -> Run:
        self.say(
            f"[1/5] train {self.schedule.end} steps on 2×2 (2 replicas × 2 shards, 4 processes), "
            "undisturbed: the run that all others must match"
        )
        return self._run("uninterrupted", Job(ORIGINAL, self.schedule.end))

    def _killed(self, root: Path) -> Outcome:
        schedule = self.schedule
        self.say(
            f"[2/5] the same again, with a checkpoint at step {schedule.checkpoint} and SIGKILL to "
            f"every process at step {schedule.kill}: what a preempted job looks like"
        )
        job = Job(ORIGINAL, schedule.end, save_to=root, save_at=schedule.checkpoint)
        outcome = self._launch(job, kill_after=schedule.kill)
        self.say(f"      killed after {max(outcome.losses)} steps, {outcome.seconds:.0f} s")
        return outcome

    def _examine(self, root: Path) -> Path:
        """Verify and inspect what the killed run left; the checkpoint."""
        self.say(
            "[3/5] verify and inspect what it left: every byte is checked against its checksum"
        )
        entry = latest(open_storage(root))
        if entry is None:
            raise NotFoundError(f"{root}: the killed run left no checkpoint; that is a fault here")
        path = root / entry.name
        checkpoint = open_checkpoint(path)
        report = verify_checkpoint(checkpoint, "full")
        if report.problems:
            raise CorruptError(f"{path}: {report.problems[0].message}")
        manifest = checkpoint.manifest
        owners = ", ".join(
            f"{found.member} {found.imbalance:.2f}"
            for found in map(summarize_owners, manifest.ownership)
        )
        self.say(
            f"      {entry.name}: good, {report.files} files, {size_text(report.bytes_read)}, "
            f"{topology_text(manifest.topology)}, {len(manifest.tensors)} tensors; each "
            f"optimizer state is on one replica only; busiest over mean: {owners}"
        )
        return path

    def _reshard(self, source: Path, mesh: tuple[int, int]) -> Path:
        """The checkpoint as `mesh` would have written it."""
        replicas, shards = mesh
        self.say(
            f"[4/5] reshard to {replicas}×{shards}: rewrite the checkpoint as those ranks would "
            "have saved it, without loading the model"
        )
        name = f"resharded-{replicas}x{shards}"
        checkpoint = open_checkpoint(source)
        plan = plan_reshard(checkpoint, parse_mesh(f"replicate={replicas},shard={shards}"))
        result = execute_reshard(plan, checkpoint, open_storage(self.directory), name)
        how = f"read {size_text(result.bytes_read)}, wrote {size_text(result.bytes_written)}"
        if not result.bytes_written:
            how = "the same shards, so the data files are shared and nothing is copied"
        self.say(f"      {how}, {result.seconds:.1f} s")
        return self.directory / name

    def _resume(
        self, name: str, mesh: tuple[int, int] | None, checkpoint: Path, exact: bool = False
    ) -> Run:
        job = Job(mesh, self.schedule.end, resume_from=checkpoint)
        where = f"{job.topology}, {job.ranks} processes" if mesh else "one process"
        wanted = "bit for bit the same" if exact else "the same up to rounding"
        self.say(f"[5/5] resume from step {self.schedule.checkpoint} on {where}: must be {wanted}")
        return self._run(name, job, exact)

    def _run(self, name: str, job: Job, exact: bool = False) -> Run:
        outcome = self._launch(job)
        last = outcome.losses[self.schedule.end]
        self.say(f"      loss {last:.4f} at step {self.schedule.end}, {outcome.seconds:.0f} s")
        return Run(
            name=name,
            topology=job.topology,
            ranks=job.ranks,
            losses=outcome.losses,
            parameters=_agreed(outcome),
            state_bytes_per_rank=max(result.state_bytes for result in outcome.results),
            bytes_read=sum(result.bytes_read for result in outcome.results),
            seconds=round(outcome.seconds, 1),
            exact=exact,
        )

    def _launch(self, job: Job, kill_after: int | None = None) -> Outcome:
        return launch(job, on_step=self._heard, kill_after=kill_after)

    def _heard(self, done: StepDone) -> None:
        if done.step % 10 == 0:
            self.say(f"      step {done.step:3}: loss {done.loss:.4f}")


def _agreed(outcome: Outcome) -> str:
    """The digest of the final parameters; every rank must have the same."""
    digests = {result.parameters for result in outcome.results}
    return digests.pop() if len(digests) == 1 else f"ranks disagree: {sorted(digests)}"
