"""Pieces of in-flight data: what is written is read, and nothing that is damaged is taken for whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.barriers.alignment.inflight import decode, encode
from holdfast.barriers.elements import Batch, CheckpointBarrier, Element, LatencyMarker, Watermark, WatermarkStatus
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.snapshot.unpacking import SETTING


def batch(*numbers: int, timed: bool = True) -> Batch:
    columns = pa.RecordBatch.from_pydict({"n": pa.array(numbers, pa.int64()), "s": [f"row {number}" for number in numbers]})
    return Batch(columns=columns, timestamps=np.array(numbers, np.int64) * 10 if timed else None)


def plain(elements: list[Element]) -> list[object]:
    """Elements as values that can be compared."""
    found: list[object] = []
    for each in elements:
        if isinstance(each, Batch):
            stamps = None if each.timestamps is None else each.timestamps.tolist()
            found.append((each.columns().to_pydict(), stamps))
        else:
            found.append(each)
    return found


ELEMENTS: list[Element] = [Watermark(5), batch(1, 2), WatermarkStatus(idle=True), batch(3), Watermark(40)]


@pytest.mark.parametrize("timed", [True, False])
def test_elements_come_back_in_their_places(timed: bool) -> None:
    elements: list[Element] = [Watermark(5), batch(1, 2, timed=timed), batch(3, timed=timed), Watermark(40)]
    assert plain(decode(encode(elements), rows=3)) == plain(elements)


def test_events_alone_come_back() -> None:
    events: list[Element] = [Watermark(7), WatermarkStatus(idle=False)]
    assert decode(encode(events), rows=0) == events


def test_barriers_and_latency_markers_are_left_out() -> None:
    elements: list[Element] = [batch(1), CheckpointBarrier(1, 0), LatencyMarker(0, "s", 0), batch(2)]
    assert plain(decode(encode(elements), rows=2)) == plain([batch(1), batch(2)])


def test_metadata_of_the_columns_survives() -> None:
    columns = batch(1).columns().replace_schema_metadata({"holdfast.rows": "combined"})
    (found,) = decode(encode([Batch(columns=columns, timestamps=np.array([1], np.int64))]), rows=1)
    assert isinstance(found, Batch)
    assert found.columns().schema.metadata == {b"holdfast.rows": b"combined"}


def test_a_piece_cut_off_at_any_offset_is_refused() -> None:
    data = encode(ELEMENTS)
    assert plain(decode(data, rows=3)) == plain(ELEMENTS)
    for length in range(len(data)):
        with pytest.raises(CorruptStateError, match="in-flight data"):
            decode(data[:length], rows=3)


def test_a_piece_with_something_behind_it_or_other_rows_is_refused() -> None:
    data = encode(ELEMENTS)
    for wrong, rows in ((data + b"\0", 3), (data + data, 6), (data, 2), (data, 4)):
        with pytest.raises(CorruptStateError, match="in-flight data"):
            decode(wrong, rows=rows)


def stream(*batches: pa.RecordBatch, event: bytes | None = None, **options: Any) -> bytes:
    """Of another writer. `event`: metadata of the last batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for each in batches[:-1]:
            writer.write_batch(each)
        writer.write_batch(batches[-1], custom_metadata=None if event is None else {"holdfast.event": event})
    return bytes(sink.getvalue())


ROWS = batch(1, 2, timed=False).columns()
WRONG: dict[str, bytes] = {
    "an event with rows": stream(ROWS, event=b'{"type":"watermark","timestamp_ms":1}'),
    "an event that is none": stream(ROWS, ROWS.slice(0, 0), event=b'{"type":"barrier"}'),
    "a watermark beyond int64": stream(ROWS, ROWS.slice(0, 0), event=b'{"type":"watermark","timestamp_ms":9223372036854775808}'),
    "a watermark that is no number": stream(ROWS, ROWS.slice(0, 0), event=b'{"type":"watermark","timestamp_ms":true}'),
    "an event that is no JSON": stream(ROWS, ROWS.slice(0, 0), event=b"\xff"),
    "timestamps of another type": stream(ROWS.append_column("_timestamp_ms", pa.array([1.0, 2.0]))),
    "a record without a timestamp": stream(ROWS.append_column("_timestamp_ms", pa.array([1, None]))),
    "columns of one name": stream(ROWS.append_column("n", pa.array([1, 2]))),
    "an offset that is not within the column": stream(ROWS).replace(
        np.array([0, 5, 10], np.int32).tobytes(), np.array([0, 5, 1 << 20], np.int32).tobytes()
    ),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_stream_that_is_no_piece_is_refused(what: str) -> None:
    assert plain(decode(stream(ROWS), rows=2)) == plain([batch(1, 2, timed=False)])
    assert WRONG[what] != stream(ROWS)
    with pytest.raises(CorruptStateError, match="in-flight data"):
        decode(WRONG[what], rows=2)


def nulls(count: int) -> pa.Array:
    """Of no type, which take no memory."""
    return pa.Array.from_buffers(pa.null(), count, [None])


BOMBS: dict[str, pa.Array] = {
    "packed": pa.array(np.zeros(1 << 20, np.int64)),
    "rows of nothing": nulls(1 << 30),
    "nested nothing": pa.Array.from_buffers(pa.list_(pa.null(), 1 << 22), 1 << 8, [None], children=[nulls(1 << 30)]),
}


@pytest.mark.parametrize("what", list(BOMBS))
def test_a_piece_that_unpacks_to_more_than_it_may_is_refused_unopened(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, str(1 << 20))
    column = BOMBS[what]
    data = stream(pa.RecordBatch.from_arrays([column], ["n"]), compression="zstd")
    assert len(data) < 1 << 12
    with pytest.raises(CorruptStateError, match=r"in-flight data.* unpack to more than"):
        decode(data, rows=len(column))
