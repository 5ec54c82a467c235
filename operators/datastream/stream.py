"""The DSL: streams, keyed streams and windows. Each call adds a node to the graph; nothing runs before `Environment.execute`.

Columns, types and keys are checked as the calls are made, so that an error points at the line that caused it. On a keyed
stream process functions, windows and running aggregates keep state per key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from typing import Any, Literal, Protocol, Self, overload

import pyarrow as pa

from holdfast.barriers.jobgraph import Partitioning
from holdfast.operators.base import JobPlan, Operator
from holdfast.operators.datastream.graph import Chaining, StreamEdge, StreamGraph, StreamNode
from holdfast.operators.functions.aggregates import Aggregate, columnar_descriptor
from holdfast.operators.functions.async_map import AsyncMapOperator, RetryStrategy, check_async_settings
from holdfast.operators.functions.broadcast import (
    BroadcastProcessFunction,
    BroadcastProcessOperator,
    KeyedBroadcastProcessFunction,
    KeyedBroadcastProcessOperator,
)
from holdfast.operators.functions.connected import (
    CoProcessFunction,
    CoProcessOperator,
    CoRowFunctionOperator,
    KeyedCoProcessFunction,
    KeyedCoProcessOperator,
)
from holdfast.operators.functions.event_time.timestamps import (
    TimestampsOperator,
    alignment_properties,
    check_time_column,
    timestamps_operator,
)
from holdfast.operators.functions.event_time.watermarks import WatermarkStrategy
from holdfast.operators.functions.expressions import condition_operator, select_operator
from holdfast.operators.functions.joins.buffers import JoinInterval
from holdfast.operators.functions.joins.interval import join_interval, planned_join
from holdfast.operators.functions.joins.late import late_outputs
from holdfast.operators.functions.joins.lookup import check_lookup, function_lookup, table_lookup
from holdfast.operators.functions.joins.output import How, On, Suffixes
from holdfast.operators.functions.joins.regular import retained_interval
from holdfast.operators.functions.joins.temporal import temporal_join
from holdfast.operators.functions.joins.windowed import CoGroupFunction, JoinWindows, cogroup, window_join
from holdfast.operators.functions.partitioning import CustomPartitioning, custom_partitioning
from holdfast.operators.functions.process import (
    CallableProcessFunction,
    Collector,
    KeyedFunction,
    PlainProcessOperator,
    ProcessContext,
    ProcessFunction,
    ProcessOperator,
    StatefulFunction,
)
from holdfast.operators.functions.rows import FilterOperator, FlatMapOperator, MapBatchesOperator, MapOperator
from holdfast.operators.functions.running_aggregates import RunningAggregateOperator
from holdfast.operators.functions.schema import UNDECLARED, RowType, annotated_type, declared_type, merged_type, undeclared_error
from holdfast.operators.functions.selectors import Key, OneKeySelector, Selector, key_selector
from holdfast.operators.functions.side_outputs import OutputTag, SideOutputDeclarations, declared_side_outputs, tag_name
from holdfast.operators.functions.skipping import is_skipping
from holdfast.operators.functions.tables.carried import map_with_state_operator, reduce_operator
from holdfast.operators.functions.tables.one_row import Place, deduplication, one_row_operator
from holdfast.operators.functions.tables.top import ranking, top_operator
from holdfast.operators.functions.tables.window_top import window_top_operator
from holdfast.operators.functions.windows.assigners import ASSIGNERS, Global, Session, WindowAssigner
from holdfast.operators.functions.windows.columnar_operators import columnar_window
from holdfast.operators.functions.windows.contents import Contents
from holdfast.operators.functions.windows.evictors import CountEvictor, Evictor
from holdfast.operators.functions.windows.options import (
    RowWindowOptions,
    check_state_names,
    check_window_function,
    stored_row_type,
)
from holdfast.operators.functions.windows.row_functions import PassOn, ProcessWindowFunction, WindowOperator
from holdfast.operators.functions.windows.triggers import CountTrigger, PurgingTrigger, Trigger, check_trigger
from holdfast.operators.sinks.connector import Sink
from holdfast.operators.sinks.simple import PRINTED_ROWS_MAX, PrintSink
from holdfast.operators.task.user_failures import check_returns, function_name
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state import (
    AggregateFunction,
    MapStateDescriptor,
    OperatorListStateDescriptor,
    StateDescriptor,
    duration_ms,
)

DEFAULT_SLOT_SHARING_GROUP = "default"
"""Of all operators (ADR 59)."""

KEYED_UNION = "a union of keyed streams loses the key: call union before key_by"


class StreamEnvironment(Protocol):
    """The Environment as its streams see it: the graph that their operators are added to."""

    @property
    def graph(self) -> StreamGraph: ...

    def build(self) -> JobPlan: ...

    def explain(self, *, format: Literal["text", "json"] = "text") -> str: ...


class Stage:
    """Something that has a node: settings that apply to one operator."""

    def __init__(self, node: StreamNode | None) -> None:
        self._node = node

    def uid(self, uid: str) -> Self:
        """The operator's stable identity: state is found by it when the job is changed and restored."""
        if not uid:
            raise GraphError(f"the uid of {self._own('uid').name!r} must not be empty", operator=self._own("uid").label)
        self._own("uid").uid = uid
        return self

    def name(self, name: str) -> Self:
        """What the operator is called in displays and errors."""
        self._own("name").name = name
        return self

    def set_parallelism(self, parallelism: int) -> Self:
        """Subtasks of this operator, instead of the environment's parallelism."""
        self._own("set_parallelism").parallelism = _at_least_one(parallelism, "parallelism", self._own("set_parallelism"))
        return self

    def set_max_parallelism(self, max_parallelism: int) -> Self:
        """Key groups of this operator: the largest parallelism that its state can ever be restored at."""
        node = self._own("set_max_parallelism")
        node.max_parallelism = _at_least_one(max_parallelism, "max parallelism", node)
        return self

    def start_new_chain(self) -> Self:
        """Put an exchange in front of this operator, instead of running it in the subtask of the one before."""
        self._own("start_new_chain").chaining = Chaining.HEAD
        return self

    def disable_chaining(self) -> Self:
        """Give this operator a subtask of its own."""
        self._own("disable_chaining").chaining = Chaining.NEVER
        return self

    def slot_sharing_group(self, group: str) -> Self:
        """Slots are shared by all operators: subtask i of each runs in slot i. `group`: "default", the one group that they form.

        Any other raises GraphError, which Flink would give slots of its own."""
        node = self._own("slot_sharing_group")
        if group != DEFAULT_SLOT_SHARING_GROUP:
            raise GraphError(
                f"operator {node.label!r} can't be in the slot sharing group {group!r}: all operators share slots, subtask i of "
                f"each runs in slot i, and their one group is {DEFAULT_SLOT_SHARING_GROUP!r}",
                operator=node.label,
                setting="slot_sharing_group",
            )
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._told()}>"

    def _told(self) -> str:
        """The operator and its uid, or that it has none."""
        if self._node is None:
            return "of no operator"
        return f"{self._node.name!r}, {f'uid {self._node.uid!r}' if self._node.uid else 'without uid'}"

    def _own(self, setting: str) -> StreamNode:
        if self._node is None:
            what = "a union, key_by, partitioning or side output"
            raise GraphError(f"{setting}() applies to an operator, not to {what}: call it on what follows")
        return self._node


