"""State as user functions declare and see it: descriptors, time to live (TTL), and the protocols of state objects.

Descriptors are plain records, declared when the graph is built and listed in its JSON. A backend hands out the state objects; they
follow its current key, and only the worker's loop thread uses them.

State with a TTL stores a stamp with each value, list element and map entry: the processing time, ms since the epoch, of the last
write (or read, if reads count). The stamp alone decides expiry: at time T, a value has expired if its stamp is at or below
T - duration. The duration is not stored, so a restored job may declare another.

CORE: no clock, no storage; how values are encoded is for serialization/."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.errors import InvalidConfigError

_MILLISECOND = timedelta(milliseconds=1)


def duration_ms(duration: timedelta | int, what: str) -> int:
    """Milliseconds of a timedelta, or of an int that counts them. `what` names the duration in errors.

    Raises InvalidConfigError for another type, or a fraction of a millisecond."""
    if isinstance(duration, timedelta):
        whole, rest = divmod(duration, _MILLISECOND)
        if rest:
            raise InvalidConfigError(f"{what} must be whole milliseconds, not {duration}", setting=what)
        return whole
    if isinstance(duration, bool) or not isinstance(duration, int):
        raise InvalidConfigError(f"{what} must be a timedelta, or ms as an int, not {duration!r}", setting=what)
    return duration


TtlUpdate = Literal["write", "read"]
TtlVisibility = Literal["never_expired", "until_cleaned"]

_PREFIX = "ttl<"

DURATION_MS_MAX = 2**63 - 1
"""Longest TTL, ms, for values that never expire: a longer one does not fit the int64 of a stamp. Source: Flink's bound."""


@dataclass(frozen=True, slots=True)
class Ttl:
    """Time to live of a state's values, in processing time: the wall clock of the worker.

    Raises InvalidConfigError for a setting out of bounds. Source: Flink, StateTtlConfig."""

    duration: timedelta | int
    """A timedelta, or ms; 1 ms .. DURATION_MS_MAX. A value expires so long after its stamp."""
    update: TtlUpdate = "write"
    """What sets the stamp: `write`, or `read` too (each read of a value, list or map entry that has not expired)."""
    visibility: TtlVisibility = "never_expired"
    """`never_expired`: expired values are never returned. `until_cleaned`: they may be, until they are cleaned up."""
    cleanup_entries: int = 5
    """Values that each access to the state checks for expiry, 0..1000. In RocksDB rows are checked behind each checkpoint instead.

    0: expired values are dropped only when they are read, written to RocksDB, or part of a snapshot."""

    def __post_init__(self) -> None:
        duration = duration_ms(self.duration, "the duration of a TTL")
        if duration < 1:
            raise InvalidConfigError(f"the duration of a TTL must be at least 1 ms, not {self.duration!r}", setting="duration")
        if duration > DURATION_MS_MAX:
            raise InvalidConfigError(
                f"the duration of a TTL must be at most {DURATION_MS_MAX} ms, not {duration}", setting="duration"
            )
        for setting, choices in (("update", get_args(TtlUpdate)), ("visibility", get_args(TtlVisibility))):
            if getattr(self, setting) not in choices:
                raise InvalidConfigError(
                    f"{setting} of a TTL is {getattr(self, setting)!r}; choose from {', '.join(choices)}", setting=setting
                )
        entries = self.cleanup_entries
        if not isinstance(entries, int) or isinstance(entries, bool) or not 0 <= entries <= 1000:
            raise InvalidConfigError(f"cleanup_entries of a TTL must be 0..1000, not {entries!r}", setting="cleanup_entries")

    @property
    def duration_ms(self) -> int:
        return duration_ms(self.duration, "the duration of a TTL")


def ttl_text(value_text: str) -> str:
    """Value type text of a state whose values carry stamps. Readers that don't know TTLs refuse it."""
    return f"{_PREFIX}{value_text}>"


def split_ttl_text(text: str) -> tuple[str, bool]:
    """(text of the value itself, whether it carries a stamp)."""
    if text.startswith(_PREFIX) and text.endswith(">"):
        return text[len(_PREFIX) : -1], True
    return text, False


