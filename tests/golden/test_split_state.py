"""What sources with splits keep, byte for byte: each connector's splits as readers store them, and what its enumerator knows.
`split_state_v1.json` grows, and what is in it stays: `OLDER` was written before splits had a time to stop, and is read alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from holdfast.barriers.exchange.split_entries import STATE_VERSION, EnumeratorEntry
from holdfast.operators.connectors.kafka.partitions import Bounds, Found, KafkaPartition, PartitionEnumerator
from holdfast.operators.connectors.nats.source import NatsSplit
from holdfast.operators.sources.file_formats import FileSplit
from holdfast.operators.sources.files import FileMemory
from holdfast.operators.sources.split_state import SplitCodec
from holdfast.operators.sources.splits import AssignedSplit, SourceSplit
from holdfast.statebackends.errors import CorruptStateError

FILE = Path(__file__).parent / "split_state_v1.json"
GOLDEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}

FOUND = {bytes(range(16)): bytes(range(16, 24)), bytes(range(24, 40)): bytes(range(40, 48))}
MEMORY = FileMemory(FOUND, {bytes(range(24, 40)): 2}, 1_770_000_000_000_000_001).with_state()
PARTITIONS = {"orders[0]": "K3ZlZGUtdG9waWMtaWQ", "orders[1]": ""}

SPLITS: dict[str, AssignedSplit[Any]] = {
    "kafka": AssignedSplit(KafkaPartition("orders[1]", "orders", 1, 40, 90_000, "K3ZlZGUtdG9waWMtaWQ"), (41,)),
    "kafka, not begun, endless": AssignedSplit(KafkaPartition("orders[0]", "orders", 0, 0)),
    "nats": AssignedSplit(NatsSplit("orders.eu", "ORDERS", "orders.eu", "2026-01-31T12:05:00.000000001Z", 7, 1_000), (8,)),
    "nats, all subjects": AssignedSplit(NatsSplit("ORDERS", "ORDERS", "", "2026-01-31T12:05:00Z", 1)),
    "kafka, to a time": AssignedSplit(KafkaPartition("orders[1]", "orders", 1, 40, None, "K3Zl", 1_770_000_000_000), (41,)),
    "nats, to a time": AssignedSplit(
        NatsSplit("ORDERS", "ORDERS", "", "2026-01-31T12:05:00Z", 1, stop_time="2026-02-02T02:40:00+00:00")
    ),
    "file": AssignedSplit(FileSplit("/data/in/day=1/a.csv", 1 << 33, 1_770_000_000_000_000_001), (1 << 24, 299)),
    "file, not begun": AssignedSplit(FileSplit("bucket/in/b.parquet", 12, 0)),
}
OLDER = {"kafka", "kafka, not begun, endless", "nats", "nats, all subjects"}
ENUMERATORS = {
    "kafka": EnumeratorEntry(STATE_VERSION, True, msgspec.msgpack.encode(PARTITIONS)),
    "file": EnumeratorEntry(STATE_VERSION, True, MEMORY.encoded),
    "nothing found yet": EnumeratorEntry(STATE_VERSION, False, b""),
}


def codec(of: SourceSplit) -> SplitCodec[Any]:
    return SplitCodec(type(of), "in")


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_read_and_written_as_ever(name: str) -> None:
    stored = bytes.fromhex(GOLDEN["splits"][name])
    assert codec(SPLITS[name].split).decode(stored) == SPLITS[name]
    if name not in OLDER:
        assert codec(SPLITS[name].split).encode(SPLITS[name]) == stored


@pytest.mark.parametrize("name", ENUMERATORS)
def test_an_enumerator_is_read_and_written_as_ever(name: str) -> None:
    """With a split that waits."""
    stored, waiting = bytes.fromhex(GOLDEN["enumerators"][name]), bytes.fromhex(GOLDEN["splits"]["file, not begun"])
    split = SPLITS["file, not begun"].split
    assert codec(split).decode_enumerator([waiting, stored]) == (ENUMERATORS[name], [split])
    assert msgspec.msgpack.encode(ENUMERATORS[name]) == stored


def test_what_was_found_is_known_again() -> None:
    folder = FileMemory.decoded(ENUMERATORS["file"].state, "in")
    assert (folder.found, folder.gone, folder.newest_ns) == (MEMORY.found, MEMORY.gone, MEMORY.newest_ns)
    partitions = PartitionEnumerator(cast("Any", None), Bounds(("orders",), "earliest", None, "", 1_000))
    partitions.restore_state(ENUMERATORS["kafka"].state)
    found = [KafkaPartition(name, "orders", number, 0, None, topic) for number, (name, topic) in enumerate(PARTITIONS.items())]
    new = KafkaPartition("orders[2]", "orders", 2, 0)
    assert partitions.handle_discovered(Found([*found, new], is_last=False)) == [new]


@pytest.mark.parametrize(("name", "other"), [("kafka", "nats"), ("file", "kafka"), ("nats", "file")])
def test_a_split_of_another_connector_is_refused_by_the_source_s_name(name: str, other: str) -> None:
    with pytest.raises(CorruptStateError, match="source in: a split is no"):
        codec(SPLITS[other].split).decode(bytes.fromhex(GOLDEN["splits"][name]))
