"""Durations as users write them. CORE: no clock."""

from __future__ import annotations

from datetime import timedelta

from holdfast.statebackends.errors import InvalidConfigError

_MILLISECOND = timedelta(milliseconds=1)


def duration_ms(duration: timedelta | int, what: str) -> int:
    """Whole ms of a timedelta, or of an int that counts ms. Raises InvalidConfigError for anything else, or a fraction of one."""
    if isinstance(duration, timedelta):
        whole, rest = divmod(duration, _MILLISECOND)
        if rest:
            raise InvalidConfigError(f"{what} must be whole milliseconds, not {duration}", setting=what)
        return whole
    if isinstance(duration, bool) or not isinstance(duration, int):
        raise InvalidConfigError(f"{what} must be a timedelta, or ms as an int, not {duration!r}", setting=what)
    return duration
