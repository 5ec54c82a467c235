"""A new folder that one writer fills and finishes with one last file; who fails deletes what it wrote.

The claim is a conditional create, so that two writers never share a folder. Until the last file exists the folder means
nothing to anybody; a folder that holds anything is never written into."""

from __future__ import annotations

import signal
import threading
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    HoldfastError,
    InvalidConfigError,
    InvariantError,
    ObjectMissingError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import FileHandle
from holdfast.statebackends.storage.deleting import delete_files
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    Flow,
    InParallel,
    ListFiles,
    ListFolder,
    PutIfAbsent,
    ReadFile,
    StatFile,
    Storage,
    UploadFile,
    perform,
    run_flow,
)

CLAIM_NAME = "_unfinished"


class ClaimedFolder:
    """Made by `claimed_folder`."""

    def __init__(self, storage: Storage, folder: str, purpose: str, nonce: str) -> None:
        self.location = f"{storage.root.rstrip('/')}/{folder}"
        self._storage = storage
        self._folder = folder
        self._claim = msgspec.json.encode({"purpose": purpose, "nonce": nonce})
        self._names: list[str] = []
        self._marks: list[str] = []
        self._entered = self._finished = self._unknown = False

    def upload(self, local: str, name: str, *, expected: tuple[int, str] | None = None) -> int:
        """Copy a local file in; returns its bytes. Any thread. Raises StorageUnavailableError, also if other bytes arrived than
        expected."""
        self._names.append(name)
        found: tuple[int, str] = self._storage.execute(UploadFile(local, self._path(name)))
        if expected is not None and found != expected:
            raise StorageUnavailableError(f"{self.location}/{name}: other bytes were written than read", path=self._path(name))
        return found[0]

    def upload_all(self, files: Sequence[tuple[str, str, int]]) -> None:
        """Several local files, each with its name here and its bytes, at one time. Raises StorageUnavailableError."""
        self._names += [name for _, name, _ in files]
        flows = [self._upload(local, name, size) for local, name, size in files]
        perform(InParallel(flows, [size for *_, size in files]), self._storage)

    def _upload(self, local: str, name: str, size: int) -> Flow[None]:
        length, _ = yield UploadFile(local, self._path(name))
        if length != size:
            raise StorageUnavailableError(f"{self.location}/{name}: {length} bytes were written of {size}", path=self._path(name))

    def store(self, local: str, name: str) -> FileHandle:
        """As `upload`, for a file of a snapshot."""
        self._names.append(name)
        length, checksum = self._storage.execute(UploadFile(local, self._path(name)))
        return FileHandle(name, length, checksum)

    def expect(self, mark: str) -> None:
        """Other processes write files with this mark in their names; those that are not admitted are deleted in the end.

        One that lives on may still write after that: its file is named by nothing."""
        self._marks.append(mark)

    def admit(self, name: str, length: int, checksum: str) -> FileHandle:
        """A file of an expected mark. Raises StorageUnavailableError if it is not in the folder as it was told."""
        path = self._path(name)
        found: int | None = self._storage.execute(StatFile(path))
        if found != length:
            what = "is not there" if found is None else f"has {found} bytes instead of {length}"
            raise StorageUnavailableError(
                f"{self.location}/{name} {what}: do all processes that write see the same {self.location}?", path=path
            )
        self._names.append(name)
        return FileHandle(name, length, checksum)

    def _sweep(self, kept: Collection[str]) -> None:
        """Delete what other processes left."""
        if not self._marks:
            return
        names = [path.removeprefix(f"{self._folder}/") for path in self._storage.execute(ListFiles(self._folder))]
        self._delete([name for name in names if name not in kept and any(mark in name for mark in self._marks)])

    def _delete(self, names: Iterable[str]) -> None:
        run_flow(delete_files(self._path(name) for name in names), self._storage)

    def finish(self, name: str, content: bytes) -> None:
        """Withdraw the claim and create the last file.

        Raises AmbiguousWriteError if storage can't tell whether it did: then nothing is deleted."""
        self._sweep(self._names)
        self._storage.execute(DeleteFile(self._path(CLAIM_NAME)))
        self._names.append(name)
        path = self._path(name)
        try:
            created = self._storage.execute(PutIfAbsent(path, content))
        except StorageUnavailableError as error:
            self._unknown = isinstance(error, AmbiguousWriteError)
            if not self._holds(name, content):
                raise
            created = True
        if not created and not self._holds(name, content):
            self._names.remove(name)
            raise InvalidConfigError(f"{self.location} was written into by somebody else: {name} exists", path=path)
        self._finished = True

    def _enter(self) -> None:
        self._refuse_used(self._listed())
        try:
            created = self._storage.execute(PutIfAbsent(self._path(CLAIM_NAME), self._claim))
        except StorageUnavailableError:
            if not self._holds(CLAIM_NAME, self._claim):
                raise
            created = True
        if not created and not self._holds(CLAIM_NAME, self._claim):
            self._refuse_used([CLAIM_NAME])

    def _refuse_used(self, names: list[str]) -> None:
        if CLAIM_NAME in names:
            raise InvalidConfigError(
                f"{self.location} is being written by somebody else, or its writer died: delete it then, or name another folder",
                path=self._folder,
            )
        if names:
            what = "holds a snapshot" if "_metadata" in names else f"is not empty ({names[0]})"
            raise InvalidConfigError(f"{self.location} {what}: nothing is overwritten, name a new folder", path=self._folder)

    def abandon(self) -> None:
        """Delete what was written, finished or not; nothing, once that is done. Raises StorageUnavailableError."""
        if not self._entered and not self._holds(CLAIM_NAME, self._claim):
            return  # an interrupted claim may stand all the same
        self._exit(KeyboardInterrupt())

    def _exit(self, error: BaseException) -> None:
        """Delete what was written: the newest first, which may be what makes the rest a snapshot, and the claim last; say so in the
        error if that fails."""
        if self._unknown:
            return
        try:
            self._sweep(())
            self._delete(self._names[-1:])
            self._delete(reversed(self._names[:-1]))
            self._delete([CLAIM_NAME])
            if not self._storage.execute(ListFiles(self._folder)):
                self._storage.execute(DeleteFolder(self._folder))
            self._names.clear()
            self._marks.clear()
            self._entered = False
        except HoldfastError as failure:
            if isinstance(error, HoldfastError):
                error.message += f"; and {self.location} could not be emptied again: {failure}"

    def _listed(self) -> list[str]:
        names: list[str] = self._storage.execute(ListFolder(self._folder))
        return names

    def _holds(self, name: str, content: bytes) -> bool:
        try:
            standing: bytes = self._storage.execute(ReadFile(self._path(name), 0, len(content) + 1))
        except ObjectMissingError:
            return False
        return standing == content

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