if TYPE_CHECKING:
    from types import UnionType
    from typing import _SpecialForm


    _Special: TypeAlias = UnionType | _SpecialForm
    """`int | None`, `Optional[int]`, `Literal["a"]`, `Annotated[int, ...]` as values, to type checkers."""
    _Undetermined: TypeAlias = type[Any] | _Special

V = TypeVar("V")
K = TypeVar("K")
ACC = TypeVar("ACC")
IN = TypeVar("IN", contravariant=True)
OUT = TypeVar("OUT", covariant=True)


class Pickled(Generic[V]):
    """Type marker: a state declared `Pickled` or `Pickled[MyClass]` stores its values by pickle.

    Such state can't be evolved, shown by tools, or read without its classes: an explicit choice, never a default. The classes must
    be importable by every worker, since pickle stores their names."""


# Type checkers infer V from `type`: a class itself, or the class that `Pickled` marks. For a union and the like they can't;
# annotate those: `x: ValueStateDescriptor[int | None] = ValueStateDescriptor("x", int | None)`.


@dataclass(frozen=True, slots=True)
class ValueStateDescriptor(Generic[V]):
    """One value per key."""

    name: str
    """Unique among the states of the operator; so in every descriptor."""
    type: Any
    """A type that TypeSerializer.of accepts: int, str, a msgspec.Struct ...; so in every descriptor."""
    ttl: Ttl | None = None
    """None: values never expire; so in every descriptor."""
    kind = "value"

    if TYPE_CHECKING:

        @overload
        def __init__(self, name: str, type: builtins.type[Pickled[V]], ttl: Ttl | None = None) -> None: ...
        @overload
        def __init__(self, name: str, type: builtins.type[V], ttl: Ttl | None = None) -> None: ...
        @overload
        def __init__(
            self: ValueStateDescriptor[Any], name: str, type: _Undetermined, ttl: Ttl | None = None
        ) -> None: ...
        def __init__(self, name: str, type: Any, ttl: Ttl | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class ListStateDescriptor(Generic[V]):
    """A list per key; `type` is that of an element. With a TTL each element expires by itself."""

    name: str
    type: Any
    ttl: Ttl | None = None
    kind = "list"

    if TYPE_CHECKING:

        @overload
        def __init__(self, name: str, type: builtins.type[Pickled[V]], ttl: Ttl | None = None) -> None: ...
        @overload
        def __init__(self, name: str, type: builtins.type[V], ttl: Ttl | None = None) -> None: ...
        @overload
        def __init__(
            self: ListStateDescriptor[Any], name: str, type: _Undetermined, ttl: Ttl | None = None
        ) -> None: ...
        def __init__(self, name: str, type: Any, ttl: Ttl | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class MapStateDescriptor(Generic[K, V]):
    """A map per key; `type` is that of an entry's value. With a TTL each entry expires by itself."""

    name: str
    key_type: Any
    type: Any
    ttl: Ttl | None = None
    kind = "map"

    if TYPE_CHECKING:

        @overload
        def __init__(
            self, name: str, key_type: builtins.type[K], type: builtins.type[Pickled[V]], ttl: Ttl | None = None
        ) -> None: ...
        @overload
        def __init__(self, name: str, key_type: builtins.type[K], type: builtins.type[V], ttl: Ttl | None = None) -> None: ...
        @overload
        def __init__(
            self: MapStateDescriptor[K, Any], name: str, key_type: builtins.type[K], type: _Undetermined, ttl: Ttl | None = None
        ) -> None: ...
        def __init__(self, name: str, key_type: builtins.type[K], type: Any, ttl: Ttl | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class ReducingStateDescriptor(Generic[V]):
    """One value per key, combined by `reduce(old, added)`, which must be associative."""

    name: str
    type: Any
    reduce: Callable[[Any, Any], Any] = field(compare=False)
    """Not compared: a function that was shipped by value is another object each time it is loaded."""
    ttl: Ttl | None = None
    kind = "reducing"

    if TYPE_CHECKING:

        @overload
        def __init__(
            self, name: str, type: builtins.type[Pickled[V]], reduce: Callable[[V, V], V], ttl: Ttl | None = None
        ) -> None: ...
        @overload
        def __init__(self, name: str, type: builtins.type[V], reduce: Callable[[V, V], V], ttl: Ttl | None = None) -> None: ...
        @overload
        def __init__(
            self: ReducingStateDescriptor[Any], name: str, type: _Special, reduce: Callable[[V, V], V], ttl: Ttl | None = None
        ) -> None: ...
        def __init__(self, name: str, type: Any, reduce: Callable[[V, V], V], ttl: Ttl | None = None) -> None: ...


class AggregateFunction(Protocol[IN, ACC, OUT]):
    """Incremental aggregation over an accumulator of the descriptor's declared type. Source: Flink, AggregateFunction."""

    def create_accumulator(self) -> ACC: ...
    def add(self, value: IN, accumulator: ACC) -> ACC: ...
    def get_result(self, accumulator: ACC) -> OUT: ...
    def merge(self, left: ACC, right: ACC) -> ACC: ...


@dataclass(frozen=True, slots=True)
class AggregatingStateDescriptor(Generic[IN, OUT]):
    """An accumulator per key. `type` is the accumulator's type."""

    name: str
    type: Any
    aggregate: AggregateFunction[IN, Any, OUT] = field(compare=False)
    """Not compared, like `ReducingStateDescriptor.reduce`."""
    ttl: Ttl | None = None
    kind = "aggregating"


@dataclass(frozen=True, slots=True)
class ColumnAggregate:
    """One columnar accumulator."""

    function: str
    """count | sum | min | max | mean | count_distinct | first | last | arg_max | arg_min | stddev."""
    column: str | None
    """Input column; None for count(*)."""
    output: str
    """Name of the result column."""
    input_type: pa.DataType | None = None
    """Arrow type of `column`; None for count. sum, mean and stddev take an integer, floating or decimal128 type, the others also
    booleans, text, binary values, dates and times."""
    by: str | None = None
    """The column by which arg_max and arg_min compare."""
    by_type: pa.DataType | None = None
    where: Any = None
    """Which rows count: a boolean column's name, or a function of the batch's columns; None: all. Not part of the stored type."""

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Of pickled state that may be older than a field."""
        for name, value in zip_longest(self.__slots__, state):
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class ColumnarStateDescriptor:
    """Accumulators in numpy columns, one row per (key, namespace). The namespace is an int64: a window's start in ms, or 0.

    Without a TTL: rows are removed with their window."""

    name: str
    aggregates: tuple[ColumnAggregate, ...]
    kind = "columnar"


NO_TIME = -(2**63)
"""Of a row of a row table that has no event time."""
NO_ORDER = -1
"""Below the orders of all rows of row tables."""


@dataclass(frozen=True, slots=True)
class RowTableStateDescriptor:
    """Rows of typed columns, many of a (key, namespace); the namespace is an int64, whatever the operator makes of it.

    `schema` has the columns beside the key's; all of them may be null. There is no TTL: rows leave when they are deleted."""

    name: str
    schema: pa.Schema
    by_time: bool = False
    """Whether rows are asked for by time (`RowTable.until`); not part of the stored state."""
    kind = "row_table"


KeyedStateDescriptor: TypeAlias = (
    ValueStateDescriptor[Any]
    | ListStateDescriptor[Any]
    | MapStateDescriptor[Any, Any]
    | ReducingStateDescriptor[Any]
    | AggregatingStateDescriptor[Any, Any]
    | ColumnarStateDescriptor
    | RowTableStateDescriptor
)


class Redistribution(StrEnum):
    """How a restore distributes the entries of an operator state over the new subtasks. Source: Flink, OperatorStateStore."""

    SPLIT = "split"
    """List state: each entry goes to one subtask; at equal parallelism each subtask keeps its own entries."""
    UNION = "union"
    """Union list state: every subtask gets all entries, in the order of the old subtasks, and picks its own."""
    BROADCAST = "broadcast"
    """Broadcast state: all subtasks hold the same entries, and a new one gets the copy of one old subtask."""

    @property
    def kind(self) -> str:
        """Value of `StateMeta.kind`."""
        return _OPERATOR_KINDS[self]


_OPERATOR_KINDS = {
    Redistribution.SPLIT: "operator_list",
    Redistribution.UNION: "operator_union",
    Redistribution.BROADCAST: "operator_broadcast",
}
OPERATOR_KINDS = frozenset(_OPERATOR_KINDS.values())
"""`StateMeta.kind` of operator state, which belongs to a subtask and not to a key."""


@dataclass(frozen=True, slots=True)
class OperatorListStateDescriptor:
    """Operator state: a list per subtask, which belongs to no key.

    Raises InvalidConfigError for an unknown redistribution."""

    name: str
    redistribution: Redistribution = Redistribution.SPLIT
    type: Any = None
    """That of an entry, as of any other state; None: opaque bytes, which the operator encodes. A restore refuses another one."""
    of_event_time: bool = False
    """How far event time had come. Not part of a snapshot behind a cut that may hold records from behind a barrier: subtasks have
    come to different points there, and what one has passed would be late for the others."""

    def __post_init__(self) -> None:
        if self.redistribution not in _OPERATOR_KINDS:
            choices = ", ".join(_OPERATOR_KINDS)
            raise InvalidConfigError(
                f"operator state {self.name!r}: redistribution is {self.redistribution!r}; choose from {choices}", state=self.name
            )

    @property
    def kind(self) -> str:
        """operator_list | operator_union | operator_broadcast."""
        return _OPERATOR_KINDS[self.redistribution]


StateDescriptor: TypeAlias = KeyedStateDescriptor | OperatorListStateDescriptor

DESCRIPTORS = (
    ValueStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    AggregatingStateDescriptor,
    ColumnarStateDescriptor,
    RowTableStateDescriptor,
    OperatorListStateDescriptor,
)
"""The classes of `StateDescriptor`, for isinstance."""


class ValueState(Protocol[V]):
    """One value for the current key. A changed mutable value must be passed to `update()`; otherwise the change may be lost.
    An object that is stored twice (under two keys, in two elements) is two values once a checkpoint or a restore has copied it."""

    @overload
    def value(self) -> V | None: ...
    @overload
    def value(self, default: V) -> V: ...
    @overload
    def value(self, default: V | None = None) -> V | None:
        """The value, or `default` if there is none."""

    def update(self, value: V) -> None: ...
    def clear(self) -> None: ...


class ListState(Protocol[V]):
    """A list for the current key."""

    def get(self) -> list[V]: ...
    def add(self, value: V) -> None: ...
    def add_all(self, values: Iterable[V]) -> None: ...
    def update(self, values: Iterable[V]) -> None: ...
    def clear(self) -> None: ...


class MapState(Protocol[K, V]):
    """A map for the current key; each entry is stored separately."""

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: V | None = None) -> V | None:
        """The entry's value, or `default` if there is none."""

    def put(self, key: K, value: V) -> None: ...
    def remove(self, key: K) -> None: ...
    def contains(self, key: K) -> bool: ...
    def items(self) -> Iterator[tuple[K, V]]: ...
    def keys(self) -> Iterator[K]: ...
    def values(self) -> Iterator[V]: ...
    def is_empty(self) -> bool: ...
    def clear(self) -> None: ...


class ReadOnlyMapState(Protocol[K, V]):
    """A map that can be read alone: the broadcast state as records of the other stream see it."""

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: V | None = None) -> V | None:
        """The entry's value, or `default` if there is none."""

    def contains(self, key: K) -> bool: ...
    def items(self) -> Iterator[tuple[K, V]]: ...
    def keys(self) -> Iterator[K]: ...
    def values(self) -> Iterator[V]: ...
    def is_empty(self) -> bool: ...


class AppendingState(Protocol[IN, OUT]):
    """Reducing and aggregating state: `add` values, `get` the combined result (None if no value was added)."""

    def get(self) -> OUT | None: ...
    def add(self, value: IN) -> None: ...
    def clear(self) -> None: ...


class WindowRows(Protocol):
    """Rows of windows over panes of a columnar state, one window after the other."""

    def changed(self, namespace: int) -> None:
        """Panes from this one on got records."""

    def merged(self, start: int) -> Iterator[None]:
        """Merge the panes of the window that begins at `start`, step by step; between two of them panes must not change."""

    def window(self, start: int, keys: KeyColumn | None = None) -> tuple[list[pa.Array], list[pa.Array]]:
        """Key columns, and results of the aggregates, of each key with a row in any pane of the window that begins at `start`.

        `keys`: of the distinct keys among these alone, each of which has such a row. Raises StateOverflowError."""


class Straddling(NamedTuple):
    """Sessions of some keys that began at a moment or before it, and end behind it: of a key there is one at most."""

    codes: npt.NDArray[np.int64]
    """Of each row, the number of its key."""
    starts: npt.NDArray[np.int64]
    """Of each key, by number; the greatest int64 where there is none."""
    has_remains: npt.NDArray[np.bool_]
    """Of each key, by number: whether a row is there of a session that is gone."""


class SessionRows(Protocol):
    """Sessions over panes of a columnar state, whose first two aggregates are start and end of a session, ms: its least event time,
    and its greatest plus the gap. A session that ends at `late_until` or before it is gone."""

    def first_pane(self, late_until: int) -> int:
        """Records of earlier panes belong into this one."""

    def next_end(self, after: int) -> int | None:
        """The first moment behind `after` at which a session may end; None without rows that end behind it."""

    def next_closing(self, after: int, until: int) -> int | None:
        """Start of the first pane in which a session may end behind `after` and not behind `until`; None: there is none."""

    def closing(self, pane: int, after: int, until: int) -> tuple[list[pa.Array], list[pa.Array]] | None:
        """Key columns, and results, of the sessions that end in a pane, behind `after` and not behind `until`; None without any."""

    def last_end(self, pane: int) -> int:
        """The last moment at which a session can end that ends in a pane; those of earlier panes end before all of this one."""

    def touched(
        self, keys: KeyColumn, panes: npt.NDArray[np.int64], until: int
    ) -> Iterator[tuple[list[pa.Array], list[pa.Array]]]:
        """The same of the sessions of these rows, each once, whose end does not lie behind `until`."""

    def straddling(self, keys: KeyColumn, late_until: int) -> Straddling: ...

    def drop_remains(self, late_until: int) -> None:
        """Rows of sessions that are gone leave the state, in the first pane, which is the only one that may have some."""

    def forget(self, late_until: int) -> bool:
        """One pane in front of the first one leaves the state; of sessions that go on its rows are merged into the next. False:
        there is none."""


class FilledWindows(NamedTuple):
    """Windows that records of a batch have filled."""

    records: npt.NDArray[np.int64]
    """By number, ascending: those that filled them."""
    results: list[pa.Array]
    """Of each aggregate."""


class CountWindows(Protocol):
    """Windows of so many records of a key."""

    def take(
        self,
        keys: KeyColumn,
        columns: Sequence[npt.NDArray[Any] | pa.Array | tuple[pa.Array, ...] | None],
        times: npt.NDArray[np.int64] | None = None,
    ) -> list[FilledWindows]:
        """Records in order of arrival; at least one. `columns`, `times` and errors as of `ColumnarState.update`, without a column
        for the first aggregate. Windows in the order of the records that filled them."""


class ColumnarState(Protocol):
    """Vectorised accumulators of one descriptor, one row per (key, namespace)."""

    def update(
        self,
        keys: KeyColumn,
        namespaces: npt.NDArray[np.int64] | int,
        columns: Sequence[npt.NDArray[Any] | pa.Array | tuple[pa.Array, ...] | None],
        times: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Aggregate one batch. columns[i] is the input of aggregates[i] (None for count(*)), as long as `keys`.

        A column is a numpy array, a masked numpy array or an Arrow array, or a pair of Arrow arrays (value, what it is compared
        by) for arg_max and arg_min; masked rows and nulls are ignored. `times`: event times, ms, by which `first` and `last` go
        and what is equal otherwise; None: order of arrival decides.
        Raises StateOverflowError."""

    def keep_first(
        self,
        keys: KeyColumn,
        namespace: int,
        columns: Sequence[pa.Array],
        greatest: Sequence[bool],
        *,
        latest: bool,
    ) -> npt.NDArray[np.int64]:
        """Instead of `update`: keep of each key the record that comes first. Rows that are kept now and were not before, ascending.

        columns[i] becomes the value of aggregates[i], whatever its function, which has one column in a snapshot. Records are
        compared by as many of the columns as `greatest` has entries: from the greatest value or from the least, null last. Of
        equals the one that came last comes first if `latest`, else the one that came first."""

    def find(self, keys: KeyColumn, namespace: int) -> tuple[npt.NDArray[np.int64], list[pa.Array]]:
        """Rows of those keys, ascending, that have a row in the namespace, and the results of each aggregate for them."""

    def merge(self, keys: KeyColumn, namespaces: npt.NDArray[np.int64] | int, parts: Sequence[pa.Array]) -> None:
        """Aggregate rows that stand for several records each: all accumulator parts, as a snapshot has them. Keys may repeat.

        Only of aggregates that `accumulators.is_exact` allows. Raises StateOverflowError."""

    def namespaces(self, since: int | None = None, until: int | None = None) -> list[int]:
        """Namespaces that hold rows, ascending: all of them, or those of a range [since, until)."""

    def first_namespace(self, since: int | None = None) -> int | None:
        """The first namespace that holds rows, from `since` on; None: there is none."""

    def row_count(self, namespace: int) -> int: ...

    def read(self, namespace: int, offset: int = 0, length: int | None = None) -> pa.RecordBatch:
        """Rows of a namespace: key columns (named by key_names), then results under their output names.

        Rows come in the order in which their keys first arrived, stable until the namespace is removed. `length`: rows at most."""

    def rows_of(self, keys: KeyColumn, namespace: int) -> pa.RecordBatch:
        """Rows of the distinct keys among `keys`, as `read` gives them. Each key must have been updated in the namespace before."""

    def panes(
        self,
        pane_ms: int,
        panes: int,
        offset_ms: int,
        keys: KeyColumn | None = None,
    ) -> WindowRows:
        """Merge of windows that are made of `panes` namespaces each, which begin at multiples of pane_ms plus offset_ms.

        `keys`: of the rows of these keys alone."""

    def sessions(self, gap_ms: int) -> SessionRows:
        """Merge of sessions that are made of namespaces as long as the gap, which begin at its multiples."""

    def count_windows(self, count: int, slide: int) -> CountWindows:
        """Windows of the last `count` records of a key, one every `slide`. The first aggregate must be one that counts all
        records, and has a name of its own: it is for the state alone, which nothing else may change."""

    def numbered(self, keys: KeyColumn) -> tuple[npt.NDArray[np.int64], KeyColumn]:
        """(number of each row's key, from 0 in order of first arrival; each key once, by number)."""

    def drop_front(self, namespace: int, count: int) -> None:
        """Drop the first `count` rows in read order: a window that fires in slices keeps exactly the rows it has not emitted.

        Later snapshots lack them. Their keys must not be updated in this namespace again."""

    def remove(self, namespace: int) -> None:
        """Drop all rows of a namespace."""


class RowMatches(Protocol):
    """Rows that one read of a row table found; what is done to the table afterwards does not change it."""

    @property
    def queries(self) -> npt.NDArray[np.int64]:
        """Of each row, ascending: which of the keys asked for is its key; of a scan the number of its key in the slice."""

    @property
    def orders(self) -> npt.NDArray[np.int64]:
        """Ascending for each query. An earlier row of a key has a lower one, at any parallelism."""

    @property
    def namespaces(self) -> npt.NDArray[np.int64]: ...

    @property
    def times(self) -> npt.NDArray[np.int64]:
        """Event times in ms; NO_TIME for a row without one."""

    def keys(self) -> list[pa.Array]:
        """One array for each field of the key."""

    def take(self, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Columns of the rows: these, or the key's fields (named as in key_names) and all columns."""

    def select(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> RowMatches:
        """Some of the rows."""

    def __len__(self) -> int: ...


class RowScan(Protocol):
    """A pass over a row table by key."""

    def next(self, rows_max: int) -> RowMatches | None:
        """About `rows_max` rows, all of each key that is among them; maybe none, since a slice also looks at few rows that it does
        not give. None: the pass is over.

        Between two slices rows may be appended and deleted, and a barrier may come: what was given stays in the table until it
        is deleted. A row that is appended is given if its key's turn has not come yet."""


class RowProbe(Protocol):
    """The rows of a batch of keys, in bounded slices: a key may have any number of them.

    It gives what was in the table when it began; of that it may leave out what was deleted since."""

    def next(self, rows_max: int) -> RowMatches | None:
        """The wanted ones among the next rows of the keys, `rows_max` at most: maybe none. None: it is over."""

    @property
    def complete(self) -> int:
        """How many of the keys, from the first on, are done."""

    @property
    def last_order(self) -> int:
        """Of key number `complete`: the order up to which its rows were looked at; NO_ORDER if none was."""


class RowTable(Protocol):
    """Rows of one descriptor, by key, namespace and order of arrival.

    Namespaces are meant to be few beside rows: windows, or stretches of time, whose rows go together."""

    def append(
        self,
        keys: KeyColumn,
        namespaces: npt.NDArray[np.int64] | int,
        columns: Sequence[pa.Array],
        times: npt.NDArray[np.int64] | None = None,
        orders: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Add one batch: columns[i] is that of the schema's field i; all have the length of `keys`. The arrays are kept: they must
        not change. `times`: event times in ms, NO_TIME for none. Raises StateValueError for a column of another type.

        Returns the orders of the rows. `orders`: those of another table's rows with these keys, ascending and above all that this
        table had: by them `counterparts` finds rows of one table in the other."""

    def count(self, namespace: int | None = None) -> int:
        """Rows, of one namespace or all. O(1)."""

    def namespaces(self) -> list[int]:
        """Namespaces that hold rows, ascending."""

    def rows_of(
        self,
        keys: KeyColumn,
        namespaces: npt.NDArray[np.int64] | int | None = None,
        times: tuple[npt.NDArray[np.int64] | int, npt.NDArray[np.int64] | int] | None = None,
    ) -> RowMatches:
        """All rows of each key: of its namespace, if any is given, and with times from the first to the second, both inclusive.

        A number is the same for all keys. A key that is asked for twice has its rows twice."""

    def probe(
        self,
        keys: KeyColumn,
        times: tuple[npt.NDArray[np.int64] | int, npt.NDArray[np.int64] | int],
        after: npt.NDArray[np.int64] | None = None,
    ) -> RowProbe:
        """As `rows_of`, with times, in slices. `after`: of each key the rows of orders above this alone."""

    def until(self, moment: int, rows_max: int, after: int = NO_TIME) -> RowMatches:
        """The earliest rows with a time behind `after` and up to `moment`, by time; of a table `by_time`. O(those that it gives,
        and those that were deleted between these times), and the table's rows / 32,768."""

    def counterparts(self, rows: RowMatches) -> RowMatches:
        """The rows of this table that have the key and the order of some rows of another table of the same subtask; `queries` has
        the places of those."""

    def scan(
        self, namespace: int | None = None, times: tuple[int, int] | None = None, *, splits_keys: bool = False
    ) -> RowScan:
        """A pass over the rows of a namespace, or all rows, by key and for each key by order; begins before the first.

        `times`: of the rows, lowest and highest, both inclusive. `splits_keys`: a key that has more rows than a slice takes
        comes in several of them."""

    def delete(self, rows: RowMatches) -> int:
        """Delete rows that this table gave; how many of them were still there."""

    def drop(self, namespace: int) -> None:
        """Delete a namespace's rows. Costs nothing for each row."""

    def drop_until(self, namespace: int) -> None:
        """Delete the rows of all namespaces up to this one. O(namespaces)."""


class KeyColumn(Protocol):
    """The keys of one batch, vectorised; made by KeyType.column(arrays)."""

    @property
    def arrays(self) -> Sequence[pa.Array]:
        """One Arrow array per key field, cast to the declared type."""

    @property
    def key_groups(self) -> npt.NDArray[np.int32]:
        """Key group of each row."""

    def encoded(self) -> list[bytes]:
        """Canonical key bytes of each row."""

    def __len__(self) -> int: ...
