"""Folders on a host that belong to one live process each, deletion of those of dead ones, and the identity of a process.

    <root>/<name>/{lock, ...}

The owner holds an flock on the file `lock` as long as it lives; the system releases it at any death, and not while the process
merely stands still. A folder is made and locked under another name first, so that a folder under its own name without a holder
belongs to a dead process. Only folders of our user that are no links, and whose name and lock are of this kind, are deleted.

SHELL: a pid alone is reused, and means another process in another namespace or on another host, so a process is killed by pid and
fingerprint. Linux only; elsewhere no process has a fingerprint, and none is killed by one."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator

from holdfast.barriers.processes import fingerprint_of as fingerprint_of
from holdfast.barriers.transport.socketfolder import is_own

log = logging.getLogger("holdfast.workingfolders")

LOCK_NAME = "lock"
BEGUN_SUFFIX = ".begun"
BEGUN_AGE_S = 3600
"""Age at which a folder whose maker died before it was renamed is deleted."""
SWEPT_MAX = 1_000
"""Most folders that one process deletes at its start; its successors go on."""

WORKER_FOLDER = re.compile(r"[^/]+-[0-9]+-[0-9]+-[0-9a-f]{16}")
"""Name of a worker's folder: job, slot, task attempt, nonce. RocksDB's databases are in it."""
PACKAGE_FOLDER = re.compile(r"holdfast-package-[0-9a-f]{16}")
"""Name of a driver's folder with the package that it ships."""


def root_of_user(parent: str, name: str) -> str:
    """I/O. Root of all this user's processes in a folder where everybody may make some, such as the system's temporary one: the
    same for each, of mode 0700, made if missing. Raises OSError.

    A predictable name may be taken: a folder that is not ours, or open to others, is left alone, and a root with a random name is
    used in its place, which later processes find."""
    own = f"{name}-{os.geteuid()}"
    path = os.path.join(parent, own)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    if is_own(path):
        return path
    drawn = (os.path.join(parent, each) for each in sorted(_listed(parent)) if each.startswith(f"{own}-"))
    found = next(filter(is_own, drawn), None)
    if found is None:
        found = tempfile.mkdtemp(prefix=f"{own}-", dir=parent)
        log.warning("%s is not a folder of this user alone: %s is used", path, found)
    return found


class OwnedFolder:
    """One folder of this process."""

    def __init__(self, root: str, name: str) -> None:
        """Make and lock it; each `name` is used once. Raises OSError."""
        self.path = os.path.join(root, name)
        self._descriptor: int | None = None
        os.makedirs(root, exist_ok=True)
        begun = f"{self.path}{BEGUN_SUFFIX}"
        os.mkdir(begun, 0o700)
        try:
            self._lock(begun)
            os.rename(begun, self.path)
        except BaseException:
            self.close()
            shutil.rmtree(begun, ignore_errors=True)
            raise

    def _lock(self, folder: str) -> None:
        path = os.path.join(folder, LOCK_NAME)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a file system without locks: without the lock file no process takes the folder for a dead one's
            os.close(descriptor)
            os.unlink(path)
            log.warning("%s can't be locked (%s): if this process is killed, it stays", folder, error)
        else:
            self._descriptor = descriptor

    def close(self) -> None:
        """Release the lock, as the system does at the death of the process. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def delete(self) -> None:
        """Delete the folder, which the process no longer needs."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()


class FolderSweep:
    """Deletes what dead processes left below a root, one folder a step. Raises nothing."""

    def __init__(self, root: str, names: re.Pattern[str]) -> None:
        self._root = root
        self._names = names
        self._left: Iterator[str] | None = None
        self.swept = 0
        """Number of deleted folders."""

    def step(self) -> bool:
        """I/O. Find the next dead folder and delete it; False: there is none left."""
        if self._left is None:
            self._left = iter(sorted(_listed(self._root)))
        for name in self._left:
            if self.swept < SWEPT_MAX and self._is_candidate(name) and _delete_dead(self._root, name):
                self.swept += 1
                return True
        return False

    def _is_candidate(self, name: str) -> bool:
        begun = name.removesuffix(BEGUN_SUFFIX)
        if self._names.fullmatch(begun) is None:
            return False
        return name == begun or _age_s(os.path.join(self._root, name)) > BEGUN_AGE_S


def _listed(root: str) -> list[str]:
    try:
        return os.listdir(root)
    except OSError:
        return []


def _age_s(path: str) -> float:
    try:
        return time.time() - os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _delete_dead(root: str, name: str) -> bool:
    """Delete a folder if it belongs to a dead process; whether it is gone."""
    with contextlib.ExitStack() as opened:
        try:
            folder = os.open(os.path.join(root, name), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            opened.callback(os.close, folder)
            if os.fstat(folder).st_uid != os.geteuid():
                return False
            lock = os.open(LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            opened.callback(os.close, lock)
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return False
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # another process was about to delete it, and it may be empty by now
            return _remove_empty(root, name)
        except OSError:  # its owner lives, or it is not ours
            return False
        return _empty(folder, root, name)


def _empty(folder: int, root: str, name: str) -> bool:
    """Delete the content of a folder whose lock we hold, then the folder. The lock goes last: if this process dies in between, the
    folder still counts as a dead process's."""
    try:
        entries = [entry for entry in os.listdir(folder) if entry != LOCK_NAME]
        for entry in entries:
            if stat.S_ISDIR(os.lstat(entry, dir_fd=folder).st_mode):
                shutil.rmtree(entry, dir_fd=folder)  # follows no link
            else:
                os.unlink(entry, dir_fd=folder)
        os.unlink(LOCK_NAME, dir_fd=folder)
    except OSError as error:
        log.warning("%s is left by a process that died, and can't be deleted: %s", os.path.join(root, name), error)
        return False
    return _remove_empty(root, name)


def _remove_empty(root: str, name: str) -> bool:
    try:
        os.rmdir(os.path.join(root, name))
    except OSError:
        return False
    return True


def kill_process(pid: int, fingerprint: str) -> bool:
    """Send SIGKILL, which ends a stopped process, too, if the process with this pid on this host has this fingerprint now.

    False: it was not killed, being another process, elsewhere, gone, or not ours to kill."""
    if pid <= 1 or pid == os.getpid() or not fingerprint or not hasattr(os, "pidfd_open"):
        return False
    try:
        handle = os.pidfd_open(pid)
    except (OSError, OverflowError):  # the number comes from another process and need not be a pid
        return False
    try:
        if fingerprint_of(pid) != fingerprint:  # checked while the handle is held: the pid can't pass to another process in between
            return False
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(handle)
