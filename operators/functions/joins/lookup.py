"""Lookup joins: rows enriched by what a user's function knows of their keys, or by a table that travels with the job.

Calls go through the machinery of `async_map`: many under way, with timeouts and retries, rows in flight in the state. A call gets
the keys of some rows that are not in the cache, each once. The cache belongs to one subtask and one attempt, and is no state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.functions.async_map import AsyncMapOperator, Request, check_async_settings
from holdfast.operators.functions.joins.output import (
    JoinKeySelector,
    JoinOutput,
    JoinSide,
    On,
    Suffixes,
    join_output,
    join_sides,
)
from holdfast.operators.functions.joins.sides import Mask, Positions
from holdfast.operators.functions.schema import RowType, declared_type, undeclared_error
from holdfast.operators.functions.selectors import key_selector
from holdfast.operators.task.user_failures import shown
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.row_tables.frozen import Rows
from holdfast.statebackends.row_tables.key_codes import key_codes
from holdfast.statebackends.row_tables.probe import MatchFilter, Probe, matches_in
from holdfast.statebackends.row_tables.run import Matches, RowColumns
from holdfast.statebackends.row_tables.table import sorted_run
from holdfast.statebackends.state import NO_TIME, duration_ms

CACHE_ROWS_MAX = 100_000_000
TABLE_BYTES_MAX = 256 << 20
"""Of a table that is looked up: it travels with the job, and each subtask has a copy."""
ROWS_PER_BATCH_MAX = 1 << 15
"""Rows with their matches that are made and emitted at once, where some keys have many."""
ROWS_AT_ONCE_MAX = 1 << 18
"""The same where no key has so many that a batch could have more."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Of what was looked up."""

    rows_max: int = 0
    """Rows, and keys without a row; 0: nothing is kept."""
    ttl_ms: int | None = None
    """How long an answer holds; None: until others push it out."""


class LookupCache:
    """Key -> its rows, least recently used first."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._entries: OrderedDict[Any, tuple[int, list[Any]]] = OrderedDict()
        self._rows = 0

    def __len__(self) -> int:
        """Rows, and keys without a row."""
        return self._rows

    def get(self, key: Any, now_ms: int) -> list[Any] | None:
        """None: it is to be asked for."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        asked_ms, rows = entry
        if self._settings.ttl_ms is not None and now_ms - asked_ms >= self._settings.ttl_ms:
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return rows

    def put(self, key: Any, rows: list[Any], asked_ms: int) -> None:
        """`asked_ms`: when the call began; its answer is as old as that."""
        size = max(1, len(rows))
        if key in self._entries:
            self._drop(key)
        if size > self._settings.rows_max:
            return
        self._entries[key] = asked_ms, rows
        self._rows += size
        while self._rows > self._settings.rows_max:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: Any) -> None:
        _, rows = self._entries.pop(key)
        self._rows -= max(1, len(rows))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is known of the keys of one request's rows."""

    keys: list[Any]
    """Of each row; a row without a key has None."""
    known: dict[Any, list[Any]]
    wanted: list[Any]
    """The others, each once, in the order of the rows."""
    asked_ms: int


