"""`_metadata`: every truncation and bit flip is a typed error; version 1 is read for ever (golden file)."""

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.alignment.inflight import decode, encode
from holdfast.barriers.elements import Batch, Element, Watermark, WatermarkStatus
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, UnsupportedVersionError
from holdfast.statebackends.handles import (
    ChannelPiece,
    ChannelState,
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.snapshot.metadata import (
    HOOK_STATE_BYTES_MAX,
    HookState,
    SnapshotMetadata,
    decode_metadata,
    encode_metadata,
)
from holdfast.statebackends.storage.checksums import checksum_of
from tests.examples import examples

GOLDEN = Path(__file__).parent.parent / "golden" / "snapshot_metadata_v1.json"
GOLDEN_HOOKS = GOLDEN.with_name("snapshot_metadata_v3.json")
GOLDEN_IN_FLIGHT = GOLDEN.with_name("snapshot_metadata_v2.json")


def operator(uid: str, *subtasks: OperatorSubtaskState) -> OperatorState:
    return OperatorState(uid, operator_id(uid), uid.title(), len(subtasks), 128, subtasks)


def sample() -> SnapshotMetadata:
    count = StateMeta("count", "value", "int", "utf8")
    keyed = KeyedStateHandle(KeyGroupRange(0, 64), "arrow", (count,), (InlineHandle(b"\x00\xffrows"),))
    part = FileHandle("window-1-1-n/count.parquet", 1234, checksum_of(b"x"))
    other = KeyedStateHandle(KeyGroupRange(64, 128), "parquet", (count,), (part,))
    shared = FileHandle("../shared/1-1-w-0-n", 1, checksum_of(b"y"))
    rocks = KeyedStateHandle(KeyGroupRange(0, 128), "rocksdb", (count,), (shared,), ("000012.sst",))
    offsets = OperatorListHandle(StateMeta("offsets", "operator_list", "bytes"), InlineHandle(b"\x91\xc4\x01a"), 1)
    return SnapshotMetadata(
        job_id="9f86d081884c7d65",
        job_name="flights größer",
        checkpoint_id=42,
        kind="savepoint",
        attempt=3,
        epoch=2,
        trigger_timestamp_ms=1_700_000_000_000,
        completion_timestamp_ms=1_700_000_000_250,
        operators=(
            operator("source", OperatorSubtaskState(operator=(offsets,), external=("job/sources/source/manifest",))),
            operator("window", OperatorSubtaskState(keyed=(keyed,)), OperatorSubtaskState(keyed=(other,))),
            operator("rocks", OperatorSubtaskState(keyed=(rocks,))),
            operator("finished", OperatorSubtaskState()),
        ),
        external=("job/sources/source/manifest",),
        properties={"backend": "rocksdb"},
        graph={"operators": [{"uid": "source", "parallelism": 1, "ratio": 0.5, "note": None}]},
    )


def test_s01_round_trip() -> None:
    assert decode_metadata(encode_metadata(sample()), "p") == sample()
    assert sample().size == 6 + 1234 + 1 + 4
    empty = msgspec.structs.replace(sample(), operators=(), external=(), properties={}, graph=None)
    assert decode_metadata(encode_metadata(empty), "p") == empty


def test_s03_golden_file_of_version_1() -> None:
    data = GOLDEN.read_bytes()
    assert decode_metadata(data, str(GOLDEN)) == sample()
    assert encode_metadata(sample()) == data, "the format of version 1 changed: that needs a new version"


def test_a_graph_that_its_caller_has_encoded_gives_the_same_bytes() -> None:
    graph = msgspec.Raw(msgspec.json.encode(sample().graph))
    assert encode_metadata(sample(), graph) == encode_metadata(sample())


def in_flight(*, source: str, side: str, pieces: dict[int, list[Element]], **edge: Any) -> ChannelState:
    """Inline; two subtasks at either end."""
    data, found = b"", []
    for peer, elements in pieces.items():
        encoded = encode(elements)
        rows = sum(each.num_rows for each in elements if isinstance(each, Batch))
        found.append(ChannelPiece(peer, len(data), len(encoded), rows))
        data += encoded
    fixed: dict[str, Any] = {"tag": None, "target": "window", "input": 0, "ordinal": 0, "subtask": 1, **edge}
    rows = sum(piece.rows for piece in found)
    return ChannelState(source=source, side=side, rows=rows, part=InlineHandle(data), pieces=tuple(found), **fixed)  # type: ignore[arg-type]


def flights(*numbers: int) -> Batch:
    columns = pa.RecordBatch.from_pydict({"flight": pa.array(numbers, pa.int64()), "carrier": pa.array(["AA"] * len(numbers))})
    return Batch(columns=columns, timestamps=np.array(numbers, np.int64) * 1000)


LATE = Batch(columns=pa.RecordBatch.from_pydict({"late": pa.array([1.5])}))
IN_FLIGHT: tuple[dict[str, Any], ...] = (
    {"source": "parse", "side": "input", "partitioning": "hash", "pieces": {0: [flights(1, 2), Watermark(1500)], 1: [flights(3)]}},
    {"source": "parse", "side": "output", "partitioning": "rebalance", "tag": "late", "target": "report", "input": 1, "ordinal": 1,
     "pieces": {0: [WatermarkStatus(True), LATE]}},
)  # fmt: skip


def sample_in_flight() -> SnapshotMetadata:
    return msgspec.structs.replace(sample(), version=2, kind="checkpoint", channels=tuple(in_flight(**each) for each in IN_FLIGHT))


def test_golden_file_of_version_2() -> None:
    """The metadata is compared as text; a piece by what it says, since its bytes are Arrow's."""
    if os.environ.get("HOLDFAST_GOLDEN"):
        GOLDEN_IN_FLIGHT.write_bytes(encode_metadata(sample_in_flight()))
    data = GOLDEN_IN_FLIGHT.read_bytes()
    found = decode_metadata(data, str(GOLDEN_IN_FLIGHT))
    assert found.version == 2
    assert encode_metadata(found) == data, "the format of version 2 changed: that needs a new version"
    assert msgspec.structs.replace(found.without_in_flight(), kind="savepoint") == sample()
    for state, wanted in zip(found.in_flight, IN_FLIGHT, strict=True):
        assert isinstance(state.part, InlineHandle)
        assert all(getattr(state, name) == value for name, value in wanted.items() if name != "pieces")
        for piece, (peer, elements) in zip(state.pieces, wanted["pieces"].items(), strict=True):
            read = decode(state.part.data[piece.offset : piece.offset + piece.length], rows=piece.rows)
            assert piece.peer == peer
            assert [shown(each) for each in read] == [shown(each) for each in elements]


HOOKS = (HookState("ledger", 2, b"\x00\xffbook 7"), HookState("watch", 0, b""))


def sample_hooks(*, in_flight: bool = False) -> SnapshotMetadata:
    base = sample_in_flight() if in_flight else sample()
    return msgspec.structs.replace(base, version=3, master_hooks=HOOKS)


def test_golden_file_of_version_3() -> None:
    if os.environ.get("HOLDFAST_GOLDEN"):
        GOLDEN_HOOKS.write_bytes(encode_metadata(sample_hooks()))
    data = GOLDEN_HOOKS.read_bytes()
    assert decode_metadata(data, str(GOLDEN_HOOKS)) == sample_hooks()
    assert encode_metadata(sample_hooks()) == data, "the format of version 3 changed: that needs a new version"


def test_hooks_beside_records_in_flight() -> None:
    both = sample_hooks(in_flight=True)
    assert decode_metadata(encode_metadata(both), "p") == both
    without = both.without_in_flight()
    assert (without.version, without.hooks, without.in_flight) == (3, HOOKS, ())
    assert decode_metadata(encode_metadata(without), "p") == without


@pytest.mark.parametrize(
    "hooks",
    [
        (HookState("b", 1, b""), HookState("a", 1, b"")),
        (HookState("a", 1, b""), HookState("a", 1, b"")),
        (HookState("", 1, b""),),
        (HookState("a", -1, b""),),
        (HookState("a", 1, bytes(HOOK_STATE_BYTES_MAX + 1)),),
    ],
)
def test_states_that_no_hook_can_have_given(hooks: tuple[HookState, ...]) -> None:
    wrong = msgspec.structs.replace(sample(), version=3, master_hooks=hooks)
    with pytest.raises(InvalidConfigError):
        encode_metadata(wrong)
    body = msgspec.json.encode(wrong)
    header = b'{"format":"holdfast-snapshot","version":3,"length":%d,"checksum":"%s","snapshot":'
    with pytest.raises(CorruptStateError):
        decode_metadata(header % (len(body), checksum_of(body).encode()) + body + b"}\n", "p")


def shown(element: Element) -> Any:
    if not isinstance(element, Batch):
        return element
    return element.columns().to_pydict(), None if element.timestamps is None else element.timestamps.tolist()


def test_any_json_tool_reads_it() -> None:
    document = json.loads(encode_metadata(sample()))
    assert (document["format"], document["version"]) == ("holdfast-snapshot", 1)
    assert document["snapshot"]["operators"][0]["uid"] == "source"


def test_truncation_at_every_byte_is_corrupt_at_that_byte() -> None:
    data = encode_metadata(sample())
    for stop in range(len(data)):
        with pytest.raises(CorruptStateError, match=r"chk-42/_metadata: corrupt at \d+: ") as caught:
            decode_metadata(data[:stop], "chk-42/_metadata")
        assert caught.value.path == "chk-42/_metadata"
        assert f"corrupt at {stop}:" in str(caught.value)


def test_every_bit_flip_is_seen() -> None:
    data = encode_metadata(sample())
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptStateError):
                decode_metadata(bytes(damaged), "p")


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_random_bytes_are_corrupt(data: bytes, whole_first: bool) -> None:
    with pytest.raises(CorruptStateError):
        decode_metadata(encode_metadata(sample()) + data + b"x" if whole_first else data, "p")