class Stream(Stage):
    """A stream of rows."""

    def __init__(
        self, environment: StreamEnvironment, inputs: tuple[StreamEdge, ...], row_type: RowType, node: StreamNode | None = None
    ) -> None:
        super().__init__(node)
        self.environment = environment
        self._inputs = inputs
        self._row_type = row_type

    @property
    def schema(self) -> pa.Schema | None:
        """Declared columns; None when the rows are of undeclared type."""
        return self._row_type.schema

    def _told(self) -> str:
        """What the rows are, behind what they come from."""
        if self._node is not None:
            return f"{super()._told()}: {self._row_type.described()}"
        nodes = self.environment.graph.nodes
        sources = ", ".join(repr(nodes[edge.source].label) for edge in self._inputs)
        return f"of {sources}: {self._row_type.described()}"

    # ------------------------------------------------------------------------------------------------- transformations

    def map(self, function: Callable[[Any], Any], *, returns: Any = None, on_error: str = "fail") -> Stream:
        """One row in, one row out. `returns`: pa.Schema, {column: type} or a record type; else the return annotation.

        `on_error`: "fail", or "skip" to leave out the rows on which the function raises, and those that don't fit the declared
        columns. They are counted; `skipped_rows_max` of the Environment is the limit."""
        skips = is_skipping(on_error, "map")
        output = self._declared(function, returns, "map")
        if output.schema is not None:
            check_returns(function, "map")
        self._row_type.check_rows("map")
        return self._add("map", MapOperator(function, self._row_type, output, skips=skips), output)

    def filter(self, function: Callable[[Any], Any] | str, *, on_error: str = "fail") -> Stream:
        """Keep the rows for which the function is true, or which meet a condition in SQL: "price < 10000 and channel = 'Apple'".

        `on_error` as in `map`. Null counts as false. A condition needs the extra `holdfast[sql]`, and columns; it is a scalar
        expression of type BOOLEAN, as in `select`, whose errors it raises."""
        skips = is_skipping(on_error, "filter")
        if isinstance(function, str):
            if self._row_type.schema is None:
                raise undeclared_error("filter", "columns")
            return self._add("filter", condition_operator(function, self._row_type, skips=skips), self._row_type)
        check_returns(function, "filter")
        self._row_type.check_rows("filter")
        return self._add("filter", FilterOperator(function, self._row_type, self._row_type, skips=skips), self._row_type)

    def flat_map(
        self, function: Callable[[Any], Iterable[Any]], *, returns: Any = None, on_error: str = "fail"
    ) -> Stream:
        """One row in, any number out: the function returns or yields rows. `returns` as in `map`, of one row.

        `on_error` as in `map`: a row on which the function raises gives none at all, also of what it had yielded before."""
        skips = is_skipping(on_error, "flat_map")
        check_returns(function, "flat_map")
        output = self._declared(function, returns, "flat_map", each=True)
        self._row_type.check_rows("flat_map")
        return self._add("flat_map", FlatMapOperator(function, self._row_type, output, skips=skips), output)

    def select(self, *columns: str, on_error: str = "fail", **expressions: str) -> Stream:
        """These columns as they are, then computed ones: price_eur="price * 0.908". Event times stay.

        An expression is DuckDB's SQL over one row: nothing across rows, no subquery, nothing that asks the clock, chance or the
        environment. Needs the extra `holdfast[sql]` for them. `on_error` as in `map`: a row on which one fails is left out.

        Raises GraphError with the reason, UnknownColumnError, InvalidConfigError if DuckDB is not installed."""
        skips = is_skipping(on_error, "select")
        if self._row_type.schema is None:
            raise undeclared_error("select", "columns")
        operator = select_operator(columns, expressions, self._row_type, skips=skips)
        return self._add("select", operator, operator.output_type)

    def map_batches(self, function: Callable[[pa.RecordBatch], pa.RecordBatch], *, returns: Any) -> Stream:
        """Columns in, columns out, a record batch at a time; must not depend on where a batch ends.

        `returns`: the pa.Schema of the result, or {column: type}."""
        if self._row_type.schema is None:
            raise undeclared_error("map_batches", "columns")
        output = declared_type(returns, "map_batches")
        return self._add("map_batches", MapBatchesOperator(function, self._row_type, output), output)

    def async_map(
        self,
        function: Callable[[Any], Any],
        *,
        ordered: bool = True,
        capacity: int = 100,
        timeout_ms: int = 60_000,
        retry: RetryStrategy | None = None,
        batch_rows: int | None = None,
        returns: Any = None,
        on_error: str = "fail",
    ) -> Stream:
        """One row in, one row out, by a function that waits for others: a coroutine function, or one that blocks (in a thread).

        `ordered`: rows keep their order; else a result leaves when it is there, and crosses no watermark. `capacity`: calls under
        way on each subtask, 1 .. 100,000; beyond, it takes no input. `timeout_ms`: of each attempt. `retry`: None, one attempt.
        `batch_rows`: the function gets a list of up to so many rows, and returns a list of as many results. `returns` and
        `on_error` as in `map`; a call without an answer is an AsyncTimeoutError. Rows in flight are state, and must be declared."""
        skips = is_skipping(on_error, "async_map")
        output = self._declared(function, returns, "async_map", each=batch_rows is not None)
        check_async_settings(capacity, timeout_ms, batch_rows, retry)
        if self._row_type.schema is None:
            raise undeclared_error("async_map", "columns")
        self._row_type.check_rows("async_map")
        operator = AsyncMapOperator(
            function,
            self._row_type,
            output,
            skips=skips,
            ordered=ordered,
            capacity=capacity,
            timeout_ms=timeout_ms,
            retry=retry,
            batch_rows=batch_rows,
        )
        return self._add("async_map", operator, output, chaining=Chaining.HEAD)

    def assign_timestamps(
        self,
        source: str | Callable[[Any], Any],
        max_out_of_orderness: timedelta | int | None = None,
        *,
        max_out_of_orderness_ms: int | None = None,
        on_error: str = "fail",
    ) -> Stream:
        """Give records their event time, and emit watermarks for records at most so much out of order.

        `source`: a column (int64 ms, or a timestamp with a zone), or a function of the row (ms, or an aware datetime).
        `on_error`: "fail", or "skip" to leave out rows that have no event time, as in `map`."""
        skips = is_skipping(on_error, "assign_timestamps")
        what = "max_out_of_orderness"
        if (max_out_of_orderness is None) == (max_out_of_orderness_ms is None):
            raise GraphError(f"assign_timestamps needs {what}= (a timedelta, or ms) or {what}_ms=, one of them", setting=what)
        bound_ms = duration_ms(max_out_of_orderness if max_out_of_orderness_ms is None else max_out_of_orderness_ms, what)  # type: ignore[arg-type]
        if bound_ms < 0:
            raise GraphError(f"{what} must not be negative, got {bound_ms} ms", setting=what)
        if callable(source):
            check_returns(source, "assign_timestamps")
            self._row_type.check_rows("assign_timestamps")
        else:
            check_time_column(self._row_type.column(source, "assign_timestamps"), "assign_timestamps")
        stream = self._add("timestamps", TimestampsOperator(source, bound_ms, self._row_type, skips=skips), self._row_type)
        stream._own("assign_timestamps").timestamped = True
        return stream

    def assign_timestamps_and_watermarks(self, strategy: WatermarkStrategy, *, on_error: str = "fail") -> Stream:
        """Give records their event time, and emit watermarks, as the strategy says.

        Without a timestamp assigner records keep the event times that they have. `on_error` as of `assign_timestamps`. Raises
        GraphError for records without event times, and for a column that is no event time."""
        what = "assign_timestamps_and_watermarks"
        operator = timestamps_operator(strategy, self._row_type, what, is_timed=self._timestamped, on_error=on_error)
        stream = self._add("timestamps", operator, self._row_type, properties=alignment_properties(strategy))
        stream._own(what).timestamped = True
        return stream

    def process(
        self,
        function: ProcessFunction | Callable[[Any, ProcessContext, Collector], None],
        *,
        states: Sequence[StateDescriptor] = (),
        returns: Any = None,
        side_outputs: SideOutputDeclarations | None = None,
    ) -> Stream:
        """Run a ProcessFunction, or a plain function `(value, ctx, out)` with these `states`, on each record.

        Without keys its states are operator state (`hf.OperatorListStateDescriptor`), and it has no timers: GraphError says so.
        `returns` and `side_outputs` as of `KeyedStream.process`."""
        checked = _process_function(function, states)
        _check_plain(checked, "process")
        self._row_type.check_rows("process")
        output, sides = _declared_outputs(checked, returns, side_outputs, "process")
        operator = PlainProcessOperator(checked, self._row_type, output, sides)
        return self._add("process", operator, output, side_outputs=sides)

    def key_by(self, key: Key, *, key_type: Any = None) -> KeyedStream:
        """Bring equal keys together: a column, several columns, or a deterministic function of the row.

        `key_type` (a Python class, an Arrow type) is needed for a function without a return annotation."""

        selector = key_selector(key, key_type, self._row_type, f"key_by({self._key_text(key)})")
        inputs = tuple(edge.partitioned(Partitioning.HASH, selector=selector) for edge in self._inputs)
        return KeyedStream(self.environment, inputs, self._row_type, selector)

    def window_all(self, windows: WindowAssigner) -> WindowedStream:
        """Group all records into windows, on one subtask, whose speed bounds the job's. Their key is 0; results over columns have
        no column of it. Source: Flink, windowAll."""
        selector = OneKeySelector()
        inputs = tuple(edge.partitioned(Partitioning.HASH, selector=selector) for edge in self._inputs)
        return KeyedStream(self.environment, inputs, self._row_type, selector).window(windows)

    # --------------------------------------------------------------------------------------------------- partitionings

    def union(self, *others: Stream) -> Stream:
        """One stream of the records of all; their columns must be equal. Key the union, not what it is made of."""
        streams = (self, *others)
        for other in others:
            if isinstance(other, KeyedStream):
                raise GraphError(KEYED_UNION)
            if other.environment is not self.environment:
                raise GraphError("a union takes streams of one environment")
        row_type = reduce(lambda left, right: merged_type(left, right, "union"), (stream._row_type for stream in streams))
        return Stream(self.environment, tuple(edge for stream in streams for edge in stream._inputs), row_type)

    @overload
    def connect(self, other: Stream) -> ConnectedStreams: ...
    @overload
    def connect(self, other: BroadcastStream) -> BroadcastConnectedStream: ...
    def connect(self, other: Stream | BroadcastStream) -> ConnectedStreams | BroadcastConnectedStream:
        """Two streams of whatever columns for one operator, which knows the records of each and shares state between them.

        `other` may be broadcast, with its state: `rules.broadcast(RULES)`."""
        if not isinstance(other, Stream | BroadcastStream):
            raise GraphError(f"connect takes a stream, not {other!r}")
        if other.environment is not self.environment:
            raise GraphError("connect takes streams of one environment")
        return BroadcastConnectedStream(self, other) if isinstance(other, BroadcastStream) else ConnectedStreams(self, other)

    def interval_join(
        self,
        right: Stream,
        *,
        on: On,
        lower: timedelta | int | None = None,
        upper: timedelta | int | None = None,
        how: How = "inner",
        lower_exclusive: bool = False,
        upper_exclusive: bool = False,
        late_left: OutputTag | str | None = None,
        late_right: OutputTag | str | None = None,
        suffixes: Suffixes | None = None,
    ) -> Stream:
        """Pairs of rows with equal keys, of which the right one's event time is `lower` to `upper` (ms, or timedeltas) behind the
        left one's. A pair comes out once, with the later time.

        `on`: a column, a pair (left, right), or several. `how`: "inner", "left", "right" or "full"; a row without a partner comes
        out when none can follow, with that time: t + upper of the left, t - lower of the right. `late_left`, `late_right`: side
        outputs of late rows, which else are dropped and counted. `suffixes` part columns of one name. Raises GraphError."""
        interval = join_interval(
            lower, upper, "interval_join", lower_exclusive=lower_exclusive, upper_exclusive=upper_exclusive
        )
        return self._timed_join("interval_join", right, (late_left, late_right), on, how, suffixes, interval)

    def join(
        self,
        right: Stream,
        *,
        on: On,
        retain: timedelta | int | tuple[timedelta | int, timedelta | int] | None = None,
        how: How = "inner",
        late_left: OutputTag | str | None = None,
        late_right: OutputTag | str | None = None,
        suffixes: Suffixes | None = None,
    ) -> Stream:
        """Pairs of rows with equal keys, whichever came first, as long as rows are retained: `retain` ms of event time, or a
        timedelta, or a pair for left and right. The same as an `interval_join` from -right to left, where the rest is said."""
        interval = retained_interval(retain, "join")
        return self._timed_join("join", right, (late_left, late_right), on, how, suffixes, interval)

    def _timed_join(
        self,
        what: str,
        right: Stream,
        late: tuple[OutputTag | str | None, OutputTag | str | None],
        on: On,
        how: How,
        suffixes: Suffixes | None,
        interval: JoinInterval,
    ) -> Stream:
        _check_timed(what, self, right)
        inputs = self._row_type, right._row_type
        outputs = late_outputs(late, inputs, what)
        plan = planned_join(inputs, outputs, on, how, suffixes, interval, what)
        settings = {"properties": plan.properties, "side_outputs": outputs.types}
        selectors = plan.sides[0].selector, plan.sides[1].selector
        return _add_join(self, right, what, plan.operator, selectors, plan.operator.output_type, **settings)

    def temporal_join(
        self, versions: Stream, *, on: On, how: Literal["inner", "left"] = "inner", suffixes: Suffixes | None = None
    ) -> Stream:
        """Each row with the version of its key that was valid at its event time: the last one up to then.

        Rows of `versions` hold from their event time until the next one of their key; of equal times the later arrival holds. A
        result leaves when the watermark passes its row's time. `on`, `suffixes` and the columns as of the other joins."""
        what = "temporal_join"
        _check_timed(what, self, versions)
        operator = temporal_join(self._row_type, versions._row_type, on, how, suffixes, what)
        selectors = operator.left.side.selector, operator.right.side.selector
        return _add_join(self, versions, what, operator, selectors, operator.result.row_type)

    def window_join(
        self,
        right: Stream,
        *,
        on: On,
        window: JoinWindows,
        how: How = "inner",
        late_left: OutputTag | str | None = None,
        late_right: OutputTag | str | None = None,
        suffixes: Suffixes | None = None,
    ) -> Stream:
        """All pairs of rows of one key and one window of event time, when the window fires; their time is its last millisecond.

        `window`: Tumbling, Sliding or Session, whose records are those of both sides. `how`: also rows of a window without a
        partner. A row is late when all of its windows have fired. `late_left`, `late_right`, `on`, `suffixes` and the columns as
        of the other joins."""
        what = "window_join"
        _check_timed(what, self, right)
        late = late_outputs((late_left, late_right), (self._row_type, right._row_type), what)
        operator = window_join(self._row_type, right._row_type, on, window, how, suffixes, what, late.tags)
        one, other = (side.side.selector for side in operator.sides)
        return _add_join(self, right, what, operator, (one, other), operator.result.row_type, side_outputs=late.types)

    def cogroup(
        self,
        right: Stream,
        function: CoGroupFunction,
        *,
        on: On,
        window: JoinWindows,
        returns: Any = None,
        late_left: OutputTag | str | None = None,
        late_right: OutputTag | str | None = None,
    ) -> Stream:
        """`function(key, window, left rows, right rows)` of each key and window that has rows, when the window fires: it returns
        or yields rows. One of the lists may be empty. `window`, `late_left` and `late_right` as of `window_join`; `returns` as of
        `flat_map`."""
        what = "cogroup"
        _check_timed(what, self, right)
        output = self._declared(function, returns, what, each=True)
        late = late_outputs((late_left, late_right), (self._row_type, right._row_type), what)
        operator = cogroup(self._row_type, right._row_type, on, window, function, output, what, late.tags)
        return _add_join(self, right, what, operator, operator.selectors, output, side_outputs=late.types)

    def lookup_join(
        self,
        lookup: Callable[[list[Any]], Any] | pa.Table | pa.RecordBatch,
        *,
        on: On,
        how: Literal["inner", "left"] = "inner",
        returns: Any = None,
        suffixes: Suffixes | None = None,
        cache_rows: int = 0,
        cache_ttl_ms: int | None = None,
        ordered: bool = True,
        capacity: int = 10,
        timeout_ms: int = 60_000,
        retry: RetryStrategy | None = None,
        batch_rows: int = 1_000,
        on_error: str = "fail",
    ) -> Stream:
        """Each row with the rows that `lookup` has of its key: a table that travels with the job, or a function that is asked.

        The function, which may be a coroutine function, gets the keys of up to `batch_rows` rows, each once. It returns a mapping
        of keys to rows, or a list with an entry for each key: a row, a list of rows, or None. `returns`: their columns, beside
        the key's. `cache_rows`: rows kept on each subtask, 0: none; `cache_ttl_ms`: how long. Other settings as of `async_map`."""
        what = "lookup_join"
        skips = is_skipping(on_error, what)
        cache = check_lookup(how, cache_rows, cache_ttl_ms, what)
        if isinstance(lookup, pa.Table | pa.RecordBatch):
            table = table_lookup(lookup, self._row_type, on, how, suffixes, what)
            return self._add(what, table, table.result.row_type)
        self._declared(lookup, None, what)
        calls = {"ordered": ordered, "capacity": capacity, "timeout_ms": timeout_ms, "retry": retry, "batch_rows": batch_rows}
        settings: dict[str, Any] = {**calls, "skips": skips}
        asking = function_lookup(lookup, self._row_type, on, how, returns, suffixes, cache, what, **settings)
        return self._add(what, asking, asking.output_type, chaining=Chaining.HEAD)

    def side_output(self, tag: OutputTag | str) -> Stream:
        """The rows that the operator emits with this tag (`ctx.output(tag, row)`), as a stream like any other.

        Raises GraphError for a tag that the operator does not declare."""
        node, name = self._own("side_output"), tag_name(tag)
        if name not in node.side_outputs:
            declared = ", ".join(node.side_outputs) or "none"
            raise GraphError(
                f"operator {node.label!r} has no side output {name!r}; declared: {declared}. Declare it in side_outputs",
                operator=node.label,
            )
        return Stream(self.environment, (StreamEdge(node.index, side_output=name),), node.side_outputs[name])

    def rebalance(self) -> Stream:
        """Deal the records to the next operator's subtasks in turn."""
        return self._partitioned(Partitioning.REBALANCE)

    @overload
    def broadcast(self) -> Stream: ...
    @overload
    def broadcast(
        self, state: MapStateDescriptor[Any, Any], /, *states: MapStateDescriptor[Any, Any]
    ) -> BroadcastStream: ...
    def broadcast(self, *states: MapStateDescriptor[Any, Any]) -> Stream | BroadcastStream:
        """Give every record to every subtask of the next operator.

        With `states` it is the broadcast side of `other.connect(...)`: each is a map that its records write, and of which all
        subtasks have an equal copy."""
        stream = self._partitioned(Partitioning.BROADCAST)
        return BroadcastStream(stream, states) if states else stream

    def forward(self) -> Stream:
        """Keep records on their subtask; the next operator must have the same parallelism."""
        return self._partitioned(Partitioning.FORWARD)

    def rescale(self) -> Stream:
        """Deal the records in turn to a group of neighbouring subtasks: without a channel from each subtask to each.

        Subtasks of the side with fewer get groups of the other side whose sizes differ by one at most."""
        return self._partitioned(Partitioning.RESCALE)

    def shuffle(self, seed: int = 0) -> Stream:
        """Give each record to a pseudo-random subtask of the next operator, by seed, sending subtask and the record's number.

        Numbers begin at 0 in each attempt: after a restore records may go to other subtasks than before. `seed`: int64; else
        GraphError is raised."""
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise GraphError(f"the seed of shuffle must be an integer of 64 bits, not {seed!r}", setting="seed")
        return self._partitioned(Partitioning.SHUFFLE, seed=seed)

    def global_(self) -> Stream:
        """Give every record to subtask 0 of the next operator; its other subtasks get none."""
        return self._partitioned(Partitioning.GLOBAL)

    def partition_custom(self, function: Callable[[Any, int], int], key: Key) -> Stream:
        """Give each record to the subtask that `function(key, parallelism)` returns, from 0 to parallelism - 1.

        `key`: a column, several columns (a tuple), or a function of the row. What follows has no keyed state: its key groups
        lie where `key_by` has them. Anything but such a subtask fails the job with PartitionOutOfRangeError."""
        return self._partitioned(Partitioning.CUSTOM, custom=custom_partitioning(function, key, self._row_type))

    # ------------------------------------------------------------------------------------------------------------ ends

    def sink_to(self, sink: Sink, *, name: str | None = None, uid: str | None = None) -> StreamSink:
        """Write the stream to a two-phase sink, exactly once."""
        label = uid or name or sink.name
        if sink.needs_columns and self._row_type.schema is None:
            raise undeclared_error(label, "columns")
        node = self.environment.graph.add(
            "sink", name or sink.name, self._inputs, sink=sink, input_type=self._row_type, uid=uid, timestamped=self._timestamped
        )
        return StreamSink(node)

    def print(self, *, limit: int | None = PRINTED_ROWS_MAX, uid: str | None = None) -> StreamSink:
        """Write rows where the job's workers write to, on `local[N]` the driver's terminal: for a look, not exactly once.

        `limit`: rows of each subtask; None: all."""
        return self.sink_to(PrintSink(limit=limit), uid=uid)

    # -------------------------------------------------------------------------------------------------------- internal

    def _add(self, kind: str, operator: Operator, output: RowType, **settings: Any) -> Stream:
        node = self.environment.graph.add(
            kind,
            kind,
            self._inputs,
            operator=operator,
            input_type=self._row_type,
            output_type=output,
            timestamped=self._timestamped,
            **settings,
        )
        return Stream(self.environment, (StreamEdge(node.index),), output, node)

    def _partitioned(
        self,
        partitioning: Partitioning,
        *,
        selector: Selector | None = None,
        seed: int | None = None,
        custom: CustomPartitioning | None = None,
    ) -> Stream:
        inputs = tuple(edge.partitioned(partitioning, selector=selector, seed=seed, custom=custom) for edge in self._inputs)
        return Stream(self.environment, inputs, self._row_type)

    @property
    def _timestamped(self) -> bool:
        nodes = self.environment.graph.nodes
        return all(nodes[edge.source].timestamped and not nodes[edge.source].is_untimed(edge.side_output) for edge in self._inputs)

    def _declared(self, function: Callable[..., Any], returns: Any, operator: str, *, each: bool = False) -> RowType:
        if not callable(function):
            raise GraphError(f"operator {operator!r}: {function!r} is not a function", operator=operator)
        return annotated_type(function, operator, each=each) if returns is None else declared_type(returns, operator)

    @staticmethod
    def _key_text(key: Key) -> str:
        if callable(key):
            return function_name(key)
        return key if isinstance(key, str) else ", ".join(map(str, key))