class LookupJoinOperator(AsyncMapOperator):
    """Rows with what a function returns for their keys."""

    def __init__(
        self,
        function: Callable[[list[Any]], Any],
        left: JoinSide,
        right: RowType,
        result: JoinOutput,
        cache: CacheSettings,
        *,
        keeps_unmatched: bool,
        **settings: Any,
    ) -> None:
        """`settings`: of `async_map`."""
        super().__init__(function, left.row_type, result.row_type, **settings)
        self.left = left
        self.right = right
        self.result = result
        self.cache = cache
        self.keeps_unmatched = keeps_unmatched

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._cache = LookupCache(self.cache)
        self._asked: dict[Request, _Asked] = {}

    def _call(self, request: Request) -> None:
        asked = self._asked[request] = self._ask(request)
        if asked.wanted:
            super()._call(request)
            return
        request.is_done = self._is_due = True
        if not self.ordered:
            request.segment.answered.append(request)

    def _argument(self, request: Request) -> Any:
        return list(self._asked[request].wanted)

    def _ask(self, request: Request) -> _Asked:
        rows, context, selector = request.batch.slice(request.start, request.count), self.context, self.left.selector
        found = selector.keys(rows, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask)
        keys: list[Any] = found.values()
        if (keyless := selector.without_key(rows)) is not None:
            keys = [None if is_null else key for key, is_null in zip(keys, keyless.tolist(), strict=True)]
        now_ms = context.monotonic_ms()
        known: dict[Any, list[Any]] = {}
        wanted: list[Any] = []
        for key in dict.fromkeys(keys):
            if key is None:
                continue
            cached = self._cache.get(key, now_ms)
            if cached is None:
                wanted.append(key)
            else:
                known[key] = cached
        return _Asked(keys, known, wanted, now_ms)

    def _emit_results(self, ready: list[Request]) -> None:
        for request in ready:
            asked = self._asked.pop(request)
            if request.error is not None:
                self._failed_call(request.error, request)
                continue
            try:
                found = answers(asked.wanted, request.results) if asked.wanted else {}
            except ValueError as error:
                self._failed_call(error, request)
                continue
            if self.cache.rows_max:
                for key, rows in found.items():
                    self._cache.put(key, rows, asked.asked_ms)
            self._emit_joined(request, asked.keys, {**asked.known, **found})

    def _emit_joined(self, request: Request, keys: list[Any], found: dict[Any, list[Any]]) -> None:
        """Each row of the request with each of its key's rows, in order."""
        flat: list[Any] = []
        places: dict[Any, tuple[int, int]] = {None: (0, 0)}
        for key, rows in found.items():
            places[key] = len(flat), len(rows)
            flat += rows
        schema = self.right.schema
        looked_up = Batch(rows=flat, schema=schema, row_factory=self.right.record, producer=self.context.uid).columns()
        starts, counts = np.array([places[key] for key in keys], np.int64).T
        batch = request.batch.slice(request.start, request.count)
        for left, at, matched in pairs(starts, counts, keeps_unmatched=self.keeps_unmatched):
            emit_pairs(self.output, self.result, self.left, batch, left, looked_up.columns, at, matched)


class TableLookupOperator(Operator):
    """Rows with those of a table that has their key."""

    def __init__(
        self, table: pa.RecordBatch, left: JoinSide, right: JoinSide, result: JoinOutput, *, keeps_unmatched: bool
    ) -> None:
        self.table = table
        self.left = left
        self.right = right
        self.result = result
        self.keeps_unmatched = keeps_unmatched

    def open(self) -> None:
        batch = Batch(columns=self.table)
        keyless = self.right.selector.without_key(batch)
        if keyless is not None:
            batch = batch.filter(~keyless)
        keys, count = self._keys(self.right, batch), batch.num_rows
        arrays = [*keys.arrays, *self.right.values(batch.columns())]
        values = [field.name for field in self.right.columns]
        prefix = "key_"
        while any(name.startswith(prefix) for name in values):
            prefix = f"_{prefix}"
        names = [*(f"{prefix}{position}" for position in range(len(keys.arrays))), *values]
        schema = pa.schema([pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)])
        orders, nothing = np.arange(count), np.zeros(count, np.int64)
        rows = Rows(key_codes(keys), orders, nothing, np.full(count, NO_TIME), pa.RecordBatch.from_arrays(arrays, schema=schema))
        self._columns = RowColumns(schema, len(keys.arrays))
        self._names = names[len(keys.arrays) :]
        run = sorted_run([rows], schema, len(keys.arrays))
        self._runs = [] if run is None else [run]
        self._matches_max = 0 if run is None else int(np.unique(run.codes, return_counts=True)[1].max())
        """Rows of the table that a key has at most."""

    def _keys(self, side: JoinSide, batch: Batch) -> Any:
        context = self.context
        return side.selector.keys(
            batch, max_parallelism=context.max_parallelism, operator=context.uid, subtask=context.subtask
        )

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if not batch.num_rows:
            return
        keyless = self.left.selector.without_key(batch)
        is_matched = np.zeros(batch.num_rows, np.bool_)
        settled = 0
        for found, complete in self._matches(self._keys(self.left, batch)):
            if keyless is not None:
                found = found.select(~keyless[found.queries])
            is_matched[found.queries] = True
            lone = np.flatnonzero(~is_matched[settled:complete]) + settled
            settled = complete
            self._emit(batch, found, lone if self.keeps_unmatched else lone[:0])

    def _matches(self, keys: Any) -> Iterator[tuple[Matches, int]]:
        """(some rows of the table by key, how many of the keys are done)."""
        asked = MatchFilter(None, None)
        if len(keys) * self._matches_max <= ROWS_AT_ONCE_MAX:
            yield matches_in(self._runs, keys, asked, self._columns), len(keys)
            return
        probe, nothing = Probe(self._runs, keys, asked, None, self._columns), np.empty(0, np.int64)
        complete = 0
        while complete < len(keys):
            found = probe.next(ROWS_PER_BATCH_MAX)
            complete = probe.complete
            yield Matches(self._runs, nothing, nothing, nothing, self._columns) if found is None else found, complete

    def _emit(self, batch: Batch, found: Matches, lone: Positions) -> None:
        """Rows with their matches, and rows without one, in the order of the batch."""
        rows, columns = found.queries, found.take(self._names).columns if self._names else []
        places, matched = np.arange(len(rows)), np.ones(len(rows), np.bool_)
        if len(lone):
            rows = np.concatenate([rows, lone])
            order = np.argsort(rows, kind="stable")
            places, matched = (np.concatenate([each, np.zeros(len(lone), each.dtype)])[order] for each in (places, matched))
            rows = rows[order]
        emit_pairs(self.output, self.result, self.left, batch, rows, columns, places, matched)


