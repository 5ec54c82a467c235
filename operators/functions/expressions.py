"""SQL scalar expressions over columns: `select`, `filter` and conditions of aggregates, evaluated by DuckDB on record batches.

Types are found when the graph is built. A row's values never depend on the rows beside it, so that batches may end anywhere:
`sql.py` refuses the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.schema import RowType
from holdfast.operators.functions.skipping import SkippingOperator
from holdfast.operators.functions.sql import Expression, ExpressionChecker, connect, refusal
from holdfast.operators.task.user_failures import NO_RECORD, shown
from holdfast.statebackends.errors import GraphError, InvalidConfigError, InvariantError, UserFunctionError

if TYPE_CHECKING:
    import duckdb

_TABLE = "holdfast input"

_ARROW_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "utinyint": pa.uint8(),
    "usmallint": pa.uint16(),
    "uinteger": pa.uint32(),
    "ubigint": pa.uint64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "varchar": pa.string(),
    "blob": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "timestamp_s": pa.timestamp("s"),
    "timestamp_ms": pa.timestamp("ms"),
    "timestamp_ns": pa.timestamp("ns"),
    "timestamp with time zone": pa.timestamp("us", tz="UTC"),
}
_CASTS = {
    "hugeint": "DECIMAL(38, 0), BIGINT or DOUBLE",
    "uhugeint": "DECIMAL(38, 0), UBIGINT or DOUBLE",
    "interval": "VARCHAR, or take seconds with epoch()",
    "uuid": "VARCHAR",
    "enum": "VARCHAR",
}
"""What a value can be cast to whose type has no column."""


class Expressions:
    """Scalar expressions over the columns of one schema, computed together. It travels by pickle, without its connection."""

    def __init__(self, texts: Mapping[str, str], schema: pa.Schema, operator: str) -> None:
        """Raises GraphError (with the reason) for what is no scalar expression of these columns, InvalidConfigError without DuckDB.

        texts: column of the result -> expression; the name "" is that of a condition."""
        self._operator = operator
        self._connection: duckdb.DuckDBPyConnection | None = None
        self.expressions: list[Expression] = []
        self._is_computed: list[bool] = []
        """Of each expression: by DuckDB. A column as it is needs none."""
        self.schema = pa.schema([])
        """Columns of the result; each may be null."""
        self.columns: tuple[str, ...] = ()
        """Columns that are read."""
        if texts:
            self._compile(texts, schema)

    def _compile(self, texts: Mapping[str, str], schema: pa.Schema) -> None:
        operator = self._operator
        connection = connect(operator)
        try:
            checker = ExpressionChecker(connection, schema, operator)
            self.expressions = [checker.check(name, text) for name, text in texts.items()]
            self.columns = _read(self.expressions, schema)
            self._fed_columns = self.columns
            connection.register(_TABLE, _Feed([self._fed(_no_rows(schema))]))
            self.schema = pa.schema([pa.field(each.name, self._type_of(connection, each)) for each in self.expressions])
            self._is_computed = [
                each.column is None or schema.field(each.column).type != data_type
                for each, data_type in zip(self.expressions, self.schema.types, strict=True)
            ]
            self._fed_columns = _read(self._computed, schema)
            self._input = pa.schema([schema.field(name) for name in self._fed_columns])
        finally:
            connection.close()

    @property
    def _computed(self) -> list[Expression]:
        return list(compress(self.expressions, self._is_computed))

    def _type_of(self, connection: duckdb.DuckDBPyConnection, expression: Expression) -> pa.DataType:
        import duckdb

        try:
            (found,) = connection.sql(_statement([expression])).types
        except duckdb.Error as error:
            raise refusal(self._operator, expression.shown, _reason(error)) from error
        data_type = _arrow_type(found)
        if data_type is None:
            cast = f"; cast it to {_CASTS[found.id]}" if found.id in _CASTS else ""
            raise refusal(self._operator, expression.shown, f"its type is {found}, which has no column type{cast}")
        return data_type

    def open(self) -> None:
        """Connect and prepare; done with the first batch, too. Raises InvalidConfigError."""
        if not any(self._is_computed):
            return
        self._connection = connection = connect(self._operator)
        self._feed = _Feed([self._fed(_no_rows(self._input))])
        connection.register(_TABLE, self._feed)
        self._query = connection.sql(_statement(self._computed))
        expected = list(compress(self.schema.types, self._is_computed))
        if [_arrow_type(each) for each in self._query.types] != expected:
            found = ", ".join(map(str, self._query.types))
            raise InvalidConfigError(
                f"operator {self._operator!r}: DuckDB gives {found} here, on the driver {expected}: install one version",
                operator=self._operator,
                package="duckdb",
            )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def evaluate(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        """The result for each row. Raises duckdb.Error if one has none: `failing` finds it."""
        if not self.expressions:
            return columns.select([])
        results: Iterator[pa.ChunkedArray] = iter(())
        if any(self._is_computed):
            if self._connection is None:
                self.open()
            results = iter(self._run(self._query, columns))
        arrays = [
            _array(next(results), data_type) if is_computed else columns.column(each.column)
            for each, data_type, is_computed in zip(self.expressions, self.schema.types, self._is_computed, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def failing(self, columns: pa.RecordBatch) -> Iterator[tuple[int, duckdb.Error]]:
        """(index, error) of each row that has no result, in order."""
        import duckdb

        ranges = [(0, columns.num_rows)]
        while ranges:
            start, length = ranges.pop()
            try:
                self.evaluate(columns.slice(start, length))
            except duckdb.Error as error:
                if not _is_of_rows(error):
                    raise
                if length == 1:
                    yield start, error
                    continue
                half = length // 2
                ranges += [(start + half, length - half), (start, half)]

    def error_of(self, columns: pa.RecordBatch, position: int, error: Exception, subtask: int | None) -> UserFunctionError:
        """The typed error of a row that has no result: it names the expression that fails."""
        row = columns.slice(position, 1)
        expression = self._blamed(row)
        record: Any = NO_RECORD
        with contextlib.suppress(Exception):  # a value that Python has no type for, such as nanoseconds
            (record,) = row.select(list(self.columns)).to_pylist()
        where = f"operator {self._operator!r}" + ("" if subtask is None else f", subtask {subtask}")
        text = shown(record)
        return UserFunctionError(
            f"{where}: {expression.shown} failed: {_reason(error)}" + (f"; record {text}" if text else ""),
            operator=self._operator,
            subtask=subtask,
            function=expression.shown,
            record=text,
            frames="",
        )

    def named(self, operator: str) -> None:
        """Errors name this operator from now on."""
        self._operator = operator

    def _blamed(self, row: pa.RecordBatch) -> Expression:
        """The first expression that fails on a row."""
        import duckdb

        assert self._connection is not None
        for expression in self._computed:
            try:
                self._run(self._connection.sql(_statement([expression])), row)
            except duckdb.Error:
                return expression
        return self._computed[0]

    def _run(self, query: duckdb.DuckDBPyRelation, columns: pa.RecordBatch) -> list[pa.ChunkedArray]:
        self._feed.batches = [self._fed(columns)]
        try:
            table = query.to_arrow_table()
        finally:
            self._feed.batches = []
        if table.num_rows != columns.num_rows:
            raise InvariantError(f"operator {self._operator!r}: DuckDB gave {table.num_rows} rows for {columns.num_rows}")
        return list(table.columns)

    def _fed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns that DuckDB reads; without any, one that tells how many rows there are."""
        if self._fed_columns:
            return batch.select(list(self._fed_columns))
        return pa.record_batch({"rows": pa.nulls(batch.num_rows, pa.bool_())})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_feed", "_query")} | {"_connection": None}