class StreamSink(Stage):
    """The end of a stream."""

    def _told(self) -> str:
        return f"{super()._told()}: {self._own('repr').sink!r}"


def _at_least_one(value: int, what: str, node: StreamNode) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidConfigError(f"the {what} of {node.label!r} must be at least 1, not {value!r}", operator=node.label)
    return value


class KeyedStream(Stream):
    """A stream whose records are brought together by key. `map`, `filter` and sinks see each key on one subtask."""

    def __init__(
        self, environment: StreamEnvironment, inputs: tuple[StreamEdge, ...], row_type: RowType, selector: Selector
    ) -> None:
        super().__init__(environment, inputs, row_type)
        self._selector = selector

    def _told(self) -> str:
        return f"by {self._selector!r} ({self._selector.key_type_text}) {super()._told()}"

    def process(
        self,
        function: ProcessFunction | Callable[[Any, ProcessContext, Collector], None],
        *,
        states: Sequence[StateDescriptor] = (),
        returns: Any = None,
        side_outputs: SideOutputDeclarations | None = None,
    ) -> Stream:
        """Run a ProcessFunction, or a plain function `(value, ctx, out)` with these `states`, on each record of a key.

        `side_outputs`: {tag: columns}, or hf.OutputTags, of what it emits with `ctx.output`; None: as the function declares."""
        function = _process_function(function, states)
        self._row_type.check_rows("process")
        output, sides = _declared_outputs(function, returns, side_outputs, "process")
        operator = ProcessOperator(function, self._selector, self._row_type, output, sides)
        stream = self._add_keyed("process", operator, output)
        stream._own("process").side_outputs.update(sides)
        if operator.uses_timers:
            stream._own("process").properties["timers"] = True
        return stream

    def window(self, windows: WindowAssigner) -> WindowedStream:
        """Group each key's records into windows, of event time or, with `time="processing"`, of processing time."""
        if not isinstance(windows, ASSIGNERS):
            raise GraphError(f"operator 'window': {windows!r} is not a window such as hf.Tumbling(minutes=1)", operator="window")
        if windows.is_event_time and not self._timestamped:
            raise GraphError(
                "operator 'window': event-time windows need event times and watermarks: call assign_timestamps before key_by",
                operator="window",
            )
        return WindowedStream(self, windows)

    def count_window(self, count: int, slide: int | None = None) -> WindowedStream:
        """Windows of so many records of a key: each `count`, side by side, or, every `slide` records, the last `count`.

        What is left at the end of input does not fire. Raises InvalidConfigError for less than 1. Source: Flink, countWindow."""
        windowed = WindowedStream(self, Global())
        if slide is None:
            return windowed.trigger(PurgingTrigger(CountTrigger(count)))
        return windowed.evictor(CountEvictor(count)).trigger(CountTrigger(slide))

    def aggregate(self, *, emit: str = "changes", **aggregates: Aggregate) -> Stream:
        """Running aggregates per key. emit: `changes` (after each batch the new rows of its keys) or `none`."""
        if emit not in ("changes", "none"):
            raise GraphError(f"operator 'aggregate': emit must be 'changes' or 'none', not {emit!r}", operator="aggregate")
        self._need_columns("aggregate")
        descriptor = columnar_descriptor("aggregates", aggregates, self._row_type, self._selector.names, "aggregate")
        operator = RunningAggregateOperator(descriptor, self._selector, self._row_type, emits_changes=emit == "changes")
        return self._add_keyed("aggregate", operator, operator.output_type)

    # -------------------------------------------------------------------------------------------------------- tables

    def top(
        self,
        n: int,
        by: str | Sequence[str],
        *,
        descending: bool | Sequence[bool] = True,
        ties: str = "earlier",
        rank_column: str = "rank",
    ) -> Stream:
        """The first n rows of each key by one or several columns: updates, each the row that a rank (1 .. n) now has.

        The last update of (key, rank) counts; a rank never loses its row. `descending`: from the greatest value (NaN) on;
        of all columns, or one for each. Null comes last. `ties`: of equals the "earlier" or the "later" comes first, by
        event time, then by arrival. Event time of an update: the latest of the rows up to its rank. Raises GraphError,
        UnknownColumnError."""
        operator = top_operator(ranking(n, by, descending, ties, rank_column), self._selector, self._row_type)
        return self._add_keyed("top", operator, operator.output_type, n=n)

    def deduplicate(self, *, keep: str = "first", by: str | None = None, ttl: timedelta | int | None = None) -> Stream:
        """One row of each key: the "first" or the "last" by a column such as the event time, or (None) by arrival.

        Rows pass that are the first, or the last, so far: the last one of a key counts, and without `by` the first is final.
        Null is behind all others. `ttl`: a timedelta, or ms of processing time after which a key is forgotten, from the row that
        passed last. Raises GraphError, UnknownColumnError, InvalidConfigError."""
        return self._one_row("deduplicate", deduplication(keep, by, ttl))

    def max_by(self, column: str) -> Stream:
        """Each row with a greater value than all earlier ones of its key; of equals the earliest, by event time, then by arrival.

        The last row of a key counts. NaN is the greatest number, null the least of all. Source: Flink, maxBy, which emits for
        every record."""
        return self._one_row("max_by", Place(column, greatest=True, latest=False))

    def min_by(self, column: str) -> Stream:
        """As `max_by`, of the least value; null comes behind all others."""
        return self._one_row("min_by", Place(column, greatest=False, latest=False))

    def _one_row(self, kind: str, place: Place) -> Stream:
        operator = one_row_operator(kind, place, self._selector, self._row_type, is_timed=self._timestamped)
        return self._add_keyed(kind, operator, self._row_type)

    def reduce(
        self, function: Callable[[Any, Any], Any], *, row_type: Any = None, ttl: timedelta | int | None = None
    ) -> Stream:
        """The rows of each key combined to one, `function(old, row)`, which is emitted for every row. Source: Flink, reduce.

        `row_type`: type of the rows where they have no declared columns. `ttl`: as of a state (hf.Ttl), ms or a timedelta."""
        operator = reduce_operator(function, self._selector, self._row_type, row_type, ttl)
        return self._add_keyed("reduce", operator, operator.output_type)

    def map_with_state(
        self,
        function: Callable[[Any, Any], tuple[Any, Any]],
        state_type: Any,
        *,
        returns: Any = None,
        ttl: timedelta | int | None = None,
    ) -> Stream:
        """`function(row, value)` returns (row to emit or None, the key's new value or None to forget it).

        It gets None where the key has no value. `state_type`: of the value, as of a state descriptor. `returns` as in `map`; `ttl`
        as of `reduce`. Source: Flink's Scala API, mapWithState."""
        operator = map_with_state_operator(function, self._selector, self._row_type, state_type, returns, ttl)
        return self._add_keyed("map_with_state", operator, operator.output_type)

    def union(self, *others: Stream) -> Stream:
        """Refused: unite the streams first, then key the union."""
        raise GraphError(KEYED_UNION)

    def _add_keyed(self, kind: str, operator: Operator, output: RowType, **properties: Any) -> Stream:
        stream = self._add(kind, operator, output, selector=self._selector, properties=properties)
        return stream if self._selector.is_shown else stream.set_parallelism(1)

    def _need_columns(self, operator: str) -> None:
        if self._row_type.schema is None:
            raise undeclared_error(operator, "columns")


