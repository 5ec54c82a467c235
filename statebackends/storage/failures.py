"""Errors of failed system calls, as reported by Python, Arrow, RocksDB and rocksdict.

One table maps the system's error numbers to error classes, and one function reads each form in which they are reported. Only a
wrong checksum or format is a CorruptStateError, which ends the job. All that the system refuses may pass: the job restarts under
its strategy, and the error's class says why. S3's answers are in s3_connection.py."""

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
"""Error number -> class. Other numbers (out of memory, a missing folder, a lock) give a plain StorageUnavailableError.

Made from names, since a system has only some of them: EREMOTEIO and EUCLEAN are Linux's alone."""

_NOT_A_DATABASE = ("Corruption", "Invalid argument", "Not implemented")
"""First words of RocksDB's errors for files that are no database: damaged, of another kind, of a newer version."""

_SUBCODES = {
    "No space left on device": errno.ENOSPC,
    "Space limit reached": errno.ENOSPC,
    "Stale file handle": errno.ESTALE,
    "IO fenced off": errno.EIO,
    "No such file or directory": errno.ENOENT,
}
"""RocksDB's own words behind `IO error: `, whatever the system's language."""

_NUMBER = re.compile(r"\(os error ([0-9]+)\)|\[(?i:errno) ([0-9]+)\]")
"""An error number as Rust and Arrow write it."""


def kind_of(code: int | None) -> type[StorageUnavailableError]:
    """Class for an error number; None: not known."""
    return KINDS.get(code, StorageUnavailableError) if code is not None else StorageUnavailableError


def errno_of(error: BaseException) -> int | None:
    """The system's error number, from the exception or its message; None if neither has one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    text = str(error)
    found = _NUMBER.search(text)
    return int(found[1] or found[2]) if found is not None else _told(text)


def _told(text: str) -> int | None:
    """Number of an error that RocksDB reports as `IO error: [subcode: ]what: path: words`, maybe with more behind it."""
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
    """The error for a failed call. `doing` precedes the system's words in the message; `fields` name the things concerned."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    code = errno_of(error)
    if code is not None:
        fields["errno"] = code
    return kind_of(code).of(f"{doing}: {reason}", fields)


def refusal(error: BaseException, doing: str, **fields: object) -> StorageUnavailableError | None:
    """The error for memory or a call that the system refused while a library converted a table. None: the error is about the bytes.

    Arrow raises OSError for both, with a number only for a refused call."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and errno_of(error) is not None):
        return unavailable(error, doing, **fields)
    return None


def rocksdb_failure(error: BaseException, folder: str, *, opening: bool = False) -> StorageUnavailableError | CorruptStateError:
    """The error for an exception of rocksdict. `opening`: a database is being opened, so `Invalid argument` and `Not implemented`
    are about its files.

    RocksDB also reports a table as corrupt if the system refused to open it; then the system's error decides."""
    status = str(error).partition(": ")[0]
    is_format = status in _NOT_A_DATABASE if opening else status == "Corruption"
    if is_format and kind_of(errno_of(error)) is StorageUnavailableError:
        doing = "opened" if opening else "read"
        return CorruptStateError(f"{folder} can't be {doing} by RocksDB: {error}", path=folder, reason="rocksdb")
    return unavailable(error, folder, path=folder)
