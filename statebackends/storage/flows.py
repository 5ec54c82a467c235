"""Small files that are read and decoded whole, however long somebody has made them: never more of one than such files have.

A sparse file costs its maker nothing, and whoever reads it all of its length.

Several files deleted at one time, where their order is nobody's business.

What one must do before acting on a file that somebody else may have died over: make sure that its name stays.

On a directory a name can be seen before it is durable. Who wrote it was not told of success then; whoever finds it and goes on
from there has to finish the job, or a power loss takes back what others have acted on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.storage.port import DeleteFile, Flow, InParallel, PutIfAbsent, ReadFile

T = TypeVar("T")

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


def read_in_group(readers: Sequence[Callable[[], Flow[T]]]) -> Flow[list[T]]:
    """Results of flows that read small files whole, in their order. Each is begun once, or once more if it reads a long file.

    Those that a first read of each file is enough for run several at one time. The others, which anybody may have made as long as
    their kind can be, come one after another: a pool counts each as if it were moved in pieces, and these are in memory whole."""
    first: list[list[T]] = yield InParallel([_unless_long(reader()) for reader in readers], [FIRST_BYTES] * len(readers))
    results: list[T] = []
    for reader, found in zip(readers, first, strict=True):
        results += found or [(yield from reader())]
    return results


def _unless_long(flow: Flow[T]) -> Flow[list[T]]:
    """The flow's result, or nothing as soon as it asks for what follows the first bytes of a file."""
    step: Callable[[], Any] = partial(next, flow)
    while True:
        try:
            operation = step()
        except StopIteration as stop:
            return [stop.value]
        if isinstance(operation, ReadFile) and operation.offset:
            flow.close()
            return []
        try:
            step = partial(flow.send, (yield operation))
        except Exception as error:
            step = partial(flow.throw, error)


def delete_files(paths: Iterable[str]) -> Flow[int]:
    """Delete files in any order; returns how many there were. A crash, or a failure, leaves any of them."""
    flows = [_delete(path) for path in paths]
    gone: list[bool] = yield InParallel(flows, [0] * len(flows))
    return sum(gone)


def _delete(path: str) -> Flow[bool]:
    was_there: bool = yield DeleteFile(path)
    return was_there


def make_durable(path: str, read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[bytes]:
    """Content of a file, as `read` gives it, which is durable from now on. Raises ObjectMissingError."""
    content = yield from read(path)
    yield PutIfAbsent(path, content)  # it exists: this makes its name durable, and writes nothing
    return content
