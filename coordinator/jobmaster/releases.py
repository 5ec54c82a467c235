"""CORE, part of the job master: decides when a job deletes the snapshots that it claimed. It knows counts and ids, no storage.

The submission's own base is deleted once as many checkpoints are complete as are retained, or once the job's end drops them all.
Snapshots that older submissions claimed are deleted at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.coordinator.ha.records import RestorePoint

RELEASE_TRIES_MAX = 3
"""Tries of one deletion; then it is left to the next recovery."""

RELEASE_RETRY_MS = 5_000
"""Delay before a failed deletion is tried again."""


@dataclass(frozen=True, slots=True)
class Release:
    """Delete a claimed snapshot; outcome ReleaseEnded, or LeadershipEnded."""

    folder: str
    claim: str


@dataclass(slots=True)
class Releases:
    """Claimed snapshots that are not deleted yet."""

    base: RestorePoint | None
    """The submission's own one; None if it is not claimed, and once its deletion is due."""
    retained_max: int
    _due: list[Release] = field(default_factory=list)
    _tries: dict[str, int] = field(default_factory=dict)
    _waiting: dict[int, list[Release]] = field(default_factory=dict)
    """Time in ms -> deletions to try again then."""
    _has_own: bool = False

    @staticmethod
    def of(base: RestorePoint | None, retained_max: int, subsumed: Iterable[RestorePoint]) -> Releases:
        """`subsumed`: claimed snapshots that the job needs no more; they are due at once."""
        due = [Release(point.folder, point.claim) for point in subsumed]
        held = base if base is not None and base.claim and all(release.claim != base.claim for release in due) else None
        return Releases(held, retained_max, due)

    @property
    def is_done(self) -> bool:
        """No claim is left, and no deletion waits."""
        return self.base is None and not self._due and not self._waiting

    def advance(self, own: int, *, stopped: bool, dropped: bool, now_ms: int) -> list[Release]:
        """Deletions that are due now.

        `own`: number of the submission's retained checkpoints; `stopped`: a stop-savepoint of it is complete; `dropped`: the job
        has ended and keeps no checkpoint."""
        self._has_own = self._has_own or own > 0 or stopped
        if self.base is not None and (own >= self.retained_max or (dropped and self._has_own)):
            self._due.append(Release(self.base.folder, self.base.claim))
            self.base = None
        for at_ms in sorted(at_ms for at_ms in self._waiting if at_ms <= now_ms):
            self._due += self._waiting.pop(at_ms)
        due, self._due = self._due, []
        return due

    def failed(self, release: Release, now_ms: int) -> None:
        """A deletion failed: it waits for its next try, if it has one left."""
        tries = self._tries[release.claim] = self._tries.get(release.claim, 0) + 1
        if tries < RELEASE_TRIES_MAX:
            self._waiting.setdefault(now_ms + RELEASE_RETRY_MS, []).append(release)

    def next_deadline_ms(self) -> int | None:
        return min(self._waiting, default=None)
