"""Flows that several rooms share: bounded reads of small files, group deletion, and making a found file durable.

A record is read up to a bound, however long its file is: a sparse file of any length costs its maker nothing, and its reader all of
its length. What records mean is for the callers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError
from holdfast.statebackends.storage.port import DeleteFile, Flow, InParallel, ReadFile, SyncFile

T = TypeVar("T")

FIRST_BYTES = 1 << 20
"""Bytes of the first read of a record, enough for nearly all of them."""
RECORD_BYTES_MAX = 64 << 20
"""Bytes of a record: more than a few numbers and a message, a job's metrics, or the names of an input's files need."""


def read_whole(path: str, bytes_max: int = RECORD_BYTES_MAX) -> Flow[bytes]:
    """The bytes of a record. Raises CorruptStateError naming a file longer than `bytes_max`, and ObjectMissingError."""
    content: bytes = yield ReadFile(path, 0, min(FIRST_BYTES, bytes_max + 1))
    if len(content) == FIRST_BYTES:
        rest: bytes = yield ReadFile(path, FIRST_BYTES, bytes_max + 1 - FIRST_BYTES)
        content += rest
    if len(content) > bytes_max:
        reason = f"longer than {bytes_max} bytes, which no such record is"
        raise CorruptStateError(f"{path}: {reason}", path=path, operator=None, reason=reason)
    return content


def read_in_group(readers: Sequence[Callable[[], Flow[T]]]) -> Flow[list[T]]:
    """Results, in order, of flows that read small files whole. A flow is started once, or twice if it reads a long file.

    Flows for which a first read of each file is enough run several at one time. The others run one after another: the pool counts a
    transfer's bytes as if it were streamed, and these files are in memory whole."""
    first: list[list[T]] = yield InParallel([_unless_long(reader()) for reader in readers], [FIRST_BYTES] * len(readers))
    results: list[T] = []
    for reader, found in zip(readers, first, strict=True):
        results += found or [(yield from reader())]
    return results


def _unless_long(flow: Flow[T]) -> Flow[list[T]]:
    """The flow's result in a list; an empty list as soon as the flow reads behind the first bytes of a file."""
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
    """Delete files, in any order; returns how many existed. A crash or failure may leave any of them."""
    flows = [_delete(path) for path in paths]
    gone: list[bool] = yield InParallel(flows, [0] * len(flows))
    return sum(gone)


def _delete(path: str) -> Flow[bool]:
    was_there: bool = yield DeleteFile(path)
    return was_there


def make_durable(path: str, read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[bytes]:
    """The content of a file, as `read` gives it, made durable. Raises ObjectMissingError.

    On a directory a name may be visible before it is durable, and its writer may have died in between. A process that finds the
    file and acts on it first makes the name durable; otherwise a power loss would undo what others have acted on. A caller that
    sleeps in between must not bring back what a successor has deleted: nothing is created."""
    content = yield from read(path)
    is_there: bool = yield SyncFile(path)
    if not is_there:
        raise ObjectMissingError(f"{path} was deleted while it was made durable", path=path)
    return content
