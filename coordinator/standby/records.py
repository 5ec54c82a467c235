"""The records of members: which of them is the active one, by epoch, and their signs of life. Each is created once, never changed.

They are a courtesy among members, and nothing that a job's safety rests on: that is its own epochs (`ha/leadership.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

RECORD_VERSION = 1


class ActiveRecord(msgspec.Struct, frozen=True):
    """`_service/leader/<epoch>`: the member that is the active one in this epoch, until a higher one exists."""

    epoch: int
    member: str
    """32 lower-case hex digits, drawn by the process."""
    url: str
    created_ms: int = 0
    """Of its own wall clock: for people, never compared."""
    version: int = RECORD_VERSION


class SignOfLife(msgspec.Struct, frozen=True):
    """`_service/members/<member>-<beat>.json`: a member lives, or lived when it wrote this."""

    member: str
    beat: int
    """1, 2, 3 ... in the life of the process: a sign that another one follows has changed, whatever any clock says."""
    url: str
    epoch: int = 0
    """In which it is the active one; 0: it stands by."""
    lock: str = ""
    """Identity of the lock of its host, by which members of one host know that they share it; empty: it has none that works."""
    holds_lock: bool = False
    is_leaving: bool = False
    """It has handed over: it leads no job any more, and this is its last sign."""
    host: str = ""
    pid: int = 0
    lock_problem: str = ""
    """Why it has no lock that works; for people."""
    created_ms: int = 0
    """Of its own wall clock: for people, never compared."""
    version: int = RECORD_VERSION
    gave_up: int = 0
    """Highest epoch in which it was the active one, and no longer is: others need not wait for it. Older members leave it out."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a member has read of the others."""

    active: ActiveRecord | None = None
    """Record of the highest epoch; None: nobody has ever been the active one."""
    signs: Mapping[str, SignOfLife] = field(default_factory=dict)
    """Newest sign of each member that is known of, its own included. Of a damaged one there is none."""
    beats: Mapping[str, int] = field(default_factory=dict)
    """Number of the newest sign of every member, also of those whose signs are not read."""

    @property
    def active_sign(self) -> SignOfLife | None:
        return self.signs.get(self.active.member) if self.active is not None else None
