"""Data frames <-> bytes: what travels between subtasks of different processes.

A frame is a header and a payload. A batch with a schema is one Arrow IPC message (its schema travels once per channel), one
without is one pickle of its rows; events and credit are msgpack. Columns are decoded in place, on the memory they came in.

A pickle runs code, and Arrow's decoder does not withstand hostile input: a received message stays an EncodedFrame, of which only
the header is read, until its sender, attempt, channel (admission.py) and sequence (channels.py) are checked."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias, assert_never, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch, ElementEvent, Row
from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.rows import text_of
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import HoldfastError, InvalidRowError, ProtocolError

Part: TypeAlias = bytes | bytearray | memoryview | pa.Buffer
"""Anything with the buffer protocol."""


class ChannelId(NamedTuple):
    """One channel of the job: from a producer subtask to a consumer subtask, over an edge."""

    edge: int
    producer: int
    consumer: int


class LastSequence(msgspec.Struct, frozen=True, array_like=True, tag="last_sequence"):
    """Sent now and then by the producer: number of the channel's newest frame. A receiver that is behind has lost one."""

    sequence: int


Payload: TypeAlias = Batch | ElementEvent | CreditAnnouncement | LastSequence


class Frame(msgspec.Struct, frozen=True):
    """One message on a channel. `sequence` counts batches and events of the channel from 1; 0 on credit and last-sequence frames,
    which may be lost or repeated without harm. `size`: a batch's bytes as its sender counted them for credit, 0 for the others."""

    attempt: int
    channel: ChannelId
    sequence: int
    payload: Payload
    size: int = 0

    @property
    def to_producer(self) -> bool:
        """Credit travels against the channel."""
        return isinstance(self.payload, CreditAnnouncement)

    @property
    def target_slot(self) -> int:
        """Slot of the subtask it is for: subtask i runs in slot i."""
        return self.channel.producer if self.to_producer else self.channel.consumer


class FrameKind(IntEnum):
    ARROW = 1
    """Parts: IPC record batch message [, timestamps] [, IPC schema message]."""
    ARROW_STREAM = 2
    """As ARROW, but the first part is a whole IPC stream: for dictionary-encoded columns."""
    ROWS = 3
    """Parts: pickled list [, timestamps]."""
    EVENT = 4
    CREDIT = 5
    LAST_SEQUENCE = 6


CONTROL_KINDS = frozenset((FrameKind.EVENT, FrameKind.CREDIT, FrameKind.LAST_SEQUENCE))


class Header(msgspec.Struct, frozen=True, array_like=True):
    """First part of every frame."""

    version: int
    attempt: int
    edge: int
    producer: int
    consumer: int
    sequence: int
    kind: FrameKind
    size: int = 0
    timestamps: bool = False
    schema: bool = False
    chunks: tuple[int, ...] = ()
    """How many parts each section behind the header was cut into; empty: one each."""


