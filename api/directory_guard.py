"""Guard of a state directory: a lock that refuses a second coordinator by courtesy, and the start of the service itself.

Safety rests on the coordinator's epochs, never on the guard: the guard only prevents a takeover by mistake."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from holdfast.api.settings import ServerSettings
from holdfast.barriers.run_record import RunRecord, read_run_record
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.service import CoordinatorService
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.layout import GUARD_FILE, RUN_FILE
from holdfast.statebackends.storage.permissions import permissions_of

log = logging.getLogger("holdfast.api")


GUARD_ROUND_S = 1.0
"""Seconds between two checks of who should hold the lock."""

OpenCoordinator: TypeAlias = Callable[[ServerSettings, str], Coordinator]
"""Starts the coordinator of a state directory, reached at a URL."""


class CoordinatorRunningError(InvalidConfigError):
    """Another coordinator runs on the state directory."""

    directory: str
    pid: int | None = None
    """Pid and `url` of the other one; None: unknown."""
    url: str | None = None


class DirectoryGuard:
    """Lock on the state directory while a coordinator leads it; the kernel releases it when the process dies, and a fenced
    coordinator releases it, too."""

    def __init__(self, state_dir: Path, *, takeover: bool, location: str | None = None) -> None:
        """`location`: the state directory's name in messages, if it is not `state_dir`; then only coordinators of this machine are
        detected."""
        self._state_dir = state_dir
        self._location = location or str(state_dir)
        self._takeover = takeover
        self._descriptor: int | None = None
        self._takes_locks = True
        self.announced: RunRecord | None = None
        """Address that the guarded coordinator has written for others."""

    def __enter__(self) -> DirectoryGuard:
        """Raises CoordinatorRunningError unless taking over, StorageUnavailableError if the directory can't be written."""
        if not self._take() and self._takes_locks:
            if not self._takeover:
                raise self._refused()
            log.warning("taking over %s from a coordinator that still runs", self._location)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._let_go()

    def _take(self) -> bool:
        """Take the lock without waiting; whether it is ours now."""
        path = self._state_dir / GUARD_FILE
        try:
            descriptor = permissions_of(self._state_dir).create_file(str(path), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StorageUnavailableError(f"can't write to the state directory: {error}", path=str(path)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            self._takes_locks = False
            log.warning("%s takes no locks (%s): a second coordinator is not refused, it fences the first", path, error)
            return False
        self._descriptor = descriptor
        return True

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    @contextmanager
    def kept_for(self, service: Coordinator) -> Iterator[None]:
        """Until the end of the block, keep the lock while the service leads: release it when the service was fenced, take it when
        the service has taken over. Otherwise the next start would be refused for a coordinator that leads nothing, long after its
        successor is gone."""
        stopped = threading.Event()

        def keep() -> None:
            while self._takes_locks and not stopped.wait(GUARD_ROUND_S):
                try:
                    self._check(service)
                except (HoldfastError, OSError) as error:
                    log.warning("the lock of %s can't be checked: %s", self._location, error)

        keeper = threading.Thread(target=keep, name="holdfast-guard", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            stopped.set()
            keeper.join()

    def _check(self, service: Coordinator) -> None:
        is_fenced = not service.is_leading and (service.is_referring or self._has_successor())
        if is_fenced and self.is_held:
            self._let_go()
            log.warning("another coordinator leads %s: its lock is free", self._location)
        elif not is_fenced and not self.is_held and self._take():
            log.info("the lock of %s is held from now on", self._location)

    def _has_successor(self) -> bool:
        """Whether another coordinator has announced itself since the guarded one did."""
        record = read_run_record(self._state_dir)
        mine = self.announced
        return mine is not None and record is not None and (record.url, record.pid, record.host) != (mine.url, mine.pid, mine.host)

    @property
    def is_held(self) -> bool:
        """Whether the lock is ours."""
        return self._descriptor is not None

    def doubt(self) -> str:
        """Why the guard proves nothing; empty if the lock is held."""
        return "" if self.is_held else f"{self._location} takes no locks"

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


@contextmanager
def without_coordinator(directory: Path) -> Iterator[str]:
    """Keep coordinators away from a state directory; yields the reason if one may run nevertheless, else an empty text.

    A lock alone proves little: other machines may not see it, and a coordinator that took over from one that hung has none. So the
    last coordinator must have run on this machine, too, and its process must have ended."""
    with ExitStack() as held:
        try:
            guard = held.enter_context(DirectoryGuard(directory, takeover=False))
        except CoordinatorRunningError as error:
            reason = error.message.removeprefix("refused: ")
        else:
            reason = guard.doubt() or _last_coordinator(directory)
        yield reason


def _last_coordinator(directory: Path) -> str:
    record = read_run_record(directory)
    if record is None:
        return f"{directory} has no record of its last coordinator" if (directory / RUN_FILE).exists() else ""
    if record.host != socket.gethostname():
        return f"the last coordinator ran on {record.host}, and whether it still does can't be seen from here"
    if record.pid == os.getpid():
        return ""  # it would hold the lock
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return f"process {record.pid}, which was the last coordinator, is alive"


def open_coordinator(settings: ServerSettings, url: str) -> Coordinator:
    """Open the coordinator of a state directory; on `lead` it takes the lead of the directory's live jobs."""

    return CoordinatorService(ServiceConfig(settings.location, url=url, drill_timeout_ms=settings.drill_timeout_ms))