def _process_function(
    function: ProcessFunction | Callable[[Any, ProcessContext, Collector], None], states: Sequence[StateDescriptor]
) -> ProcessFunction:
    """What `process` is given, as a ProcessFunction. Raises GraphError."""
    if not isinstance(function, ProcessFunction):
        if isinstance(function, type) or not callable(function):
            raise GraphError(f"operator 'process': {function!r} is neither a ProcessFunction instance nor a function")
        function = CallableProcessFunction(function, tuple(states))
    elif states:
        raise GraphError("operator 'process': a ProcessFunction declares its own states; don't give states=")
    if type(function).process_element is ProcessFunction.process_element and "process_element" not in vars(function):
        raise GraphError(f"operator 'process': {type(function).__name__} must define process_element")
    return function


def _check_plain(function: StatefulFunction, operator: str) -> None:
    """Raise GraphError for a function that needs a key, on a stream without one."""
    for state in function.states:
        if not isinstance(state, OperatorListStateDescriptor):
            name = getattr(state, "name", state)
            raise GraphError(
                f"operator {operator!r}: the state {name!r} of {type(function).__name__} is kept per key, and the stream has no "
                "key: call key_by before it, or declare an OperatorListStateDescriptor",
                operator=operator,
            )
    if getattr(type(function), "on_timer", KeyedFunction.on_timer) is not KeyedFunction.on_timer:
        raise GraphError(
            f"operator {operator!r}: {type(function).__name__} defines on_timer, and timers belong to a key: call key_by before it",
            operator=operator,
        )


