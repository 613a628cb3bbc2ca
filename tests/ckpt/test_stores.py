"""Checkpoints on real object stores, from end to end: save, find, load, verify, reshard, list."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import CheckpointManager
from ckpt.checkpoint import open_checkpoint
from ckpt.errors import CheckpointError, DestinationExistsError
from ckpt.loading import load
from ckpt.reading import read_targets
from ckpt.runs import entry_of, latest, problem_of, scan
from ckpt.saving import save
from ckpt.state.part import ReadTarget
from ckpt.storage import Storage, open_storage
from ckpt.storage.local import LocalStorage
from ckpt.verify import verify_checkpoint
from cli.main import main
from hyperopt.ownership import Box
from tests.ckpt.states import Net, OwnerOptimizer, assert_model, fill, shard
from tests.cli.checkpoints import write_checkpoint
from tests.distributed import run_ranks
from tests.proxy import Fault, Proxy

STEPS = 7
IMPATIENT = {"config_kwargs": {"read_timeout": 2, "retries": {"max_attempts": 1}}}


@pytest.fixture(params=["s3", "gcs"])
def run(request: pytest.FixtureRequest) -> str:
    """The URL of an empty run on each store."""
    bucket: str = request.getfixturevalue(f"{request.param}_bucket")
    return f"{bucket}/{uuid.uuid4().hex}/run"


@pytest.fixture
def s3_run(s3_bucket: str) -> str:
    return f"{s3_bucket}/{uuid.uuid4().hex}/run"


@pytest.fixture
def proxied(s3_run: str, s3_proxy: Proxy) -> Storage:
    """The run, through a proxy that counts requests and can break them."""
    return open_storage(s3_run, endpoint_url=s3_proxy.url, **IMPATIENT)


def state(sizes: tuple[int, int] | None, offset: float = 0.0) -> dict[str, Any]:
    model: nn.Module = Net()
    fill(model, offset)
    if sizes is not None:
        model = shard(model, sizes)
    replicas = sizes[0] if sizes else 1
    return {"model": model, "optimizer": OwnerOptimizer(model.named_parameters(), replicas)}


def train(root: Storage | str, sizes: tuple[int, int] | None) -> None:
    """Save steps 1 to 3, keep two, and load the newest into another state."""
    saved, loaded = state(sizes), state(sizes, offset=1.0)
    saved["optimizer"].run(STEPS)
    with CheckpointManager(root, keep_last=2) as manager:
        assert manager.load(**saved) is None
        for step in (1, 2, 3):
            manager.save(step, **saved)
        with pytest.raises(DestinationExistsError):
            manager.save(3, **saved)
        found = manager.latest("checksums")
        assert found is not None
        assert found.step == 3
        assert manager.load(**loaded) == 3
    assert_model(loaded["model"])
    loaded["optimizer"].assert_state(STEPS)


def check_load(path: str, sizes: tuple[int, int] | None) -> None:
    loaded = state(sizes, offset=1.0)
    load(path, **loaded)
    assert_model(loaded["model"])
    loaded["optimizer"].assert_state(STEPS)


def names(root: Storage) -> list[str]:
    """Checkpoints; a prefix without objects is listed by some servers, and is none."""
    return [entry.name for entry in scan(root) if entry.status == "committed"]


def test_one_process(run: str) -> None:
    train(run, None)
    root = open_storage(run)
    assert names(root) == ["step-00000002", "step-00000003"]
    assert not [file for file in root.walk() if file.name.startswith("step-00000001/")]
    report = verify_checkpoint(f"{run}/step-00000003", "full")
    assert report.problems == ()


def test_four_ranks(s3_run: str) -> None:
    run_ranks(train, 4, s3_run, (2, 2))
    assert names(open_storage(s3_run)) == ["step-00000002", "step-00000003"]
    check_load(f"{s3_run}/step-00000003", None)


def tell(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_commands(s3_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also from store to directory and back."""
    saved = state(None)
    saved["optimizer"].run(STEPS)
    source, local, back = f"{s3_run}/step-00000005", str(tmp_path / "local"), f"{s3_run}/back"
    save(source, step=5, **saved)
    listed = json.loads(tell(capsys, "ls", s3_run, "--json"))["checkpoints"]
    assert [entry["step"] for entry in listed] == [5]
    assert json.loads(tell(capsys, "latest", s3_run, "--json"))["path"] == source
    assert "momentum_buffer" in tell(capsys, "inspect", source, "--tensors")
    tell(capsys, "verify", source, "--level", "full")
    tell(capsys, "reshard", source, local, "--mesh", "shard=3")
    tell(capsys, "reshard", local, back, "--mesh", "replicate=1,shard=2")
    tell(capsys, "reshard", back, f"{s3_run}/again", "--mesh", "replicate=2,shard=1")
    for path in (local, back, f"{s3_run}/again"):
        tell(capsys, "verify", path, "--level", "full")
        check_load(path, None)
    assert main(["verify", f"{s3_run}/nothing"]) == 10
    assert f"{s3_run}/nothing" in capsys.readouterr().err


# ----------------------------------------------------------------------------- broken connections


def is_manifest(method: str, target: str) -> bool:
    return method == "PUT" and "manifest.json" in target