def answers(keys: list[Any], result: Any) -> dict[Any, list[Any]]:
    """Rows of each key, of what a call returned. Raises ValueError for what is neither a mapping nor a list of as many entries."""
    if isinstance(result, Mapping):
        entries: Sequence[Any] = [result.get(key) for key in keys]
    elif isinstance(result, list | tuple) and len(result) == len(keys):
        entries = result
    else:
        found = f"{len(result)} entries" if isinstance(result, list | tuple) else shown(result)
        raise ValueError(
            f"returned {found} for {len(keys)} keys; it must return a mapping of keys to rows, or a list with an entry for each "
            "key: a row, a list of rows, or None"
        )
    return {
        key: [] if entry is None else entry if isinstance(entry, list) else [entry]
        for key, entry in zip(keys, entries, strict=True)
    }


def pairs(starts: Positions, counts: Positions, *, keeps_unmatched: bool) -> Iterator[tuple[Positions, Positions, Mask]]:
    """(row, place of a match, whether there is one), row by row, of `counts` matches each that begin at `starts`; up to
    ROWS_PER_BATCH_MAX at once."""
    each = np.maximum(counts, 1) if keeps_unmatched else counts
    ends = np.cumsum(each)
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, ROWS_PER_BATCH_MAX):
        numbers = np.arange(first, min(first + ROWS_PER_BATCH_MAX, total))
        rows = np.searchsorted(ends, numbers, side="right")
        yield rows, numbers - (ends - each - starts)[rows], counts[rows] > 0


def emit_pairs(
    output: Output,
    result: JoinOutput,
    left: JoinSide,
    batch: Batch,
    rows: Positions,
    right: Sequence[pa.Array],
    places: Positions,
    matched: Mask,
) -> None:
    """The rows of a batch, each with the columns of its match, or with nulls."""
    if not len(rows):
        return
    columns = batch.columns()
    taken = None if _are_all(rows, batch.num_rows) else pa.array(rows)
    found = None if matched.all() and right and _are_all(places, len(right[0])) else pa.array(places, mask=~matched)
    keys, values = (_taken(arrays, taken) for arrays in (left.key_values(columns), left.values(columns)))
    stamps = batch.timestamps
    times = np.zeros(len(rows), np.int64) if stamps is None else stamps[rows]
    made = result.batch(keys, values, _taken(right, found), times)
    output.collect(made if stamps is not None else Batch(columns=made.columns()))


