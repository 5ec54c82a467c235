"""ASGI middleware: what browsers are told of every answer, and more of pages: nothing from elsewhere, no frame, no guessed types.

What a route says itself counts: the pages of Flink's UI and of Swagger need a policy of their own."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.ui.files import CONTENT_SECURITY_POLICY, PREFIX

_ALWAYS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
API_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in _ALWAYS.items())
"""What every answer that is no page's says, as ASGI has headers."""
_OF_PAGES = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_page(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


class PageHeaders:
    """Outermost, so that refusals have them, too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = {**_ALWAYS, **_OF_PAGES} if is_page(scope["path"]) else _ALWAYS

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in told.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, tell)
