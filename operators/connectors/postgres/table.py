"""CORE: whether rows fit a table: columns of Arrow beside those of PostgreSQL, what is sent for each, and which values it takes.

A type that would lose something is refused, never rounded, cut or guessed. What the server would refuse of a row is found here,
so that the job fails in front of the checkpoint that has the row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.operators.sinks.refused_rows import first_refused, shown_row
from holdfast.statebackends.errors import InvalidConfigError, InvalidKeyError, InvalidRowError

_INT_BITS = {"int2": 15, "int4": 31, "int8": 63}
_FLOAT_BITS = {"float4": 24, "float8": 53}
_TEXTS = ("text", "varchar", "bpchar")
_SENT: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bytea": pa.large_binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "interval": pa.duration("us"),
    **dict.fromkeys((*_TEXTS, "json"), pa.large_string()),
    **dict.fromkeys(("jsonb", "uuid"), pa.binary()),
}
"""What COPY's binary format takes for a type."""
_ARRAY_ITEMS = ("int2", "int4", "int8", "float4", "float8", "text")
_DATE_MIN_DAYS, _DATE_STOP_DAYS = -2_440_588, 2_145_042_906
_TIMESTAMP_MIN_US = -210_866_803_200_000_000
"""PostgreSQL's dates and times begin 4713 BC."""
_DIGITS_MAX, _WHOLE_DIGITS_MAX = 16_383, 131_072
"""Behind the point of a numeric, and before it."""
_FINE = r"[eE]-[0-9]{4}|[eE]\+?[0-9]{5}|[0-9]{1000}"
"""What a text with a number of so many digits has in it; it may be within a text, too."""
_TEXT_OR_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*+"|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?')
"""The tokens of JSON that numbers are, or may be in."""
_ZERO = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_DAY_US = 86_400_000_000
_UUID = r"^[0-9a-fA-F]{8}-?([0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}$"


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column as the catalog has it."""

    name: str
    type: str
    """Of a domain its base type; of an array `_` and the type of its items."""
    shown: str
    """As SQL writes it."""
    modifier: int = -1
    """Length or precision, as encoded in the catalog; -1: none."""
    not_null: bool = False
    has_default: bool = False
    is_generated: bool = False
    """Computed by the server: no value can be given."""
    labels: tuple[str, ...] = ()
    """Of an enum."""

    @property
    def chars_max(self) -> int | None:
        return self.modifier - 4 if self.type in ("varchar", "bpchar") and self.modifier >= 4 else None

    @property
    def digits(self) -> tuple[int, int] | None:
        """Of a numeric: digits before and behind the point; None: no limit."""
        if self.type != "numeric" or self.modifier < 4:
            return None
        scale = ((self.modifier - 4) & 0x7FF ^ 1024) - 1024
        return ((self.modifier - 4) >> 16 & 0xFFFF) - scale, scale


def misfit(given: pa.DataType, column: TableColumn) -> str | None:
    """Why values of a type don't fit a column; None: all of them do, or are checked one by one."""
    kind = "enum" if column.labels else column.type
    if pa.types.is_dictionary(given):
        given = given.value_type
    if kind in _INT_BITS:
        fits = pa.types.is_integer(given) and _value_bits(given) <= _INT_BITS[kind]
    elif kind in _FLOAT_BITS:
        whole = pa.types.is_integer(given) and _value_bits(given) <= _FLOAT_BITS[kind]
        fits = whole or (pa.types.is_floating(given) and given.bit_width <= _SENT[kind].bit_width)
    elif kind == "numeric":
        return _misfit_of_digits(given, column)
    elif kind in (*_TEXTS, "json", "jsonb", "enum"):
        fits = _is_text(given)
    elif kind == "uuid":
        fits = _is_text(given) or given == pa.binary(16)
    elif kind == "timestamp" and pa.types.is_timestamp(given) and given.tz is not None:
        return "it has a time zone, which the column would drop"
    elif kind == "timestamptz" and pa.types.is_timestamp(given) and given.tz is None:
        return "it has no time zone, and the column needs one"
    elif kind.startswith("_") and kind[1:] in _ARRAY_ITEMS:
        items = pa.string() if kind == "_text" else _SENT[kind[1:]]
        fits = (pa.types.is_list(given) or pa.types.is_large_list(given)) and given.value_type in (items, pa.large_string())
        fits = fits and (kind == "_text" or given.value_type == items)
    else:
        tests = {"bool": pa.types.is_boolean, "bytea": _is_binary, "date": pa.types.is_date, "time": pa.types.is_time}
        tests |= {"timestamp": pa.types.is_timestamp, "timestamptz": pa.types.is_timestamp, "interval": pa.types.is_duration}
        if kind not in tests:
            return "columns of this type are not written: use text"
        fits = tests[kind](given) and getattr(given, "unit", "us") != "ns"
    return None if fits else "it would lose something, or means something else"


