"""Who does something, and what that one may do. No HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckpt.errors import NotAuthorisedError
from ckpt.server.messages import Role

ROLES: tuple[Role, ...] = ("reader", "writer", "operator", "admin")
"""Each may do what those before it may."""


@dataclass(frozen=True, slots=True)
class Actor:
    """The bearer of a token, or the server itself. `runs`: patterns of the runs that it may write
    (writers only; operators and admins may write all)."""

    name: str
    role: Role
    runs: tuple[str, ...] = ("*",)

    def has(self, role: Role) -> bool:
        """Whether its role includes another one."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def require(self, role: Role) -> None:
        """NotAuthorisedError, naming both roles, unless its role includes `role`."""
        if not self.has(role):
            raise NotAuthorisedError(
                f"{self.name} has the role {self.role}, and this needs {role}: use another token"
            )

    def require_run(self, run: str) -> None:
        """NotAuthorisedError unless it may write a run."""
        self.require("writer")
        if self.role == "writer" and not any(fnmatchcase(run, pattern) for pattern in self.runs):
            raise NotAuthorisedError(
                f"{self.name} may write the runs {', '.join(self.runs)}, and not {run!r}"
            )


SYSTEM = Actor("server", "admin")
"""What the server does by itself: leases that expire, scheduled work."""
