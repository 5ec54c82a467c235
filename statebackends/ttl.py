"""Time to live (TTL) of keyed state: what a user asks for, and how a stored type says that its values carry stamps.

A stamp is the processing time, ms since the epoch, at which a value was last written (or read, if reading counts). It is
stored with each value, list element and map entry, and it alone decides what has expired: at any time T, everything whose
stamp is at or below T - duration. The duration is not stored: a restored job may have another."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from holdfast.statebackends.durations import duration_ms
from holdfast.statebackends.errors import InvalidConfigError

TtlUpdate = Literal["write", "read"]
TtlVisibility = Literal["never_expired", "until_cleaned"]

_PREFIX = "ttl<"

DURATION_MS_MAX = 2**63 - 1
"""Flink's largest, for what is never to expire. Beyond it no stamp could be compared."""


@dataclass(frozen=True, slots=True)
class Ttl:
    """State expires `duration` (a timedelta, or ms) after it was last written. Processing time: the wall clock of the worker.

    Raises InvalidConfigError."""

    duration: timedelta | int
    update: TtlUpdate = "write"
    """What sets the stamp: `write`, or also `read` (each read of a value, list or map entry that has not expired)."""
    visibility: TtlVisibility = "never_expired"
    """`never_expired`: what has expired is not returned. `until_cleaned`: it may be, until it has been cleaned up."""
    cleanup_entries: int = 5
    """Values that may have expired and that each access to the state looks at (in RocksDB: a few of them, behind each
    checkpoint). 0: no cleanup but of what is read, written to RocksDB, or in a snapshot."""

    def __post_init__(self) -> None:
        duration = duration_ms(self.duration, "the duration of a TTL")
        if duration < 1:
            raise InvalidConfigError(f"the duration of a TTL must be at least 1 ms, not {self.duration!r}", setting="duration")
        if duration > DURATION_MS_MAX:
            raise InvalidConfigError(
                f"the duration of a TTL must be at most {DURATION_MS_MAX} ms, not {duration}", setting="duration"
            )
        for setting, choices in (("update", get_args(TtlUpdate)), ("visibility", get_args(TtlVisibility))):
            if getattr(self, setting) not in choices:
                raise InvalidConfigError(
                    f"{setting} of a TTL is {getattr(self, setting)!r}; choose from {', '.join(choices)}", setting=setting
                )
        entries = self.cleanup_entries
        if not isinstance(entries, int) or isinstance(entries, bool) or not 0 <= entries <= 1000:
            raise InvalidConfigError(f"cleanup_entries of a TTL must be 0..1000, not {entries!r}", setting="cleanup_entries")

    @property
    def duration_ms(self) -> int:
        return duration_ms(self.duration, "the duration of a TTL")


def ttl_text(value_text: str) -> str:
    """Value type text of a state whose values carry stamps; an older reader knows no such type, and refuses it."""
    return f"{_PREFIX}{value_text}>"


def split_ttl_text(text: str) -> tuple[str, bool]:
    """(text of the value itself, whether it carries a stamp)."""
    if text.startswith(_PREFIX) and text.endswith(">"):
        return text[len(_PREFIX) : -1], True
    return text, False
