"""SHELL: where a worker's unix socket lies, and whether a peer's can be trusted. Connections of one host, of one user alone.

The socket is in a folder of mode 0700 below folders that no other user can rename or replace. That a peer is on this host is
proved by reaching its socket, never by names: containers with the same host name, or a shared disk, prove nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import stat
import struct
import sys
import tempfile
import uuid

from holdfast.barriers.messages import SOCKET_PATH_BYTES_MAX

log = logging.getLogger("holdfast.data")

PROBE_TIMEOUT_S = 1.0
"""Reaching a socket takes microseconds; one whose queue is full for so long is left alone."""

SOCKET_NAME = "d"
_PREFIX = "hf-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{16}}")
_UCRED = struct.Struct("3i")


class SocketFolder:
    """A folder of this process alone, locked as long as it lives; the system lets go of the lock at any death."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @property
    def socket(self) -> str:
        return os.path.join(self.path, SOCKET_NAME)

    def delete(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def make_socket_folder(working_directory: str) -> SocketFolder | None:
    """A folder for the socket: in the worker's own working folder, or, where that path is too long or open to others, below
    the system's one for temporary files, whose dead ones are swept first. None: this host has no such place."""
    if not sys.platform.startswith("linux"):
        return None  # elsewhere the kernel does not say whose a connection is
    shared = list(dict.fromkeys((tempfile.gettempdir(), "/tmp")))
    for parent in shared:
        sweep_socket_folders(parent)
    for parent in (working_directory, *shared):
        length = len(os.fsencode(os.path.join(parent, f"{_PREFIX}{0:016x}", SOCKET_NAME)))
        if length > SOCKET_PATH_BYTES_MAX:
            continue
        with contextlib.suppress(OSError):
            folder = _make(parent)
            if folder is not None:
                return folder
    log.info("there is no place for a unix socket: peers of this host are reached over TCP")
    return None


def _make(parent: str) -> SocketFolder | None:
    """Raises OSError. None where others could replace it."""
    path = os.path.join(parent, f"{_PREFIX}{uuid.uuid4().hex[:16]}")
    with contextlib.ExitStack() as made:
        os.mkdir(path, 0o700)
        made.callback(shutil.rmtree, path, ignore_errors=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        made.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # A sweep of another worker may have come between the two.
        if is_private(path) and os.path.samestat(os.stat(path), os.fstat(descriptor)):
            made.pop_all()
            return SocketFolder(path, descriptor)
    return None


def sweep_socket_folders(parent: str) -> None:
    """Delete what workers of this user left there that are dead."""
    try:
        names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            _sweep(os.path.join(parent, name))


def _sweep(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def is_own(folder: str) -> bool:
    """Whether a path is a folder, and no link to one, that belongs to this user and is closed to all others."""
    try:
        own = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(own.st_mode) and own.st_uid == os.geteuid() and not own.st_mode & 0o077


def is_private(folder: str) -> bool:
    """Whether only this user (and root) can reach what is in a folder, or put another one in its place."""
    if not is_own(folder):
        return False
    try:
        path = os.path.realpath(folder)
        while (parent := os.path.dirname(path)) != path:
            path = parent
            status = os.stat(path)
            open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
            if status.st_uid not in (0, os.geteuid()) or open_to_others:
                return False
    except OSError:
        return False
    return True


def is_reachable(path: str) -> bool:
    """Whether a process of this user, on this host, listens on a unix socket that no other user could have put there."""
    if not os.path.isabs(path) or len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX or not is_private(os.path.dirname(path)):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED):
                log.info("the socket %s can't be reached: %s", path, error)
            return False
    return bool(_UCRED.unpack(credentials)[1] == os.geteuid())
