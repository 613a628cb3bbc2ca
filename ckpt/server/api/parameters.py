"""Parameters that many routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from ckpt.server.messages import MAX_INTEGER, NAME_PATTERN, TOKEN_PATTERN

RunName = Annotated[str, Path(pattern=NAME_PATTERN, description="The name of a run.")]
SaveToken = Annotated[str, Path(pattern=TOKEN_PATTERN, description="The token of a save.")]
AttemptToken = Annotated[str, Path(pattern=TOKEN_PATTERN, description="The id of an attempt.")]
RowId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="An id that the server gave.")]
Cursor = Annotated[
    str | None, Query(max_length=256, description="`next_cursor` of the page before.")
]
Limit = Annotated[int, Query(ge=1, le=500, description="At most so many items.")]
Step = Annotated[int | None, Query(ge=0, le=MAX_INTEGER)]