def _value_bits(given: pa.DataType) -> int:
    return int(given.bit_width) - (0 if pa.types.is_unsigned_integer(given) else 1)


def _is_text(given: pa.DataType) -> bool:
    return bool(pa.types.is_string(given) or pa.types.is_large_string(given) or pa.types.is_string_view(given))


def _is_binary(given: pa.DataType) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(given) for test in kinds)


def _misfit_of_digits(given: pa.DataType, column: TableColumn) -> str | None:
    if pa.types.is_integer(given):
        before, behind = len(str(2 ** _value_bits(given))), 0
    elif pa.types.is_decimal(given):
        before, behind = given.precision - given.scale, given.scale
    else:
        return "it is no decimal and no whole number"
    if column.digits is None:
        return None
    if behind > column.digits[1]:
        return f"it has {behind} digits behind the point, the column {column.digits[1]}"
    return None if before <= column.digits[0] else f"it has up to {before} digits before the point, the column {column.digits[0]}"


@dataclass(frozen=True, slots=True)
class SentColumn:
    """How one column of the rows gets into the table. `key`: it is part of the key, and never null."""

    field: pa.Field
    column: TableColumn
    is_key: bool = False

    @property
    def name(self) -> str:
        return self.column.name

    @property
    def sent(self) -> pa.DataType:
        """Type of what is sent."""
        given = self.field.type
        if self.column.labels:
            return pa.large_string()
        if self.column.type == "numeric":
            return pa.decimal128(20, 0) if pa.types.is_integer(given) else given
        if self.column.type.startswith("_"):
            return given
        return _SENT[self.column.type]

    def encode(self, values: pa.Array) -> pa.Array:
        """What is sent for values that were checked."""
        if self.column.type == "jsonb":  # the first byte is the version of the format
            return pc.binary_join_element_wise(pa.scalar(b"\x01"), _plain(values).cast(pa.binary()), pa.scalar(b""))
        if self.column.type == "uuid":
            if _is_text(_plain(values).type):
                hexes = [None if value is None else bytes.fromhex(value.replace("-", "")) for value in values.to_pylist()]
                return pa.array(hexes, pa.binary())
            return values.cast(pa.binary())
        return values if values.type == self.sent else _plain(values).cast(self.sent)

    def checks(self) -> Iterator[Callable[[pa.Array], str | None]]:
        """What values have to pass: each gives the reason against some of them."""
        kind = self.column.type
        if self.is_key or self.column.not_null:
            yield _check_nulls
        if self.column.labels:
            yield self._check_labels
        elif kind in _TEXTS:
            yield _check_zeros
            if self.column.chars_max is not None:
                yield self._check_length
        elif kind in ("json", "jsonb"):
            yield _check_json
            if kind == "jsonb":  # `json` keeps the text as it is
                yield _check_zero_escapes
                yield _check_numbers
        elif kind == "uuid" and _is_text(self.field.type):
            yield _check_uuids
        elif kind == "_text":
            yield lambda values: _check_zeros(values.flatten())
        elif kind in ("date", "timestamp", "timestamptz", "time", "interval"):
            yield self._check_range

    def _check_labels(self, values: pa.Array) -> str | None:
        values = _plain(values)
        known = pc.is_in(values, value_set=pa.array(self.column.labels, values.type))
        return _first(values, pc.and_not(values.is_valid(), known), f"is none of {', '.join(self.column.labels)}")

    def _check_length(self, values: pa.Array) -> str | None:
        values, most = _plain(values), self.column.chars_max
        return _first(values, pc.greater(pc.utf8_length(values), most), f"has more than {most} characters")

    def _check_range(self, values: pa.Array) -> str | None:
        try:
            sent = values.cast(self.sent)
        except pa.ArrowInvalid as error:
            return str(error)
        if self.column.type == "date":
            days = sent.cast(pa.int32())
            wrong = pc.or_(pc.less(days, _DATE_MIN_DAYS), pc.greater_equal(days, _DATE_STOP_DAYS))
        elif self.column.type.startswith("timestamp"):
            wrong = pc.less(sent.cast(pa.int64()), _TIMESTAMP_MIN_US)
        elif self.column.type == "time":
            micros = sent.cast(pa.int64())
            outside = pc.or_(pc.less(micros, 0), pc.greater(micros, _DAY_US))
            return "is no time of a day" if pc.any(outside).as_py() else None
        else:
            return None
        return "is before 4713 BC, or too late" if pc.any(wrong).as_py() else None


