"""Where sources stand, from the entries that they really store; and what other bytes make of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.exchange.split_entries import STATE_VERSION, SplitEntry
from holdfast.coordinator.explain.positions import POSITION_CHARACTERS_MAX, POSITIONS_SHOWN_MAX, SourcePlaces, describe_positions
from holdfast.operators.connectors.kafka.partitions import KafkaPartition
from holdfast.operators.connectors.nats.source import NatsSplit
from holdfast.operators.connectors.postgres.slot import SlotSplit, SnapshotProgress
from holdfast.operators.sources.file_formats import FileSplit
from holdfast.operators.sources.generator import StripePosition, encode_position
from holdfast.operators.sources.split_state import SplitCodec
from holdfast.operators.sources.splits import AssignedSplit, SourceSplit
from holdfast.operators.sources.stream import StreamPosition


class Part(SourceSplit, frozen=True):
    """Of a user's connector."""


def stored(split: SourceSplit, *position: int) -> bytes:
    return SplitCodec(type(split), "uid").encode(AssignedSplit(split, position))


KAFKA = KafkaPartition("orders[3]", "orders", 3, 17)
NATS = NatsSplit("EVENTS", "EVENTS", "", "2026-01-01T00:00:00Z", 5)
FILE = FileSplit("in/a.csv", 10, 20)
SLOT = SlotSplit("slot", system="7", timeline=1)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (stored(KAFKA, 1_234), "orders[3] at offset 1,234"),
        (stored(KAFKA), "orders[3] at offset 17"),
        (stored(NATS, 99), "EVENTS at sequence 99"),
        (stored(NATS), "EVENTS at sequence 5"),
        (stored(SLOT, 0x16_B374_8D80, 0), "slot at LSN 16/B3748D80"),
        (stored(SLOT, 0x1_0000_000F, 3), "slot at LSN 1/F, 3 rows of a transaction read"),
        (stored(SLOT), "slot at its beginning"),
        (stored(FILE, 4_096, 12), "in/a.csv at byte 4,096, 12 rows on"),
        (stored(FILE, 4_096, 0), "in/a.csv at byte 4,096"),
        (stored(FILE, 1_000), "in/a.csv at row 1,000"),
        (stored(FILE), "in/a.csv at its beginning"),
        (stored(Part("p-1"), 7, 2), "p-1 at 7.2"),
        (stored(Part("p-1")), "p-1 at its beginning"),
    ],
)
def test_splits_are_told_in_the_words_of_what_is_read(entry: bytes, text: str) -> None:
    assert describe_positions([entry]) == SourcePlaces(1, (text,))


def test_rows_that_the_tables_of_a_slot_had_are_told_of() -> None:
    entry = stored(msgspec.structs.replace(SLOT, snapshot=SnapshotProgress(("public.orders",))), 1 << 32, 0)
    (text,) = describe_positions([entry]).shown
    assert text == "slot at LSN 1/0; rows that the tables had are still read"


def test_stripes_are_told_as_the_first_row_that_is_not_read() -> None:
    stripes = [encode_position(StripePosition(1, 4, stripe, 1_000 + stripe)) for stripe in (2, 0, 1)]
    assert describe_positions(stripes) == SourcePlaces(1, ("row 1,000, and some read up to 1,002",))
    stream = [msgspec.msgpack.encode(StreamPosition(1, 1, 0, 42, "input/7", 3))]
    assert describe_positions(stream) == SourcePlaces(1, ("row 42",))


def test_many_splits_are_counted_and_the_first_are_shown() -> None:
    entries = [stored(KafkaPartition(f"t[{number:03}]", "t", number, 0), number) for number in range(50)]
    found = describe_positions(entries[::-1])
    assert (found.splits, len(found.shown)) == (50, POSITIONS_SHOWN_MAX)
    assert found.shown[0] == "t[000] at offset 0"
    (long,) = describe_positions([stored(Part("x" * 4_000), 1)]).shown
    assert len(long) < POSITION_CHARACTERS_MAX + 30


@given(st.binary(max_size=200))
def test_other_bytes_say_nothing_and_raise_nothing(entry: bytes) -> None:
    describe_positions([entry])


@pytest.mark.parametrize(
    "fields",
    [
        ["split", 1, b"", [1]],
        ["split", 2, msgspec.msgpack.encode({"split_id": "a"}), [1]],
        ["split", 1, msgspec.msgpack.encode({"split_id": 7}), [1]],
        ["split", 1, msgspec.msgpack.encode({"split_id": "a"}), ["x"]],
        ["enumerator", 1, True, b""],
        [2, 4, 1, 9],
        [1, 4, 5, 9],
        [1, True, 0, 9],
        [1, 4, 1],
        [],
    ],
)
def test_entries_of_unknown_forms_say_nothing(fields: list[object]) -> None:
    assert describe_positions([msgspec.msgpack.encode(fields)]) == SourcePlaces(0, ())


def test_a_position_of_any_length_is_a_short_text() -> None:
    split = msgspec.msgpack.encode({"split_id": "a" * 5_000})
    entry = msgspec.msgpack.encode(SplitEntry(STATE_VERSION, split, tuple(range(100_000))))
    (text,) = describe_positions([entry]).shown
    assert len(text) <= 2 * POSITION_CHARACTERS_MAX
