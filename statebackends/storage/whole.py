"""Small files that are read and decoded whole, however long somebody has made them: never more of one than such files have.

A sparse file costs its maker nothing, and whoever reads it all of its length."""

from __future__ import annotations

from statebackends.errors import CorruptStateError
from statebackends.storage.operations import Flow, ReadFile

FIRST_BYTES = 1 << 20
"""Asked for first, and enough for nearly every record; room for more is made for a file that has more."""
RECORD_BYTES_MAX = 64 << 20
"""Of a record: of what a few numbers and a message, the metrics of a job, or the names of an input's files need."""


def read_whole(path: str, bytes_max: int = RECORD_BYTES_MAX) -> Flow[bytes]:
    """The bytes of a record. Raises CorruptStateError naming the file when it is longer than `bytes_max`, ObjectMissingError."""
    content: bytes = yield ReadFile(path, 0, min(FIRST_BYTES, bytes_max + 1))
    if len(content) == FIRST_BYTES:
        rest: bytes = yield ReadFile(path, FIRST_BYTES, bytes_max + 1 - FIRST_BYTES)
        content += rest
    if len(content) > bytes_max:
        reason = f"longer than {bytes_max} bytes, which no such record is"
        raise CorruptStateError(f"{path}: {reason}", path=path, operator=None, reason=reason)
    return content