def reseal(snapshot: dict[str, Any], version: int = 1) -> bytes:
    body = json.dumps(snapshot).encode()
    start = f'{{"format":"holdfast-snapshot","version":{version},"length":{len(body)},"checksum":"{checksum_of(body)}","snapshot":'
    return start.encode() + body + b"}\n"


def test_s02_newer_version_is_refused_with_both_versions() -> None:
    with pytest.raises(UnsupportedVersionError, match=r"version 7 .* reads up to version 3") as caught:
        decode_metadata(reseal({}, version=7), "p")
    assert (caught.value.version, caught.value.supported) == (7, 3)


def test_other_key_hash_is_refused() -> None:
    document = json.loads(encode_metadata(sample()))["snapshot"]
    document["key_hash_version"] = 2
    with pytest.raises(UnsupportedVersionError, match="key hash"):
        decode_metadata(reseal(document), "p")


def test_sealed_nonsense_is_corrupt() -> None:
    document = json.loads(encode_metadata(sample()))["snapshot"]
    assert decode_metadata(reseal(document), "p") == sample()
    for name, value in (("kind", "banana"), ("operators", [{}]), ("job_id", ""), ("checkpoint_id", "42"), ("format", "other")):
        with pytest.raises(CorruptStateError):
            decode_metadata(reseal({**document, name: value}), "p")


