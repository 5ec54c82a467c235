"""SHELL: a coordinator process that is one of several members: bind, open the directory's records, serve, hand over.

It decides the order of start and stop, and refuses to stand beside a coordinator that knows of no members."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.api.directory_guard import CoordinatorRunningError, OpenCoordinator
from holdfast.api.members.lock import HostLock
from holdfast.api.members.membership import Membership, open_lock
from holdfast.api.members.service import MemberService, as_coordinator
from holdfast.api.server.server import advertised_url, bind
from holdfast.api.server.tls import ServedTls, served_tls
from holdfast.api.settings import ServerSettings
from holdfast.api.tls.live import LiveContext
from holdfast.barriers.run_record import RunRecord, read_run_record, write_run_record
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.standby.records import Observation
from holdfast.coordinator.standby.store import observe
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Storage, run_flow

STRANGER_TIMEOUT_S = 2.0
"""Seconds in which the holder of the lock of this host says that it is a member: it may just have taken the lock."""
_ROUND_S = 0.05


@dataclass(frozen=True, slots=True)
class StandingBy:
    """A member with a bound socket, which takes part once `service.lead` is called."""

    service: Coordinator
    membership: Membership
    listener: socket.socket
    url: str
    tls: LiveContext | None


@contextlib.contextmanager
def standing_by(settings: ServerSettings, open_service: OpenCoordinator) -> Iterator[StandingBy]:
    """Bind, and open the records of members; undone in reverse order. Raises CoordinatorRunningError, InvalidConfigError,
    StorageUnavailableError."""
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(bind(settings))
        url = advertised_url(settings, listener.getsockname()[1])
        tls = served_tls(settings, url)
        storage = open_storage(settings.location)
        lock, problem = open_lock(settings.state_dir)
        if lock is not None and not settings.takeover:
            _refuse_beside_stranger(settings, lock, storage)
        record = _record_of(settings, listener, url, tls)
        membership = Membership(
            storage,
            url,
            lock,
            settings.election,
            open_service=lambda: open_service(settings, url),
            announce=lambda: write_run_record(settings.state_dir, record),
            lock_problem=problem,
            authorities=tls.authorities if tls is not None else None,
        )
        undo.callback(membership.stop)
        if settings.state_url is not None or read_run_record(settings.state_dir) is None:
            write_run_record(settings.state_dir, record)  # the folder is this machine's: any member passes people's requests on
        service = as_coordinator(MemberService(membership, storage.root))
        yield StandingBy(service, membership, listener, url, tls.live if tls is not None else None)


def _record_of(settings: ServerSettings, listener: socket.socket, url: str, tls: ServedTls | None) -> RunRecord:
    token_file = None if settings.token_file is None else str(settings.token_file)
    ca_file = str(tls.ca_file) if tls is not None and tls.ca_file is not None else None
    return RunRecord(url, os.getpid(), socket.gethostname(), int(listener.getsockname()[1]), token_file, ca_file)


def _refuse_beside_stranger(settings: ServerSettings, lock: HostLock, storage: Storage) -> None:
    """Raise CoordinatorRunningError if the lock of this host is held by no member: by a coordinator without `--ha`."""
    until_s, seen = time.monotonic() + STRANGER_TIMEOUT_S, Observation()
    while not lock.take():
        seen = run_flow(observe(seen), storage)
        if any(sign.holds_lock and sign.lock == lock.identity for sign in seen.signs.values()):
            return
        if time.monotonic() > until_s:
            raise CoordinatorRunningError(_stranger(settings), directory=settings.location)
        time.sleep(_ROUND_S)
    lock.release()


def _stranger(settings: ServerSettings) -> str:
    record = read_run_record(settings.state_dir)
    who = f" (pid {record.pid} on {record.host}, {record.url})" if record is not None else ""
    return (
        f"refused: a coordinator without --ha runs on {settings.location}{who}: stop it, and start it again with --ha, "
        "or fence it with --takeover"
    )
