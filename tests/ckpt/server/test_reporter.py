"""`CheckpointManager(server=...)`: the catalogue follows the files, and training never waits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ckpt.errors import ReplacedError
from ckpt.manager import CheckpointManager
from ckpt.runs import checkpoint_name
from ckpt.server.client import Client
from ckpt.server.messages import AttemptIn, VerificationIn
from ckpt.server.serving import serving
from ckpt.server.settings import Settings
from tests.ckpt.filled import model_of, value_of
from tests.servers import free_ports

CHECKPOINT_KINDS = ["checkpoint.reserved", "checkpoint.writing", "checkpoint.committed"]


def kinds(client: Client, run: str) -> list[str]:
    return [event.kind for event in client.audit(run)][::-1]


@pytest.fixture
def port_settings(settings: Settings) -> Settings:
    """A server on a port that stays the same when it is started again."""
    (port,) = free_ports(1)
    return dataclasses.replace(settings, port=port)


def test_the_server_hears_of_a_save(server_url: str, root: str) -> None:
    with CheckpointManager(f"{root}/alpha", server=server_url, require_finite=True) as manager:
        manager.save(1, model=model_of(1), metrics={"loss": 2.5})
    with Client(server_url) as client:
        (row,) = client.checkpoints("alpha")
        assert (row.state, row.name, row.finite) == ("committed", checkpoint_name(1), True)
        assert row.summary is not None
        assert row.summary.metrics == {"loss": 2.5}
        assert kinds(client, "alpha") == [
            "run.created",
            "attempt.started",
            *CHECKPOINT_KINDS,
            "attempt.ended",
        ]
        (attempt,) = client.attempts("alpha")
        assert attempt.epoch == 1
        assert attempt.ended_at is not None


def test_a_server_that_was_away_is_told_in_order_and_once(
    port_settings: Settings, root: str
) -> None:
    url = f"http://127.0.0.1:{port_settings.port}"
    with CheckpointManager(f"{root}/alpha", server=url) as manager:
        manager.save(1, model=model_of(1))
        manager.async_save(2, model=model_of(2)).wait()
    assert list(Path(root, "alpha", ".run", "outbox").iterdir())
    with serving(port_settings), Client(url) as client:
        with CheckpointManager(f"{root}/alpha", server=url) as manager:
            model = model_of(0)
            assert manager.load(model=model) == 2
            assert value_of(model) == 2
            manager.save(3, model=model)
        assert [row.step for row in client.checkpoints("alpha")] == [3, 2, 1]
        assert {row.state for row in client.checkpoints("alpha")} == {"committed"}
        assert kinds(client, "alpha") == [
            *("run.created", "attempt.started", *CHECKPOINT_KINDS, *CHECKPOINT_KINDS),
            *("attempt.ended", "attempt.started", *CHECKPOINT_KINDS, "attempt.ended"),
        ]
        attempts = client.attempts("alpha")
        assert attempts[0].resumed_from is not None
        assert attempts[0].resumed_from.path == checkpoint_name(2)
    assert not list(Path(root, "alpha", ".run", "outbox").iterdir())


def test_a_catalogue_that_was_lost_is_told_again(port_settings: Settings, root: str) -> None:
    url = f"http://127.0.0.1:{port_settings.port}"
    with CheckpointManager(f"{root}/alpha", server=url) as manager:
        with serving(port_settings):
            manager.save(1, model=model_of(1))
        empty = dataclasses.replace(
            port_settings, database=f"sqlite:///{Path(root).parent / 'other.db'}"
        )
        with serving(empty), Client(url) as client:
            manager.save(2, model=model_of(2))
            manager.close()
            assert [row.step for row in client.checkpoints("alpha")] == [2, 1]
            assert {row.state for row in client.checkpoints("alpha")} == {"committed"}


def test_a_job_that_the_server_knows_to_be_replaced_commits_nothing(
    server_url: str, root: str
) -> None:
    with (
        CheckpointManager(f"{root}/alpha", server=server_url) as manager,
        Client(server_url) as client,
    ):
        manager.save(1, model=model_of(1))
        client.put_attempt("alpha", "another", AttemptIn(epoch=7))
        with pytest.raises(ReplacedError, match="epoch 7"):
            manager.save(2, model=model_of(2))
        assert not Path(root, "alpha", checkpoint_name(2)).exists()


def test_files_that_went_away_do_not_keep_a_step_from_being_saved_again(
    server_url: str, root: str
) -> None:
    with (
        CheckpointManager(f"{root}/alpha", server=server_url) as manager,
        Client(server_url) as client,
    ):
        manager.save(1, model=model_of(1))
        first = Path(root, "alpha", checkpoint_name(1))
        first.rename(Path(root, "moved"))
        manager.save(1, model=model_of(2))
        manager.close()
        assert [row.state for row in client.checkpoints("alpha")].count("committed") == 1
        states = {row.state for row in client.checkpoints("alpha")}
        assert states == {"committed", "deleted"}


def test_verified_by_a_client_is_good(server_url: str, root: str) -> None:
    with CheckpointManager(f"{root}/alpha", server=server_url, require_finite=True) as manager:
        manager.save(5, model=model_of(1))
    with Client(server_url) as client:
        (row,) = client.checkpoints("alpha")
        client.add_verification(row.id, VerificationIn(level="full"))
        assert client.latest("alpha").step == 5
