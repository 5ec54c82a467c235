"""docs/snapshot-format.md says what the code does: its tables and vectors are read here, and tried on both readers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.statebackends import handles
from holdfast.statebackends.columnar.accumulators import parts_of, value_type_text
from holdfast.statebackends.handles import DELTA_FORMATS, NATIVE_FORMAT, TABLE_FORMATS
from holdfast.statebackends.keygroups import assign_key_groups, key_group_of_hash, operator_id, spread
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.type_serializer import TypeSerializer
from holdfast.statebackends.serialization.value_types import SCALARS
from holdfast.statebackends.snapshot import metadata
from holdfast.statebackends.snapshot.deltas import DELTAS_MAX
from holdfast.statebackends.state import OPERATOR_KINDS, ColumnAggregate, ColumnarStateDescriptor
from holdfast.statebackends.state_processor.contents import KEYED_KINDS
from holdfast.statebackends.storage.checksums import checksum_of
from tests.golden.independent_reader import container, keys

DOCUMENT = (Path(__file__).parents[2] / "docs/snapshot-format.md").read_text("utf-8")


def table_after(text: str) -> list[list[str]]:
    """Cells of the first table at or behind a text, without its head."""
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), DOCUMENT[DOCUMENT.index(text) :].splitlines())
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines))[2:]
    return [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


# ----------------------------------------------------------------------------------------------------- records and envelope

RECORDS: dict[str, type[msgspec.Struct]] = {
    "**Snapshot**": metadata.SnapshotMetadata,
    "**Operator**": handles.OperatorState,
    "**Subtask**": handles.OperatorSubtaskState,
    "**KeyedHandle**": handles.KeyedStateHandle,
    "**ListHandle**": handles.OperatorListHandle,
    "**State**": handles.StateMeta,
    "**Channels**": handles.ChannelState,
    "**Piece**": handles.ChannelPiece,
}


@pytest.mark.parametrize("heading", list(RECORDS))
def test_every_field_of_a_record_is_described_and_nothing_else(heading: str) -> None:
    record = RECORDS[heading]
    described = {name: row for row in table_after(heading) for name in code(row[0])}
    tag = {"type"} if record.__struct_config__.tag else set()
    fields = {field.name: field for field in msgspec.structs.fields(record)}
    assert set(described) == set(fields) | tag
    if tag:
        assert described["type"][1] == f'`"{record.__struct_config__.tag}"`'
    for name, field in fields.items():
        default = described[name][2] if len(described[name]) == 4 else ""
        assert bool(default) == (not field.required) or name == "format", name
        if default == "unset":
            assert field.default is msgspec.UNSET, name
        elif default:
            value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            assert json.loads(default.strip("`")) == json.loads(msgspec.json.encode(value)), name


def test_all_forms_of_parts_are_described() -> None:
    described = {code(row[0])[0].strip('"'): code(row[1]) for row in table_after("**Part**")}
    for form in (handles.InlineHandle, handles.FileHandle, handles.SegmentHandle):
        assert described.pop(str(form.__struct_config__.tag)) == [field.name for field in msgspec.structs.fields(form)]
    assert not described


def test_the_envelope_is_as_described() -> None:
    pattern = next(text for text in code(DOCUMENT) if text.startswith(r"\{"))
    assert pattern.encode() == metadata._HEADER.pattern == container.HEADER.pattern
    assert f"`{checksum_of(b'')}`" in DOCUMENT
    assert operator_id("source") == "e5a72f353fc1e6bbf3bd96a41384998c"


def test_kinds_and_formats_are_those_of_the_code() -> None:
    kinds = code(next(row for row in table_after("**State**") if row[0] == "`kind`")[1])
    assert set(kinds) == KEYED_KINDS | OPERATOR_KINDS
    formats = code(next(row for row in table_after("**KeyedHandle**") if row[0] == "`format`")[1])
    assert {text.strip('"') for text in formats} == {NATIVE_FORMAT, *DELTA_FORMATS, *TABLE_FORMATS}


# --------------------------------------------------------------------------------------------------------------------- keys


def test_spread_vectors() -> None:
    rows = [list(map(int, row)) for row in table_after("| h32, signed")]
    assert len(rows) == 9
    for h, spreaded, group in rows:
        assert (spread(h), key_group_of_hash(h, 128)) == (spreaded, group)
        assert keys.spread(h) == spreaded


def value_of(shown: Any) -> Any:
    """A key from its plain JSON."""
    if not isinstance(shown, dict):
        return shown
    ((form, text),) = shown.items()
    forms: dict[str, Callable[[Any], Any]] = {
        "float": float,
        "bytes": bytes.fromhex,
        "date": date.fromisoformat,
        "us": lambda number: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=number),
        "decimal": Decimal,
        "tuple": lambda members: tuple(map(value_of, members)),
    }
    return forms[form](text)


@pytest.mark.parametrize("row", table_after("| key type | key |"), ids=lambda row: " ".join(row[:2]))
def test_key_vectors(row: list[str]) -> None:
    text, shown, encoded = code(row[0])[0], json.loads(code(row[1])[0]), bytes.fromhex(code(row[2])[0])
    h32, group = int(row[3]), int(row[4])
    key_type, value = KeyType.parse(text), value_of(shown)
    assert (key_type.encode(value), key_type.hash32(value), key_type.key_group(value, 128)) == (encoded, h32, group)
    column = key_type.column_of_values([value], max_parallelism=128)
    assert (column.encoded(), column.hashes().tolist(), column.key_groups.tolist()) == ([encoded], [h32], [group])
    fields, members = keys.key_fields(text), keys.decode_key(text, encoded)
    decoded = [keys.key_json(member) for member in members]
    assert (decoded[0] if not text.startswith("tuple<") else {"tuple": decoded}) == shown
    hashes = [keys.key_hash(field, member) for field, member in zip(fields, members, strict=True)]
    assert keys.key_group(hashes, ["key"] if not text.startswith("tuple<") else ["key_0"], 128) == group


def test_key_types_are_all_described() -> None:
    described = {code(row[0])[0]: int(row[2], 16) for row in table_after("| field type |")}
    tags = {text: KeyType.parse(text.replace("p, s", "10, 2")).fields[0].tag for text in described}
    assert tags == described
    assert sorted(described.values()) == list(range(1, 9))
    assert {code(row[0])[0] for row in table_after("| key type | key |")} >= {text.replace("p, s", "10, 2") for text in described}


@pytest.mark.parametrize(("parallelism", "maximum"), [(1, 1), (3, 128), (7, 10), (10, 128), (5, 4096), (128, 128)])
def test_the_formula_of_ranges(parallelism: int, maximum: int) -> None:
    for subtask in range(parallelism):
        start, stop = (-(-(subtask + more) * maximum // parallelism) for more in (0, 1))
        groups = assign_key_groups(maximum, parallelism, subtask)
        assert (groups.start, groups.stop) == (start, stop)
        assert {group * parallelism // maximum for group in range(start, stop)} == {subtask}


# ------------------------------------------------------------------------------------------------------- tables and values


def test_every_type_of_value_is_described() -> None:
    described = {text for row in table_after("| text | column | msgpack |") for text in code(row[0])}
    assert {text.partition("<")[0] for text in described} == {
        *SCALAR_TEXTS, "time", "timedelta", "uuid", "pickled", "union", "optional", "list", "set", "frozenset", "tuple", "dict",
        "struct", "namedtuple", "map", "ttl",
    }  # fmt: skip
    for text in SCALAR_TEXTS:
        assert TypeSerializer.parse(text).text == text


SCALAR_TEXTS = {value_type.text for value_type in SCALARS.values()}


@pytest.mark.parametrize("kind", [pa.int32(), pa.float32(), pa.decimal128(12, 2)])
def test_the_columns_of_aggregates_are_as_described(kind: pa.DataType) -> None:
    described = {(text, *code(row[1])) for row in table_after("| aggregate | columns") for text in code(row[0])}
    assert described == {
        ("count", "out"), ("sum", "out"), ("min", "out"), ("max", "out"), ("mean", "out.sum", "out.count"),
        ("first", "out", "out.time"), ("last", "out", "out.time"), ("arg_max", "out", "out.by", "out.time"),
        ("arg_min", "out", "out.by", "out.time"), ("count_distinct", "out"),
        ("stddev", "out.count", "out.first", "out.sum", "out.squares"),
    }  # fmt: skip
    for function in ("count", "sum", "min", "max", "mean"):
        aggregate = ColumnAggregate(function, "x", "out", kind)
        wanted = ["out.sum", "out.count"] if function == "mean" else ["out"]
        assert [part.name for part in parts_of(aggregate)] == wanted
        nullable = function in ("sum", "min", "max")
        assert [part.nullable for part in parts_of(aggregate)] == [nullable] * len(wanted)
        descriptor = ColumnarStateDescriptor("s", (aggregate,))
        assert value_type_text(descriptor) == f"columnar<out={function}({kind})>"


@pytest.mark.parametrize(
    ("function", "text", "columns"),
    [
        ("first", "string", {"out": "string", "out.time": "int64"}),
        ("last", "double", {"out": "double", "out.time": "int64"}),
        ("arg_max", "string;int64", {"out": "string", "out.by": "int64", "out.time": "int64"}),
        ("arg_min", "string;int64", {"out": "string", "out.by": "int64", "out.time": "int64"}),
        ("count_distinct", "string", {"out": "list<item: string>"}),
        ("stddev", "int64", {"out.count": "int64", "out.first": "double", "out.sum": "double", "out.squares": "double"}),
        ("max", "string", {"out": "string"}),
        ("min", "date32[day]", {"out": "date32[day]"}),
        ("max", "bool", {"out": "bool"}),
    ],
)
def test_the_columns_of_further_accumulators_are_as_described(function: str, text: str, columns: dict[str, str]) -> None:
    source, by = {"date32[day]": pa.date32()}.get(text), None
    if source is None:
        source, by = (pa.type_for_alias(each) if each else None for each in (*text.split(";"), "")[:2])
    aggregate = ColumnAggregate(function, "x", "out", source, by="y" if by is not None else None, by_type=by)
    assert {part.name: str(part.arrow_type) for part in parts_of(aggregate)} == columns
    assert value_type_text(ColumnarStateDescriptor("s", (aggregate,))) == f"columnar<out={function}({text})>"
    described = next(row for row in table_after("### Columnar state") if function in code(row[0]))
    assert {name for name in columns if f"`{name}`" not in described[1]} == set()


def test_the_bound_on_deltas_is_as_described() -> None:
    assert f"at most {DELTAS_MAX} deltas" in DOCUMENT