FRAME_VERSION = 2
PART_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of one part of a message; larger sections travel in several parts. A transport takes no larger part, so that no peer makes
it allocate memory at will, and a batch may still have any size."""

PORT_PART_BYTES_MAX = 255 * 1024
"""The same where strangers reach a transport: each of their connections may hold memory for one part before it proved anything."""

HEADER_BYTES_MAX = 512
CONTROL_BYTES_MAX = 64 * 1024
"""Bytes of an event, of credit, or of a last sequence."""

ALIGNMENT = 8
"""Bytes; columns received at another address are copied once, since vector code reads them as int64."""

_pack = msgspec.msgpack.Encoder()
_headers = msgspec.msgpack.Decoder(Header)
_events = msgspec.msgpack.Decoder(ElementEvent)
_credits = msgspec.msgpack.Decoder(CreditAnnouncement)
_sequences = msgspec.msgpack.Decoder(LastSequence)


class FrameEncoder:
    """Encodes the frames of one attempt towards any peers; remembers which channels know which schema."""

    def __init__(self) -> None:
        self._schemas: dict[ChannelId, pa.Schema] = {}

    def encode(self, frame: Frame, part_bytes_max: int = PART_BYTES_MAX) -> list[Part]:
        """Parts of one multipart message, none above part_bytes_max; nothing large is copied.

        Raises InvalidRowError and SchemaMismatchError for a row that can't travel, ProtocolError for anything else that can't."""
        payload = frame.payload
        if isinstance(payload, Batch):
            try:
                return self._batch(frame, payload, part_bytes_max)
            except HoldfastError:
                raise
            except Exception as error:
                raise ProtocolError(f"a batch can't be encoded: {error}", channel=tuple(frame.channel)) from error
        if isinstance(payload, CreditAnnouncement):
            return _control(frame, FrameKind.CREDIT, payload)
        if isinstance(payload, LastSequence):
            return _control(frame, FrameKind.LAST_SEQUENCE, payload)
        return _control(frame, FrameKind.EVENT, payload)

    def _batch(self, frame: Frame, batch: Batch, part_bytes_max: int) -> list[Part]:
        stamps = batch.timestamps
        tail: list[Part] = [] if stamps is None else [pa.py_buffer(np.ascontiguousarray(stamps, np.int64))]
        flags = {"timestamps": stamps is not None}
        if batch.schema is None:
            rows = _pickled(list(batch.rows()))
            return _message(frame, FrameKind.ROWS, [rows, *tail], part_bytes_max, **flags)
        columns = batch.columns()
        if _has_dictionary(columns.schema):
            return _message(frame, FrameKind.ARROW_STREAM, [_stream(columns), *tail], part_bytes_max, **flags)
        known = self._schemas.get(frame.channel)
        new = known is not columns.schema and (known is None or not known.equals(columns.schema, check_metadata=True))
        if new:
            self._schemas[frame.channel] = columns.schema
            tail.append(columns.schema.serialize())
        return _message(frame, FrameKind.ARROW, [columns.serialize(), *tail], part_bytes_max, schema=new, **flags)


class EncodedFrame:
    """A frame as it came: its header is read, its payload is not. The facts are named as in Frame."""

    __slots__ = ("attempt", "channel", "header", "parts")

    def __init__(self, header: Header, parts: Sequence[Any]) -> None:
        self.header = header
        self.parts = parts
        self.attempt = header.attempt
        self.channel = ChannelId(header.edge, header.producer, header.consumer)

    @staticmethod
    def of(parts: Sequence[Any]) -> EncodedFrame:
        """A multipart message (bytes, or objects with `.buffer` such as zmq frames). Raises ProtocolError."""
        return EncodedFrame(decode_header(parts), parts)

    @property
    def sequence(self) -> int:
        return self.header.sequence

    @property
    def size(self) -> int:
        return self.header.size

    @property
    def kind(self) -> FrameKind:
        return self.header.kind

    @property
    def to_producer(self) -> bool:
        return self.header.kind is FrameKind.CREDIT


AnyFrame: TypeAlias = Frame | EncodedFrame
"""Within a process, or as it came from another one."""


class FrameDecoder:
    """Decodes the frames of one attempt; remembers each channel's schema."""

    def __init__(self) -> None:
        self._schemas: dict[ChannelId, pa.Schema] = {}

    def decode(self, encoded: EncodedFrame) -> Frame:
        """The whole frame; only for one whose sender was checked. Raises InvalidRowError for rows that their own classes don't make
        anew here, ProtocolError for anything else that can't be decoded."""
        header, channel = encoded.header, encoded.channel
        try:
            payload = self._payload(header, channel, _sections(header, encoded.parts))
        except (ProtocolError, InvalidRowError):
            raise
        except Exception as error:
            raise ProtocolError(f"a {header.kind.name} frame can't be decoded: {error}", channel=tuple(channel)) from error
        return Frame(header.attempt, channel, header.sequence, payload, header.size)

    def _payload(self, header: Header, channel: ChannelId, parts: list[memoryview]) -> Payload:
        match header.kind:
            case FrameKind.EVENT:
                return cast(ElementEvent, _events.decode(parts[0]))
            case FrameKind.CREDIT:
                return _credits.decode(parts[0])
            case FrameKind.LAST_SEQUENCE:
                return _sequences.decode(parts[0])
            case FrameKind.ROWS:
                rows = _unpickled(parts[0])
                return Batch(rows=rows, timestamps=_timestamps(header, parts, len(rows)))
            case FrameKind.ARROW_STREAM:
                with pa.ipc.open_stream(pa.py_buffer(_aligned(parts[0]))) as stream:
                    (columns,) = stream
                columns.validate()
                return Batch(columns=columns, timestamps=_timestamps(header, parts, columns.num_rows))
            case FrameKind.ARROW:
                if header.schema:
                    self._schemas[channel] = pa.ipc.read_schema(pa.py_buffer(parts[-1]))
                schema = self._schemas.get(channel)
                if schema is None:
                    raise ProtocolError("columns came before their schema", channel=tuple(channel))
                columns = pa.ipc.read_record_batch(pa.py_buffer(_aligned(parts[0])), schema)
                columns.validate()
                return Batch(columns=columns, timestamps=_timestamps(header, parts, columns.num_rows))
            case _:
                assert_never(header.kind)


def decode_header(parts: Sequence[Any]) -> Header:
    """Header of a multipart message, enough to drop a frame of another attempt unread. Raises ProtocolError."""
    if not parts:
        raise ProtocolError("an empty frame")
    memory = _memory(parts[0])
    if memory.nbytes > HEADER_BYTES_MAX:
        raise ProtocolError(f"a frame header of {memory.nbytes} bytes", expected=HEADER_BYTES_MAX, got=memory.nbytes)
    try:
        header = _headers.decode(memory)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a frame header: {error}") from error
    if header.version != FRAME_VERSION:
        raise ProtocolError(f"frame version {header.version}", expected=FRAME_VERSION, got=header.version)
    return header


