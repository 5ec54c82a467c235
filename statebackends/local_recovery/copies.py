"""Local recovery: copies of stored files on this host's own disk, so that a restore need not fetch them again.

    <directory>/recovery/<state directory, 16 hex>-<job>/<attempt>-<vertex>-<subtask>-<nonce>/{lock, <file, 32 hex> ...}

One folder per life of a subtask, its *owner*, which alone writes there and holds the lock as long as it lives; the system lets
go of it at any death. Restores of the same job look through all of them. Nothing here is trusted: what a copy is worth is
decided by the checksum in the snapshot (storage.py), and whatever fails here costs a download, never a restore. Copies
are not synced to disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from holdfast.statebackends.layout import TABLE_SUFFIX, safe_text
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Buffer, Storage

log = logging.getLogger("holdfast.localrecovery")

RECOVERY_FOLDER = "recovery"
LOCK_NAME = "lock"
DEAD_AGE_S = 24 * 3600
"""Copies of a job that nobody runs here any more are deleted this long after its last checkpoint, by the next worker of any job."""

TEMPORARY_SUFFIX = ".tmp"
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_OWNER = re.compile(r"([0-9]+)-.+")


class LocalRecovery:
    """The copies of one job on this host, as one worker process sees them."""

    def __init__(self, local_directory: str, *, job_id: str, state_directory: str, storage: Storage) -> None:
        """`local_directory` is shared by the workers of a host. `state_directory` tells jobs of the same id apart."""
        self._local_directory = local_directory
        self._job = f"{xxhash.xxh3_64(os.fsencode(state_directory)).hexdigest()}-{safe_text(job_id)}"
        self._storage = storage
        self._lock = threading.Lock()
        self._owned: list[LocalCopies] = []
        self._swept: set[str] = set()

    def copies(self, vertex: str, subtask: int, attempt: int, nonce: str, *, directory: str | None = None) -> LocalCopies:
        """Of one subtask's life; nothing is done before `LocalCopies.open`. `directory`: instead of the worker's own."""
        root = os.path.join(directory or self._local_directory, RECOVERY_FOLDER)
        owner = f"{attempt}-{safe_text(vertex)}-{subtask}-{nonce}"
        return LocalCopies(self, os.path.join(root, self._job), owner, attempt)

    def keeps_bytes(self, root: str) -> bool:
        """Whether copying bytes gains anything: not if the state directory is on the same disk. Other names of a file always do."""
        return not is_same_disk(self._storage, root)

    def opened(self, copies: LocalCopies, root: str) -> None:
        """Any thread. The first time in a process, what was left by jobs long dead is deleted."""
        with self._lock:
            self._owned.append(copies)
            first = root not in self._swept
            self._swept.add(root)
        if first:
            sweep_dead(root, now_s=time.time())

    def end(self) -> None:
        """The job is over: delete what this process owns, and what dead ones of the job left."""
        with self._lock:
            owned, self._owned = self._owned, []
        for copies in owned:
            copies.delete()


class LocalCopies:
    """What one owner keeps, by the path of the stored file. Thread-safe; methods do I/O where it is said, and raise nothing.

    A file is kept for the checkpoints that hold it: the newest confirmed one, the pending ones, and the restored one until
    the first of these is confirmed."""

    def __init__(self, recovery: LocalRecovery, job_folder: str, owner: str, attempt: int) -> None:
        self._recovery = recovery
        self._job_folder = job_folder
        self._owner = owner
        self._attempt = attempt
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._held: dict[str, str] = {}
        """Stored path -> file name here."""
        self._files: dict[int, set[str]] = {}
        """Checkpoint -> stored paths."""
        self._taken: set[int] = set()
        """Checkpoints that were taken in this life, and acknowledged."""
        self._keeps_bytes = False
        self._confirmed = self._swept = False
        """A checkpoint of this life completed; and what it made superfluous was deleted."""

    @property
    def folder(self) -> str:
        return os.path.join(self._job_folder, self._owner)

    @property
    def is_open(self) -> bool:
        return self._descriptor is not None

    @property
    def held(self) -> tuple[str, ...]:
        """Stored paths of the copies here, sorted."""
        with self._lock:
            return tuple(sorted(self._held))

    # ------------------------------------------------------------------------------------------------------------- life

    def open(self) -> None:
        """I/O. Make the folder and lock it; without that nothing is kept, and restores still look through the others'."""
        root = os.path.dirname(self._job_folder)
        try:
            os.makedirs(root, mode=0o700, exist_ok=True)
            if os.stat(root).st_uid != os.geteuid():
                raise PermissionError(f"{root} belongs to another user")
            os.makedirs(self.folder, mode=0o700)
            descriptor = os.open(os.path.join(self.folder, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:
                os.close(descriptor)
                raise
            self._keeps_bytes = self._recovery.keeps_bytes(root)
            self._descriptor = descriptor
        except OSError as error:
            log.warning("no local copies are kept: %s", error)
            return
        self._recovery.opened(self, root)

    def close(self) -> None:
        """The owner is gone; its copies are for those that come after it."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def delete(self) -> None:
        """I/O. The job is over."""
        self.close()
        _remove(self.folder)
        for _, folder in _owners(self._job_folder):
            if is_dead(folder):
                _remove(folder)
        with contextlib.suppress(OSError):
            os.rmdir(self._job_folder)  # refused while somebody else has copies there

    # ---------------------------------------------------------------------------------------------------------- keeping

    def keep_file(self, checkpoint_id: int, path: str, local_path: str) -> None:
        """I/O. `local_path` holds what is stored as `path`."""
        links = path.endswith(TABLE_SUFFIX) and local_path.endswith(TABLE_SUFFIX)
        self._keep(checkpoint_id, path, lambda target: bring(local_path, target, link=links))

    def keep_bytes(self, checkpoint_id: int, path: str, chunks: Sequence[Buffer]) -> None:
        """I/O. As `keep_file`, of a file that was never on this disk."""
        if self._keeps_bytes:
            self._keep(checkpoint_id, path, lambda target: _write(target, chunks))

    def adopt(self, checkpoint_id: int, path: str, copy: str) -> None:
        """I/O. As `keep_file`, of another life's copy, which nobody changes."""
        self._keep(checkpoint_id, path, lambda target: bring(copy, target, link=True))

    def _keep(self, checkpoint_id: int, path: str, make: Callable[[str], None]) -> None:
        if not self.is_open:
            return
        name = name_of(path)
        with self._lock:  # before it is there: a sweep meanwhile must know that it is wanted
            self._files.setdefault(checkpoint_id, set()).add(path)
            if path in self._held:
                return
            self._held[path] = name
        try:
            make(os.path.join(self.folder, name))
        except OSError as error:
            log.warning("%s is not kept on this host: %s", path, error)
            with self._lock:
                self._held.pop(path, None)

    # ------------------------------------------------------------------------------------------------------ checkpoints

    def took(self, checkpoint_id: int, paths: Iterable[str]) -> None:
        """A checkpoint is acknowledged: all files that it holds, those of its base included."""
        with self._lock:
            self._files[checkpoint_id] = set(paths)
            self._taken.add(checkpoint_id)

    def forget(self, checkpoint_id: int) -> bool:
        """A checkpoint failed, or was aborted. True if it had files, and `sweep` is due."""
        with self._lock:
            self._taken.discard(checkpoint_id)
            return self._files.pop(checkpoint_id, None) is not None

    def confirm(self, checkpoint_id: int) -> bool:
        """A checkpoint completed: the files of older ones are given up. True if it was taken here, and `sweep` is due."""
        with self._lock:
            if checkpoint_id not in self._taken:
                return False  # another one's: a savepoint, or what this attempt was restored from
            for older in [known for known in self._files if known < checkpoint_id]:
                del self._files[older]
            self._taken = {known for known in self._taken if known >= checkpoint_id}
            self._confirmed = True
            return True

    def sweep(self) -> None:
        """I/O. Delete copies that no checkpoint holds; and, once the first checkpoint of this attempt is confirmed, those of
        lower attempts whose owners are dead: nothing is restored from what they took any more."""
        with self._lock:
            wanted = set[str]().union(*self._files.values())
            surplus = {path: name for path, name in self._held.items() if path not in wanted}
            for path in surplus:
                del self._held[path]
            first, self._swept = self._confirmed and not self._swept, self._confirmed
        for name in surplus.values():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.folder, name))
        if self.is_open:
            with contextlib.suppress(OSError):
                os.utime(os.path.join(self.folder, LOCK_NAME))
        if first:
            for attempt, folder in _owners(self._job_folder):
                if attempt < self._attempt and is_dead(folder):
                    _remove(folder)

    # --------------------------------------------------------------------------------------------------------- restoring

    def find(self) -> dict[str, list[str]]:
        """I/O. File name -> where copies of it are on this host, whoever made them, the newest attempt's first."""
        found: dict[str, list[str]] = {}
        for _, folder in sorted(_owners(self._job_folder), reverse=True):
            for name in _names(folder):
                found.setdefault(name, []).append(os.path.join(folder, name))
        return found


