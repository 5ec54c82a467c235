"""`hf.testing`: a whole job in a test, with a clock that the test moves. See docs/testing.md.

Names are imported when they are asked for: a process that only commits to a target (`committing_process`) needs none of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.api.testing.connectors import CHECKED_COLUMNS, check_sink
    from holdfast.api.testing.feed import Feed
    from holdfast.api.testing.job import Job
    from holdfast.api.testing.output import Output
    from holdfast.api.testing.source_check import check_source

__all__ = ["CHECKED_COLUMNS", "Feed", "Job", "Output", "check_sink", "check_source"]

_HOMES = {
    "CHECKED_COLUMNS": "connectors",
    "Feed": "feed",
    "Job": "job",
    "Output": "output",
    "check_sink": "connectors",
    "check_source": "source_check",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
