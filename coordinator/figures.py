"""Figures as people read them: the same text on the command line, in explanations, and in the dashboard (api/ui/static/format.js).

Times are cut off, as a clock does: 59.96 s is not yet a minute. Sizes and shares are rounded, halves up."""

from __future__ import annotations

import math

NOT_KNOWN = "-"
_DAY_S, _HOUR_S, _MINUTE_S = 86_400, 3_600, 60
_SIZE_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def duration_text(duration_ms: float) -> str:
    """Milliseconds: `12 ms`, `3.4 s`, `5 min 07 s`, `2 h 03 min`, `3 d 04 h`; NOT_KNOWN below 0."""
    if not 0 <= duration_ms < math.inf:
        return NOT_KNOWN
    if duration_ms < 1_000:
        return f"{math.floor(duration_ms)} ms"
    seconds = math.floor(duration_ms / 1_000)
    if seconds < _MINUTE_S:
        return f"{math.floor(duration_ms / 100) / 10:.1f} s"
    if seconds < _HOUR_S:
        return f"{seconds // _MINUTE_S} min {seconds % _MINUTE_S:02d} s"
    if seconds < _DAY_S:
        return f"{seconds // _HOUR_S} h {seconds % _HOUR_S // _MINUTE_S:02d} min"
    return f"{seconds // _DAY_S} d {seconds % _DAY_S // _HOUR_S:02d} h"


def size_text(size: float) -> str:
    """Bytes: `812 B`, `1.5 MiB`; NOT_KNOWN below 0."""
    if not 0 <= size < math.inf:
        return NOT_KNOWN
    if size < 1_023.5:
        return f"{_rounded(size)} B"
    size, unit = size / 1024, 0
    while _rounded(size * 10) >= 10_240 and unit < len(_SIZE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{_rounded(size * 10) / 10:.1f} {_SIZE_UNITS[unit]}"


def _rounded(value: float) -> int:
    return math.floor(value + 0.5)


def share_text(share: float) -> str:
    """Of 1: `37 %`."""
    return f"{_rounded(share * 100)} %"
