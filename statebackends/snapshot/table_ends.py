"""How a file of a table begins and ends: enough to tell one format from another, and from anything else, without reading rows."""

from __future__ import annotations

from holdfast.statebackends.handles import DELTA_FORMAT
from holdfast.statebackends.storage.port import Buffer

_ENDS_BYTES = 6
_NAMES = {"arrow": "an Arrow IPC file", DELTA_FORMAT: "an Arrow IPC file", "parquet": "a Parquet file"}
_MARKS = {"arrow": b"ARROW1", DELTA_FORMAT: b"ARROW1", "parquet": b"PAR1"}
"""At both ends. Native files have none that we know of."""


class FileEnds:
    """The first and last bytes of chunks that pass."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first = self.last = b""

    def add(self, chunk: Buffer) -> None:
        view = memoryview(chunk).cast("B")
        self.first += bytes(view[: _ENDS_BYTES - len(self.first)])
        self.last = (self.last + bytes(view[-_ENDS_BYTES:]))[-_ENDS_BYTES:]


def wrong_format(table_format: str, ends: FileEnds) -> str:
    """Why a file that begins and ends so is no table of the format of its handle; empty if it may be one."""
    marked = [known for known, mark in _MARKS.items() if ends.first.startswith(mark) and ends.last.endswith(mark)]
    if table_format not in _MARKS or table_format in marked:
        return ""
    found = _NAMES[marked[0]] if marked else "neither an Arrow nor a Parquet file"
    return f"{found}, which a table in the format {table_format!r} is not"