def _check_defines(function: StatefulFunction, base: type[StatefulFunction], operator: str, *methods: str) -> None:
    """Raise GraphError for what is no instance of `base`, or lacks one of its methods."""
    if not isinstance(function, base):
        raise GraphError(f"operator {operator!r}: {function!r} is not a {base.__name__} instance", operator=operator)
    for method in methods:
        if getattr(type(function), method) is getattr(base, method):
            raise GraphError(f"operator {operator!r}: {type(function).__name__} must define {method}", operator=operator)


def _declared_outputs(
    function: StatefulFunction, returns: Any, side_outputs: SideOutputDeclarations | None, operator: str
) -> tuple[RowType, dict[str, RowType]]:
    """Rows of the main output and of each side output, by what the call or else the function declares."""
    declared = function.returns if returns is None else returns
    sides = function.side_outputs if side_outputs is None else side_outputs
    output = UNDECLARED if declared is None else declared_type(declared, operator)
    return output, declared_side_outputs(sides, operator)


class ConnectedStreams:
    """Two streams whose records go to one operator: `map` and `flat_map` with a function for each, or, by key, `process`."""

    def __init__(self, first: Stream, second: Stream) -> None:
        self._streams = (first, second)

    def __repr__(self) -> str:
        first, second = self._streams
        return f"<ConnectedStreams of {first!r} and {second!r}>"

    def key_by(self, key1: Key, key2: Key, *, key_type: Any = None) -> ConnectedStreams:
        """Bring equal keys of both streams together: a key of the first, and a key of the second, which have one type.

        `key_type` as of `Stream.key_by`, for both. What follows raises GraphError for keys of different types."""
        first, second = self._streams
        return ConnectedStreams(first.key_by(key1, key_type=key_type), second.key_by(key2, key_type=key_type))

    def map(
        self, f1: Callable[[Any], Any], f2: Callable[[Any], Any], *, returns: Any = None, on_error: str = "fail"
    ) -> Stream:
        """One row out for each row in: `f1` for those of the first stream, `f2` for those of the second.

        `returns` and `on_error` as of `Stream.map`; without `returns` both functions have the same return annotation, or none."""
        return self._rows("co_map", MapOperator, (f1, f2), returns, on_error, each=False)

    def flat_map(
        self,
        f1: Callable[[Any], Iterable[Any]],
        f2: Callable[[Any], Iterable[Any]],
        *,
        returns: Any = None,
        on_error: str = "fail",
    ) -> Stream:
        """Any number of rows out for each row in; else as `map`."""
        return self._rows("co_flat_map", FlatMapOperator, (f1, f2), returns, on_error, each=True)

    def process(
        self,
        function: KeyedCoProcessFunction | CoProcessFunction,
        *,
        returns: Any = None,
        side_outputs: SideOutputDeclarations | None = None,
    ) -> Stream:
        """Run a KeyedCoProcessFunction, whose state and timers both streams share; or, without keys, a CoProcessFunction.
        `returns` and `side_outputs` as of `KeyedStream.process`.

        Raises GraphError for a KeyedCoProcessFunction on streams without keys, or with keys of different types."""
        what, methods = "co_process", ("process_element1", "process_element2")
        if isinstance(function, CoProcessFunction):
            _check_defines(function, CoProcessFunction, what, *methods)
            return self._process_plain(what, function, returns, side_outputs)
        _check_defines(function, KeyedCoProcessFunction, what, *methods)
        first, second = self._streams
        if not isinstance(first, KeyedStream) or not isinstance(second, KeyedStream):
            raise GraphError(f"operator {what!r}: both streams need a key: call key_by(key1, key2) before it", operator=what)
        output, sides = _declared_outputs(function, returns, side_outputs, what)
        selectors = (first._selector, second._selector)
        operator = KeyedCoProcessOperator(function, selectors, (first._row_type, second._row_type), output, sides)
        properties = {"timers": True} if operator.uses_timers else {}
        return self._add(what, operator, output, selector=first._selector, side_outputs=sides, properties=properties)

    def _process_plain(
        self, what: str, function: CoProcessFunction, returns: Any, side_outputs: SideOutputDeclarations | None
    ) -> Stream:
        _check_plain(function, what)
        first, second = self._streams
        for stream in self._streams:
            stream._row_type.check_rows(what)
        output, sides = _declared_outputs(function, returns, side_outputs, what)
        operator = CoProcessOperator(function, (first._row_type, second._row_type), output, sides)
        return self._add(what, operator, output, side_outputs=sides)

    def _rows(
        self,
        kind: str,
        operator: type[MapOperator] | type[FlatMapOperator],
        functions: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        returns: Any,
        on_error: str,
        *,
        each: bool,
    ) -> Stream:
        skips = is_skipping(on_error, kind)
        declared = [stream._declared(f, returns, kind, each=each) for stream, f in zip(self._streams, functions, strict=True)]
        output = declared[0]
        if declared[1] != output:
            raise GraphError(
                f"operator {kind!r}: its functions return rows of different types, {output.described()} and "
                f"{declared[1].described()}: give returns=",
                operator=kind,
            )
        for stream, function in zip(self._streams, functions, strict=True):
            if each or output.schema is not None:
                check_returns(function, kind)
            stream._row_type.check_rows(kind)
        pairs = zip(functions, self._streams, strict=True)
        first, second = (operator(function, stream._row_type, output, skips=skips) for function, stream in pairs)
        return self._add(kind, CoRowFunctionOperator(first, second), output)

    def _add(self, kind: str, operator: Operator, output: RowType, **settings: Any) -> Stream:
        return _add_connected(*self._streams, kind, operator, output, **settings)


