"""How a coordinator comes to lead a state directory: the courtesy refusal of a second one, and the service itself.

Safety rests on the coordinator's epochs, never on the guard: the guard only spares people a takeover by mistake."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from api.runfile import read_run_record
from api.settings import ServerSettings
from coordinator.config import ServiceConfig
from coordinator.interface import Coordinator
from coordinator.service import CoordinatorService
from statebackends.errors import InvalidConfigError, StorageUnavailableError

log = logging.getLogger("holdfast.api")

GUARD_FILE = "_lock"

OpenCoordinator: TypeAlias = Callable[[ServerSettings, str], Coordinator]
"""Starts the coordinator of a state directory, reached at a URL."""


class CoordinatorRunningError(InvalidConfigError):
    """Another coordinator runs on the state directory. Fields: directory, pid, url."""


class DirectoryGuard:
    """A lock on the state directory while a coordinator leads it; the kernel drops it when the process dies."""

    def __init__(self, state_dir: Path, *, takeover: bool, location: str | None = None) -> None:
        """`location`: the state directory's name for people, if it is elsewhere; then only this machine's coordinators are seen."""
        self._state_dir = state_dir
        self._location = location or str(state_dir)
        self._takeover = takeover
        self._descriptor: int | None = None

    def __enter__(self) -> DirectoryGuard:
        """Raises CoordinatorRunningError unless taking over, StorageUnavailableError if the directory can't be written."""
        path = self._state_dir / GUARD_FILE
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageUnavailableError(f"can't write to the state directory: {error}", path=str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            if not self._takeover:
                raise self._refused() from error
            log.warning("taking over %s from a coordinator that still runs", self._location)
        except OSError as error:
            os.close(descriptor)
            log.warning("%s takes no locks (%s): a second coordinator is not refused, it fences the first", path, error)
        else:
            self._descriptor = descriptor
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _refused(self) -> CoordinatorRunningError:
        record = read_run_record(self._state_dir)
        pid, url = (record.pid, record.url) if record is not None else (None, None)
        who = f" (pid {pid} on {record.host}, {url})" if record is not None else ""
        return CoordinatorRunningError(
            f"refused: another coordinator runs on {self._location}{who}; use it, or fence it with --takeover",
            directory=self._location,
            pid=pid,
            url=url,
        )


def open_coordinator(settings: ServerSettings, url: str) -> Coordinator:
    """The coordinator of a state directory; it leads the directory's live jobs on before this returns."""

    return CoordinatorService(ServiceConfig(state_directory=settings.location, url=url))
