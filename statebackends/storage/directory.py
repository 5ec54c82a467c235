"""Storage on a directory (a local disk or a shared file system), with conditional create by hard links.

A file appears under its name whole or not at all: its bytes go to `.tmp` below the root, are synced, and are then linked. link() is
atomic and refuses to overwrite; rename() would not. A write is durable when it returns: the file is synced first, then the folder
that names it; a folder is made when needed, and synced into its parent before a file in it counts. It knows nothing of the content
of files. System calls are in filesystem.py, modes in permissions.py."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, assert_never
from urllib.parse import unquote

from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    InvalidConfigError,
    InvariantError,
    ObjectMissingError,
    StorageUnavailableError,
)
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.checksums import Digest
from holdfast.statebackends.storage.failures import unavailable
from holdfast.statebackends.storage.filesystem import (
    COPY_BYTES,
    UPLOAD_BYTES,
    FileStat,
    FileSystem,
    OsFileSystem,
    about_local,
    copy_file,
    write_all,
)
from holdfast.statebackends.storage.permissions import OUTPUT, PRIVATE, permissions_of
from holdfast.statebackends.storage.transfers import ONE_BY_ONE, TransferPool


def folder_of(location: str) -> str:
    """Folder of a path or a `file:///` URL. Raises InvalidConfigError for any other location."""
    scheme, mark, rest = location.partition("://")
    if not mark:
        return check_folder(location)
    if scheme != "file":
        raise InvalidConfigError(
            f"storage scheme {scheme!r} is not supported: use a path, file:/// or s3://bucket/prefix", url=location
        )
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidConfigError(f"{location!r} names a host: use file:/// and an absolute path", url=location)
    if "?" in path or "#" in path:  # a URL's path ends there: it would name another folder
        raise InvalidConfigError(f"{location!r}: in a URL the name of a folder has %3F for '?' and %23 for '#'", url=location)
    return check_folder(f"/{unquote(path)}")


def check_folder(path: str) -> str:
    """The path itself. Raises InvalidConfigError for an empty path, or one that no system accepts."""
    if not path:
        raise InvalidConfigError("the location of a folder is empty", path=path)
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise InvalidConfigError(f"{path!r} is no path: it is no text", path=path) from error
    if b"\0" in encoded:
        raise InvalidConfigError(f"{path!r} is no path: it holds a null character", path=path)
    return path


T = TypeVar("T")


class DurableFolders:
    """Folders below a storage root that this process has made durable. Thread-safe."""

    def __init__(self, file_system: FileSystem, root: str) -> None:
        self._fs, self._root = file_system, root
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._below: dict[str, set[str]] = {}
        """Folder -> those in it that are known, or have known ones below them: a deletion must not look at those of all jobs."""

    def within(self, folder: str, action: Callable[[], T]) -> T:
        """Run an action in a durable folder; if another process removed the folder meanwhile, make it again and repeat."""
        self.ensure(folder)
        try:
            return action()
        except FileNotFoundError:
            self.forget("")
            self.ensure(folder)
            return action()

    def ensure(self, folder: str) -> None:
        """Make a folder and its ancestors, and sync each into its parent.

        Existing ones are synced too: another process may have made one and not synced it yet."""
        with self._lock:
            if folder in self._known:
                return
        parent = posixpath.dirname(folder)
        if folder != self._root and folder.startswith(self._root):
            self.ensure(parent)
        try:
            self._fs.mkdir(folder)
        except FileExistsError:
            pass  # a file in its place makes the next step fail
        except FileNotFoundError:
            self.forget("")
            self.ensure(parent)
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(folder)
        self._sync(parent)
        with self._lock:
            self._add(folder)

    def _add(self, folder: str) -> None:
        self._known.add(folder)
        while (parent := posixpath.dirname(folder)) != folder:
            beside = self._below.setdefault(parent, set())
            if folder in beside:
                return
            beside.add(folder)
            folder = parent

    def sync(self, folder: str) -> bool:
        """Sync the names in a folder, and the folder's own and its ancestors' unless they are known. False if it does not exist:
        unlike `ensure` this makes none."""
        above, unknown = folder, []
        with self._lock:
            while above not in self._known:
                unknown.append(posixpath.dirname(above))
                if above == self._root or not above.startswith(self._root):
                    break
                above = posixpath.dirname(above)
        try:
            for parent in reversed(unknown):
                self._sync(parent)
            self._fs.fsync_folder(folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _sync(self, parent: str) -> None:
        try:
            self._fs.fsync_folder(parent)
        except PermissionError:
            if parent.startswith(self._root):
                raise  # a folder above the root that this process may not read needs no sync by it

    def forget(self, folder: str) -> None:
        """Forget a deleted folder and those below it; all folders if `folder` is empty."""
        with self._lock:
            if not folder:
                self._known, self._below = set(), {}
                return
            self._below.get(posixpath.dirname(folder), set()).discard(folder)
            gone = [folder]
            while gone:
                each = gone.pop()
                self._known.discard(each)
                gone += self._below.pop(each, ())


TEMPORARY_FOLDER = ".tmp"
_NOT_NAMES = frozenset({"", ".", ".."})
TEMPORARY_AGE_MS = 24 * 3_600_000
"""Age at which a temporary file is one that a dead writer left; the first write of each storage object deletes those."""
_READ_BYTES = 128 << 20
"""Bytes of one read where the caller gives a length, so that blocks needn't be joined. A read of unknown length has smaller steps:
room for so much takes several times as long as a small file, keeps its memory pages, and may be refused under a memory limit."""
_DELETE_PASSES_MAX = 3
_TRANSFERS = TransferPool(transfers_max=4, bytes_max=4 * UPLOAD_BYTES, transfer_bytes_max=UPLOAD_BYTES)
"""Pool of all directories of a process: a file system syncs several files in hardly more time than one."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class LocalStorage:
    """Implements `port.Storage`. Makes the root at the first write, with the modes of permissions.py."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        file_system: FileSystem | None = None,
        new_nonce: Callable[[], str] = lambda: uuid.uuid4().hex,
        elsewhere: Callable[[str], ops.Storage] | None = None,
    ) -> None:
        """`elsewhere` opens locations outside of file systems."""
        self._root = os.path.abspath(os.fspath(root))
        self._prefix = self._root if self._root.endswith("/") else f"{self._root}/"
        self._fs: FileSystem = file_system if file_system is not None else OsFileSystem(permissions_of(self._root))
        self._new_nonce = new_nonce
        self._elsewhere = elsewhere
        self._folders = DurableFolders(self._fs, self._root)
        self._has_swept = False
        self.transfers = _TRANSFERS if file_system is None else ONE_BY_ONE
        """As `port.ConcurrentStorage`; another file system than the real one gets one operation at a time."""

    @property
    def root(self) -> str:
        return self._root

    def at(self, location: str) -> ops.Storage:
        """Another folder of the same file system, or a location elsewhere."""
        if self._elsewhere is not None and "://" in location and not location.startswith("file://"):
            return self._elsewhere(location)
        folder = folder_of(location)
        found = permissions_of(folder) if self._is_private else PRIVATE
        return self._derived(folder, self._fs if found is PRIVATE else OsFileSystem(found))

    def for_output(self) -> LocalStorage:
        """The same folder for a sink's output, which other programs may read as far as the umask allows."""
        return self._derived(self._root, OsFileSystem(OUTPUT) if type(self._fs) is OsFileSystem else self._fs)

    @property
    def _is_private(self) -> bool:
        return type(self._fs) is OsFileSystem and self._fs.permissions is PRIVATE

    def _derived(self, folder: str, file_system: FileSystem) -> LocalStorage:
        return LocalStorage(folder, file_system=file_system, new_nonce=self._new_nonce, elsewhere=self._elsewhere)

    def execute(self, operation: ops.Operation) -> Any:
        """Perform one operation. Raises StorageUnavailableError, or its subclass in failures.py, with the path and the system's
        words."""
        path = ops.path_of(operation)
        try:
            return self._perform(operation)
        except OSError as error:
            raise self._unavailable(operation, path, error) from error

    def sweep_temporary(self, *, now_ms: int, age_ms: int) -> int:
        """Delete files in `.tmp` that were last modified before now_ms - age_ms (file system clock); returns how many."""
        folder = posixpath.join(self._root, TEMPORARY_FOLDER)
        deleted = 0
        for name, _ in self._entries(folder):
            path = posixpath.join(folder, name)
            found = self._stat(path)
            if found is not None and found.modified_ms < now_ms - age_ms:
                deleted += self._unlink(path)
        return deleted

    def _perform(self, operation: ops.Operation) -> Any:
        match operation:
            case ops.PutIfAbsent():
                return self._put_if_absent(self._resolve(operation.path), operation.data)
            case ops.SyncFile():
                return self._make_durable(self._resolve(operation.path))
            case ops.WriteFile():
                return self._write(self._resolve(operation.path), operation.chunks)
            case ops.UploadFile():
                return self._upload(operation)
            case ops.DownloadFile():
                return self._download(operation)
            case ops.ReadFile():
                at_once = COPY_BYTES if operation.length is None else _READ_BYTES
                return _joined(list(self._read(self._resolve(operation.path), operation.offset, operation.length, at_once)))
            case ops.StatFile():
                return self._size(self._resolve(operation.path), operation.own_names)
            case ops.ListFiles():
                return sorted(self._files(operation.prefix.rstrip("/")))
            case ops.DescribeFiles():
                return list(self._described(operation.prefix.rstrip("/")))
            case ops.ListFolder():
                return sorted(name + "/" * is_folder for name, is_folder in self._listed(operation.prefix.rstrip("/")))
            case ops.LinkFile():
                return self._link(self._resolve(operation.source), self._resolve(operation.target))
            case ops.DeleteFile():
                return self._delete_file(self._resolve(operation.path))
            case ops.DeleteFolder():
                return self._delete_folder(self._resolve(operation.prefix.rstrip("/")))
            case _:
                assert_never(operation)

    def _resolve(self, path: str) -> str:
        """Absolute path of a storage path. Raises InvalidConfigError for a path that could leave the root."""
        parts = path.split("/")
        if not _NOT_NAMES.isdisjoint(parts) or "\0" in path or parts[0] == TEMPORARY_FOLDER:
            raise InvalidConfigError(f"{path!r} is not a path below the storage root", path=path)
        return self._prefix + path

    # -- writing

    def _put_if_absent(self, target: str, data: bytes) -> bool:
        if self._stat(target) is None:
            created = self._publish(target, lambda descriptor: write_all(self._fs, descriptor, [data]))
        else:
            created = False
        if not created:
            # its writer may have died before this fsync, and the caller acts on the file
            self._folders.ensure(posixpath.dirname(target))
            self._fs.fsync_folder(posixpath.dirname(target))
        return created

    def _make_durable(self, target: str) -> bool:
        return self._folders.sync(posixpath.dirname(target)) and self._stat(target) is not None

    def _write(self, target: str, chunks: Sequence[ops.Buffer]) -> int:
        """Bytes written. Their checksum matters only where the name is taken: it is the caller's to compute, who has them too."""
        if not self._publish(target, lambda descriptor: write_all(self._fs, descriptor, chunks)):
            digest = Digest()
            for chunk in chunks:
                digest.add(chunk)
            self._check_earlier_try(target, digest)
        return sum(memoryview(chunk).nbytes for chunk in chunks)

    def _store(self, target: str, fill: Callable[[int, Digest], None]) -> tuple[int, str]:
        """Write under a name that is this writer's alone: (length, checksum)."""
        digest = Digest()
        if not self._publish(target, lambda descriptor: fill(descriptor, digest)):
            self._check_earlier_try(target, digest)
        return digest.length, digest.checksum

    def _check_earlier_try(self, target: str, digest: Digest) -> None:
        """The existing file must be an earlier try of the same write."""
        found = self._stat(target)
        if found is None or found.size != digest.length or self._checksum(target) != digest.checksum:
            raise InvariantError(f"{target} exists with other content: its name was used twice", path=target)
        self._fs.fsync_folder(posixpath.dirname(target))

    def _publish(self, target: str, fill: Callable[[int], None]) -> bool:
        """Make a durable temporary file, link it to `target`, and make the name durable. False: the name was taken."""
        folder = self._prefix + TEMPORARY_FOLDER
        temporary = f"{folder}/{self._new_nonce()}"
        try:
            self._folders.within(folder, lambda: self._make(temporary, fill))
            self._sweep_once(temporary)
            return self._folders.within(posixpath.dirname(target), lambda: self._link_new(temporary, target))
        finally:
            self._discard(temporary)

    def _sweep_once(self, temporary: str) -> None:
        """Delete temporary files of writers that died long ago, by the file system's clock. Failures don't matter to this write."""
        if self._has_swept:
            return
        self._has_swept = True
        with contextlib.suppress(OSError):
            self.sweep_temporary(now_ms=self._fs.stat(temporary).modified_ms, age_ms=TEMPORARY_AGE_MS)

    def _make(self, path: str, fill: Callable[[int], None]) -> None:
        descriptor = self._fs.create(path)
        try:
            fill(descriptor)
            self._fs.fsync(descriptor)
        finally:
            self._fs.close(descriptor)

    def _link_new(self, temporary: str, target: str) -> bool:
        try:
            self._fs.link(temporary, target)
        except FileExistsError:
            # a network file system may repeat a link() whose first answer was lost: then this call made the name
            mine, found = self._stat(temporary), self._stat(target)
            if mine is None or found is None or mine.inode != found.inode:
                return False
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise InvalidConfigError(
                    f"{self._root}: the file system has no hard links, which conditional create needs ({error.strerror})",
                    path=target,
                ) from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EXDEV, errno.ENOTDIR):
                raise  # refused: certainly not created
            raise AmbiguousWriteError(f"{target}: {error.strerror}", path=target) from error
        try:
            self._fs.fsync_folder(posixpath.dirname(target))
        except OSError as error:
            raise AmbiguousWriteError(f"{target}: {error.strerror}", path=target) from error
        return True

    def _discard(self, temporary: str) -> None:
        with contextlib.suppress(OSError):  # sweep_temporary finds it later; the write's own outcome matters more
            self._fs.unlink(temporary)

    def _upload(self, operation: ops.UploadFile) -> tuple[int, str]:
        target = self._resolve(operation.path)

        def copy(descriptor: int, digest: Digest) -> None:
            with self._opened(operation.local_path) as source:
                copy_file(self._fs, source, descriptor, digest)

        return self._store(target, copy)

    def _download(self, operation: ops.DownloadFile) -> tuple[int, str]:
        digest = Digest()
        chunks = digest.passing(self._read(self._resolve(operation.path)))
        first = next(chunks, b"")  # a missing source is seen before the local file is touched
        with about_local(operation.local_path):
            self._unlink(operation.local_path)
            descriptor = self._fs.create(operation.local_path)
        try:
            for chunk in itertools.chain([first], chunks):
                with about_local(operation.local_path):
                    write_all(self._fs, descriptor, [chunk])
        finally:
            self._fs.close(descriptor)
        return digest.length, digest.checksum

    # -- linking

    def _link(self, source: str, target: str) -> bool:
        found = self._stat(target)
        origin = self._stat(source)
        if found is None:
            if origin is None:
                raise ObjectMissingError(f"{source} does not exist", path=source)
            if self._folders.within(posixpath.dirname(target), lambda: self._link_new(source, target)):
                return True
            found = self._stat(target)
        if origin is not None and found is not None and origin.inode != found.inode and not self._same(source, target):
            raise InvariantError(f"{target} exists with other content than {source}", path=target)
        self._fs.fsync_folder(posixpath.dirname(target))
        return False

    def _same(self, left: str, right: str) -> bool:
        return self._checksum(left) == self._checksum(right)

    def _checksum(self, path: str) -> str:
        digest = Digest()
        for chunk in self._read(path):
            digest.add(chunk)
        return digest.checksum

    # -- reading

    def _read(self, path: str, offset: int = 0, length: int | None = None, at_once: int = COPY_BYTES) -> Iterator[bytes]:
        with self._opened(path) as descriptor:
            remaining = length
            while remaining is None or remaining > 0:
                wanted = at_once if remaining is None else min(remaining, at_once)
                chunk = self._fs.read(descriptor, wanted, offset)
                if not chunk:
                    return
                offset += len(chunk)
                remaining = None if remaining is None else remaining - len(chunk)
                yield chunk

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        try:
            descriptor = self._fs.open(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissingError(f"{path} does not exist", path=path) from error
        try:
            yield descriptor
        finally:
            self._fs.close(descriptor)

    def _stat(self, path: str) -> FileStat | None:
        try:
            return self._fs.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _size(self, path: str, own_names: int) -> int | None:
        above = path
        for _ in range(own_names):
            if self._fs.is_link(above):
                return ops.LINKED
            above = posixpath.dirname(above)
        found = self._stat(path)
        return None if found is None or found.is_folder else found.size

    def _entries(self, folder: str) -> list[tuple[str, bool]]:
        try:
            return list(self._fs.list_folder(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _listed(self, prefix: str) -> list[tuple[str, bool]]:
        entries = self._entries(self._resolve(prefix) if prefix else self._root)
        return [entry for entry in entries if prefix or entry[0] != TEMPORARY_FOLDER]

    def _files(self, prefix: str) -> Iterator[str]:
        for name, is_folder in self._listed(prefix):
            path = f"{prefix}/{name}" if prefix else name
            if is_folder:
                yield from self._files(path)
            else:
                yield path

    def _described(self, prefix: str) -> Iterator[ops.FileFacts]:
        for path in sorted(self._files(prefix)):
            found = self._stat(self._prefix + path)
            if found is not None and not found.is_folder:  # else it was deleted meanwhile
                yield ops.FileFacts(path, found.size, found.modified_ms)

    # -- deleting

    def _unlink(self, path: str) -> bool:
        try:
            self._fs.unlink(path)
        except FileNotFoundError:
            return False
        return True

    def _delete_file(self, path: str) -> bool:
        deleted = self._unlink(path)
        if deleted:
            self._fs.fsync_folder(posixpath.dirname(path))  # an order of deletions must survive a power cut
        return deleted

    def _delete_folder(self, folder: str) -> int:
        deleted: list[str] = []
        for last in range(_DELETE_PASSES_MAX, 0, -1):
            try:
                self._delete_tree(folder, deleted)
                break
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or last == 1:  # a zombie wrote into it meanwhile
                    raise
        self._folders.forget(folder)
        parent = posixpath.dirname(folder)
        if self._stat(parent) is not None:
            self._fs.fsync_folder(parent)
        return len(deleted)

    def _delete_tree(self, folder: str, deleted: list[str]) -> None:
        for name, is_folder in self._entries(folder):
            path = posixpath.join(folder, name)
            if is_folder:
                self._delete_tree(path, deleted)
            elif self._unlink(path):
                deleted.append(path)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rmdir(folder)

    def _unavailable(self, operation: ops.Operation, path: str, error: OSError) -> StorageUnavailableError:
        return unavailable(error, f"{ops.describe(operation)} in {self._root}", path=path)


def _joined(blocks: list[bytes]) -> bytes:
    return blocks[0] if len(blocks) == 1 else b"".join(blocks)


def check_no_file(folder: str) -> None:
    """Raise InvalidConfigError where a folder of this absolute path can't be made, because a file is in its place or above it."""
    above = folder
    while above != "/" and not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise InvalidConfigError(f"{above} is no directory: name another folder", path=folder, setting="target")


def storage_from_url(url: str) -> LocalStorage:
    """Storage of a path or a `file:///` URL. Raises InvalidConfigError for any other scheme."""
    return LocalStorage(folder_of(url))