@pytest.mark.parametrize(
    "damage",
    [
        {"job_id": ""},
        {"job_name": ""},
        {"operators": (msgspec.structs.replace(operator("a", OperatorSubtaskState()), uid=""),)},
        {"operators": (msgspec.structs.replace(operator("a", OperatorSubtaskState()), name=""),)},
        {"operators": (msgspec.structs.replace(operator("a", OperatorSubtaskState()), operator_id=""),)},
        {"operators": (operator("a"), operator("a"))},
        {"operators": (msgspec.structs.replace(operator("a"), parallelism=2),)},
        {
            "operators": (
                operator(
                    "a",
                    OperatorSubtaskState(
                        operator=(OperatorListHandle(StateMeta("", "operator_list", "bytes"), InlineHandle(b""), 0),)
                    ),
                ),
            )
        },
    ],
)
def test_s04_empty_names_are_refused_on_write(damage: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfigError):
        encode_metadata(msgspec.structs.replace(sample(), **damage))


@pytest.mark.slow
def test_s06_100_000_subtasks(record_property: Any) -> None:
    count = StateMeta("count", "value", "int", "utf8")
    subtask = OperatorSubtaskState(
        keyed=(KeyedStateHandle(KeyGroupRange(0, 1), "arrow", (count,), (FileHandle("f", 1, checksum_of(b"")),)),)
    )
    big = msgspec.structs.replace(sample(), operators=tuple(operator(f"op-{index}", *([subtask] * 10_000)) for index in range(10)))
    started = time.perf_counter()
    assert decode_metadata(encode_metadata(big), "p") == big
    record_property("seconds", time.perf_counter() - started)
