"""State descriptors (declared when the graph is built) and the state objects that user functions see.

Descriptors are plain records listed in the graph's JSON; state objects are handed out by a backend, follow its
current key, and are used on the worker's loop thread only.

Durations as users write them. CORE: no clock.

Time to live (TTL) of keyed state: what a user asks for, and how a stored type says that its values carry stamps.

A stamp is the processing time, ms since the epoch, at which a value was last written (or read, if reading counts). It is
stored with each value, list element and map entry, and it alone decides what has expired: at any time T, everything whose
stamp is at or below T - duration. The duration is not stored: a restored job may have another."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeAlias, TypeVar, get_args, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.statebackends.errors import InvalidConfigError

_MILLISECOND = timedelta(milliseconds=1)


def duration_ms(duration: timedelta | int, what: str) -> int:
    """Whole ms of a timedelta, or of an int that counts ms. Raises InvalidConfigError for anything else, or a fraction of one."""
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
"""Flink's largest, for what is never to expire. Beyond it no stamp could be compared."""


@dataclass(frozen=True, slots=True)
class Ttl:
    """State expires `duration` (a timedelta, or ms) after it was last written. Processing time: the wall clock of the worker.

    Raises InvalidConfigError."""

    duration: timedelta | int
    update: TtlUpdate = "write"
    """What sets the stamp: `write`, or also `read` (each read of a value, list or map entry that has not expired)."""
    visibility: TtlVisibility = "never_expired"
    """`never_expired`: what has expired is not returned. `until_cleaned`: it may be, until it has been cleaned up."""
    cleanup_entries: int = 5
    """Values that may have expired and that each access to the state looks at (in RocksDB: a few of them, behind each
    checkpoint). 0: no cleanup but of what is read, written to RocksDB, or in a snapshot."""

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
    """Value type text of a state whose values carry stamps; an older reader knows no such type, and refuses it."""
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
    """`int | None`, `Optional[int]`, `Literal["a"]`, `Annotated[int, ...]`, as type checkers see them where a value is expected."""
    _Undetermined: TypeAlias = type[Any] | _Special

V = TypeVar("V")
K = TypeVar("K")
ACC = TypeVar("ACC")
IN = TypeVar("IN", contravariant=True)
OUT = TypeVar("OUT", covariant=True)


class Pickled(Generic[V]):
    """Type marker: values of a state declared `Pickled` or `Pickled[MyClass]` are stored by pickle.

    Such state can't be read without the classes, evolved, or shown by tools: an explicit choice, never a default. The classes are
    those of installed modules: pickle stores their names, by which every worker must be able to import them."""


# What follows from `type` for type checkers: the class itself, what `Pickled` marks, or nothing for a union and the like, whose
# members they can't tell. Annotate those: `x: ValueStateDescriptor[int | None] = ValueStateDescriptor("x", int | None)`.


@dataclass(frozen=True, slots=True)
class ValueStateDescriptor(Generic[V]):
    """One value per key. `type` is a type that serializers.TypeSerializer.of accepts (int, str, a msgspec.Struct ...)."""

    name: str
    type: Any
    ttl: Ttl | None = None
    """When the value expires; None: never. So in every descriptor."""
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
    """A list per key; `type` is the element type. With a TTL every element expires on its own."""

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
    """A map per key. With a TTL every entry expires on its own."""

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
    """Not compared: functions that travelled by value are other objects each time that they are loaded."""
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
    """Incremental aggregation; the accumulator has the descriptor's declared type."""

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
    """Not compared, as `reduce`."""
    ttl: Ttl | None = None
    kind = "aggregating"


@dataclass(frozen=True, slots=True)
class ColumnAggregate:
    """One columnar accumulator: `function` is count | sum | min | max | mean; `column` is None for count only."""

    function: str
    column: str | None
    output: str
    """Name of the result column."""
    input_type: pa.DataType | None = None
    """Arrow type of `column` (an integer, floating or decimal128 type); None for count."""


@dataclass(frozen=True, slots=True)
class ColumnarStateDescriptor:
    """Accumulators in numpy columns per (key, namespace); the namespace is an int64 (a window's start in ms, or 0).

    There is no TTL: rows leave with their window."""

    name: str
    aggregates: tuple[ColumnAggregate, ...]
    kind = "columnar"


KeyedStateDescriptor: TypeAlias = (
    ValueStateDescriptor[Any]
    | ListStateDescriptor[Any]
    | MapStateDescriptor[Any, Any]
    | ReducingStateDescriptor[Any]
    | AggregatingStateDescriptor[Any, Any]
    | ColumnarStateDescriptor
)