def _add_connected(first: Stream, second: Stream, kind: str, operator: Operator, output: RowType, **settings: Any) -> Stream:
    """An operator with the records of `first` as input 0 and those of `second` as input 1."""
    inputs = (*first._inputs, *(replace(edge, input_index=1) for edge in second._inputs))
    timestamped = first._timestamped and second._timestamped
    graph = first.environment.graph
    node = graph.add(kind, kind, inputs, operator=operator, output_type=output, timestamped=timestamped, **settings)
    return Stream(first.environment, (StreamEdge(node.index),), output, node)


def _check_timed(kind: str, left: Stream, right: Stream) -> None:
    """Raise GraphError for what is no two streams of one environment with event times."""
    if not isinstance(right, Stream) or right.environment is not left.environment:
        raise GraphError(f"operator {kind!r} takes two streams of one environment, not {right!r}", operator=kind)
    for name, stream in (("left", left), ("right", right)):
        if not stream._timestamped:
            raise GraphError(
                f"operator {kind!r}: the rows of its {name} side have no event times: call assign_timestamps before it",
                operator=kind,
            )


def _add_join(
    left: Stream,
    right: Stream,
    kind: str,
    operator: Operator,
    selectors: tuple[Selector, Selector],
    output: RowType,
    **settings: Any,
) -> Stream:
    """An operator that brings rows of equal keys of two streams together."""
    keyed = []
    for stream, selector in zip((left, right), selectors, strict=True):
        inputs = tuple(edge.partitioned(Partitioning.HASH, selector=selector) for edge in stream._inputs)
        keyed.append(Stream(stream.environment, inputs, stream._row_type))
    return _add_connected(keyed[0], keyed[1], kind, operator, output, selector=selectors[0], **settings)