def _plain(values: pa.Array) -> pa.Array:
    """Without a dictionary, and of a type that the kernels take."""
    values = values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values
    return values.cast(pa.large_string()) if pa.types.is_string_view(values.type) else values


def _first(values: pa.Array, wrong: pa.Array, reason: str) -> str | None:
    """The reason, with the first value that it is true of."""
    if not pc.any(wrong).as_py():
        return None
    row = pc.index(wrong.fill_null(False), True).as_py()
    return f"{values[row].as_py()!r:.100} {reason}"


def _check_nulls(values: pa.Array) -> str | None:
    return "a null, and the column has none" if values.null_count else None


def _check_zeros(values: pa.Array) -> str | None:
    values = _plain(values)
    return _first(values, pc.match_substring(values, "\0"), "has a character of code 0, which no text of PostgreSQL has")


def _check_json(values: pa.Array) -> str | None:
    for value in _plain(values).to_pylist():
        try:
            if value is not None:
                _check_syntax(value)
        except (msgspec.DecodeError, RecursionError) as error:
            return f"{value!r:.100} is no JSON: {error}"
    return None


def _check_zero_escapes(values: pa.Array) -> str | None:
    for value in _plain(values).to_pylist():
        if value is not None and _ZERO.search(value):
            return f"{value!r:.100} has a character of code 0, which no text of PostgreSQL has"
    return None


def _check_syntax(value: str) -> None:
    """Raises msgspec.DecodeError, RecursionError. A number of any size is JSON, also one that no float is."""
    try:
        msgspec.json.decode(value)
    except msgspec.ValidationError:
        msgspec.json.decode(_TEXT_OR_NUMBER.sub(lambda found: found[0] if found[0][0] == '"' else "0", value))


def _check_numbers(values: pa.Array) -> str | None:
    """A `jsonb` has its numbers as numeric; `json` keeps their text."""
    suspects = _plain(values)
    for value in suspects.filter(pc.fill_null(pc.match_substring_regex(suspects, _FINE), False)).to_pylist():
        try:
            json.loads(value, parse_float=_checked_number, parse_int=_checked_number)
        except (ValueError, RecursionError) as error:
            return f"{value!r:.100} {error}"
    return None


def _checked_number(text: str) -> float:
    """Raises ValueError for more digits than a numeric has."""
    mantissa, _, exponent = text.lower().partition("e")
    before, _, behind = mantissa.removeprefix("-").partition(".")
    if len(behind) - int(exponent or 0) > _DIGITS_MAX:
        raise ValueError(f"has a number with more than {_DIGITS_MAX:,} digits behind the point, which PostgreSQL has not")
    if len(before) + int(exponent or 0) > _WHOLE_DIGITS_MAX:
        raise ValueError(f"has a number with more than {_WHOLE_DIGITS_MAX:,} digits before the point, which PostgreSQL has not")
    return 0.0


