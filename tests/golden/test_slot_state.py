"""What a source of changes of tables keeps of its slot, byte for byte. `slot_state_v1.json` was made once: "plain" by the version
that knew no server and no first reading, which is taken for read; the others by the one that knew no late rows and kept no
tables. `slot_state_v2.json` is what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.operators.connectors.postgres.published import ReadTable
from holdfast.operators.connectors.postgres.slot import SlotSplit, SnapshotProgress
from holdfast.operators.sources.split_state import SplitCodec
from holdfast.operators.sources.splits import AssignedSplit

TABLES = ("public.orders", "shop.items")
FIRST: dict[str, str] = json.loads((Path(__file__).parent / "slot_state_v1.json").read_text())
GOLDEN: dict[str, str] = json.loads((Path(__file__).parent / "slot_state_v2.json").read_text())
PROGRESS = SnapshotProgress(TABLES, ("id", "day"), ("17", "2026-01-31"), (("3", "2026-01-30"), ("9", "2026-01-31")))
READ = (
    ReadTable(16_384, ("table 16400",), ("public.orders",)),
    ReadTable(16_391, ("schema 16402", "all 16403"), ("shop.item", "shop.items")),
)
ENTRIES = {
    "plain": AssignedSplit(SlotSplit("shop"), (0x16_B374D848, 3)),
    "read": AssignedSplit(SlotSplit("shop", "7711450029303427631", 2), (0x16_B374D848, 0)),
    "not begun": AssignedSplit(SlotSplit("shop", "7711450029303427631", 1, SnapshotProgress(TABLES))),
    "midway": AssignedSplit(
        SlotSplit("shop", "7711450029303427631", 1, SnapshotProgress(TABLES, ("id", "day"), ("17", "2026-01-31"))),
        (0x16_B374D847, 17),
    ),
    "late": AssignedSplit(SlotSplit("shop", "7711450029303427631", 1, PROGRESS), (0x16_B374D847, 17)),
    "tables": AssignedSplit(SlotSplit("shop", "7711450029303427631", 1, None, READ), (0x16_B374D848, 0)),
}
CODEC = SplitCodec(SlotSplit, "changes")


@pytest.mark.parametrize("name", ENTRIES)
def test_a_slot_is_read_and_written_as_ever(name: str) -> None:
    stored = bytes.fromhex(GOLDEN[name])
    assert CODEC.decode(stored) == ENTRIES[name]
    assert CODEC.encode(ENTRIES[name]) == stored


@pytest.mark.parametrize("name", FIRST)
def test_a_slot_of_an_older_version_is_read(name: str) -> None:
    assert CODEC.decode(bytes.fromhex(FIRST[name])) == ENTRIES[name]
