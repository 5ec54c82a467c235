"""What a failed call of the system means, whoever tells of it: Python, Arrow, RocksDB or the library between Python and RocksDB.

One table from the system's error numbers to errors of ours, and one function for each way in which they are told. Only a wrong
checksum or format is a CorruptStateError, which ends a job. Whatever the system refuses may pass: the job is restarted under
its strategy, and the error's class says why. S3's answers are in `s3_failures`."""

from __future__ import annotations

import errno
import os
import re

from holdfast.statebackends.errors import (
    CorruptStateError,
    InputOutputError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageUnavailableError,
    TooManyFilesError,
)

_NAMES: dict[type[StorageUnavailableError], tuple[str, ...]] = {
    OutOfSpaceError: ("ENOSPC", "EDQUOT", "EFBIG"),  # EFBIG: a limit of the process, or of the file system
    TooManyFilesError: ("EMFILE", "ENFILE"),
    PermissionDeniedError: ("EACCES", "EPERM", "EROFS"),
    # EUCLEAN: the file system's own structures are damaged
    InputOutputError: ("EIO", "ENODEV", "ENXIO", "ESTALE", "EREMOTEIO", "ENOTCONN", "ESHUTDOWN", "EUCLEAN", "EBADMSG"),
}

KINDS: dict[int, type[StorageUnavailableError]] = {
    getattr(errno, name): kind for kind, names in _NAMES.items() for name in names if hasattr(errno, name)
}
"""By error number. Any other (out of memory, a missing folder, a lock) is a StorageUnavailableError without a name of its own.

By name first, since a system has only some of them: EREMOTEIO and EUCLEAN are Linux's alone."""

_NOT_A_DATABASE = ("Corruption", "Invalid argument", "Not implemented")
"""What RocksDB says first of files that it can't make a database of: damaged, of another kind, of a newer version."""

_SUBCODES = {
    "No space left on device": errno.ENOSPC,
    "Space limit reached": errno.ENOSPC,
    "Stale file handle": errno.ESTALE,
    "IO fenced off": errno.EIO,
    "No such file or directory": errno.ENOENT,
}
"""RocksDB's own words behind `IO error: `, in any language of the system."""

_NUMBER = re.compile(r"\(os error ([0-9]+)\)|\[(?i:errno) ([0-9]+)\]")
"""As Rust and Arrow tell it."""


def kind_of(code: int | None) -> type[StorageUnavailableError]:
    """The class of errors with this number; None: it is not known."""
    return KINDS.get(code, StorageUnavailableError) if code is not None else StorageUnavailableError


def errno_of(error: BaseException) -> int | None:
    """The system's error number, from the exception or from its words; None if neither has one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    found = _NUMBER.search(text)
    return int(found[1] or found[2]) if found is not None else _told(text)


def _told(text: str) -> int | None:
    """The number of an error that RocksDB tells in words: `IO error: [subcode: ]what: path: words`, maybe with more behind it."""
    _, status, rest = text.partition("IO error: ")
    if not status:
        return None
    for words, code in _SUBCODES.items():
        if rest.startswith(words):
            return code
    ends = re.split(r"\s\s|\n", rest, maxsplit=1)[0]
    words = ends.rpartition(": ")[2]
    return next((code for code in errno.errorcode if os.strerror(code) == words), None)


def unavailable(error: BaseException, doing: str, **fields: object) -> StorageUnavailableError:
    """What a failed call is called here. `doing` comes before the system's words; `fields` name what it was about."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    code = errno_of(error)
    if code is not None:
        fields["errno"] = code
    return kind_of(code).of(f"{doing}: {reason}", fields)


def refusal(error: BaseException, doing: str, **fields: object) -> StorageUnavailableError | None:
    """What the system refused while a library made bytes a table, or a table bytes: memory, or a call. None: the error is about the
    bytes. Arrow tells both as OSError, and only the first with a number."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and errno_of(error) is not None):
        return unavailable(error, doing, **fields)
    return None


def rocksdb_failure(error: BaseException, folder: str, *, opening: bool = False) -> StorageUnavailableError | CorruptStateError:
    """What an exception of RocksDB's library means. `opening`: files are about to become a database, so that what RocksDB calls
    invalid or not implemented is of them.

    RocksDB also calls a table corrupt that it could not open; then the system's refusal decides."""
    status = str(error).partition(": ")[0]
    is_format = status in _NOT_A_DATABASE if opening else status == "Corruption"
    if is_format and kind_of(errno_of(error)) is StorageUnavailableError:
        doing = "opened" if opening else "read"
        return CorruptStateError(f"{folder} can't be {doing} by RocksDB: {error}", path=folder, reason="rocksdb")
    return unavailable(error, folder, path=folder)