def _are_all(rows: Positions, count: int) -> bool:
    """Whether these are all of so many rows, each once, in order."""
    return len(rows) == count and bool((rows == np.arange(count)).all())


def _taken(arrays: Sequence[pa.Array], rows: pa.Array | None) -> list[pa.Array]:
    return list(arrays) if rows is None else [array.take(rows) for array in arrays]


def check_lookup(how: Any, cache_rows: Any, cache_ttl: Any, operator: str) -> CacheSettings:
    """Raises GraphError naming the operator."""
    if how not in ("inner", "left"):
        raise GraphError(f"operator {operator!r}: how is 'inner' or 'left', not {how!r}", operator=operator)
    if type(cache_rows) is not int or not 0 <= cache_rows <= CACHE_ROWS_MAX:
        raise GraphError(
            f"operator {operator!r}: cache_rows must be 0..{CACHE_ROWS_MAX}, not {cache_rows!r}",
            operator=operator,
            setting="cache_rows",
        )
    try:
        ttl_ms = None if cache_ttl is None else duration_ms(cache_ttl, "cache_ttl_ms")
    except InvalidConfigError as error:
        raise GraphError(f"operator {operator!r}: {error}", operator=operator, setting="cache_ttl_ms") from error
    if ttl_ms is not None and (ttl_ms < 1 or not cache_rows):
        reason = "must be at least 1" if ttl_ms < 1 else "needs cache_rows"
        raise GraphError(f"operator {operator!r}: cache_ttl_ms {reason}", operator=operator, setting="cache_ttl_ms")
    return CacheSettings(cache_rows, ttl_ms)


def function_lookup(
    function: Callable[[list[Any]], Any],
    left: RowType,
    on: On,
    how: Any,
    returns: Any,
    suffixes: Suffixes | None,
    cache: CacheSettings,
    operator: str,
    *,
    batch_rows: int,
    **settings: Any,
) -> LookupJoinOperator:
    """The operator of `stream.lookup_join(function, on, returns=)`; `settings` are those of `async_map`.

    Raises GraphError naming the operator."""
    if left.schema is None:
        raise undeclared_error(operator, "columns")
    left.check_rows(operator)
    if returns is None:
        raise GraphError(f"operator {operator!r}: give returns=, the columns of what the function finds", operator=operator)
    if batch_rows is None:
        raise GraphError(f"operator {operator!r}: batch_rows must be at least 1", operator=operator, setting="batch_rows")
    check_async_settings(settings["capacity"], settings["timeout_ms"], batch_rows, settings["retry"], operator)
    names = [on] if isinstance(on, str) else on
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise GraphError(f"operator {operator!r}: on= is a column of the stream, or several, not {on!r}", operator=operator)
    key_type = key_selector(list(names), None, left, operator).key_type
    right = declared_type(returns, operator)
    sides = JoinSide(left, JoinKeySelector(list(names), key_type)), JoinSide(right, JoinKeySelector([], key_type))
    return LookupJoinOperator(
        function,
        sides[0],
        right,
        join_output(*sides, how, suffixes, operator),
        cache,
        keeps_unmatched=how == "left",
        batch_rows=batch_rows,
        **settings,
    )


def table_lookup(
    table: pa.Table | pa.RecordBatch, left: RowType, on: On, how: Any, suffixes: Suffixes | None, operator: str
) -> TableLookupOperator:
    """The operator of `stream.lookup_join(table, on)`. Raises GraphError naming the operator."""
    rows = pa.Table.from_batches([table]) if isinstance(table, pa.RecordBatch) else table
    if rows.nbytes > TABLE_BYTES_MAX:
        raise GraphError(
            f"operator {operator!r}: a table of {rows.nbytes:,} bytes can't travel with the job; the limit is {TABLE_BYTES_MAX:,}: "
            "read it as a stream, and join that",
            operator=operator,
        )
    sides = join_sides(on, left, RowType(rows.schema), operator)
    whole = rows.combine_chunks().to_batches()
    batch = whole[0] if whole else pa.RecordBatch.from_pylist([], schema=rows.schema)
    return TableLookupOperator(batch, *sides, join_output(*sides, how, suffixes, operator), keeps_unmatched=how == "left")