class BroadcastStream:
    """A stream that each subtask gets in full, with the states that its records write: for `other.connect(...)`."""

    def __init__(self, stream: Stream, states: Sequence[MapStateDescriptor[Any, Any]]) -> None:
        """Raises GraphError for what is no map state, has a TTL, or has the name of another."""
        for state in states:
            if not isinstance(state, MapStateDescriptor):
                raise GraphError(f"broadcast takes MapStateDescriptors, not {state!r}")
            if state.ttl is not None:
                raise GraphError(
                    f"the broadcast state {state.name!r} has a TTL: clocks of subtasks differ, and so would their copies"
                )
        self._stream = stream
        self._states = tuple(states)

    @property
    def environment(self) -> StreamEnvironment:
        return self._stream.environment

    def __repr__(self) -> str:
        return f"<BroadcastStream with {', '.join(state.name for state in self._states)} {self._stream._told()}>"


class BroadcastConnectedStream:
    """A stream, with keys or without, and a broadcast one."""

    def __init__(self, stream: Stream, broadcast: BroadcastStream) -> None:
        self._stream = stream
        self._broadcast = broadcast

    def __repr__(self) -> str:
        return f"<BroadcastConnectedStream of {self._stream!r} and {self._broadcast!r}>"

    def process(
        self,
        function: KeyedBroadcastProcessFunction | BroadcastProcessFunction,
        *,
        returns: Any = None,
        side_outputs: SideOutputDeclarations | None = None,
    ) -> Stream:
        """Run a KeyedBroadcastProcessFunction, or on a stream without keys a BroadcastProcessFunction. `returns` and
        `side_outputs` as of `KeyedStream.process`.

        Raises GraphError for the function of the other kind of stream."""
        what, first, second = "broadcast_process", self._stream, self._broadcast._stream
        base = KeyedBroadcastProcessFunction if isinstance(first, KeyedStream) else BroadcastProcessFunction
        _check_defines(function, base, what, "process_element", "process_broadcast_element")
        for stream in (first, second):
            stream._row_type.check_rows(what)
        output, sides = _declared_outputs(function, returns, side_outputs, what)
        types = (first._row_type, second._row_type)
        if isinstance(first, KeyedStream):
            assert isinstance(function, KeyedBroadcastProcessFunction)
            states = self._broadcast._states
            keyed = KeyedBroadcastProcessOperator(function, first._selector, types, states, output, sides)
            properties = {"timers": True} if keyed.uses_timers else {}
            settings: dict[str, Any] = {"selector": first._selector, "properties": properties}
            return _add_connected(first, second, what, keyed, output, side_outputs=sides, **settings)
        assert isinstance(function, BroadcastProcessFunction)
        _check_plain(function, what)
        plain = BroadcastProcessOperator(function, types, self._broadcast._states, output, sides)
        return _add_connected(first, second, what, plain, output, side_outputs=sides)


