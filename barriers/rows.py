"""Conversion of rows to columns and back, by the declared schema; data is never trusted.

A row is a dict by column name or an instance of a declared record type. Errors name operator, row and column of a misfit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy, deepcopy
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from holdfast.statebackends.errors import InvalidConfigError, InvalidRowError, SchemaMismatchError

REPR_CHARACTERS_MAX = 500
"""A record is shown in an error with at most this many characters."""

PYTHON_TYPES: dict[pa.DataType, str] = {
    pa.bool_(): "bool",
    pa.int64(): "int",
    pa.float64(): "float",
    pa.string(): "str",
    pa.binary(): "bytes",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "datetime",
}
"""What a column of the type is called by who declares it with an annotation."""
_DATETIMES_US = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""The first and the last datetime, in microseconds since 1970."""
PYTHON_DATES = (-719_162, 2_932_896)
"""The first and the last date, in days since 1970."""
_NOT_A_TIME = -(2**63)
"""A null, as numpy has it in columns of times."""

_EXPONENT_MIN = -10_000
"""Of a decimal that a column may be made of; no type of column has a scale that is near."""

_MISFIT = (pa.ArrowException, LookupError, AttributeError, TypeError, ValueError, OverflowError)
"""What a conversion raises on a row that doesn't fit."""


_UNCHANGEABLE = frozenset({type(None), bool, int, float, str, bytes, date, datetime, time, timedelta, Decimal, UUID})
"""Types of values that nothing changes in place."""


def own_copy(row: Any) -> Any:
    """A row to emit of one that is kept as state, with lists and the like of its own: a function that changes what it is given of
    its state, or another one that changes its row, must change nothing of the other. Most rows have no lists, and are copied ten
    times as fast."""
    return copy(row) if isinstance(row, dict) and _UNCHANGEABLE.issuperset(map(type, row.values())) else deepcopy(row)


def copied_apart(row: Any) -> Any:
    """`own_copy` of a row that may be any object: what can't be copied, such as a lock in it, stays shared."""
    try:
        return own_copy(row)
    except Exception:
        return copy(row)


