"""`/openapi.json` and `/docs`: Swagger UI from files in the package, since a coordinator often has no internet access, and no
foreign script may run where people type their token.

Both are open to everybody, so they are built once and sent in blocks: a slow reader holds one block and not a megabyte."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from holdfast.statebackends.errors import NotFoundError

router = APIRouter(include_in_schema=False)

OPENAPI_PATH, PAGE_PATH = "/openapi.json", "/docs"

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Swagger UI sets styles itself; everything else must come from this server."""

_BLOCK_BYTES = 64 * 1024
_FOLDER = "vendor/swagger-ui"
_START = b"""window.addEventListener("load", () => SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null, syntaxHighlight: false,
}));
"""
_PAGE = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Holdfast: REST</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript; the description itself is <a href="openapi.json">here</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
_PARTS = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "start.js": "text/javascript; charset=utf-8",
}

OPEN_PATHS = frozenset({OPENAPI_PATH, PAGE_PATH, *(f"{PAGE_PATH}/{name}" for name in _PARTS)})
"""Paths that need no token; they reveal nothing about jobs."""


@router.get(OPENAPI_PATH)
async def openapi(request: Request) -> Response:
    """The OpenAPI document, built at the first request in a thread; concurrent requests wait without a thread."""
    state = request.app.state
    async with state.describing:
        if not hasattr(state, "openapi"):
            state.openapi = await run_in_threadpool(lambda: json.dumps(request.app.openapi()).encode())
    return _answer(request, state.openapi, "application/json")


@router.get(PAGE_PATH)
async def page(request: Request) -> Response:
    """The HTML page."""
    return _answer(request, _PAGE, "text/html; charset=utf-8")


@router.get(PAGE_PATH + "/start.js")
async def start(request: Request) -> Response:
    """The script that starts Swagger UI: a file of its own, since the page may not contain scripts."""
    return _answer(request, _START, _PARTS["start.js"])


@router.get(PAGE_PATH + "/{name}")
async def part(request: Request, name: str) -> Response:
    """One file of Swagger UI."""
    if name not in _PARTS:
        raise NotFoundError(f"the description has no file {name[:100]!r}")
    return _answer(request, await run_in_threadpool(_file, name), _PARTS[name])


@functools.cache
def _file(name: str) -> bytes:
    return files("holdfast.api.docs").joinpath(_FOLDER, name).read_bytes()


@functools.lru_cache(maxsize=8)
def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _answer(request: Request, body: bytes, media_type: str) -> Response:
    tag = _tag(body)
    headers = {
        "ETag": tag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return StreamingResponse(_blocks(body), headers={**headers, "Content-Length": str(len(body))}, media_type=media_type)


async def _blocks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _BLOCK_BYTES):
        yield body[start : start + _BLOCK_BYTES]