class _Feed:
    """What DuckDB scans, under one name for the life of a connection: the batches of now."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._schema = batches[0].schema
        self.batches = batches

    def __arrow_c_schema__(self) -> Any:
        return self._schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return pa.RecordBatchReader.from_batches(self._schema, self.batches).__arrow_c_stream__(requested_schema)


class Predicate:
    """A condition on rows. Null counts as false."""

    def __init__(self, expressions: Expressions) -> None:
        self.expressions = expressions

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that it reads."""
        return self.expressions.columns

    def mask(self, columns: pa.RecordBatch, *, subtask: int | None = None) -> npt.NDArray[np.bool_]:
        """Whether each row meets it. Raises UserFunctionError naming operator, expression and the first row that has no answer."""
        try:
            return _met(self.expressions.evaluate(columns))
        except Exception as error:
            _raise_first(self.expressions, columns, error, subtask)

    def close(self) -> None:
        """Let its connection go; another `mask` makes a new one."""
        self.expressions.close()


def predicate_of(text: str, schema: pa.Schema, operator: str) -> Predicate:
    """The condition that a text says, over the columns of a schema. It travels by pickle, and connects where it is first used.

    Raises GraphError for what is no scalar expression of type BOOLEAN, UnknownColumnError, InvalidConfigError without DuckDB."""
    expressions = Expressions({"": text}, schema, operator)
    if expressions.schema.types != [pa.bool_()]:
        reason = f"a condition is BOOLEAN, and this is {expressions.schema.types[0]}"
        raise refusal(operator, expressions.expressions[0].shown, reason)
    return Predicate(expressions)


