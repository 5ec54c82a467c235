"""GETs that are answered from the views that jobs publish: how old the answer is, and 304 for one that the caller has.

The tag is weak: answers with equal tags differ at most in times that only say how long ago something was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from fastapi import Depends, Request, Response

from holdfast.api.routes.common import Service
from holdfast.api.version import REVISION, VERSION

AS_OF_HEADER = "X-Holdfast-As-Of"
"""Until when the answer is known to have been so, ms since the epoch."""

TAGS_MAX = 64
"""Tags of an `If-None-Match` that are compared; further ones don't count."""


class NotModifiedError(Exception):
    """The caller has this answer."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__("not modified")
        self.headers = headers


def from_views(request: Request, response: Response, service: Service) -> None:
    """Dependency of routes that read views alone, of the job in their path or of all jobs. Raises NotModifiedError."""
    moment = service.moment(request.path_params.get("jobid"))
    digest = hashlib.blake2b(f"{VERSION} {REVISION} {moment.tag}".encode(), digest_size=12).hexdigest()
    headers = {"ETag": f'W/"{digest}"', AS_OF_HEADER: str(moment.as_of_ms), "Cache-Control": "no-cache"}
    if _is_known(request.headers.get("if-none-match", ""), digest):
        raise NotModifiedError(headers)
    response.headers.update(headers)


def _is_known(condition: str, digest: str) -> bool:
    """Compares weakly, as RFC 9110 says for If-None-Match."""
    tags = (tag.strip().removeprefix("W/") for tag in condition.split(",", TAGS_MAX)[:TAGS_MAX])
    return condition.strip() == "*" or f'"{digest}"' in tags


async def not_modified(request: Request, error: Exception) -> Response:
    """Error handler of the application."""
    assert isinstance(error, NotModifiedError)
    return Response(status_code=304, headers=dict(error.headers))


VIEWED: dict[str, Any] = {
    "dependencies": [Depends(from_views)],
    "responses": {304: {"description": "The caller's If-None-Match has the tag of this answer"}},
}
"""Options of such a route. Not for one that changes anything, or reads anything else: its answer could be withheld."""
