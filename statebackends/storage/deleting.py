"""Several files deleted at one time, where their order is nobody's business."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.statebackends.storage.port import DeleteFile, Flow, InParallel


def delete_files(paths: Iterable[str]) -> Flow[int]:
    """Delete files in any order; returns how many there were. A crash, or a failure, leaves any of them."""
    flows = [_delete(path) for path in paths]
    gone: list[bool] = yield InParallel(flows, [0] * len(flows))
    return sum(gone)


def _delete(path: str) -> Flow[bool]:
    was_there: bool = yield DeleteFile(path)
    return was_there
