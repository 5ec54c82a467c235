"""Which page a request is from, and the cookie of a browser's session.

Cookies of one host are sent to all of its ports: so the cookie's name has the port, and two services of a machine don't end each
other's sessions."""

from __future__ import annotations

from starlette.types import Scope

from holdfast.api.errors import ForeignOriginError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_COOKIES_BYTES_MAX = 8_192


def header_of(scope: Scope, name: bytes) -> bytes:
    """The first header of a name, in lower case; empty without one."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def is_of_this_service(scope: Scope, *, unsaid: bool) -> bool:
    """Whether a page of this service sent the request. `unsaid`: the answer where nothing in it says so: browsers name the origin
    of every request that may change something, but not of a GET."""
    host = header_of(scope, b"host")
    origin, site, referer = (header_of(scope, name) for name in (b"origin", b"sec-fetch-site", b"referer"))
    if site:
        return site == b"same-origin"
    if origin or referer:
        return bool(host) and (origin or referer).partition(b"://")[2].partition(b"/")[0] == host
    return unsaid


def foreign() -> ForeignOriginError:
    return ForeignOriginError("a change is taken with a bearer token, or from pages of this service: this may be from another page")


def is_encrypted(scope: Scope) -> bool:
    """Whether the request came over TLS of this service."""
    return bool(scope.get("scheme") == "https")


def cookie_name(scope: Scope) -> str:
    """Name of the session's cookie. `__Host-`: browsers take it from this host alone, over TLS, for all paths."""
    server = scope.get("server") or ("", 0)
    return f"__Host-holdfast-{server[1]}" if is_encrypted(scope) else f"holdfast-{server[1]}"


def session_text(scope: Scope) -> str:
    """What the session's cookie holds; empty without one."""
    wanted = cookie_name(scope)
    for name, value in scope["headers"]:
        if name != b"cookie":
            continue
        for pair in value[:_COOKIES_BYTES_MAX].decode("latin-1").split(";"):
            found, _, text = pair.strip().partition("=")
            if found == wanted:
                return str(text)
    return ""


def set_cookie(scope: Scope, text: str, *, life_s: int) -> str:
    """Header that gives a browser its session; `life_s` 0 takes it away."""
    secure = "; Secure" if is_encrypted(scope) else ""
    return f"{cookie_name(scope)}={text}; Path=/; Max-Age={life_s}; HttpOnly; SameSite=Strict{secure}"