def _check_uuids(values: pa.Array) -> str | None:
    values = _plain(values)
    return _first(values, pc.invert(pc.match_substring_regex(values, _UUID)), "is no UUID")


@dataclass(frozen=True, slots=True)
class TableFit:
    """How the rows of a sink get into its table: found on the driver, used by writers and committer."""

    place: str
    schema: str
    """Of PostgreSQL: the namespace that the table is in."""
    table: str
    columns: tuple[SentColumn, ...]

    @property
    def sent_schema(self) -> pa.Schema:
        return pa.schema([pa.field(each.name, each.sent) for each in self.columns])

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.columns if each.is_key)

    def encode(self, batch: pa.RecordBatch, ignored: np.ndarray | None = None) -> pa.RecordBatch:
        """`ignored`: rows of which only the key counts, and nothing else is sent: the server would refuse what was not checked."""
        kept = None if ignored is None else pa.array(np.arange(batch.num_rows), mask=ignored)
        arrays = []
        for each in self.columns:
            values = batch.column(each.field.name)
            arrays.append(each.encode(values if kept is None or each.is_key else values.take(kept)))
        return pa.RecordBatch.from_arrays(arrays, schema=self.sent_schema)

    def check_rows(self, batch: pa.RecordBatch, ignored: np.ndarray | None = None) -> None:
        """`ignored`: rows of which only the key counts. Raises InvalidRowError, InvalidKeyError for a key that is null."""
        kept = None if ignored is None else np.flatnonzero(~ignored)
        for each in self.columns:
            values, rows = batch.column(each.field.name), None if each.is_key else kept
            values = values if rows is None else values.take(pa.array(rows))
            for check in each.checks():
                if check(values) is not None:
                    at, reason = first_refused(check, values)
                    raise self._refused(each, reason, batch, at if rows is None else int(rows[at]))

    def _refused(self, each: SentColumn, reason: str, batch: pa.RecordBatch, row: int) -> InvalidRowError | InvalidKeyError:
        name = each.field.name
        record = shown_row(batch, row)
        if each.is_key and reason.startswith("a null"):
            return InvalidKeyError(f"{self.place}: key column {name} has a null: row {record}", record=record)
        return InvalidRowError(f"{self.place}: column {name} of row {record}: {reason}", column=name, reason=reason, record=record)


def fit(
    place: str,
    schema: str,
    table: str,
    rows: pa.Schema,
    columns: Sequence[TableColumn],
    *,
    key: Sequence[str],
    unwritten: str | None,
) -> TableFit:
    """`unwritten`: a column of the rows that the table need not have. Raises InvalidConfigError, naming the column, for rows that
    don't fit the table."""
    found = {column.name: column for column in columns}
    sent = []
    for each in rows:
        column = found.pop(each.name, None)
        if column is None and each.name == unwritten:
            continue
        if column is None:
            raise _unfit(place, each.name, "the table has no such column")
        if column.is_generated:
            raise _unfit(place, each.name, "the server computes it: it can't be written")
        reason = misfit(each.type, column)
        if reason is not None:
            raise _unfit(place, each.name, f"{each.type} does not fit {column.shown}: {reason}")
        sent.append(SentColumn(each, column, each.name in key))
    for column in found.values():
        if column.not_null and not column.has_default:
            raise _unfit(place, column.name, "the rows don't have it, and it is NOT NULL without a default")
    for name in key:
        if not any(each.name == name for each in sent):
            raise _unfit(place, name, "it is part of the key, and no column of both the rows and the table")
    return TableFit(place, schema, table, tuple(sent))


def _unfit(place: str, column: str, reason: str) -> InvalidConfigError:
    return InvalidConfigError(f"{place}: column {column}: {reason}", column=column)
