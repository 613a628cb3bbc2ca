"""Keeps the help of every command in the manual: `python -m cli.manual` rewrites docs/cli.md.

Hand-written text stays; the fenced block after each `<!-- help: NAME -->` is replaced.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from typer.main import get_command

from cli.commands import COMMANDS
from cli.main import PROGRAM, build_app

MANUAL = Path(__file__).parents[1] / "docs" / "cli.md"
_BLOCK = re.compile(r"<!-- help: (?P<name>[\w-]+) -->\n\n```text\n.*?```\n", re.DOTALL)


def command_help() -> dict[str, str]:
    """The help text of the program and of each command, at 80 columns."""
    program = get_command(build_app())
    root = program.make_context(PROGRAM, [], resilient_parsing=True, terminal_width=80)
    texts = {PROGRAM: root.get_help()}
    for name in COMMANDS:
        command = program.get_command(root, name)  # type: ignore[attr-defined]  # it is a group
        texts[name] = command.make_context(
            name, [], parent=root, resilient_parsing=True, terminal_width=80
        ).get_help()
    return texts


def refresh(manual: str) -> str:
    """The manual with every help block brought up to date."""
    texts = command_help()
    return _BLOCK.sub(lambda match: _block(match["name"], texts[match["name"]]), manual)


def _block(name: str, text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"<!-- help: {name} -->\n\n```text\n{lines}\n```\n"


def main() -> int:
    """Rewrite the manual. With `--check`, only say whether it is up to date."""
    present = MANUAL.read_text()
    wanted = refresh(present)
    if "--check" in sys.argv[1:]:
        if present != wanted:
            sys.stderr.write(f"{MANUAL} is out of date: run `python -m cli.manual`\n")
        return int(present != wanted)
    MANUAL.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
