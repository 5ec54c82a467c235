"""Disposals of savepoints that clients asked for over REST: each runs once, in a thread of its own, and is remembered a while.

A disposal is crash-only: what a stopped service leaves of a savepoint is no snapshot, and asking again deletes the rest. So its
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
"""Under way at one time; more are refused, to be asked for again later."""
REMEMBERED_MAX = 1_000
"""Disposals; beyond that the oldest that has ended is forgotten."""

log = logging.getLogger("holdfast.disposals")


@dataclass(frozen=True, slots=True)
class Disposal:
    """One request, and what became of it."""

    trigger_id: str
    location: str
    in_progress: bool = True
    failure: str = ""
    failure_kind: str = ""
    """Class of the error; both are empty as long as nothing has gone wrong."""


class Disposals:
    """Of one service; any thread."""

    def __init__(self, dispose: Callable[[str], object]) -> None:
        """`dispose` deletes the savepoint at a location, again if it was cut off; raises HoldfastErrors."""
        self._dispose = dispose
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Disposal] = OrderedDict()

    def begin(self, location: str, trigger_id: str | None) -> str:
        """Start one, unless the trigger id is known: then nothing is done again. Returns the trigger id, new or given.

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
        except RuntimeError as error:  # the system gives us no more threads: nobody would ever end it
            with self._lock:
                del self._known[chosen]
            raise StorageUnavailableError(f"{location} can't be disposed of now: {error}", path=location) from error
        return chosen

    def status(self, trigger_id: str) -> Disposal:
        """Raises NotFoundError for an id that is not known, or not any more."""
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
