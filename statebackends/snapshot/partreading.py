"""Parts of a snapshot read together: several at one time, and pieces of one file with one request where most of it is wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.statebackends.errors import ObjectMissingError
from holdfast.statebackends.handles import SegmentHandle, StateHandle
from holdfast.statebackends.snapshot.parts import check_bytes, missing, part_path, read_part
from holdfast.statebackends.storage.port import Flow, InParallel, ReadFile

SPARE_MAX = 2
"""A read of several pieces may be this many times as long as they are."""


def read_parts(parts: Sequence[StateHandle], folder: str, *, operator: str | None = None) -> Flow[list[bytes]]:
    """The bytes of parts, in their order, each checked. Raises CorruptStateError naming file and operator."""
    spans = list(_spans(parts))
    flows = [_read_span([parts[index] for index in span], folder, operator) for span in spans]
    read = yield InParallel(flows, [sum(parts[index].length for index in span) for span in spans])
    found: dict[int, bytes] = {}
    for span, pieces in zip(spans, read, strict=True):
        found.update(zip(span, pieces, strict=True))
    return [found[index] for index in range(len(parts))]


def _spans(parts: Sequence[StateHandle]) -> Iterator[list[int]]:
    """Positions of parts that are read at once: those of pieces of one file by their offsets, and of every other part alone."""
    pieces: dict[str, list[tuple[int, int, int]]] = {}
    for index, part in enumerate(parts):
        if isinstance(part, SegmentHandle) and part.is_inside:
            pieces.setdefault(part.path, []).append((part.offset, part.length, index))
        else:
            yield [index]
    for places in pieces.values():
        places.sort()
        start, stop = places[0][0], max(offset + length for offset, length, _ in places)
        if stop - start <= SPARE_MAX * sum(length for _, length, _ in places):
            yield [index for *_, index in places]
        else:
            yield from ([index] for *_, index in places)


def _read_span(parts: Sequence[StateHandle], folder: str, operator: str | None) -> Flow[list[bytes]]:
    if len(parts) == 1:
        return [(yield from read_part(parts[0], folder, operator=operator))]
    pieces = [part for part in parts if isinstance(part, SegmentHandle)]  # all of them: see _spans
    path = part_path(folder, pieces[0].path, operator=operator)
    start, stop = pieces[0].offset, max(piece.offset + piece.length for piece in pieces)
    try:
        data: bytes = yield ReadFile(path, start, stop - start)
    except ObjectMissingError as error:
        raise missing(path, operator) from error
    read = [data[piece.offset - start : piece.offset - start + piece.length] for piece in pieces]
    for piece, content in zip(pieces, read, strict=True):
        check_bytes(content, piece, path, operator)
    return read
