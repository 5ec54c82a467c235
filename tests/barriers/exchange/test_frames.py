"""Data frames: every payload there and back, in place where possible, and refusals."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.elements import (
    Batch,
    CancelMarker,
    CheckpointBarrier,
    ElementEvent,
    EndOfData,
    EndOfPartition,
    LatencyMarker,
    Watermark,
    WatermarkStatus,
)
from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.exchange.frames import (
    PART_BYTES_MAX,
    ChannelId,
    EncodedFrame,
    Frame,
    FrameDecoder,
    FrameEncoder,
    Header,
    LastSequence,
)
from holdfast.statebackends.errors import InvalidRowError, ProtocolError, SchemaMismatchError
from tests.examples import examples

CHANNEL = ChannelId(1, 2, 3)


def frame(payload: Any, sequence: int = 1, channel: ChannelId = CHANNEL) -> Frame:
    return Frame(5, channel, sequence, payload, payload.size if isinstance(payload, Batch) else 0)


def wire(parts: list[Any], shift: int = 0) -> list[memoryview]:
    """The parts as a peer would receive them, at any address."""
    received = []
    for part in parts:
        buffer = bytearray(shift) + bytearray(part)
        received.append(memoryview(buffer)[shift:])
    return received


def decode(parts: list[Any]) -> Frame:
    return FrameDecoder().decode(EncodedFrame.of(parts))


def travelled(payload: Any, shift: int = 0) -> Frame:
    return decode(wire(FrameEncoder().encode(frame(payload)), shift))


NUMBERS = pa.record_batch({"n": np.arange(100, dtype=np.int64), "s": [str(number) for number in range(100)]})
TABLE = pa.record_batch(
    {
        "n": pa.array([1, None, 3], pa.int64()),
        "s": ["a", "ü", None],
        "t": pa.array([dt.datetime(2020, 1, 1, tzinfo=dt.UTC)] * 3, pa.timestamp("us", "UTC")),
        "d": pa.array([decimal.Decimal("1.50")] * 3, pa.decimal128(5, 2)),
        "l": [[1], [], [2, 3]],
    }
)


# -------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("parts", [[], [b""], [b"\xc1"], [b"\x90"], [b"hello", b"world"]])
def test_rubbish_is_a_protocol_error(parts: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(parts)


def test_another_version_is_refused() -> None:
    import msgspec

    header = msgspec.msgpack.encode(Header(1, 1, 1, 1, 1, 1, 4))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="frame version 1"):
        decode([header, b""])


@pytest.mark.parametrize(
    "payload", [Batch(columns=TABLE), Batch(rows=[1]), Watermark(1), CreditAnnouncement(1, 1, 0, 0), LastSequence(1)]
)
def test_truncated_payload_names_the_channel(payload: Any) -> None:
    parts = FrameEncoder().encode(frame(payload))
    parts[1] = bytes(memoryview(parts[1]))[:-1]
    with pytest.raises(ProtocolError) as caught:
        decode(parts)
    assert caught.value.channel == tuple(CHANNEL)


def test_a_missing_part_is_refused() -> None:
    parts = FrameEncoder().encode(frame(Batch(columns=TABLE)))
    with pytest.raises(ProtocolError, match="ARROW frame has"):
        decode(parts[:-1])


def test_columns_before_their_schema_are_refused() -> None:
    encoder = FrameEncoder()
    encoder.encode(frame(Batch(columns=TABLE)))
    with pytest.raises(ProtocolError, match="before their schema"):
        decode(encoder.encode(frame(Batch(columns=TABLE))))


def test_rows_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(InvalidRowError, match=r"a row can't be sent to another process, it can't be pickled: ") as raised:
        FrameEncoder().encode(frame(Batch(rows=["a", lambda: 1, lambda: 2])))
    assert raised.value.record is not None
    assert raised.value.record.startswith("<function")
    assert raised.value.reason.startswith("it can't be pickled: ")


def test_a_row_that_tells_nothing_of_itself_is_refused_like_any_other() -> None:
    class Mute:
        def __reduce__(self) -> str:
            raise MuteError

        def __repr__(self) -> str:
            raise ValueError

    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    with pytest.raises(InvalidRowError) as raised:
        FrameEncoder().encode(frame(Batch(rows=[Mute()])))
    assert raised.value.record == "<Mute whose repr raises ValueError>"
    assert raised.value.reason == "it can't be pickled: MuteError: <MuteError whose str raises ValueError>"


class Unmade:
    """Is pickled, and raises as it is made anew."""

    def __setstate__(self, state: Any) -> None:
        raise KeyError("gone")

    def __getstate__(self) -> str:
        return "all of it"


class Unknown:
    """As one of a module that the receiver does not have."""

    def __reduce__(self) -> str:
        return "Unknown"


def test_rows_that_cannot_be_made_anew_are_of_the_user_and_not_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = FrameEncoder().encode(frame(Batch(rows=[{"id": 1}, Unmade()])))
    with pytest.raises(InvalidRowError, match=r"a row can't be taken in by another process, .*unpickled: KeyError: 'gone'"):
        decode(parts)
    monkeypatch.setattr(f"{__name__}.Unknown", known := Unknown())
    parts = FrameEncoder().encode(frame(Batch(rows=[known])))
    monkeypatch.delattr(f"{__name__}.Unknown")
    with pytest.raises(InvalidRowError, match="it can't be unpickled: AttributeError: Can't get attribute 'Unknown'"):
        decode(parts)


@pytest.mark.parametrize("batch", [Batch(rows=["a", "b"]), Batch(columns=TABLE.slice(0, 2))], ids=["rows", "columns"])
@pytest.mark.parametrize("stamps", [1, 3, 0])
def test_event_times_that_are_not_one_for_each_row_are_refused(batch: Batch, stamps: int) -> None:
    parts = FrameEncoder().encode(frame(batch.with_timestamps(np.array([1, 2], np.int64))))
    at = next(index for index, part in enumerate(parts) if bytes(part) == np.array([1, 2], np.int64).tobytes())
    parts[at] = np.arange(stamps, dtype=np.int64).tobytes()
    with pytest.raises(ProtocolError, match=f"2 rows came with {stamps} event times"):
        decode(parts)


def test_rows_are_a_list() -> None:
    parts = FrameEncoder().encode(frame(Batch(rows=["a", "b"])))
    with pytest.raises(ProtocolError, match="rows are a list, and a dict came"):
        decode([parts[0], pickle.dumps({"a": 1})])


def test_rows_that_are_no_pickle_are_of_the_protocol() -> None:
    parts = FrameEncoder().encode(frame(Batch(rows=["a", "b"])))
    for spoiled in (bytes(parts[1])[:-1], b"", b"\xff" * 8):
        with pytest.raises(ProtocolError, match="a ROWS frame can't be decoded"):
            decode([parts[0], spoiled])


def test_a_row_that_does_not_fit_the_declared_columns_is_refused() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    with pytest.raises(SchemaMismatchError, match="operator 'made': row 0 of a batch doesn't fit the declared schema, column 'a'"):
        FrameEncoder().encode(frame(Batch(rows=[{"a": "x"}], schema=schema, producer="made")))


def large_rows() -> list[Any]:
    """Header and two parts."""
    return wire(FrameEncoder().encode(frame(Batch(rows=["x" * (PART_BYTES_MAX + 1)]))))


@pytest.mark.parametrize("change", ["one is missing", "one too many", "more than came", "none", "negative"])
def test_parts_that_do_not_add_up_are_refused(change: str) -> None:
    import msgspec

    parts = large_rows()
    assert len(parts) == 3
    fields = msgspec.msgpack.decode(parts[0])
    match change:
        case "one is missing":
            parts = parts[:-1]
        case "one too many":
            parts.append(parts[-1])
        case _:
            fields[-1] = {"more than came": [2**62], "none": [0], "negative": [-1, 3]}[change]
            parts[0] = memoryview(msgspec.msgpack.encode(fields))
    with pytest.raises(ProtocolError, match="ROWS frame has"):
        decode(parts)


def test_a_large_event_is_neither_sent_nor_read() -> None:
    barrier = CheckpointBarrier(1, 1, folder="x" * 100_000)
    with pytest.raises(ProtocolError, match="bytes"):
        FrameEncoder().encode(frame(barrier))
    header, _ = FrameEncoder().encode(frame(Watermark(1)))
    with pytest.raises(ProtocolError, match="bytes"):
        decode([header, bytes(100_000)])


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2_000), st.binary(min_size=1, max_size=8), st.integers(0, 2))
def test_a_damaged_message_is_a_protocol_error_or_another_batch(at: int, patch: bytes, part: int) -> None:
    """Whatever an admitted peer sends: an error of ours, never an exception of Arrow's, nor a crash."""
    parts = [bytearray(memoryview(each)) for each in FrameEncoder().encode(frame(Batch(columns=NUMBERS)))]
    target = parts[1 + part % (len(parts) - 1)]
    at %= len(target)
    target[at : at + len(patch)] = patch
    try:
        received = decode([memoryview(each) for each in parts])
    except ProtocolError:
        return
    assert isinstance(received.payload, Batch)
    assert received.payload.columns().nbytes >= 0


