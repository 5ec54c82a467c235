"""Local recovery: copies of stored files on this host's disk, so that a restore needs not download them.

    <directory>/recovery/<state directory, 16 hex>-<job>/<attempt>-<vertex>-<subtask>-<nonce>/{lock, <file, 32 hex> ...}

A folder belongs to one attempt of a subtask, its *owner*, which alone writes there, and holds the lock while it lives; the system
releases the lock when the process dies. Restores of the job read the copies of all owners. Copies are not trusted, and not synced
to disk: storage.py compares them with the snapshot's checksums, and any failure here costs a download, never a restore.
Source: Flink, task-local recovery."""

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
"""Seconds after a job's last checkpoint here, after which the next worker of any job deletes copies of dead owners."""

TEMPORARY_SUFFIX = ".tmp"
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_OWNER = re.compile(r"([0-9]+)-.+")


class LocalRecovery:
    """Copies of one job on this host, for one worker process. Thread-safe."""

    def __init__(self, local_directory: str, *, job_id: str, state_directory: str, storage: Storage) -> None:
        """`local_directory`: shared by the workers of a host. `state_directory`: tells jobs of equal id apart."""
        self._local_directory = local_directory
        self._job = f"{xxhash.xxh3_64(os.fsencode(state_directory)).hexdigest()}-{safe_text(job_id)}"
        self._storage = storage
        self._lock = threading.Lock()
        self._owned: list[LocalCopies] = []
        self._swept: set[str] = set()

    def copies(self, vertex: str, subtask: int, attempt: int, nonce: str, *, directory: str | None = None) -> LocalCopies:
        """Copies of one attempt of a subtask; does no I/O. `directory`: used instead of the worker's `local_directory`."""
        root = os.path.join(directory or self._local_directory, RECOVERY_FOLDER)
        owner = f"{attempt}-{safe_text(vertex)}-{subtask}-{nonce}"
        return LocalCopies(self, os.path.join(root, self._job), owner, attempt)

    def keeps_bytes(self, root: str) -> bool:
        """Whether copies of bytes are worth making: not if the state directory is on the same disk. Hard links always are."""
        return not is_same_disk(self._storage, root)

    def opened(self, copies: LocalCopies, root: str) -> None:
        """Register an owner of this process; the first one in a folder deletes the copies of owners that are long dead."""
        with self._lock:
            self._owned.append(copies)
            first = root not in self._swept
            self._swept.add(root)
        if first:
            sweep_dead(root, now_s=time.time())

    def end(self) -> None:
        """Delete the job's copies when it is over: those of this process, and those of dead owners."""
        with self._lock:
            owned, self._owned = self._owned, []
        for copies in owned:
            copies.delete()


def delete_copies(local_directory: str, job_id: str) -> tuple[str, ...]:
    """I/O. Delete a job's copies below a local directory, whatever path its state directory had; returns the folders that stay,
    because their owner lives or is too young to tell, or because they can't be deleted.

    Of jobs of the same id in other state directories dead owners lose theirs, too: they are copies."""
    root = os.path.join(local_directory, RECOVERY_FOLDER)
    left: list[str] = []
    for job in _names(root):
        if not job.endswith(f"-{safe_text(job_id)}"):
            continue
        job_folder = os.path.join(root, job)
        for _, folder in _owners(job_folder):
            if is_dead(folder):
                _remove(folder)
        with contextlib.suppress(OSError):
            os.rmdir(job_folder)
        left += [os.path.join(job_folder, name) for name in _names(job_folder)]
    return tuple(left)