class WindowedStream:
    """Records of each key and window, to be aggregated over columns, or given to row functions."""

    def __init__(self, keyed: KeyedStream, windows: WindowAssigner, options: RowWindowOptions | None = None) -> None:
        self._keyed = keyed
        self._windows = windows
        self._options = options or RowWindowOptions()

    def __repr__(self) -> str:
        return f"<WindowedStream of {self._windows!r} {self._keyed._told()}>"

    # ------------------------------------------------------------------------------------------------------- settings

    def trigger(self, trigger: Trigger) -> WindowedStream:
        """When the windows fire, instead of at their end. Row functions only, but for those of `count_window`."""
        check_trigger(trigger, merges=isinstance(self._windows, Session))
        return self._with(trigger=trigger)

    def evictor(self, evictor: Evictor) -> WindowedStream:
        """Which records the function sees, and which are kept behind it. Row functions only, but for that of `count_window`."""
        if not isinstance(evictor, Evictor):
            raise GraphError(f"operator 'window': {evictor!r} is not an evictor such as hf.CountEvictor(10)", operator="window")
        return self._with(evictor=evictor)

    def allowed_lateness(self, lateness: timedelta | int) -> WindowedStream:
        """How long after its end a window takes records: a timedelta, or ms of event time. Each fires it again; of aggregates over
        columns each batch does, for the keys that it has records of.

        Raises InvalidConfigError below 0. A window of processing time has no late records."""
        lateness_ms = duration_ms(lateness, "the allowed lateness of a window")
        if lateness_ms < 0:
            raise InvalidConfigError(
                f"the allowed lateness of a window must be at least 0 ms, not {lateness_ms}", setting="allowed_lateness"
            )
        return self._with(lateness_ms=lateness_ms)

    def side_output_late(self, tag: OutputTag | str) -> WindowedStream:
        """Late records go unchanged to this side output of the result, instead of being dropped and counted."""
        return self._with(late_tag=OutputTag(tag_name(tag)).name)

    def _with(self, **options: Any) -> WindowedStream:
        return WindowedStream(self._keyed, self._windows, replace(self._options, **options))

    # -------------------------------------------------------------------------------------------------- row functions

    def reduce(
        self,
        function: Callable[[Any, Any], Any],
        window_function: ProcessWindowFunction | None = None,
        *,
        row_type: Any = None,
        returns: Any = None,
    ) -> Stream:
        """The rows of each key and window combined to one, `function(old, row)`, as a row of the same type.

        `window_function` gets that row and the window, and emits instead. `row_type`: type of the rows where they have no declared
        columns. `returns`: of what is emitted; without a window function that of the input."""
        if not callable(function):
            raise GraphError(f"operator 'window': {function!r} is not a function", operator="window")
        contents = Contents(self._stored_type(row_type), reduce=function)
        if returns is None and window_function is None:
            returns = self._keyed._row_type
        return self._rows(window_function or PassOn(function), contents, returns, None)

    def process(
        self,
        function: ProcessWindowFunction,
        *,
        row_type: Any = None,
        returns: Any = None,
        side_outputs: SideOutputDeclarations | None = None,
    ) -> Stream:
        """Run a ProcessWindowFunction on all rows of a key and window each time that the window fires.

        `row_type` as of `reduce`; `returns` and `side_outputs` as of `KeyedStream.process`."""
        return self._rows(function, Contents(self._stored_type(row_type)), returns, side_outputs)

    @overload
    def aggregate(
        self,
        function: AggregateFunction[Any, Any, Any],
        /,
        *,
        accumulator_type: Any,
        window_function: ProcessWindowFunction | None = None,
        returns: Any = None,
    ) -> Stream: ...
    @overload
    def aggregate(self, /, **aggregates: Aggregate) -> Stream: ...
    def aggregate(self, function: Any = None, /, **options: Any) -> Stream:
        """One row per key and window: key columns, window_start, window_end (UTC; not of count windows), and the named aggregates,
        over columns.

        With an AggregateFunction object: what its `get_result` returns, row by row; `accumulator_type` as of a state descriptor,
        `window_function` and `returns` as of `reduce`."""
        if function is None:
            return self._columns(**options)
        unknown = sorted(set(options) - {"accumulator_type", "window_function", "returns"})
        if unknown or "accumulator_type" not in options:
            raise GraphError(
                "operator 'window': aggregate(function, accumulator_type=...) takes window_function and returns beside it"
                + (f", not {', '.join(unknown)}" if unknown else ""),
                operator="window",
            )
        for method in ("create_accumulator", "add", "get_result", "merge"):
            if not callable(getattr(function, method, None)):
                raise GraphError(
                    f"operator 'window': {type(function).__name__} is no AggregateFunction: it has no {method}", operator="window"
                )
        contents = Contents(options["accumulator_type"], aggregate=function)
        if self._options.evictor is not None:
            contents = replace(contents, type=self._stored_type(None))
        return self._rows(options.get("window_function") or PassOn(function.add), contents, options.get("returns"), None)

    def top(
        self,
        n: int,
        by: str | Sequence[str],
        *,
        descending: bool | Sequence[bool] = True,
        ties: str = "earlier",
        rank_column: str = "rank",
    ) -> Stream:
        """The first n rows of each key and window, each once, when the window fires: the row's columns, window_start, window_end
        (UTC), and the rank (1 .. n). Tumbling and sliding windows of event time. Arguments as of `KeyedStream.top`."""
        ranked = ranking(n, by, descending, ties, rank_column)
        keyed, tag = self._keyed, self._options.late_tag
        operator = window_top_operator(ranked, self._windows, self._options, keyed._selector, keyed._row_type)
        stream = keyed._add_keyed("window", operator, operator.output_type, n=n)
        stream._own("window").side_outputs.update({tag: keyed._row_type} if tag else {})
        return stream

    def _columns(self, **aggregates: Aggregate) -> Stream:
        keyed = self._keyed
        made = columnar_window(self._windows, self._options, aggregates, keyed._selector, keyed._row_type)
        stream = keyed._add_keyed("window", made.operator, made.operator.output_type, **made.properties)
        stream._own("window").side_outputs.update(made.side_outputs)
        return stream

    def _stored_type(self, row_type: Any) -> Any:
        return stored_row_type(self._keyed._row_type, row_type, "window")

    def _rows(
        self,
        function: ProcessWindowFunction,
        contents: Contents,
        returns: Any,
        side_outputs: SideOutputDeclarations | None,
    ) -> Stream:
        what, keyed = "window", self._keyed
        check_window_function(function, merges=isinstance(self._windows, Session))
        keyed._row_type.check_rows(what)
        settings = self._options.settings(self._windows)
        output, sides = _declared_outputs(function, returns, side_outputs, what)
        if settings.late_tag in sides:
            raise GraphError(f"operator {what!r}: two side outputs are called {settings.late_tag!r}", operator=what)
        if settings.late_tag:
            sides[settings.late_tag] = keyed._row_type
        operator = WindowOperator(function, settings, contents, keyed._selector, keyed._row_type, output, sides)
        check_state_names(operator.declared_states(), what)
        stream = keyed._add_keyed("row_window", operator, output, timers=True, windows=repr(self._windows))
        stream._own(what).side_outputs.update(sides)
        return stream