# -------------------------------------------------------------------------------------------------- there and back

EVENTS: list[ElementEvent] = [
    Watermark(-(2**63)),
    Watermark(2**63 - 1),
    WatermarkStatus(idle=True),
    CheckpointBarrier(7, 123, "savepoint", True, "job/chk-7", 6),
    CancelMarker(7),
    LatencyMarker(1, "v", 2),
    EndOfData(drain=False),
    EndOfData(stopped=True),
    EndOfPartition(),
]


@pytest.mark.parametrize("payload", [*EVENTS, CreditAnnouncement(1, 2, 3, 4), LastSequence(9)])
def test_events_and_credit(payload: Any) -> None:
    assert travelled(payload) == frame(payload)


@pytest.mark.parametrize(
    "marker",
    [
        LatencyMarker(-1, "v", 0),
        LatencyMarker(-(2**63), "v", 0),
        LatencyMarker(2**64 - 1, "v", 0),
        LatencyMarker(0, "v" * 129, 0),
        LatencyMarker(0, "v", -1),
        LatencyMarker(0, "v", 2**40),
    ],
)
def test_a_latency_marker_that_no_source_sends_is_refused(marker: LatencyMarker) -> None:
    """The difference to our clock would be beyond what a heartbeat can tell, and each one would be refused."""
    with pytest.raises(ProtocolError):
        travelled(marker)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_columns_at_any_address(shift: int) -> None:
    batch = Batch(columns=TABLE, timestamps=np.array([1, -2, 3], np.int64))
    received = travelled(batch, shift)
    assert (received.attempt, received.channel, received.sequence, received.size) == (5, CHANNEL, 1, batch.size)
    assert isinstance(received.payload, Batch)
    assert received.payload.columns().equals(TABLE)
    received.payload.columns().validate(full=True)
    assert received.payload.timestamps is not None
    assert received.payload.timestamps.tolist() == [1, -2, 3]