@contextmanager
def claimed_folder(storage: Storage, folder: str, purpose: str, nonce: str = "") -> Iterator[ClaimedFolder]:
    """A folder that is new or empty, for this writer alone; the block must call `finish`.

    `nonce`: no other writer has it; one is drawn unless given. Raises InvalidConfigError for a folder in use. When the block
    raises, the folder is as it was before."""
    target = ClaimedFolder(storage, folder, purpose, nonce or uuid.uuid4().hex)
    _newest.append(target)
    try:
        target._enter()
        target._entered = True
        target._refuse_used([name for name in target._listed() if name != CLAIM_NAME])  # somebody may just have finished
        yield target
        if not target._finished:
            raise InvariantError(f"{target.location} was not finished")
    except BaseException as error:
        with uninterrupted():
            if target._entered:
                target._exit(error)
            elif not isinstance(error, Exception):
                target.abandon()
        raise


_newest: deque[ClaimedFolder] = deque(maxlen=8)
"""Of this process, for a command that is interrupted when they are finished, and has not said so yet."""


def abandon_newest() -> None:
    """Delete what the newest writers of this process have written: for a process that writes for one command, and ends."""
    while _newest:
        _newest.pop().abandon()


def forget_newest() -> None:
    """They stay, whatever becomes of what this process does next."""
    _newest.clear()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """No Ctrl-C within: what deletes has to come to its end. Elsewhere than on the main thread there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