def columns_to_rows(columns: pa.RecordBatch, row_factory: Callable[..., Any] | None = None) -> list[Any]:
    """Rows of a record batch: dicts by column name in column order, or `row_factory(**fields)`.

    Values are Python's: int, float, str, bytes, bool, date, datetime (us, aware when the column has a zone), Decimal, None.
    Raises InvalidConfigError on a column of nanoseconds, which a datetime can't hold, and InvalidRowError for a time beyond
    Python's, as of milliseconds that were given as microseconds."""
    names = tuple(columns.schema.names)
    if not names:
        make = dict if row_factory is None else row_factory
        return [make() for _ in range(columns.num_rows)]
    values = [values_of(column, name) for name, column in zip(names, columns.columns, strict=True)]
    if row_factory is None:
        rows: list[Any] = _dict_maker(names)(*values)
        return rows
    return [row_factory(**dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]


@functools.lru_cache(maxsize=256)
def _dict_maker(names: tuple[str, ...]) -> Callable[..., list[dict[str, Any]]]:
    """A function from columns to dicts, compiled once per set of names: a dict display is twice as fast as dict(zip(...))."""
    variables = [f"v{index}" for index in range(len(names))]
    fields = ", ".join(f"{name!r}: {variable}" for name, variable in zip(names, variables, strict=True))
    columns = ", ".join(f"c{index}" for index in range(len(names)))
    source = f"lambda {columns}: [{{{fields}}} for {', '.join(variables)}, in zip({columns}, strict=True)]"
    maker: Callable[..., list[dict[str, Any]]] = eval(source, {"zip": zip})
    return maker


def values_of(array: pa.Array, name: str = "") -> list[Any]:
    """The Python values of a column. Dates and times go through numpy, which is several times faster than pyarrow, and would give
    a bare number for a time beyond Python's. Raises as `columns_to_rows`; `name`: of the column, for that."""
    kind = array.type
    try:
        if pa.types.is_timestamp(kind):
            if kind.unit == "ns":
                raise InvalidConfigError("a column of nanoseconds has no Python values: cast it to timestamp[us] first")
            moments = array.cast(pa.timestamp("us")).to_numpy(zero_copy_only=False)
            _check_range(moments, _DATETIMES_US, "datetime", name)
            if kind.tz is None:
                return moments.tolist()  # type: ignore[no-any-return]
            if kind.tz in ("UTC", "Etc/UTC", "+00:00"):
                return [value and value.replace(tzinfo=UTC) for value in moments.tolist()]
        elif pa.types.is_date32(kind):
            days = array.to_numpy(zero_copy_only=False)
            _check_range(days, PYTHON_DATES, "date", name)
            return days.tolist()  # type: ignore[no-any-return]
        return array.to_pylist()  # type: ignore[no-any-return]
    except (pa.ArrowInvalid, OverflowError, ValueError) as error:  # times of other units or zones, or within lists and structs
        raise _beyond_python(f"a value of {kind} has no Python value: {error}", name) from error


def _check_range(times: np.ndarray[Any, Any], bounds: tuple[int, int], what: str, name: str) -> None:
    """Raises InvalidRowError for the first time that is out of bounds."""
    numbers = times.view(np.int64)
    first, last = bounds
    outside = (numbers > last) | ((numbers < first) & (numbers != _NOT_A_TIME))
    if outside.any():
        raise _beyond_python(f"{times[int(outside.argmax())]} is no {what} of Python's, of the years 1 to 9999", name)


def _beyond_python(reason: str, name: str) -> InvalidRowError:
    where = f"column {name!r}: " if name else ""
    return InvalidRowError(f"{where}{reason}", column=name or None, reason=reason)


def rows_to_columns(rows: Sequence[Any], schema: pa.Schema, producer: str = "") -> pa.RecordBatch:
    """A record batch of the declared schema; `producer` is the operator that made the rows.

    Raises SchemaMismatchError naming the first row and column that don't fit: a column that is missing or was not declared,
    another type, a null where none is allowed, a naive datetime where a zone is declared."""
    try:
        arrays = _arrays(rows, schema)
    except _MISFIT as error:
        raise _mismatch(rows, schema, producer, error) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def fitting_columns(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch | None:
    """As rows_to_columns; None where that would raise SchemaMismatchError, without its search for the row and its story."""
    try:
        return pa.RecordBatch.from_arrays(_arrays(rows, schema), schema=schema)
    except _MISFIT:
        return None


def misfits(rows: Sequence[Any], schema: pa.Schema) -> Iterator[int]:
    """Positions of the rows that don't fit, in order; all others together do. Each row is checked by itself alone, since after a
    replay it may have other neighbours. Each is found by bisection, so that k of n rows cost O(k log n) conversions."""
    blocks = [(0, len(rows))]
    while blocks:
        start, stop = blocks.pop()
        if start == stop:
            continue
        try:
            _arrays(rows[start:stop], schema)
        except _MISFIT:
            if stop - start == 1:
                yield start
            else:
                middle = (start + stop) // 2
                blocks += [(middle, stop), (start, middle)]


def _arrays(rows: Sequence[Any], schema: pa.Schema) -> list[pa.Array]:
    """The columns of rows, each of its own form: a dict or an object."""
    kinds = set(map(type, rows))
    objects = {kind for kind in kinds if not issubclass(kind, dict)}
    dicts = rows if not objects else [row for row in rows if type(row) not in objects] if len(objects) < len(kinds) else []
    getter: Callable[[str], Callable[[Any], Any]] = itemgetter if not objects else _either_getter if dicts else attrgetter
    arrays = []
    for field in schema:
        values = list(map(getter(field.name), rows))
        _refuse_lossy(values, field.type)
        array = _array(values, field.type)
        if _has_narrow_floats(field.type):
            _refuse_overflow(array, values)
        if array.null_count and not field.nullable:
            raise ValueError(f"null in a column that was declared without nulls; {nulls_hint(field.type)}")
        arrays.append(array)
    excess = sum(map(len, rows)) != len(rows) * len(schema) if kinds == {dict} else set(map(len, dicts)) - {len(schema)}
    if excess:  # a dict has at least the columns; one of another kind may make them up, so that the sum says nothing
        raise ValueError("a row has columns that were not declared")
    return arrays


def _either_getter(name: str) -> Callable[[Any], Any]:
    return lambda row: row[name] if issubclass(type(row), dict) else getattr(row, name)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """pyarrow takes the form of the first struct (dict, tuple, pairs) for that of all. Where one is no dict each value is converted
    alone, so that what becomes of it doesn't depend on those before it."""
    if pa.types.is_nested(kind) and not _are_dicts(values, kind):
        return pa.concat_arrays([pa.array([value], type=kind) for value in values])
    return pa.array(values, type=kind)


@functools.lru_cache(maxsize=256)
def _holds_structs(kind: pa.DataType) -> bool:
    """Whether pyarrow converts values of the type by way of structs: a map's entries are ones too."""
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return True
    return bool(pa.types.is_nested(kind)) and any(_holds_structs(kind.field(index).type) for index in range(kind.num_fields))


@functools.lru_cache(maxsize=256)
def _with_structs(kind: pa.DataType) -> tuple[int, ...]:
    """Which fields of a struct, or of (key, value) of a map, hold structs themselves."""
    types = (kind.key_type, kind.item_type) if pa.types.is_map(kind) else tuple(field.type for field in kind)
    return tuple(index for index, each in enumerate(types) if _holds_structs(each))


def _are_dicts(values: Sequence[Any], kind: pa.DataType) -> bool:
    """Whether all structs in the values are dicts, or None, and all entries of maps tuples. Other types with structs: False."""
    if not _holds_structs(kind):
        return True
    types = set(map(type, values)) - {type(None)}
    dicts = {found for found in types if issubclass(found, dict)}
    if pa.types.is_struct(kind):
        return types == dicts and all(
            _are_dicts([value.get(kind.field(index).name) for value in values if value is not None], kind.field(index).type)
            for index in _with_structs(kind)
        )
    if not types - dicts <= {list, tuple}:
        return False
    if pa.types.is_map(kind):
        nested = _with_structs(kind)
        if types == dicts and not nested:
            return True
        entries = [value.items() if type(value) in dicts else value for value in values if value] if dicts else filter(None, values)
        pairs = list(chain.from_iterable(entries))
        if set(map(type, pairs)) - {tuple}:
            return False
        types_of_entry = (kind.key_type, kind.item_type)
        return all(_are_dicts([pair[index] for pair in pairs], types_of_entry[index]) for index in nested)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and not dicts and _are_dicts(list(chain.from_iterable(filter(None, values))), kind.value_type)


@functools.lru_cache(maxsize=256)
def _has_narrow_floats(kind: pa.DataType) -> bool:
    return kind in (pa.float32(), pa.float16()) or any(_has_narrow_floats(each) for each in _part_types(kind))


def _part_types(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_map(kind):
        return [kind.key_type, kind.item_type]
    return [kind.field(index).type for index in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _refuse_overflow(array: pa.Array, values: list[Any]) -> None:
    """Refuse a number that pyarrow made an infinity, since it is too large for its column."""
    infinite = _count_infinite(array)
    if not infinite:
        return
    try:
        given = _count_infinite(_array(values, _widened(array.type)))
    except _MISFIT:  # of a form that the wide type does not take, such as an array of narrow floats, which fit
        return
    if given < infinite:
        raise ValueError(f"a number is too large for {array.type}, which would have it as infinity")


def _count_infinite(array: pa.Array) -> int:
    kind = array.type
    if pa.types.is_floating(kind):
        return int(np.isinf(array.drop_null().to_numpy(zero_copy_only=False)).sum())
    if not pa.types.is_nested(kind):
        return 0
    if pa.types.is_map(kind):
        parts = [array.keys, array.items]
    else:
        parts = array.flatten() if pa.types.is_struct(kind) else [array.flatten()]
    return sum(map(_count_infinite, parts))


@functools.lru_cache(maxsize=256)
def _widened(kind: pa.DataType) -> pa.DataType:
    """The type with float64 in place of narrower floats."""
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_widened(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_widened(kind.key_type), _widened(kind.item_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_widened(kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(_widened(kind.value_type))
    return kind


def nulls_hint(declared: pa.DataType) -> str:
    """How a column of this type is declared so that it takes nulls."""
    python = PYTHON_TYPES.get(declared)
    wanted = f"declare it as {python} | None, or nullable in a schema" if python else "make the field of its schema nullable"
    return f"where one may come, {wanted}"


def _refuse_lossy(values: list[Any], declared: pa.DataType) -> None:
    """Refuse what pyarrow would convert in silence: 1.5 to 1, True to 1.0, b"x" to "x", a datetime to a date or to UTC, and a text
    to a list of its characters; also within lists, maps and structs."""
    exact = _exact_types(declared)
    if exact is None:
        if pa.types.is_decimal(declared):
            _refuse_tiny(values, declared)
        elif _is_looked_into(declared):
            _refuse_lossy_parts([value for value in values if value is not None], declared)
        return
    for found in set(map(type, values)) - exact[0]:
        if not issubclass(found, exact[1]) or issubclass(found, exact[2]):
            raise ValueError(f"{found.__name__} is not {declared}")
    if pa.types.is_timestamp(declared):
        zoned = declared.tz is not None
        if any(value is not None and (value.tzinfo is not None) != zoned for value in values):
            raise ValueError(f"{'a naive' if zoned else 'an aware'} datetime in a column of {declared}")


def _refuse_tiny(values: list[Any], declared: pa.DataType) -> None:
    """Refuse a decimal of a huge negative exponent, also a zero: pyarrow ends the process over it."""
    if any(isinstance(value, Decimal) and value.adjusted() < _EXPONENT_MIN for value in values):
        raise ValueError(f"a decimal with an exponent below {_EXPONENT_MIN} is not {declared}")


@functools.lru_cache(maxsize=256)
def _is_looked_into(kind: pa.DataType) -> bool:
    """Whether values of the type have parts that could be converted in silence. Floats are left out: they lose nothing but that a
    bool was one, and long lists of them are frequent. A struct's names are looked at, whatever its fields are."""
    return bool(pa.types.is_struct(kind)) or any(map(_is_part_looked_at, _part_types(kind)))


def _is_part_looked_at(kind: pa.DataType) -> bool:
    if pa.types.is_decimal(kind) or _is_looked_into(kind):
        return True
    return _exact_types(kind) is not None and not pa.types.is_floating(kind)


def _refuse_lossy_parts(values: list[Any], declared: pa.DataType) -> None:
    """Of values that are not None. What is no list, no dict and no pairs is left to pyarrow, which refuses it or takes it apart."""
    if pa.types.is_struct(declared):
        dicts = [value for value in values if isinstance(value, dict)]
        _refuse_undeclared(dicts, declared)
        for field in filter(lambda field: _is_part_looked_at(field.type), declared):
            _refuse_lossy([value.get(field.name) for value in dicts], field.type)
    elif pa.types.is_map(declared):
        entries = (value.items() if isinstance(value, dict) else value for value in values)
        pairs = [pair for pair in chain.from_iterable(entries) if type(pair) is tuple and len(pair) == 2]
        for index, kind in enumerate((declared.key_type, declared.item_type)):
            if _is_part_looked_at(kind):
                _refuse_lossy([pair[index] for pair in pairs], kind)
    else:
        if str in set(map(type, values)):
            raise ValueError(f"str is not {declared}")
        _refuse_lossy(list(chain.from_iterable(map(_items_of, values))), declared.value_type)


def _refuse_undeclared(dicts: list[dict[Any, Any]], declared: pa.DataType) -> None:
    """Refuse what pyarrow drops in silence, as a row's own columns are refused."""
    names = {field.name for field in declared}
    if not all(map(names.issuperset, dicts)):
        extra = next(name for value in dicts for name in value if name not in names)
        raise ValueError(f"it has {extra!r}, which is no field of {declared}")


def _items_of(value: Any) -> Any:
    """Items of a list; of an array of numbers, all of which are of one type, the first."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value[:1].tolist() if value.dtype.kind in "biuf" else ()
    return value if isinstance(value, Iterable) else ()


@functools.lru_cache(maxsize=256)
def _exact_types(declared: pa.DataType) -> tuple[set[type], tuple[type, ...], tuple[type, ...]] | None:
    """(exact types of values that need no look, their bases, bases that are refused all the same) of a column type."""
    none, types = type(None), pa.types
    if types.is_integer(declared):
        return {int, none}, (int, np.integer), (bool,)
    if types.is_floating(declared):
        return {float, int, none}, (float, int, np.floating, np.integer), (bool,)
    if types.is_string(declared) or types.is_large_string(declared):
        return {str, none}, (str,), ()
    if types.is_binary(declared) or types.is_large_binary(declared):
        return {bytes, none}, (bytes, bytearray, memoryview), ()
    if types.is_date(declared):
        return {date, none}, (date,), (datetime,)
    if types.is_timestamp(declared):
        return {datetime, none}, (datetime,), ()
    return None


def _mismatch(rows: Sequence[Any], schema: pa.Schema, producer: str, cause: Exception) -> SchemaMismatchError:
    """Find the first row and column that don't fit, now that something is known not to."""
    index = next(misfits(rows, schema), None)
    if index is None:
        return _error(producer, None, None, str(cause), rows[0] if rows else None)
    return misfit_error(rows[index], index, schema, producer)


def misfit_error(row: Any, index: int, schema: pa.Schema, producer: str = "") -> SchemaMismatchError:
    """The error for a row that `misfits` found at `index`, naming the column."""
    column, reason = _first_misfit(row, schema)
    return _error(producer, index, column, reason or "its columns are not the declared ones", row)


def _first_misfit(row: Any, schema: pa.Schema) -> tuple[str | None, str]:
    if row is None:
        return None, "it is None, and no row: the function returned nothing for it, or emitted None"
    for field in schema:
        try:
            alone = {field.name: row[field.name]} if isinstance(row, dict) else row
            _arrays([alone], pa.schema([field]))
        except (LookupError, AttributeError):
            return field.name, f"it has no {field.name!r}"
        except Exception as error:
            return field.name, f"{error} (declared {field.type}{'' if field.nullable else ', no nulls'})"
    if isinstance(row, dict):
        extra = [name for name in row if name not in schema.names]
        if extra:
            return str(extra[0]), f"it has {', '.join(map(repr, extra))}, not declared in returns="
    return None, ""


def _error(producer: str, index: int | None, column: str | None, reason: str, row: Any) -> SchemaMismatchError:
    where = f"operator {producer!r}: " if producer else ""
    which = "rows don't" if index is None else f"row {index} of a batch doesn't"
    shown = text_of(row, repr)
    return SchemaMismatchError(
        f"{where}{which} fit the declared schema{f', column {column!r}' if column else ''}: {reason}; record {shown}",
        operator=producer,
        column=column,
        record=shown,
    )


def text_of(value: object, form: Callable[[object], str]) -> str:
    """Text of a user's object, truncated. One that has none does not hide the error that it belongs to."""
    try:
        return form(value)[:REPR_CHARACTERS_MAX]
    except Exception as error:
        return f"<{type(value).__name__} whose {form.__name__} raises {type(error).__name__}>"
