"""The published JSON Schema is the one that the structs have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from ckpt.manifest import manifest_schema

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "manifest.schema.json"


def test_the_published_schema_is_current() -> None:
    command = [sys.executable, "-m", "ckpt.manifest"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == PUBLISHED.read_text(), (
        "run: python -m ckpt.manifest > docs/manifest.schema.json"
    )


def test_the_manual_explains_every_member() -> None:
    """docs/format.md names each member of each struct."""
    text = (ROOT / "docs" / "format.md").read_text()
    members = {
        member
        for definition in manifest_schema()["$defs"].values()
        for member in definition.get("properties", {})
    }
    assert {m for m in members if not re.search(rf"`{m}`", text)} == set()
    assert json.loads(PUBLISHED.read_text())["title"] in text
