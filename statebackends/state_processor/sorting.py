"""Rows in any order, given back in key-group order: in memory while they are few, else through files of some key groups each.

Memory: HELD_BYTES_MAX while rows come in; while they go out, the rows of a BUCKETS-th of the key groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import KEY_GROUP, NAMESPACE, POSITION
from holdfast.statebackends.serialization.keys import key_columns
from holdfast.statebackends.snapshot.tables import restrict, sort_by_key_group
from holdfast.statebackends.state_processor.conform import StateLayout
from holdfast.statebackends.state_processor.reading import scratch_errors

BUCKETS = 64
HELD_BYTES_MAX = 64 << 20


class KeyGroupSorter:
    """The rows of one state; one thread. Files are the caller's scratch folder's to delete."""

    def __init__(self, layout: StateLayout, new_path: Callable[[str], str], *, held_bytes_max: int = HELD_BYTES_MAX) -> None:
        self._layout = layout
        self._new_path = new_path
        self._held_bytes_max = held_bytes_max
        self._count = min(BUCKETS, layout.max_parallelism)
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._rows = 0
        self._files: dict[int, tuple[str, pa.NativeFile, pa.ipc.RecordBatchStreamWriter]] = {}
        self._finished = False

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Rows as `StateLayout.conform` takes them; raises as it does."""
        if batch.num_rows:
            table = self._layout.conform(batch, self._rows)
            self._rows += batch.num_rows
            self._held.append(table)
            self._held_bytes += table.nbytes
            if self._held_bytes > self._held_bytes_max:
                self._spill()

    @property
    def rows(self) -> int:
        return self._rows

    def tables(self, groups: KeyGroupRange) -> Iterator[pa.Table]:
        """The rows of some key groups, in their order; those of a list in the order of their positions, which are counted anew.

        No rows may be added afterwards. Raises InvalidKeyError for two rows of one entry."""
        self._finish()
        for bucket in range(self._count):
            own = self._groups_of(bucket)
            wanted = own.intersection(groups)
            if len(wanted):
                table = restrict(sort_by_key_group(self._load(bucket)), wanted)
                if table.num_rows:
                    self._layout.check_distinct(table)
                    yield self._numbered(table) if self._layout.meta.kind == "list" else table

    def _groups_of(self, bucket: int) -> KeyGroupRange:
        size = self._layout.max_parallelism
        return KeyGroupRange(-(-bucket * size // self._count), -(-(bucket + 1) * size // self._count))

    def _spill(self) -> None:
        table = pa.concat_tables(self._held)
        self._held, self._held_bytes = [], 0
        groups = table.column(KEY_GROUP).to_numpy().astype(np.int64)
        buckets = groups * self._count // self._layout.max_parallelism
        order = np.argsort(buckets, kind="stable")
        table, buckets = table.take(pa.array(order)), buckets[order]
        cuts = np.searchsorted(buckets, np.arange(self._count + 1))
        for bucket in range(self._count):
            part = table.slice(cuts[bucket], cuts[bucket + 1] - cuts[bucket])
            if part.num_rows:
                self._write(bucket, part)

    def _write(self, bucket: int, part: pa.Table) -> None:
        if bucket not in self._files:
            path = self._new_path("sorting")
            with scratch_errors(path):
                sink = pa.OSFile(path, "wb")
                self._files[bucket] = path, sink, pa.ipc.new_stream(sink, self._layout.schema)
        path, _, writer = self._files[bucket]
        with scratch_errors(path):
            writer.write_table(part)

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        if self._files and self._held:
            self._spill()
        for path, sink, writer in self._files.values():
            with scratch_errors(path):
                writer.close()
                sink.close()

    def _load(self, bucket: int) -> pa.Table:
        if not self._files:
            table = pa.concat_tables(self._held) if self._held else self._layout.schema.empty_table()
            return restrict(table, self._groups_of(bucket))
        if bucket not in self._files:
            return self._layout.schema.empty_table()
        path, _, _ = self._files[bucket]
        with scratch_errors(path), pa.OSFile(path) as source:
            return pa.ipc.open_stream(source).read_all()

    def _numbered(self, table: pa.Table) -> pa.Table:
        """List elements of one key side by side, numbered from 0."""
        names = [*key_columns(self._layout.key_type), NAMESPACE]
        order = pc.sort_indices(table, [(name, "ascending") for name in (KEY_GROUP, *names, POSITION)])
        table = table.take(order)
        entries = self._layout.lists(table)
        starts = np.fromiter((row == 0 or entries[row] != entries[row - 1] for row in range(len(entries))), bool, len(entries))
        firsts = np.flatnonzero(starts)
        counts = np.diff([*firsts, len(entries)])
        positions = np.arange(len(entries)) - np.repeat(firsts, counts)
        index = table.schema.get_field_index(POSITION)
        return table.set_column(index, self._layout.schema.field(POSITION), pa.array(positions.astype(np.int32)))
