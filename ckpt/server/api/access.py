"""Who asks, and what the routes need of the application."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from ckpt.server.actors import Actor
from ckpt.server.messages import Role
from ckpt.server.registry import Registry


def registry_of(request: Request) -> Registry:
    """The registry of this application."""
    registry: Registry = request.app.state.registry
    return registry


def actor_of(request: Request) -> Actor:
    """Who asks. AuthenticationError without a valid token."""
    authenticate = request.app.state.authenticate
    actor: Actor = authenticate(request)
    return actor


class Needs:
    """A dependency: the actor, who must have a role."""

    def __init__(self, role: Role) -> None:
        self.role = role

    def __call__(self, actor: Annotated[Actor, Depends(actor_of)]) -> Actor:
        actor.require(self.role)
        return actor


TheRegistry = Annotated[Registry, Depends(registry_of)]
Reader = Annotated[Actor, Depends(Needs("reader"))]
Writer = Annotated[Actor, Depends(Needs("writer"))]
Operator = Annotated[Actor, Depends(Needs("operator"))]
Admin = Annotated[Actor, Depends(Needs("admin"))]
