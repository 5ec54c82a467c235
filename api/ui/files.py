"""Files of the dashboard: which there are, and what they are. A path that is not in the table has no file, whatever it names."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

PREFIX: Final = "/ui"
VISITOR_PATH: Final = f"{PREFIX}/visitor"
INDEX: Final = "index.html"

BYTES_MAX: Final = 300_000
"""Of all files together, as they are sent."""

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No script and no style in a page or an attribute, and nothing of another host."""

_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"

_OURS: Mapping[str, str] = {
    INDEX: "text/html; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "app.css": _STYLE,
    "app.js": _SCRIPT,
    "session.js": _SCRIPT,
    "polling.js": _SCRIPT,
    "format.js": _SCRIPT,
    "parts.js": _SCRIPT,
    "dialog.js": _SCRIPT,
    "chart.js": _SCRIPT,
    "graph.js": _SCRIPT,
    "pages/jobs.js": _SCRIPT,
    "pages/job.js": _SCRIPT,
    "pages/vertex.js": _SCRIPT,
    "pages/checkpoints.js": _SCRIPT,
    "pages/explanation.js": _SCRIPT,
    "pages/snapshots.js": _SCRIPT,
    "pages/snapshot.js": _SCRIPT,
    "pages/failures.js": _SCRIPT,
    "pages/forget.js": _SCRIPT,
    "pages/care.js": _SCRIPT,
    "pages/service.js": _SCRIPT,
}
_OTHERS: Mapping[str, str] = {
    "vendor/preact/preact.mjs": _SCRIPT,
    "vendor/preact/hooks.mjs": _SCRIPT,
    "vendor/htm/htm.mjs": _SCRIPT,
    "vendor/dagre/dagre.esm.js": _SCRIPT,
    "vendor/uplot/uPlot.iife.min.js": _SCRIPT,
    "vendor/uplot/uPlot.min.css": _STYLE,
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file, whole: all of them are small."""

    content: bytes
    media_type: str
    tag: str
    """ETag: changes with the content."""


NAMES: Final = (*_OURS, *_OTHERS)


@functools.cache
def find(name: str) -> PageFile | None:
    """The file of a name below `/ui/`; the page itself for the empty one. The cache has no more entries than the table: other names
    are looked up in `is_file` first."""
    chosen = name or INDEX
    media_type = _OURS.get(chosen) or _OTHERS.get(chosen)
    if media_type is None:
        return None
    folder = files("holdfast.api.ui")
    content = (folder if chosen in _OTHERS else folder.joinpath("static")).joinpath(*chosen.split("/")).read_bytes()
    return PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def is_file(name: str) -> bool:
    return not name or name in _OURS or name in _OTHERS


OPEN_PATHS: Final = frozenset({PREFIX, f"{PREFIX}/", *(f"{PREFIX}/{name}" for name in NAMES)})
"""Paths that need no token: a browser has none before the page asks for it. They reveal nothing about jobs."""
