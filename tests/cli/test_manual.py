"""The manual holds the help of every command, as it is now."""

from __future__ import annotations

import re

import pytest

from ckpt import errors
from cli.commands import COMMANDS
from cli.main import PROGRAM
from cli.manual import MANUAL, command_help, refresh


@pytest.mark.parametrize("name", [PROGRAM, *COMMANDS])
def test_the_manual_has_the_help_of(name: str) -> None:
    lines = "\n".join(line.rstrip() for line in command_help()[name].splitlines())
    assert f"<!-- help: {name} -->\n\n```text\n{lines}\n```\n" in MANUAL.read_text()


def test_refreshing_the_manual_changes_nothing() -> None:
    assert refresh(MANUAL.read_text()) == MANUAL.read_text()


def test_a_stale_block_is_replaced_and_the_rest_kept() -> None:
    stale = "before\n<!-- help: ls -->\n\n```text\nold\n```\nafter\n"
    fresh = refresh(stale)
    assert "old" not in fresh
    assert fresh.startswith("before\n<!-- help: ls -->")
    assert fresh.endswith("```\nafter\n")


def test_the_manual_lists_every_exit_code() -> None:
    listed = set(re.findall(r"^\| (\d+) \|", MANUAL.read_text(), re.MULTILINE))
    codes = {kind.exit_code for kind in errors.CheckpointError.__subclasses__()}
    assert listed == {str(code) for code in codes | {0, 1, 130}}
