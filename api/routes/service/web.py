"""Flink's UI below `/flink/`, beside the dialect that it asks there. Its files need a token like everything else, but for the
manifest."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, StreamingResponse

from holdfast.api.flink.web_interface import WebInterface
from holdfast.statebackends.errors import NotFoundError

router = APIRouter(include_in_schema=False)

PREFIX = "/flink"

OPEN_PATHS = frozenset({f"{PREFIX}/assets/favicon/manifest.json"})
"""Paths that need no token: browsers ask for a page's manifest without one. It is the same in every jar of Flink."""

_BLOCK_BYTES = 64 * 1024
_HANDLER = b"this.media='all'"
"""The one script in an attribute of Flink's page: its stylesheet, once loaded, is for the screen."""

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-hashes' "
    f"'sha256-{base64.b64encode(hashlib.sha256(_HANDLER).digest()).decode()}'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self'; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
"""Flink's UI sets styles itself; everything else must come from this server."""

_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


@router.get(PREFIX)
async def below() -> Response:
    """The page names its parts relative to a folder."""
    return RedirectResponse(f"{PREFIX}/")


@router.get(PREFIX + "/{name:path}")
async def file(request: Request, name: Annotated[str, Path(max_length=500)]) -> Response:
    """One file of the UI; the page itself for no name. What the dialect has was asked before."""
    web: WebInterface = request.app.state.web
    found = web.find(name)
    if found is None:
        raise NotFoundError(f"Flink's UI has no file {name[:100]!r}")
    headers = {**_HEADERS, "ETag": found.tag}
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    content = await run_in_threadpool(web.read, found)
    headers["Content-Length"] = str(len(content))
    return StreamingResponse(_blocks(content), headers=headers, media_type=found.media_type)


async def _blocks(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _BLOCK_BYTES):
        yield content[start : start + _BLOCK_BYTES]
