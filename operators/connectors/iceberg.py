"""Rows into an Iceberg table, exactly once: `IcebergSink`.

Rows and position are one commit to the catalog: an appended snapshot, and the property `holdfast.position.<sink id>`. The commit
requires that the branch still ends with the snapshot that was loaded with the position: pyiceberg's own `commit_transaction` moves
on to a newer one by itself, and then two committers of one position both commit. A changed property alone would not be seen by that
requirement, so an owner takes over with an empty snapshot. Specification: https://iceberg.apache.org/spec/."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from holdfast.operators.connectors.extras import import_extra
from holdfast.operators.sinks.files.parquet import FILE_SIZE_MAX
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import FencedError, InvalidConfigError
from holdfast.statebackends.secrets import Secret, check_settings, resolve

BRANCH = "main"

CHUNK_BYTES = 128 * 1024 * 1024
"""Of rows in memory, from which one data file per partition is written."""

COMMITS_MAX = 20
"""Tries against commits of others to the same table."""


class IcebergSink(StagedSink):
    """Appends rows to an Iceberg table, exactly once, by `pyiceberg` (extra `holdfast[iceberg]`). All rows of a checkpoint appear
    in one snapshot, beside those of other writers.

    table: its identifier, such as `shop.orders`. It is created, with its namespace and without partitions, if it is not there; for
    partitions create it first.
    catalog: name of the catalog in pyiceberg's configuration.
    properties: of the catalog, as `pyiceberg.catalog.load_catalog` takes them; passwords, tokens, keys, and an address with a
    password are `hf.Secret`, other values may be.
    The others: as `StagedSink`. With `commit_interval_ms` the rows of several checkpoints go into one snapshot, in fewer files.

    Raises InvalidConfigError for a secret as plain text, for a table with other columns, or for columns that Iceberg has no type
    for."""

    def __init__(
        self,
        table: str,
        sink_id: str = "",
        *,
        catalog: str = "default",
        properties: Mapping[str, str | Secret] | None = None,
        rows_per_commit: int | None = None,
        commit_interval_ms: int = 0,
        file_size_max: int = FILE_SIZE_MAX,
        name: str = "",
    ) -> None:
        if not isinstance(table, str) or not all(table.split(".")) or "." not in table:
            raise InvalidConfigError(
                f"an IcebergSink writes to a table by its identifier, namespace.table, not to {table!r}", setting="table"
            )
        check_settings("IcebergSink", "properties", properties or {})
        super().__init__(
            IcebergTarget(table, catalog, dict(properties or {})),
            sink_id,
            rows_per_commit=rows_per_commit,
            commit_interval_ms=commit_interval_ms,
            file_size_max=file_size_max,
            name=name or "IcebergSink",
        )


class IcebergTarget(CommitTarget):
    """See `IcebergSink`."""

    def __init__(self, identifier: str, catalog: str, properties: dict[str, str | Secret]) -> None:
        self._identifier = identifier
        self._catalog_name = catalog
        self._properties = properties
        self._schema: pa.Schema | None = None
        """Of the rows: known before the target is pickled into its job."""
        self._catalog: Any = None
        self._table: Any = None

    @property
    def place(self) -> str:
        return f"Iceberg table {self._identifier} in catalog {self._catalog_name}"

    def check(self, schema: pa.Schema) -> None:
        convert = _pyiceberg("io.pyarrow")._pyarrow_to_schema_without_ids
        for field in schema:
            try:
                kept = convert(pa.schema([field])).as_arrow().field(0).type
            except Exception as error:
                raise self._no_type(field) from error
            if not _same_type(kept, field.type):
                raise self._no_type(field)
            if _empties_nulls(field):
                raise InvalidConfigError(
                    f"{self.place}: column {field.name} is {field.type}: pyiceberg writes a list or a map of structs that is null "
                    "as an empty one; declare that it is never null",
                    column=field.name,
                )
        self._schema = schema

    def open(self, owner: CommitOwner) -> CommitPosition:
        if self._catalog is None:
            properties = {name: resolve(value) for name, value in self._properties.items()}
            self._catalog = _pyiceberg("catalog").load_catalog(self._catalog_name, **properties)
        self._table = self._load()
        self._check_table()
        refused: Exception
        for _ in range(COMMITS_MAX):
            position = owner.take(self._stored(owner.sink_id))
            try:
                self._commit([], position)
            except _pyiceberg("exceptions").CommitFailedException as error:
                refused = error
                self._table = self._catalog.load_table(self._identifier)
                continue
            return position
        raise refused

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        self._table = self._catalog.load_table(self._identifier)
        self._check_is_at(expected)
        files = [file for chunk in self._chunks(batches) for file in self._write(chunk)]
        refused: Exception
        for _ in range(COMMITS_MAX):
            try:
                self._commit(files, position)
            except _pyiceberg("exceptions").CommitFailedException as error:  # who was first: another owner, or another writer
                refused = error
                self._table = self._catalog.load_table(self._identifier)
                self._check_is_at(expected)
                continue
            return
        raise refused

    def close(self) -> None:
        if self._catalog is not None:
            with contextlib.suppress(Exception):  # there is nothing to be done about it
                self._catalog.close()

    def _load(self) -> Any:
        try:
            return self._catalog.load_table(self._identifier)
        except _pyiceberg("exceptions").NoSuchTableError:
            self._catalog.create_namespace_if_not_exists(self._identifier.rpartition(".")[0])
            return self._catalog.create_table_if_not_exists(self._identifier, self._schema)

    def _check_table(self) -> None:
        """Raises InvalidConfigError when the rows don't fit into the table."""
        assert self._schema is not None
        theirs = self._table.schema().as_arrow()
        for name in sorted(set(theirs.names) ^ set(self._schema.names)):
            where = "has no column" if name in self._schema.names else "has a column that the rows don't have:"
            raise InvalidConfigError(f"{self.place} {where} {name}", column=name)
        for field in self._schema:
            wanted = theirs.field(field.name)
            if not _same_type(field.type, wanted.type):
                raise InvalidConfigError(
                    f"{self.place}: column {field.name} is {wanted.type}, in the rows {field.type}", column=field.name
                )
            if field.nullable and not wanted.nullable:
                raise InvalidConfigError(
                    f"{self.place}: column {field.name} takes no nulls, and the rows may have some", column=field.name
                )

    def _no_type(self, field: pa.Field) -> InvalidConfigError:
        return InvalidConfigError(
            f"{self.place}: Iceberg has no type for column {field.name}: {field.type}", column=field.name
        )

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        """The rows in the table's order of columns, some at a time."""
        names = self._table.schema().as_arrow().names
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch.select(names))
            if sum(each.nbytes for each in held) >= CHUNK_BYTES:
                yield pa.Table.from_batches(held)
                held = []
        if held:
            yield pa.Table.from_batches(held)

    def _write(self, rows: pa.Table) -> Iterator[Any]:
        """Data files, which no snapshot has yet."""
        write = _pyiceberg("io.pyarrow")._dataframe_to_data_files
        return iter(write(table_metadata=self._table.metadata, df=rows, io=self._table.io))

    def _commit(self, files: list[Any], position: CommitPosition) -> None:
        """Append files and store a position, if the table is as it was loaded. Raises CommitFailedException if it is not."""
        transaction = self._table.transaction()
        with transaction.update_snapshot(branch=BRANCH).fast_append() as snapshot:
            for file in files:
                snapshot.append_data_file(file)
        transaction.set_properties({_property(position.sink_id): position.encode().decode()})
        same_table = _pyiceberg("table.update").AssertTableUUID(uuid=self._table.metadata.table_uuid)
        self._catalog.commit_table(self._table, (*transaction._requirements, same_table), transaction._updates)

    def _stored(self, sink_id: str) -> CommitPosition | None:
        content = self._table.properties.get(_property(sink_id))
        return None if content is None else CommitPosition.decode(content, f"{self.place}, property {_property(sink_id)}")

    def _check_is_at(self, expected: CommitPosition) -> None:
        stored = self._stored(expected.sink_id)
        if stored != expected:
            raise FencedError(
                f"sink {expected.sink_id}: {self.place} is at {stored}, not at {expected}",
                sink=expected.sink_id,
                owner=expected.job_id if stored is None else stored.job_id,
                job_id=expected.job_id,
                held=expected.attempt,
                newer=0 if stored is None else stored.attempt,
            )


