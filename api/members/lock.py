"""SHELL: the lock of one host, by which its members learn at once that the active one is gone: the kernel frees it at death.

A hint, never a proof of leadership. A file system without locks that work is named, and members do without: then time and a probe
decide alone."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import socket
from pathlib import Path

from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import GUARD_FILE
from holdfast.statebackends.storage.permissions import permissions_of

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LocksUnusableError(StorageUnavailableError):
    """The file system of a folder takes no locks, or gives one lock to two holders."""


class HostLock:
    """The lock of a state directory on this host (the same file as the guard's). Single owner."""

    def __init__(self, folder: Path) -> None:
        """Raises LocksUnusableError naming the file, StorageUnavailableError if it can't be written."""
        self.path = folder / GUARD_FILE
        _check_locks(folder)
        self._descriptor = _open(self.path)
        self.is_held = False
        self.identity = _identity(self._descriptor)
        """The same for two processes if, and only if, they compete for the same lock of one kernel."""

    def take(self) -> bool:
        """Take the lock without waiting; whether it became ours by this call."""
        if self.is_held:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # somebody's; or locks have stopped working, which gives it to nobody
            return False
        if _identity_at(self.path) != self.identity:  # deleted, and made again: whoever holds this file's lock excludes nobody
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            return False
        self.is_held = True
        return True

    def release(self) -> None:
        """Release it, if it is held."""
        if self.is_held:
            self.is_held = False
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        self.is_held = False
        os.close(self._descriptor)


def _open(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    try:
        return permissions_of(path.parent).create_file(str(path), flags)
    except OSError as error:
        raise StorageUnavailableError(f"can't write to the state directory: {error}", path=str(path)) from error


def _check_locks(folder: Path) -> None:
    """Take a lock twice, on a file of its own: the second time must be refused."""
    trial = folder / f"{GUARD_FILE}.{secrets.token_hex(8)}"
    first = _open(trial)
    try:
        second = _open(trial)
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            raise LocksUnusableError(f"{folder} takes no locks: {error}", path=str(folder)) from error
        finally:
            os.close(second)
    finally:
        os.close(first)
        trial.unlink(missing_ok=True)
    raise LocksUnusableError(f"{folder} gave one lock to two holders", path=str(folder))


def _identity(descriptor: int) -> str:
    return _digest(os.fstat(descriptor))


def _identity_at(path: Path) -> str:
    try:
        return _digest(os.stat(path))
    except OSError:
        return ""


def _digest(facts: os.stat_result) -> str:
    """Of the kernel, by its boot, and the file: members of two hosts never share one, whatever a network file system promises."""
    try:
        kernel = _BOOT_ID.read_text("ascii").strip()
    except (OSError, ValueError):
        kernel = socket.gethostname()
    return hashlib.blake2b(f"{kernel}:{facts.st_dev}:{facts.st_ino}".encode(), digest_size=16).hexdigest()