class LocalCopies:
    """Copies of one owner, by the path of the stored file. Thread-safe; methods that do I/O say so, and none raises.

    A copy is kept while a checkpoint holds the file: the newest confirmed one, a pending one, or the restored one until the first
    confirmation."""

    def __init__(self, recovery: LocalRecovery, job_folder: str, owner: str, attempt: int) -> None:
        self._recovery = recovery
        self._job_folder = job_folder
        self._owner = owner
        self._attempt = attempt
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._held: dict[str, str] = {}
        """Stored path -> file name of its copy."""
        self._files: dict[int, set[str]] = {}
        """Checkpoint -> stored paths."""
        self._taken: set[int] = set()
        """Checkpoints that this attempt took and acknowledged."""
        self._keeps_bytes = False
        self._confirmed = self._swept = False
        """A checkpoint of this attempt completed; `sweep` ran after that."""

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
        """I/O. Make the folder and lock it. If that fails no copies are kept, and restores still read those of other owners."""
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
        """Release the lock when the owner ends; its copies stay for later attempts."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def delete(self) -> None:
        """I/O. Delete this owner's copies, and those of the job's dead owners: the job is over."""
        self.close()
        _remove(self.folder)
        for _, folder in _owners(self._job_folder):
            if is_dead(folder):
                _remove(folder)
        with contextlib.suppress(OSError):
            os.rmdir(self._job_folder)  # fails while another owner has copies there

    # ---------------------------------------------------------------------------------------------------------- keeping

    def keep_file(self, checkpoint_id: int, path: str, local_path: str) -> None:
        """I/O. Keep a copy of the stored file `path` from `local_path`, which has its content."""
        links = path.endswith(TABLE_SUFFIX) and local_path.endswith(TABLE_SUFFIX)
        self._keep(checkpoint_id, path, lambda target: bring(local_path, target, link=links))

    def keep_bytes(self, checkpoint_id: int, path: str, chunks: Sequence[Buffer]) -> None:
        """I/O. As `keep_file`, from memory; only where `LocalRecovery.keeps_bytes`."""
        if self._keeps_bytes:
            self._keep(checkpoint_id, path, lambda target: _write(target, chunks))

    def adopt(self, checkpoint_id: int, path: str, copy: str) -> None:
        """I/O. As `keep_file`, by a link to another owner's copy, which never changes."""
        self._keep(checkpoint_id, path, lambda target: bring(copy, target, link=True))

    def _keep(self, checkpoint_id: int, path: str, make: Callable[[str], None]) -> None:
        if not self.is_open:
            return
        name = name_of(path)
        with self._lock:  # before the file exists: a sweep meanwhile must know that it is wanted
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
        """A checkpoint was acknowledged. `paths`: all its files, those of its base included."""
        with self._lock:
            self._files[checkpoint_id] = set(paths)
            self._taken.add(checkpoint_id)

    def forget(self, checkpoint_id: int) -> bool:
        """A checkpoint failed or was aborted. Returns whether it had files, so that `sweep` is due."""
        with self._lock:
            self._taken.discard(checkpoint_id)
            return self._files.pop(checkpoint_id, None) is not None

    def confirm(self, checkpoint_id: int) -> bool:
        """A checkpoint completed: older ones need no copies. Returns whether this attempt took it, so that `sweep` is due."""
        with self._lock:
            if checkpoint_id not in self._taken:
                return False  # of another attempt: a savepoint, or the restored checkpoint
            for older in [known for known in self._files if known < checkpoint_id]:
                del self._files[older]
            self._taken = {known for known in self._taken if known >= checkpoint_id}
            self._confirmed = True
            return True

    def sweep(self) -> None:
        """I/O. Delete copies that no checkpoint holds.

        After the first confirmed checkpoint of this attempt, also delete the copies of lower attempts whose owners are dead: no
        restore reads their checkpoints again."""
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
        """I/O. File name -> paths of its copies on this host, of all owners, the newest attempt's first."""
        found: dict[str, list[str]] = {}
        for _, folder in sorted(_owners(self._job_folder), reverse=True):
            for name in _names(folder):
                found.setdefault(name, []).append(os.path.join(folder, name))
        return found


def is_same_disk(storage: Storage, folder: str) -> bool:
    """Whether a storage and a local folder lie in one file system."""
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
    """Make the file `target` with the content of `source`: a hard link if `link` and the file system allow it, else a copy.

    Raises OSError."""
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
    """Whether an owner's lock is free. A folder without a lock is new, or left by a deletion: its age decides."""
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
    """Delete copies, of any job, of owners that died more than DEAD_AGE_S ago by the clock of this host."""
    for job in _names(root):
        job_folder = os.path.join(root, job)
        for _, folder in _owners(job_folder):
            lock = os.path.join(folder, LOCK_NAME)
            if _age_s(lock, now_s) > DEAD_AGE_S and is_dead(folder):
                _remove(folder)
        with contextlib.suppress(OSError):
            os.rmdir(job_folder)


def _age_s(path: str, now_s: float) -> float:
    """Seconds since a file or folder was touched; of its folder if a lock is missing; 0 if that is not known."""
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
    """Delete an owner's folder. The lock goes last, so that a half-deleted folder is recognised and deleted again."""
    for name in _names(folder):
        if name != LOCK_NAME:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))
    shutil.rmtree(folder, ignore_errors=True)