def _met(result: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    return np.asarray(result.column(0).fill_null(False).to_numpy(zero_copy_only=False))


def _raise_first(expressions: Expressions, columns: pa.RecordBatch, error: Exception, subtask: int | None) -> NoReturn:
    """Raise the error that names the first row without a result; `error`, that of the whole batch, if no row alone has one."""
    if _is_of_rows(error):
        for position, found in expressions.failing(columns):
            raise expressions.error_of(columns, position, found, subtask) from error
    raise error


class ExpressionOperator(SkippingOperator):
    """Base of operators that compute columns. With `skips`, a row that has no result is left out."""

    def __init__(self, expressions: Expressions, *, skips: bool) -> None:
        self.expressions = expressions
        self.skips = skips

    def open(self) -> None:
        self.expressions.named(self.context.uid)
        self.expressions.open()

    def close(self) -> None:
        self.expressions.close()

    def _computed(self, batch: Batch) -> tuple[pa.RecordBatch, Batch]:
        """(results, the batch of the rows that have them)."""
        columns = batch.columns()
        try:
            return self.expressions.evaluate(columns), batch
        except Exception as error:
            if self._skipped is None or not _is_of_rows(error):
                _raise_first(self.expressions, columns, error, self.context.subtask)
        kept = np.ones(columns.num_rows, np.bool_)
        for position, failure in self.expressions.failing(columns):
            kept[position] = False
            self._refuse(partial(self.expressions.error_of, columns, position, failure, self.context.subtask))
        rest = batch.filter(kept)
        return self.expressions.evaluate(rest.columns()), rest


class SelectOperator(ExpressionOperator):
    """One row out for each row in: columns that are taken as they are, and computed ones."""

    def __init__(self, taken: Sequence[str], expressions: Expressions, output_type: RowType, *, skips: bool) -> None:
        super().__init__(expressions, skips=skips)
        self._taken = list(taken)
        self.output_type = output_type

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        return frozenset((*self._taken, *self.expressions.columns))

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        computed, rest = self._computed(batch)
        if not rest.num_rows:
            return
        columns = rest.columns()
        arrays = [*(columns.column(name) for name in self._taken), *computed.columns]
        result = pa.RecordBatch.from_arrays(arrays, schema=self.output_type.schema)
        self.output.collect(Batch(columns=result, timestamps=rest.timestamps))


class ConditionOperator(ExpressionOperator):
    """Keeps the rows that meet a condition."""

    def columns_read(self, wanted: frozenset[str] | None) -> frozenset[str] | None:
        return None if wanted is None else wanted | frozenset(self.expressions.columns)

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        result, rest = self._computed(batch)
        mask = _met(result)
        if mask.all():
            if rest.num_rows:
                self.output.collect(rest)
        elif mask.any():
            self.output.collect(rest.filter(mask))


def select_operator(taken: Sequence[str], texts: Mapping[str, str], input_type: RowType, *, skips: bool) -> SelectOperator:
    """Raises GraphError, UnknownColumnError, InvalidConfigError without DuckDB."""
    assert input_type.schema is not None
    names = [*taken, *texts]
    if not names:
        raise GraphError("operator 'select': name at least one column or expression: price_eur='price * 0.908'", operator="select")
    if len(set(names)) < len(names):
        raise GraphError(f"operator 'select': two columns have one name: {', '.join(names)}", operator="select")
    fields = [input_type.column(name, "select") for name in taken]
    expressions = Expressions(texts, input_type.schema, "select")
    return SelectOperator(taken, expressions, RowType(pa.schema([*fields, *expressions.schema])), skips=skips)


def condition_operator(text: str, input_type: RowType, *, skips: bool) -> ConditionOperator:
    """Raises GraphError, UnknownColumnError, InvalidConfigError without DuckDB."""
    return ConditionOperator(predicate_of(text, input_type.schema, "filter").expressions, skips=skips)


def _read(expressions: Sequence[Expression], schema: pa.Schema) -> tuple[str, ...]:
    """Columns that expressions read, in their order."""
    read = {name for each in expressions for name in each.columns}
    return tuple(name for name in schema.names if name in read)


def _statement(expressions: Sequence[Expression]) -> str:
    # The line break ends a comment in the text. Results go by their place: an alias could be read by the next expression.
    listed = ", ".join(f"({each.sql}\n)" for each in expressions)
    return f'SELECT {listed} FROM "{_TABLE}"'


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _array(column: pa.ChunkedArray, data_type: pa.DataType) -> pa.Array:
    whole = column.combine_chunks()
    array = pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
    return array if array.type == data_type else array.cast(data_type)


def _arrow_type(found: Any) -> pa.DataType | None:
    """Column type of a DuckDB type; None if it has none."""
    match found.id:
        case "decimal":
            sizes = dict(found.children)
            return pa.decimal128(sizes["precision"], sizes["scale"])
        case "list":
            item = _arrow_type(found.children[0][1])
            return None if item is None else pa.list_(pa.field("item", item))
        case "struct":
            fields = [(name, _arrow_type(child)) for name, child in found.children]
            return None if any(each is None for _, each in fields) else pa.struct(fields)
        case other:
            return _ARROW_TYPES.get(other)


def _is_of_rows(error: Exception) -> bool:
    """Whether values can be the cause of DuckDB's error."""
    import duckdb

    return isinstance(error, duckdb.DataError | duckdb.ProgrammingError | duckdb.NotSupportedError)


def _reason(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
