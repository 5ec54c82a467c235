"""The dashboard below `/ui/`. Its files are open to everybody; what they show is asked of `/v1` by whoever is logged in.

The page finds its way behind `#`, so that every link into it is a path that this server has, behind a proxy with a prefix too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, StreamingResponse

from holdfast.api.ui import files
from holdfast.statebackends.errors import NotFoundError

router = APIRouter(include_in_schema=False)

_BLOCK_BYTES = 64 * 1024
_HEADERS = {"Cache-Control": "no-cache"}
"""Besides those of every page (`PageHeaders`)."""


@router.get(files.PREFIX)
async def below() -> Response:
    """The page names its parts relative to a folder."""
    return RedirectResponse("ui/")


@router.get(files.PREFIX + "/{name:path}")
async def file(request: Request, name: Annotated[str, Path(max_length=200)]) -> Response:
    """One file; the page itself for no name."""
    found = await run_in_threadpool(files.find, name) if files.is_file(name) else None
    if found is None:
        raise NotFoundError(f"the dashboard has no file {name[:100]!r}")
    headers = {**_HEADERS, "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    headers["Content-Length"] = str(len(found.content))
    return StreamingResponse(_blocks(found.content), headers=headers, media_type=found.media_type)


async def _blocks(content: bytes) -> AsyncIterator[bytes]:
    """A slow reader holds one block: anybody may ask."""
    for start in range(0, len(content), _BLOCK_BYTES):
        yield content[start : start + _BLOCK_BYTES]