def is_same_disk(storage: Storage, folder: str) -> bool:
    """Whether a state directory lies in the file system of a local folder."""
    if not isinstance(storage, LocalStorage):
        return False
    try:
        return os.stat(storage.root).st_dev == os.stat(folder).st_dev
    except OSError:
        return False


def name_of(path: str) -> str:
    """File name of the copy of a stored file: 32 hex digits."""
    return xxhash.xxh3_128(os.fsencode(path)).hexdigest()


def bring(source: str, target: str, *, link: bool) -> None:
    """Make `target` have the content of `source`: another name of it where that is possible, else a copy. Raises OSError."""
    if link:
        try:
            os.link(source, target)
            return
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
    temporary = f"{target}{TEMPORARY_SUFFIX}"
    try:
        shutil.copyfile(source, temporary)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _write(target: str, chunks: Sequence[Buffer]) -> None:
    temporary = f"{target}{TEMPORARY_SUFFIX}"
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def is_dead(folder: str) -> bool:
    """Whether nobody holds an owner's lock. A folder without one is about to get it, or was left by a deletion: see its age."""
    try:
        descriptor = os.open(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _age_s(folder, time.time()) > DEAD_AGE_S
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def sweep_dead(root: str, *, now_s: float) -> None:
    """Delete copies of any job whose owners died DEAD_AGE_S ago, by the clock of this host."""
    for job in _names(root):
        job_folder = os.path.join(root, job)
        for _, folder in _owners(job_folder):
            lock = os.path.join(folder, LOCK_NAME)
            if _age_s(lock, now_s) > DEAD_AGE_S and is_dead(folder):
                _remove(folder)
        with contextlib.suppress(OSError):
            os.rmdir(job_folder)


def _age_s(path: str, now_s: float) -> float:
    """Seconds since a file or folder was touched; 0 if it can't be told, its folder's if it is missing."""
    try:
        return now_s - os.stat(path).st_mtime
    except FileNotFoundError:
        parent = os.path.dirname(path)
        return _age_s(parent, now_s) if os.path.basename(path) == LOCK_NAME else 0.0
    except OSError:
        return 0.0


def _owners(job_folder: str) -> Iterator[tuple[int, str]]:
    """(attempt, folder) of each owner."""
    for name in _names(job_folder):
        found = _OWNER.fullmatch(name)
        if found is not None:
            yield int(found[1]), os.path.join(job_folder, name)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _remove(folder: str) -> None:
    """The lock goes last: an owner's folder that was deleted by half can be told, and deleted again."""
    for name in _names(folder):
        if name != LOCK_NAME:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    shutil.rmtree(folder, ignore_errors=True)
