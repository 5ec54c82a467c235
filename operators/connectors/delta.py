"""Rows into a Delta table, exactly once: `DeltaSink`.

Rows and position are one version of the table. A position is stored in `txn` actions, which hold one number each:

    holdfast-<sink id>/<field>         value + 1 of a field that is a number; written by each commit
    holdfast-<sink id>/rows            number of bytes of the JSON of the other fields, but those of the owner
    holdfast-<sink id>/rows/<n>        7 bytes of it; written by each commit
    holdfast-<sink id>/owner texts     number of bytes of the JSON of the fields that change with the owner alone
    holdfast-<sink id>/owner texts/<n> 7 bytes of it; written when an owner takes over

Two committers that have read the same version conflict on the application ids, so only one of them commits. Checkpoints of the
table's log keep these actions when old log files are cleaned up, and none is a file that VACUUM could delete. A property of the
table would do for the texts, but a changed property makes the commits of other writers fail.
Protocol: https://github.com/delta-io/delta/blob/master/PROTOCOL.md, Transaction Identifiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.barriers.messages import has_control_characters
from holdfast.operators.connectors.batches import CapturedBatches
from holdfast.operators.connectors.extras import import_extra
from holdfast.operators.sinks.files.parquet import FILE_SIZE_MAX
from holdfast.operators.sinks.refused_rows import check_column, time_without_text
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import CorruptStateError, FencedError, InvalidConfigError
from holdfast.statebackends.secrets import Secret, check_settings, has_login, resolve

RETENTION = "delta.setTransactionRetentionDuration"
"""Property of a table that forgets `txn` actions."""

OWNER_TEXTS = "owner texts"
ROWS_TEXTS = "rows"

OF_OWNER = ("nonce", "job_id", "line")
"""The fields of a position that are texts and change with its owner alone."""

SLICE_BYTES = 7
"""A version of a `txn` has 63 bits."""

PARTITION_BYTES_MAX = 200
"""Of a folder of a partition, column included, as a URL has it; file systems take 255."""

TAKEOVERS_MAX = 20
"""Tries of `open` against committers that change the table meanwhile."""


class DeltaSink(StagedSink):
    """Appends rows to a Delta table, exactly once, by `deltalake` (extra `holdfast[delta]`). All rows of a checkpoint appear in one
    version of the table, beside the versions of other writers.

    table: folder or URL. It is created if it is not there, with the columns of the rows.
    partition_by: columns of a table that is created. A table that exists keeps its own.
    storage_options: as `deltalake` takes them; passwords, tokens and keys are `hf.Secret`, other values may be.
    target_file_size: bytes of a data file, at most, about; None: `deltalake`'s.
    The others: as `StagedSink`. With `commit_interval_ms` the rows of several checkpoints go into one version, in fewer files.

    Raises InvalidConfigError for a secret as plain text, for columns that Delta has no type for, for a table with other columns,
    and for one that forgets application ids (`delta.setTransactionRetentionDuration`)."""

    def __init__(
        self,
        table: str,
        sink_id: str = "",
        *,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str | Secret] | None = None,
        target_file_size: int | None = None,
        rows_per_commit: int | None = None,
        commit_interval_ms: int = 0,
        file_size_max: int = FILE_SIZE_MAX,
        name: str = "",
    ) -> None:
        if not isinstance(table, str) or not table:
            raise InvalidConfigError("a DeltaSink writes to the folder or the URL of a table", setting="table")
        if has_login(table):
            raise InvalidConfigError("DeltaSink: the table's URL has a password: it belongs into storage_options", setting="table")
        check_settings("DeltaSink", "storage_options", storage_options or {})
        if isinstance(partition_by, str) or not all(isinstance(column, str) for column in partition_by):
            raise InvalidConfigError(f"partition_by is a sequence of column names, not {partition_by!r}", setting="partition_by")
        if target_file_size is not None and (type(target_file_size) is not int or target_file_size < 1):
            raise InvalidConfigError(f"target_file_size is a number of bytes, not {target_file_size!r}", setting="target_file_size")
        super().__init__(
            DeltaTarget(table, tuple(partition_by), dict(storage_options or {}), target_file_size),
            sink_id,
            rows_per_commit=rows_per_commit,
            commit_interval_ms=commit_interval_ms,
            file_size_max=file_size_max,
            name=name or "DeltaSink",
        )


class DeltaTarget(CommitTarget):
    """See `DeltaSink`."""

    def __init__(
        self, location: str, partition_by: tuple[str, ...], storage_options: dict[str, str | Secret], target_file_size: int | None
    ) -> None:
        self._location = location
        self._partition_by = partition_by
        self._storage_options = storage_options
        self._target_file_size = target_file_size
        self._schema: pa.Schema | None = None
        """Of the rows: known before the target is pickled into its job."""
        self._narrower: dict[str, pa.DataType] = {}
        """Columns of which Delta does not take every value, with what they become: found with `_schema`."""
        self._table: Any = None

    @property
    def place(self) -> str:
        return f"Delta table {self._location}"

    def check(self, schema: pa.Schema) -> None:
        delta = _deltalake()
        narrower = {}
        for field in schema:
            try:
                kept = pa.schema(delta.Schema.from_arrow(pa.schema([field])).to_arrow()).field(0).type
            except Exception as error:
                raise InvalidConfigError(
                    f"{self.place}: Delta has no type for column {field.name}: {field.type}", column=field.name
                ) from error
            if _is_narrowed(field.type):
                narrower[field.name] = kept
        missing = [column for column in self._partition_by if column not in schema.names]
        if missing:
            raise InvalidConfigError(f"{self.place}: partition_by names {missing[0]}, which is no column", column=missing[0])
        for column in self._partition_by:
            self._check_partition(column)
            kind = schema.field(column).type
            if pa.types.is_nested(kind):
                raise InvalidConfigError(f"{self.place}: {column} is {kind}, which names no folder", column=column)
        self._schema, self._narrower = schema, narrower

    def _check_partition(self, column: str) -> None:
        """Behind a checkpoint each commit would fail."""
        if has_control_characters(column):
            raise InvalidConfigError(
                f"{self.place}: the name {column!r} has a control character, which none of a folder may have: it can't be "
                "partitioned by",
                column=column,
            )

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        """As they are, if the table takes them: behind the checkpoint a row that it refuses would block all that follow."""
        for name, kept in self._narrower.items():
            self._check(columns, name, partial(_misfit, kept))
        for name in self._partition_by:
            kind = columns.schema.field(name).type
            if pa.types.is_string(kind):
                self._check(columns, name, partial(_too_long, name))
            elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):  # readers fail of a table that has one
                self._check(columns, name, time_without_text)
        return columns

    def _check(self, rows: pa.RecordBatch, column: str, check: Callable[[pa.Array], str | None]) -> None:
        check_column(rows, column, check, f"{self.place}: ")

    def open(self, owner: CommitOwner) -> CommitPosition:
        delta = _deltalake()
        for _ in range(TAKEOVERS_MAX):
            self._table = self._load(delta)
            self._check_table(delta)
            position = owner.take(self._stored(owner.sink_id))
            actions = {**_of_rows(position), **_of_owner(position)}
            try:
                self._table.create_write_transaction(
                    [], "append", self._table.schema(), commit_properties=_properties(delta, owner.sink_id, actions)
                )
            except delta.exceptions.CommitFailedError as error:  # another owner's, or whoever changed the table
                refused = error
                continue
            return position
        raise refused

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        delta = _deltalake()
        self._table.update_incremental()
        if not self._is_at(expected):
            raise self._fenced(expected)
        assert self._schema is not None
        rows = CapturedBatches(batches)
        try:
            delta.write_deltalake(
                self._table,
                rows.reader(self._schema),
                mode="append",
                target_file_size=self._target_file_size,
                commit_properties=_properties(delta, position.sink_id, _of_rows(position)),
            )
        except delta.exceptions.CommitFailedError as error:
            self._table.update_incremental()
            if not self._is_at(expected):
                raise self._fenced(expected) from error
            raise
        except Exception:
            rows.raise_own()  # the client has only its text
            raise

    def close(self) -> None:
        self._table = None

    def _load(self, delta: Any) -> Any:
        options = {name: resolve(value) for name, value in self._storage_options.items()}
        try:
            return delta.DeltaTable(self._location, storage_options=options)
        except delta.exceptions.TableNotFoundError:
            created = {"mode": "ignore", "partition_by": list(self._partition_by), "storage_options": options}
            delta.DeltaTable.create(self._location, self._schema, **created)
            return delta.DeltaTable(self._location, storage_options=options)

    def _check_table(self, delta: Any) -> None:
        """Raises InvalidConfigError when the rows don't fit into the table."""
        metadata = self._table.metadata()
        if RETENTION in metadata.configuration:
            raise InvalidConfigError(
                f"{self.place} has the property {RETENTION}: it forgets how far the sink has come; remove it", setting=RETENTION
            )
        if self._partition_by and list(self._partition_by) != list(metadata.partition_columns):
            raise InvalidConfigError(
                f"{self.place} is partitioned by {metadata.partition_columns}, not by {list(self._partition_by)}",
                setting="partition_by",
            )
        for column in metadata.partition_columns:
            self._check_partition(column)
        assert self._schema is not None
        theirs = {field.name: field for field in self._table.schema().fields}
        ours = {field.name: field for field in delta.Schema.from_arrow(self._schema).fields}
        for name in sorted(theirs.keys() ^ ours.keys()):
            where = "has no column" if name in ours else "has a column that the rows don't have:"
            raise InvalidConfigError(f"{self.place} {where} {name}", column=name)
        for name, field in ours.items():
            if field.type != theirs[name].type:
                raise InvalidConfigError(
                    f"{self.place}: column {name} is {theirs[name].type}, in the rows {field.type}", column=name
                )
            if field.nullable and not theirs[name].nullable:
                raise InvalidConfigError(f"{self.place}: column {name} takes no nulls, and the rows may have some", column=name)

    def _number(self, sink_id: str, name: str) -> int | None:
        """Of a `txn` in the loaded version of the table."""
        found: int | None = self._table.transaction_version(_app_id(sink_id, name))
        return found

    def _stored(self, sink_id: str) -> CommitPosition | None:
        """The position in the loaded version of the table."""
        if self._number(sink_id, OWNER_TEXTS) is None:
            return None
        fields: dict[str, Any] = {"sink_id": sink_id, **self._texts(sink_id, OWNER_TEXTS), **self._texts(sink_id, ROWS_TEXTS)}
        for name in _NUMBERS:
            if (value := self._number(sink_id, name)) is not None:
                fields[name] = value - 1
        return CommitPosition.decode(msgspec.json.encode(fields), f"{self.place}, application holdfast-{sink_id}")

    def _texts(self, sink_id: str, name: str) -> dict[str, Any]:
        length = self._number(sink_id, name) or 0
        slices = [self._number(sink_id, f"{name}/{index}") for index in range(-(-length // SLICE_BYTES))]
        content = b"".join((each or 0).to_bytes(8, "little")[:SLICE_BYTES] for each in slices)[:length]
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise CorruptStateError(
                f"{self.place}, application {_app_id(sink_id, name)} can't be read: {error}", operator=sink_id, reason=str(error)
            ) from error

    def _is_at(self, expected: CommitPosition) -> bool:
        """Whether the loaded version has this position. An owner's number is taken once, so it stands for the owner's texts."""
        return all(self._number(expected.sink_id, name) == value for name, value in _of_rows(expected).items())

    def _fenced(self, expected: CommitPosition) -> FencedError:
        stored = self._stored(expected.sink_id)
        return FencedError(
            f"sink {expected.sink_id}: {self.place} is at {stored}, not at {expected}",
            sink=expected.sink_id,
            owner=expected.job_id if stored is None else stored.job_id,
            job_id=expected.job_id,
            held=expected.attempt,
            newer=0 if stored is None else stored.attempt,
        )


def _deltalake() -> Any:
    import_extra("deltalake.exceptions", "delta", "DeltaSink")
    return import_extra("deltalake", "delta", "DeltaSink")


def _is_narrowed(kind: pa.DataType) -> bool:
    """Whether Delta has fewer values than the type, which it takes all the same: it has no unsigned numbers, days alone, and
    microseconds."""
    if pa.types.is_nested(kind):
        return any(_is_narrowed(kind.field(index).type) for index in range(kind.num_fields))
    is_time = pa.types.is_date64(kind) or (pa.types.is_timestamp(kind) and kind.unit != "us")
    return bool(is_time or pa.types.is_unsigned_integer(kind))


def _misfit(kept: pa.DataType, values: pa.Array) -> str | None:
    """Why Delta does not take some of the values."""
    if pa.types.is_nested(values.type):
        values = values.take(pa.array(np.arange(len(values))))  # of a slice of lists Arrow looks at the items of all of them
    try:
        values.cast(kept)
    except pa.ArrowInvalid as error:
        return f"Delta has it as {kept}: {error}"
    except pa.ArrowNotImplementedError:  # not known here: the client finds out
        return None
    return None


def _too_long(column: str, values: pa.Array) -> str | None:
    """Why some values name no folder."""
    if 3 * (pc.max(pc.binary_length(values)).as_py() or 0) + 3 * len(column.encode()) < PARTITION_BYTES_MAX:
        return None
    longest = max(len(quote(f"{column}={value}")) for value in pc.unique(values).to_pylist())
    reason = f"the name of its partition has more than {PARTITION_BYTES_MAX} bytes"
    return reason if longest > PARTITION_BYTES_MAX else None


def _app_id(sink_id: str, name: str) -> str:
    return f"holdfast-{sink_id}/{name}"


_NUMBERS = tuple(field.name for field in msgspec.structs.fields(CommitPosition) if field.type is int)


def _of_rows(position: CommitPosition) -> dict[str, int]:
    """What each commit writes."""
    fields = msgspec.to_builtins(position)
    texts = {name: value for name, value in fields.items() if name not in (*_NUMBERS, *OF_OWNER, "sink_id")}
    return {name: getattr(position, name) + 1 for name in _NUMBERS} | _encoded(ROWS_TEXTS, texts)


def _of_owner(position: CommitPosition) -> dict[str, int]:
    return _encoded(OWNER_TEXTS, {name: getattr(position, name) for name in OF_OWNER})


def _encoded(name: str, fields: Mapping[str, Any]) -> dict[str, int]:
    """JSON as numbers of 56 bits, and its length."""
    content = msgspec.json.encode(fields)
    slices = [content[start : start + SLICE_BYTES] for start in range(0, len(content), SLICE_BYTES)]
    return {name: len(content)} | {f"{name}/{index}": int.from_bytes(each, "little") for index, each in enumerate(slices)}


def _properties(delta: Any, sink_id: str, numbers: Mapping[str, int]) -> Any:
    """Of a commit that stores them."""
    transactions = [delta.Transaction(_app_id(sink_id, name), value) for name, value in numbers.items()]
    return delta.CommitProperties(app_transactions=transactions)