def is_data(method: str, target: str) -> bool:
    return method == "PUT" and ".distcp" in target


@pytest.mark.parametrize("matches", [is_data, is_manifest])
def test_an_interrupted_save(matches: Any, proxied: Storage, s3_run: str, s3_proxy: Proxy) -> None:
    """No checkpoint, and the same step can be saved afterwards."""
    saved = state(None)
    with CheckpointManager(proxied) as manager:
        manager.save(1, **saved)
        s3_proxy.faults.append(Fault("reset", 1000, matches))
        with pytest.raises(CheckpointError, match=re.escape(s3_run)):
            manager.save(2, **saved)
        s3_proxy.faults.clear()
        assert manager.latest() == latest(open_storage(s3_run))
        assert names(proxied) == ["step-00000001"]
        manager.save(2, **saved)
        assert manager.load(**saved) == 2
    assert verify_checkpoint(f"{s3_run}/step-00000002", "full").problems == ()


def test_a_commit_whose_answer_is_lost(proxied: Storage, s3_run: str, s3_proxy: Proxy) -> None:
    saved = state(None)
    with CheckpointManager(proxied) as manager:
        s3_proxy.faults.append(Fault("lose_answer", 1, is_manifest))
        report = manager.save(1, **saved)
        assert s3_proxy.faults[0].times == 0
        assert manager.load(**saved) == 1
    assert open_checkpoint(f"{s3_run}/step-00000001").manifest.sha256 == report.sha256


def save_twice(url: str, endpoint: str) -> str:
    saved = state((2, 1))
    saved["optimizer"].run(STEPS)
    with CheckpointManager(open_storage(url, endpoint_url=endpoint, **IMPATIENT)) as manager:
        with pytest.raises(CheckpointError) as caught:
            manager.save(1, **saved)
        manager.save(2, **saved)
    return str(caught.value)


def test_every_rank_hears_of_a_fault(s3_run: str, s3_proxy: Proxy) -> None:
    def is_of_rank_1(method: str, target: str) -> bool:
        return method == "PUT" and "step-00000001" in target and "r00001-0" in target

    s3_proxy.faults.append(Fault("reset", 1000, is_of_rank_1))
    told = run_ranks(save_twice, 2, s3_run, s3_proxy.url)
    assert all(re.search(f"{s3_run}/step-00000001/.*r00001-0", text) for text in told), told
    assert names(open_storage(s3_run)) == ["step-00000002"]


# -------------------------------------------------------------------------------- few requests


class Many(nn.Module):
    """A thousand small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(11)) for _ in range(1000))


def test_a_thousand_small_tensors_need_few_requests(proxied: Storage, s3_proxy: Proxy) -> None:
    saved, loaded = Many(), Many()
    with CheckpointManager(proxied) as manager:
        manager.save(1, model=saved)
        puts = s3_proxy.count("PUT")
        assert puts <= 6  # data, index, private state, manifest, metadata
        s3_proxy.requests.clear()
        manager.load(model=loaded)
    assert torch.equal(loaded.weights[999], saved.weights[999])
    assert s3_proxy.count("GET", ".distcp") == 1
    assert len(s3_proxy.requests) <= 40


def test_columns_of_a_matrix_need_few_requests(proxied: Storage, s3_proxy: Proxy) -> None:
    """A box that is a thousand separate runs of bytes."""
    saved = nn.Linear(64, 1000, bias=False)
    with CheckpointManager(proxied) as manager:
        manager.save(1, model=saved)
    s3_proxy.requests.clear()
    checkpoint = open_checkpoint(proxied.child("step-00000001"))
    target = torch.empty(1000, 8)
    read_targets(checkpoint, [ReadTarget("model.weight", Box((0, 16), (1000, 8)), target)])
    assert torch.equal(target, saved.weight[:, 16:24])
    assert s3_proxy.count("GET", ".distcp") == 1


def test_a_listing_needs_few_requests(proxied: Storage, s3_proxy: Proxy) -> None:
    """However many ranks have saved: of each checkpoint only the manifest is read."""
    with CheckpointManager(proxied) as manager:
        manager.save(0, model=nn.Linear(2, 3))
    source = proxied.child("step-00000000")
    for step in range(1, 8):
        for file in source.walk():
            assert proxied.link(source, file.name, f"step-{step:08d}/{file.name}")
    s3_proxy.requests.clear()
    assert len(scan(proxied)) == 8
    assert len(s3_proxy.requests) <= 3 * 8 + 1


def test_the_sizes_of_many_files_need_few_requests(
    proxied: Storage, s3_proxy: Proxy, tmp_path: Path
) -> None:
    """One listing, however many ranks have saved."""
    local = LocalStorage(write_checkpoint(tmp_path, 5, shards=8))
    target = proxied.child("step-00000005")
    for file in local.walk():
        target.create_exclusive(file.name, local.read(file.name))
    s3_proxy.requests.clear()
    found = latest(proxied, "sizes")
    assert found is not None
    assert found.manifest is not None
    assert len(found.manifest.files) >= 12
    assert len(s3_proxy.requests) <= 7
    target.remove("r00003-0.distcp")
    entry = entry_of(proxied, "step-00000005")
    assert "r00003-0.distcp is missing" in str(problem_of(proxied, entry, "sizes"))