def _pickled(rows: list[Row]) -> bytes:
    """Raises InvalidRowError with the first row that can't be pickled."""
    try:
        return pickle.dumps(rows, protocol=5)
    except Exception as error:
        reason = f"it can't be pickled: {type(error).__name__}: {text_of(error, str)}"
        record = next((text_of(row, repr) for row in rows if not _is_picklable(row)), None)
        shown = "" if record is None else f"; record {record}"
        raise InvalidRowError(f"a row can't be sent to another process, {reason}{shown}", reason=reason, record=record) from error


def _unpickled(data: memoryview) -> list[Row]:
    """Raises InvalidRowError for a row whose class is missing here, or raises as it is made anew: code of the user's, as much as
    what pickled it. Which row that was can't be told: there is none."""
    try:
        rows = pickle.loads(data)
    except (pickle.UnpicklingError, EOFError):
        raise  # no pickle at all
    except Exception as error:
        reason = f"it can't be unpickled: {type(error).__name__}: {text_of(error, str)}"
        raise InvalidRowError(f"a row can't be taken in by another process, {reason}", reason=reason) from error
    if type(rows) is not list:
        raise ProtocolError(f"rows are a list, and a {type(rows).__name__} came")
    return rows


def _is_picklable(row: Row) -> bool:
    try:
        pickle.dumps(row, protocol=5)
    except Exception:
        return False
    return True


def _control(frame: Frame, kind: FrameKind, payload: ElementEvent | CreditAnnouncement | LastSequence) -> list[Part]:
    body = _pack.encode(payload)
    if len(body) > CONTROL_BYTES_MAX:
        raise ProtocolError(f"an {kind.name} frame of {len(body)} bytes", expected=CONTROL_BYTES_MAX, got=len(body))
    return [_header(frame, kind), body]


def _message(
    frame: Frame, kind: FrameKind, sections: list[Part], part_bytes_max: int, *, timestamps: bool = False, schema: bool = False
) -> list[Part]:
    """Header and sections, cut where they are too large for one part."""
    if all(memoryview(section).nbytes <= part_bytes_max for section in sections):
        return [_header(frame, kind, timestamps=timestamps, schema=schema), *sections]
    cut = [_chunks(section, part_bytes_max) for section in sections]
    counts = tuple(len(chunks) for chunks in cut)
    header = _header(frame, kind, timestamps=timestamps, schema=schema, chunks=counts)
    return [header, *(chunk for chunks in cut for chunk in chunks)]


def _chunks(section: Part, part_bytes_max: int) -> list[Part]:
    memory = memoryview(section).cast("B")
    return [memory[start : start + part_bytes_max] for start in range(0, max(1, memory.nbytes), part_bytes_max)]


def _sections(header: Header, parts: Sequence[Any]) -> list[memoryview]:
    """What was cut for the way is joined again, at the cost of one copy. Raises ProtocolError."""
    body = [_memory(part) for part in parts[1:]]
    count = 1 + header.timestamps + header.schema
    chunks = header.chunks or (1,) * count
    if len(chunks) != count or min(chunks) < 1 or len(body) != sum(chunks):
        raise ProtocolError(f"a {header.kind.name} frame has {len(body)} parts", expected=sum(chunks), got=len(body))
    if header.kind in CONTROL_KINDS and body[0].nbytes > CONTROL_BYTES_MAX:
        raise ProtocolError(f"a {header.kind.name} frame of {body[0].nbytes} bytes", expected=CONTROL_BYTES_MAX, got=body[0].nbytes)
    if not header.chunks:
        return body
    sections, start = [], 0
    for number in chunks:
        sections.append(body[start] if number == 1 else memoryview(b"".join(body[start : start + number])))
        start += number
    return sections


def _header(
    frame: Frame, kind: FrameKind, *, timestamps: bool = False, schema: bool = False, chunks: tuple[int, ...] = ()
) -> bytes:
    edge, producer, consumer = frame.channel
    return _pack.encode(
        Header(FRAME_VERSION, frame.attempt, edge, producer, consumer, frame.sequence, kind, frame.size, timestamps, schema, chunks)
    )


def _memory(part: Any) -> memoryview:
    return memoryview(getattr(part, "buffer", part))


def _aligned(memory: memoryview) -> memoryview | bytes:
    """The same bytes at an address that columns may start at; small messages can lie anywhere in a receive buffer."""
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0] if memory.nbytes else 0
    return memory if address % ALIGNMENT == 0 else memory.tobytes()


def _timestamps(header: Header, parts: list[memoryview], rows: int) -> npt.NDArray[np.int64] | None:
    """Raises ProtocolError for more or fewer than rows: each is one row's."""
    if not header.timestamps:
        return None
    stamps = np.frombuffer(_aligned(parts[1]), np.int64)
    if len(stamps) != rows:
        raise ProtocolError(f"{rows} rows came with {len(stamps)} event times", expected=rows, got=len(stamps))
    return stamps


def _stream(columns: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, columns.schema) as writer:
        writer.write_batch(columns)
    return sink.getvalue()


def _has_dictionary(schema: pa.Schema) -> bool:
    return any(_is_dictionary(field.type) for field in schema)


def _is_dictionary(data_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(data_type):
        return True
    return any(_is_dictionary(data_type.field(index).type) for index in range(data_type.num_fields))
