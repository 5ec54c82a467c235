"""Disposals of savepoints requested over REST: each runs once, in a thread of its own, and is remembered for a while.

A disposal is crash-only: the rest of a savepoint left by a stopped service is no snapshot, and another request deletes it. So
trigger ids are kept in memory alone."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.coordinator.dispatcher.job_log import printable
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, NotFoundError, StorageUnavailableError

DISPOSALS_MAX = 8
"""Disposals under way at one time, at most; more are refused and may be requested again later."""
REMEMBERED_MAX = 1_000
"""Disposals remembered, at most; the oldest ended one is forgotten first."""

log = logging.getLogger("holdfast.disposals")


@dataclass(frozen=True, slots=True)
class Disposal:
    """One request and its outcome."""

    trigger_id: str
    location: str
    in_progress: bool = True
    failure: str = ""
    failure_kind: str = ""
    """Class of the error; both are empty unless it failed."""


class Disposals:
    """Disposals of one service; thread-safe."""

    def __init__(self, dispose: Callable[[str], object]) -> None:
        """`dispose` deletes the savepoint at a location, and can be repeated after an interruption; raises HoldfastErrors."""
        self._dispose = dispose
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Disposal] = OrderedDict()

    def begin(self, location: str, trigger_id: str | None) -> str:
        """Start a disposal, unless the trigger id is known, which does nothing. Returns the trigger id, new or given.

        Raises InvalidConfigError for an id that was another savepoint's, StorageUnavailableError when too many are under way."""
        chosen = trigger_id or secrets.token_hex(16)
        with self._lock:
            known = self._known.get(chosen)
            if known is not None:
                if known.location == location:
                    return chosen
                raise InvalidConfigError(
                    f"trigger id {chosen} is that of the disposal of {known.location}", setting="triggerId", path=location
                )
            if sum(disposal.in_progress for disposal in self._known.values()) >= DISPOSALS_MAX:
                raise StorageUnavailableError(f"{DISPOSALS_MAX} savepoints are being disposed of: try again later", path=location)
            disposal = self._known[chosen] = Disposal(chosen, location)
            self._forget()
        try:
            threading.Thread(target=self._run, args=(disposal,), name=f"disposal-{chosen[:8]}", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads: the disposal would never end
            with self._lock:
                del self._known[chosen]
            raise StorageUnavailableError(f"{location} can't be disposed of now: {error}", path=location) from error
        return chosen

    def status(self, trigger_id: str) -> Disposal:
        """Raises NotFoundError for an id that is unknown or forgotten."""
        with self._lock:
            known = self._known.get(trigger_id)
        if known is None:
            raise NotFoundError(f"no disposal has the trigger id {trigger_id}", trigger=trigger_id)
        return known

    def _run(self, disposal: Disposal) -> None:
        try:
            self._dispose(disposal.location)
        except HoldfastError as error:
            ended = replace(disposal, in_progress=False, failure=error.message, failure_kind=type(error).__name__)
        except Exception as error:
            log.exception("the disposal of %s failed", printable(disposal.location))
            ended = replace(disposal, in_progress=False, failure=f"internal error: {error}", failure_kind=type(error).__name__)
        else:
            ended = replace(disposal, in_progress=False)
        with self._lock:
            self._known[disposal.trigger_id] = ended

    def _forget(self) -> None:
        for trigger_id in list(self._known):
            if len(self._known) <= REMEMBERED_MAX:
                return
            if not self._known[trigger_id].in_progress:
                del self._known[trigger_id]