def _pyiceberg(module: str) -> Any:
    import_extra("pyiceberg", "iceberg", "IcebergSink")
    return importlib.import_module(f"pyiceberg.{module}")


def _property(sink_id: str) -> str:
    return f"holdfast.position.{sink_id}"


def _same_type(ours: pa.DataType, theirs: pa.DataType) -> bool:
    """Arrow has two texts, two kinds of bytes and two lists, of short and of long offsets, and names for a list's items; Iceberg
    has one of each, and `pyiceberg` gives the long ones."""
    return bool(_short(ours) == _short(theirs))


def _empties_nulls(field: pa.Field) -> bool:
    """Whether a value could be null that pyiceberg (0.12) writes as an empty list or map."""
    kind = field.type
    has_items = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind)
    parts = _parts(kind)
    if has_items and field.nullable and any(_has_struct(part.type) for part in parts):
        return True
    return any(_empties_nulls(part) for part in parts)


def _has_struct(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) or any(_has_struct(part.type) for part in _parts(kind))


def _parts(kind: pa.DataType) -> list[pa.Field]:
    """What values consist of; Arrow has the entries of a map as structs."""
    return [kind.key_field, kind.item_field] if pa.types.is_map(kind) else [kind.field(index) for index in range(kind.num_fields)]


def _short(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_large_string(kind):
        return pa.string()
    if types.is_large_binary(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_short_field(kind.value_field, "item"))
    if types.is_map(kind):
        return pa.map_(_short_field(kind.key_field, "key"), _short_field(kind.item_field, "value"))
    if types.is_struct(kind):
        return pa.struct([_short_field(field, field.name) for field in kind])
    return kind


def _short_field(field: pa.Field, name: str) -> pa.Field:
    return pa.field(name, _short(field.type), field.nullable)
