"""A run under anything that may happen to it: saves, deaths at any write, pins, readers, damage,
pruning by hand, other rules. What must never be lost is compared with a model after every step."""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ckpt.cleanup import Census, plan_cleanup, remove_planned, sweep
from ckpt.errors import CheckpointError
from ckpt.manager import CheckpointManager
from ckpt.marks import reading
from ckpt.retention import KeepBest, Retention
from ckpt.runs import checkpoint_name, latest, scan
from ckpt.storage import Writer, open_storage
from ckpt.storage.local import LocalStorage


@dataclass(slots=True)
class Life:
    """How many changes a process makes before it dies; None: it does not."""

    left: int | None = None

    def spend(self) -> None:
        """One change. From the last one on, nothing that this process does has an effect."""
        if self.left is None:
            return
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "this process is dead")


class Mortal(LocalStorage):
    """A directory as a process sees it that dies after some changes."""

    def __init__(self, root: Path, life: Life) -> None:
        super().__init__(root)
        self.life = life

    def child(self, name: str) -> Mortal:
        return Mortal(self.resolve(name), self.life)

    def make_directory(self, name: str) -> None:
        self.life.spend()
        super().make_directory(name)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        self.life.spend()
        with super().create(name) as writer:
            yield writer
            self.life.spend()

    def rename(self, source: str, destination: str) -> None:
        self.life.spend()
        super().rename(source, destination)

    def remove(self, name: str) -> None:
        self.life.spend()
        super().remove(name)


@dataclass(slots=True)
class Known:
    """What the model knows of a committed checkpoint."""

    loss: float
    broken: bool = False
    pinned: bool = False
    readers: list[ExitStack] = field(default_factory=list)


losses = st.sampled_from([0.5, 1.0, 2.0, math.nan])
retentions = st.sampled_from(
    [
        Retention(),
        Retention(keep_last=1),
        Retention(keep_last=2, keep_every=3),
        Retention(keep_best=KeepBest("loss")),
        Retention(keep_every=4, keep_best=KeepBest("loss", "max", 2)),
        Retention(keep_last=1, keep_best=KeepBest("loss", "min", 2)),
    ]
)


class Run(RuleBasedStateMachine):
    """The model is `self.known`: every checkpoint that is there, by its step."""

    @initialize(retention=retentions, several=st.lists(losses, min_size=2, max_size=4))
    def begin(self, retention: Retention, several: list[float]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="run-"))
        self.known: dict[int, Known] = {}
        self.step = 0
        self.retention = retention
        self.manager = self._start(Life())
        self.save(several)

    def _start(self, life: Life) -> CheckpointManager:
        rules = self.retention
        return CheckpointManager(
            Mortal(self.root, life),
            keep_last=rules.keep_last,
            keep_every=rules.keep_every,
            keep_best=rules.keep_best,
            stale_seconds=0.0,
        )

    def _must_stay(self, rules: Retention) -> set[int]:
        """Which steps retention may not touch, said as plainly as possible."""
        good = [step for step in sorted(self.known, reverse=True) if not self.known[step].broken]
        if rules.keep_last is None and rules.keep_best is None:
            return set(self.known)
        stay = set(good[: rules.keep_last or 1])
        stay |= {s for s, k in self.known.items() if k.broken or k.pinned or k.readers}
        stay |= {s for s in self.known if rules.keep_every and s % rules.keep_every == 0}
        if rules.keep_best is not None:
            sign = 1 if rules.keep_best.mode == "min" else -1
            finite = [s for s in good if math.isfinite(self.known[s].loss)]
            finite.sort(key=lambda s: (sign * self.known[s].loss, -s))
            stay |= set(finite[: rules.keep_best.n])
        return stay

    def _there(self) -> set[int]:
        found = scan(open_storage(self.root))
        return {e.step for e in found if e.status != "pending" and e.step is not None}

    # -------------------------------------------------------------------------------- what happens

    @rule(several=st.lists(losses, min_size=1, max_size=3))
    def save(self, several: list[float]) -> None:
        for loss in several:
            self._save(loss)

    def _save(self, loss: float) -> None:
        self.step += 1
        self.manager.save(self.step, metrics={"loss": loss}, extra={"step": self.step})
        self.known[self.step] = Known(loss)
        stay = self._must_stay(self.retention)
        assert self._there() == stay
        self.known = {step: known for step, known in self.known.items() if step in stay}

    @rule(loss=losses, changes=st.integers(0, 40))
    def save_and_die(self, loss: float, changes: int) -> None:
        """Somewhere between the first change and the last removal the process is killed."""
        self.step += 1
        self.manager.close()
        life = Life()
        dying = self._start(life)
        dying.claim()
        life.left = changes
        try:
            dying.save(self.step, metrics={"loss": loss}, extra={"step": self.step})
        except CheckpointError as error:
            assert "dead" in str(error)  # noqa: PT017
        self.manager = self._start(Life())
        there = self._there()
        if self.step in there:
            self.known[self.step] = Known(loss)
            assert there >= self._must_stay(self.retention)
        assert there <= self.known.keys()
        if self.step not in there:
            assert there == self.known.keys()
        self.known = {step: known for step, known in self.known.items() if step in there}

    @rule(retention=retentions)
    def start_again(self, retention: Retention) -> None:
        self.manager.close()
        self.retention = retention
        self.manager = self._start(Life())

    @rule(retention=retentions)
    def prune(self, retention: Retention) -> None:
        root = open_storage(self.root)
        remove_planned(root, plan_cleanup(Census(root), retention))
        stay = self._must_stay(retention)
        assert self._there() == stay
        self.known = {step: known for step, known in self.known.items() if step in stay}

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.known)))
        self.manager.pin(step)
        self.known[step].pinned = True

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.known)))
        self.manager.unpin(step)
        self.known[step].pinned = False

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.known)))
        stack = ExitStack()
        stack.enter_context(reading(open_storage(self.root), checkpoint_name(step)))
        self.known[step].readers.append(stack)

    @precondition(lambda self: any(known.readers for known in self.known.values()))
    @rule()
    def close(self) -> None:
        known = next(known for known in self.known.values() if known.readers)
        known.readers.pop().close()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.known)))
        next((self.root / checkpoint_name(step)).glob("extra/*")).write_bytes(b"")
        self.known[step].broken = True

    @rule()
    def sweep(self) -> None:
        sweep(open_storage(self.root), stale_seconds=0.0)
        assert not list(self.root.glob(".trash-*"))

    # --------------------------------------------------------------------------- what always holds

    @invariant()
    def what_is_there_is_what_is_known(self) -> None:
        if hasattr(self, "known"):
            assert self._there() == self.known.keys()

    @invariant()
    def the_newest_good_one_is_found(self) -> None:
        if not hasattr(self, "known"):
            return
        good = [step for step, known in self.known.items() if not known.broken]
        entry = latest(open_storage(self.root), "sizes")
        assert (entry.step if entry else None) == max(good, default=None)

    def teardown(self) -> None:
        if hasattr(self, "known"):
            for known in self.known.values():
                for reader in known.readers:
                    reader.close()
            self.manager.close()
            shutil.rmtree(self.root)


SHORT = settings(max_examples=15, stateful_step_count=16, derandomize=True, deadline=None)
LONG = settings(max_examples=3000, stateful_step_count=60, deadline=None)


def test_a_run_loses_nothing_that_must_stay() -> None:
    run_state_machine_as_test(Run, settings=SHORT)  # type: ignore[no-untyped-call]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_run_loses_nothing_that_must_stay_for_long() -> None:
    run_state_machine_as_test(Run, settings=LONG)  # type: ignore[no-untyped-call]