def test_columns_are_decoded_in_place() -> None:
    numbers = pa.record_batch({"n": np.arange(10_000, dtype=np.int64)})
    parts = FrameEncoder().encode(frame(Batch(columns=numbers)))
    memory = pa.allocate_buffer(memoryview(parts[1]).nbytes)
    memoryview(memory)[:] = memoryview(parts[1])
    received = decode([parts[0], memory, parts[2]])
    assert isinstance(received.payload, Batch)
    address = received.payload.columns().column(0).buffers()[1].address
    assert memory.address < address < memory.address + memory.size


def test_a_schema_travels_once_per_channel_and_again_when_it_changes() -> None:
    encoder, decoder = FrameEncoder(), FrameDecoder()
    other = pa.record_batch({"x": [1.5]})
    counts = []
    for table, channel in ((TABLE, CHANNEL), (TABLE, CHANNEL), (other, CHANNEL), (TABLE, CHANNEL), (TABLE, ChannelId(1, 2, 4))):
        parts = encoder.encode(frame(Batch(columns=table), channel=channel))
        counts.append(len(parts))
        payload = decoder.decode(EncodedFrame.of(wire(parts))).payload
        assert isinstance(payload, Batch)
        assert payload.columns().equals(table)
    assert counts == [3, 2, 3, 3, 3]


def test_slices_carry_only_their_rows() -> None:
    numbers = pa.record_batch({"n": np.arange(100_000, dtype=np.int64)})
    parts = FrameEncoder().encode(frame(Batch(columns=numbers).slice(50_000, 10)))
    assert memoryview(parts[1]).nbytes < 1000


def test_rows_with_a_schema_travel_as_columns() -> None:
    received = travelled(Batch(rows=[{"x": 1}, {"x": 2}], schema=pa.schema([("x", pa.int64())])))
    assert isinstance(received.payload, Batch)
    assert received.payload.is_columnar
    assert received.payload.rows() == [{"x": 1}, {"x": 2}]


def test_rows_without_a_schema_travel_as_they_are() -> None:
    rows = [{"x": 1}, ("any", {"thing"}), None]
    received = travelled(Batch(rows=rows, timestamps=np.array([1, 2, 3], np.int64)))
    assert isinstance(received.payload, Batch)
    assert received.payload.rows() == rows
    assert received.payload.timestamps is not None
    assert received.payload.timestamps.tolist() == [1, 2, 3]


def test_dictionary_columns_travel_with_their_dictionary() -> None:
    table = pa.record_batch({"c": pa.array(["x", "y", "x"]).dictionary_encode()})
    encoder, decoder = FrameEncoder(), FrameDecoder()
    for _ in range(2):
        payload = decoder.decode(EncodedFrame.of(wire(encoder.encode(frame(Batch(columns=table)))))).payload
        assert isinstance(payload, Batch)
        assert payload.columns().column(0).to_pylist() == ["x", "y", "x"]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.text(max_size=5)), max_size=20), st.integers(0, 9))
def test_any_columns(rows: list[tuple[int, str]], shift: int) -> None:
    schema = pa.schema([("n", pa.int64()), ("s", pa.utf8())])
    table = pa.record_batch([[n for n, _ in rows], [s for _, s in rows]], schema=schema)
    received = travelled(Batch(columns=table), shift)
    assert isinstance(received.payload, Batch)
    assert received.payload.columns().equals(table)
