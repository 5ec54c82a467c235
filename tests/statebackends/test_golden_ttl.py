"""State with TTL as it is stored: texts, bytes and columns that must not change unnoticed.

Regenerate with HOLDFAST_GOLDEN=1 after a deliberate change, which needs an ADR and a changelog line."""

from __future__ import annotations

import json
import os
from pathlib import Path

from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.rows import KeyedRows
from holdfast.statebackends.state import KeyedStateDescriptor, ListStateDescriptor, MapStateDescriptor, Ttl, ValueStateDescriptor

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "ttl_rows_v1.json"
KEY = KeyType.of(str)
STATES: dict[KeyedStateDescriptor, object] = {
    ValueStateDescriptor("value", int, Ttl(1000)): (1_700_000_000_000, 7),
    ListStateDescriptor("list", str, Ttl(1000)): [(1_700_000_000_000, "a"), (-1, "b")],
    MapStateDescriptor("map", str, float, Ttl(1000)): (5, 0.5),
}


def test_rows_with_stamps_are_stored_as_they_were() -> None:
    found = {}
    for descriptor, kept in STATES.items():
        serializer = StateSerializer.of(descriptor, KEY)
        schema = KeyedRows(KEY, 16, "op").schema(serializer)
        encoded = serializer.encode(kept)
        found[descriptor.name] = {
            "value_type": serializer.meta.value_type,
            "row": encoded.hex(),
            "columns": {field.name: str(field.type) for field in schema},
        }
    if os.environ.get("HOLDFAST_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert found == golden
    for descriptor, kept in STATES.items():
        assert StateSerializer.of(descriptor, KEY).decode(bytes.fromhex(golden[descriptor.name]["row"])) == kept
