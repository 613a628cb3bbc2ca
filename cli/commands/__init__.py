"""One module per command: parse, call `ckpt`, print. Modules import what they work with when they
run, so that `--help` and the torch-free commands start fast."""

from collections.abc import Callable
from typing import Any

from cli.commands.adopt import adopt
from cli.commands.convert import convert
from cli.commands.demo import demo
from cli.commands.diff import diff
from cli.commands.doctor import doctor
from cli.commands.inspect import inspect
from cli.commands.latest import latest
from cli.commands.ls import ls
from cli.commands.pin import pin, unpin
from cli.commands.plan import plan
from cli.commands.prune import prune
from cli.commands.reshard import reshard
from cli.commands.verify import verify

COMMANDS: dict[str, Callable[..., Any]] = {
    "ls": ls,
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "latest": latest,
    "prune": prune,
    "pin": pin,
    "unpin": unpin,
    "plan": plan,
    "reshard": reshard,
    "convert": convert,
    "adopt": adopt,
    "doctor": doctor,
    "demo": demo,
}