class Redistribution(StrEnum):
    """How the entries of an operator state are dealt out to the subtasks of a restored job."""

    SPLIT = "split"
    """List state: each entry goes to one subtask; at equal parallelism every subtask keeps its own."""
    UNION = "union"
    """Union list state: every subtask gets all entries, in the order of the old subtasks, and takes what it is responsible for."""
    BROADCAST = "broadcast"
    """Broadcast state: every subtask holds the same entries, so that a new one gets the copy of one old subtask."""

    @property
    def kind(self) -> str:
        """What `StateMeta.kind` calls it."""
        return _OPERATOR_KINDS[self]


_OPERATOR_KINDS = {
    Redistribution.SPLIT: "operator_list",
    Redistribution.UNION: "operator_union",
    Redistribution.BROADCAST: "operator_broadcast",
}
OPERATOR_KINDS = frozenset(_OPERATOR_KINDS.values())
"""Kinds of state that belong to a subtask and to no key."""


@dataclass(frozen=True, slots=True)
class OperatorListStateDescriptor:
    """Operator state: a list per subtask. Entries are opaque bytes to the framework, encoded by the operator.

    Raises InvalidConfigError for an unknown redistribution."""

    name: str
    redistribution: Redistribution = Redistribution.SPLIT

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
    OperatorListStateDescriptor,
)
"""The classes of `StateDescriptor`, for isinstance."""


class ValueState(Protocol[V]):
    """One value for the current key. A mutable value must be given back with `update()` to be kept."""

    @overload
    def value(self) -> V | None: ...
    @overload
    def value(self, default: V) -> V: ...
    @overload
    def value(self, default: V | None = None) -> V | None:
        """The value; without one `default`."""

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
    """A map for the current key; entries are stored one by one."""

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: V) -> V: ...
    @overload
    def get(self, key: K, default: V | None = None) -> V | None:
        """The entry's value; without one `default`."""

    def put(self, key: K, value: V) -> None: ...
    def remove(self, key: K) -> None: ...
    def contains(self, key: K) -> bool: ...
    def items(self) -> Iterator[tuple[K, V]]: ...
    def keys(self) -> Iterator[K]: ...
    def values(self) -> Iterator[V]: ...
    def is_empty(self) -> bool: ...
    def clear(self) -> None: ...


class AppendingState(Protocol[IN, OUT]):
    """Reducing and aggregating state: add values, get the combined result (None when nothing was added)."""

    def get(self) -> OUT | None: ...
    def add(self, value: IN) -> None: ...
    def clear(self) -> None: ...


class ColumnarState(Protocol):
    """Vectorised accumulators of one descriptor over (key, namespace)."""

    def update(
        self,
        keys: KeyColumn,
        namespaces: npt.NDArray[np.int64] | int,
        columns: Sequence[npt.NDArray[Any] | pa.Array | None],
    ) -> None:
        """Fold one batch in. columns[i] feeds aggregates[i] (None for count(*)); all have the length of `keys`.

        A column is a numpy array, a masked numpy array or an Arrow array; masked rows and nulls are ignored."""

    def namespaces(self) -> list[int]:
        """Namespaces that hold rows, ascending."""

    def row_count(self, namespace: int) -> int: ...

    def read(self, namespace: int, offset: int = 0, length: int | None = None) -> pa.RecordBatch:
        """Rows of a namespace: key columns (named as in key_names), then the aggregate results under their output names.

        Row order is the order of first arrival of the keys, stable until the namespace is removed."""

    def rows_of(self, keys: KeyColumn, namespace: int) -> pa.RecordBatch:
        """Current rows of the distinct keys among `keys`, as `read` gives them. Every key must have been updated before."""

    def drop_front(self, namespace: int, count: int) -> None:
        """Forget the first `count` rows in read order, which are in no later snapshot: a window that fires slice by slice
        keeps exactly what it has not emitted. Their keys must not be updated in this namespace any more."""

    def remove(self, namespace: int) -> None:
        """Drop a namespace's rows."""


class KeyColumn(Protocol):
    """The keys of one batch, vectorised; made by keys.KeyType.column(arrays)."""

    @property
    def arrays(self) -> Sequence[pa.Array]:
        """One Arrow array per key field, cast to the declared type."""

    @property
    def key_groups(self) -> npt.NDArray[np.int32]:
        """Key group of each row."""

    def encoded(self) -> list[bytes]:
        """Canonical key bytes of each row."""

    def __len__(self) -> int: ...
