"""The save protocol, over HTTP and on both databases."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

SUMMARY: dict[str, Any] = {
    "sha256": "a" * 64,
    "created": "2026-01-01T00:00:00+00:00",
    "bytes": 1000,
    "tensors": 3,
    "files": 4,
    "world_size": 4,
}


def begin(api: httpx.Client, root: str, epoch: int = 1) -> None:
    assert api.put("/v1/runs/alpha", json={"root": root}).status_code == 200
    attempt = {"epoch": epoch, "world_size": 4}
    assert api.put(f"/v1/runs/alpha/attempts/attempt-{epoch}", json=attempt).status_code == 200


def reserve(api: httpx.Client, save: str, epoch: int = 1, step: int = 10) -> httpx.Response:
    body = {
        "attempt": f"attempt-{epoch}",
        "epoch": epoch,
        "step": step,
        "name": f"step-{step:08d}",
    }
    return api.put(f"/v1/runs/alpha/saves/{save}", json=body)


def test_a_save_from_reserve_to_good(api: httpx.Client, root: str) -> None:
    begin(api, root)
    assert reserve(api, "s1").json()["state"] == "reserved"
    receipts = {"epoch": 1, "receipts": [{"rank": rank, "bytes": 250} for rank in range(4)]}
    written = api.post("/v1/runs/alpha/saves/s1/receipts", json=receipts).json()
    assert (written["state"], written["good"]) == ("writing", False)
    commit = {"epoch": 1, "summary": SUMMARY}
    for _ in range(2):  # a repeated commit is the same commit
        committed = api.post("/v1/runs/alpha/saves/s1/commit", json=commit).json()
        assert (committed["state"], committed["why_not"]) == (
            "committed",
            ["it has not been verified"],
        )
    checkpoint = committed["id"]
    assert api.get("/v1/runs/alpha/latest").status_code == 404
    verified = api.post(
        f"/v1/checkpoints/{checkpoint}/verifications", json={"level": "full", "finite": True}
    ).json()
    assert (verified["state"], verified["good"], verified["trust"]) == (
        "verified",
        True,
        pytest.approx(1.0, abs=1e-3),
    )
    assert api.get("/v1/runs/alpha/latest").json()["step"] == 10
    kinds = [event["kind"] for event in api.get("/v1/audit").json()["items"]]
    assert kinds[::-1] == [
        "run.created",
        "attempt.started",
        "checkpoint.reserved",
        "checkpoint.writing",
        "checkpoint.committed",
        "checkpoint.verified",
    ]


def test_a_replaced_attempt_is_refused_at_reserve_and_commit(api: httpx.Client, root: str) -> None:
    begin(api, root)
    assert reserve(api, "s1").status_code == 200
    begin(api, root, epoch=2)
    late = api.post("/v1/runs/alpha/saves/s1/commit", json={"epoch": 1, "summary": SUMMARY})
    assert late.status_code == 409
    assert "another attempt has replaced this one" in late.json()["detail"]
    assert late.headers["content-type"] == "application/problem+json"
    assert reserve(api, "s2", epoch=1).status_code == 409
    assert reserve(api, "s3", epoch=2).status_code == 200


def test_what_is_found_broken_is_latest_no_more(api: httpx.Client, root: str) -> None:
    begin(api, root)
    found = {}
    for step in (10, 20):
        reserve(api, f"s{step}", step=step)
        body = {"epoch": 1, "summary": {**SUMMARY, "sha256": f"{step:064d}"}}
        row = api.post(f"/v1/runs/alpha/saves/s{step}/commit", json=body).json()
        found[step] = f"/v1/checkpoints/{row['id']}/verifications"
        api.post(found[step], json={"level": "full", "finite": True})
    assert api.get("/v1/runs/alpha/latest").json()["step"] == 20
    api.post(found[20], json={"level": "sample", "problems": ["r00000-0.distcp: byte 7 differs"]})
    assert api.get("/v1/runs/alpha/latest").json()["step"] == 10


def test_the_server_answers_on_a_port(server_url: str) -> None:
    assert httpx.get(f"{server_url}/readyz").json() == {"status": "ok"}
