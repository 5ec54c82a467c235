"""One page of the rows of a state: little work, whatever the state's size, and little text, whatever its rows hold.

A position is a key group and how many of its rows were shown, so that the next page begins in the file that has that key group.
Rows of a snapshot are in an order that never changes. Operator state has no key groups: its entries are counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import pyarrow as pa

from holdfast.api.snapshots.rows import rows_of
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import KEY_GROUP
from holdfast.statebackends.snapshot.deltas import StatePart
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.state_processor.values import python_rows, python_values

ROWS_MAX = 500
"""Rows of one page."""
PARTS_MAX = 64
"""Shares of old subtasks that are opened for one page; it ends behind them, perhaps without a row."""
PART_BYTES_MAX = 256 * 1024 * 1024
"""Of one share: each page reads all of its bytes, to check them."""
CELL_CHARACTERS_MAX = 1_000
"""Text of one value; what is longer is cut."""
SMALL_BYTES = 256 * 1024
"""Rows of so many bytes together become Python's objects as they are; of larger ones each value only as far as it is shown."""
SKIPPED_MAX = 10_000_000
"""Rows of one key group, or entries of operator state, in front of a page."""

_T = TypeVar("_T")

_POSITION = re.compile(r"(\d{1,5})\.(\d{1,8})")


@dataclass(frozen=True, slots=True)
class RowPosition:
    """Where a page begins."""

    key_group: int = 0
    """0 for operator state."""
    skipped: int = 0
    """Rows of the key group, or entries, in front of it."""

    @classmethod
    def parse(cls, text: str) -> RowPosition:
        """Parse `next` of a page; the beginning for an empty text. Raises InvalidConfigError."""
        if not text:
            return cls()
        found = _POSITION.fullmatch(text)
        if found is None or int(found[2]) > SKIPPED_MAX:
            raise InvalidConfigError("after is no position of a row: give `next` of the page before", setting="after")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.key_group}.{self.skipped}"


@dataclass(frozen=True, slots=True)
class RowPage:
    """Some rows of a state."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    """Each value as JSON text, as `holdfast snapshot inspect --json` prints it; bytes as hex digits."""
    clipped: int
    """Values that were cut."""
    next: str
    """Position of the next page; empty: this is the last one."""


def read_page(stored: StoredSnapshot, uid: str, name: str, position: RowPosition, limit: int) -> RowPage:
    """Up to `limit` rows from a position on. Raises NotFoundError, CorruptStateError, InvalidConfigError for a share that is too
    large for it."""
    state = stored.state(uid, name)
    with stored.reader() as reader:
        rows, following = (_keyed if state.is_keyed else _entries)(reader, state, position, min(limit, ROWS_MAX))
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    texts = [[clip_text(cell_text(row[column])) if column in row else "" for column in columns] for row in rows]
    clipped = sum(text.endswith(ELLIPSIS) for row in texts for text in row)
    return RowPage(columns, tuple(map(tuple, texts)), clipped, "" if following is None else str(following))


def _keyed(
    reader: PartReader, state: StoredState, position: RowPosition, limit: int
) -> tuple[list[dict[str, Any]], RowPosition | None]:
    ahead = [part for part in state.keyed if part.key_groups.stop > position.key_group]
    parts = sorted(ahead, key=lambda part: part.key_groups.start)
    schema = state_schema(reader, state)
    found: list[dict[str, Any]] = []
    at = position
    for number, part in enumerate(parts):
        if number == PARTS_MAX:
            return found, RowPosition(part.key_groups.start)
        _check_size(state, part)
        wanted = KeyGroupRange(max(position.key_group, part.key_groups.start), part.key_groups.stop)
        for row in _rows(state_batches(reader, state, schema, wanted), position, limit - len(found) + 1):
            if len(found) == limit:
                return found, at
            found.append(row)
            group = row[KEY_GROUP]
            at = RowPosition(group, at.skipped + 1 if group == at.key_group else 1)
    return found, None


def _rows(batches: Iterator[pa.RecordBatch], position: RowPosition, limit: int) -> Iterator[dict[str, Any]]:
    """At most `limit` rows behind a position; no others become Python's objects."""
    to_skip, left = position.skipped, limit
    for batch in batches:
        groups = batch.column(batch.schema.get_field_index(KEY_GROUP)).to_numpy()
        ours = int((groups == position.key_group).sum()) if to_skip else 0
        start = min(to_skip, ours)
        to_skip = to_skip - start if ours == len(groups) else 0
        rows = plain_rows(batch.slice(start, left))
        left -= len(rows)
        yield from rows
        if not left:
            return


def _check_size(state: StoredState, part: StatePart) -> None:
    size = part.handle.size if part.is_native else part.size
    if size > PART_BYTES_MAX:
        raise InvalidConfigError(
            f"operator {state.operator.uid!r}, state {state.meta.name!r}: subtask {part.subtask} stored {size} bytes, and a page "
            f"reads {PART_BYTES_MAX} at most: use `holdfast snapshot inspect --state`, or export it",
            operator=state.operator.uid,
            state=state.meta.name,
        )


def _entries(
    reader: PartReader, state: StoredState, position: RowPosition, limit: int
) -> tuple[list[dict[str, Any]], RowPosition | None]:
    rows = list(islice(rows_of(reader, state), position.skipped, position.skipped + limit + 1))
    return rows[:limit], RowPosition(0, position.skipped + limit) if len(rows) > limit else None


ELLIPSIS = "…"


def clip_text(text: str) -> str:
    return text if len(text) <= CELL_CHARACTERS_MAX else text[: CELL_CHARACTERS_MAX - 1] + ELLIPSIS


class _Budget:
    """What of a value is still looked at: each piece takes no more than its text has characters, so that what is left out lies
    behind `CELL_CHARACTERS_MAX`. The interpreter lock is not let go while a large value is made into objects or text: no other
    thread would run, and workers' heartbeats would not be read."""

    def __init__(self) -> None:
        self.left = CELL_CHARACTERS_MAX + 1

    def take(self, size: int = 1) -> None:
        self.left -= size

    def some(self, items: Iterable[_T]) -> Iterator[_T]:
        """Items until it is spent. One for each is taken, as a value's own text may be empty."""
        for item in items:
            if self.left <= 0:
                return
            self.take()
            yield item


def plain_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as Python's objects; of large ones no more of a value than is shown of it."""
    if batch.nbytes <= SMALL_BYTES:
        return python_rows(batch)
    names, columns = batch.schema.names, batch.columns
    return [
        {name: _plain_scalar(column[index], _Budget()) for name, column in zip(names, columns, strict=True)}
        for index in range(batch.num_rows)
    ]


def _plain_scalar(scalar: pa.Scalar, budget: _Budget) -> Any:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.MapScalar):
        pairs = scalar.values
        return [tuple(_plain_scalar(pair[name], budget) for name in pair) for pair in budget.some(pairs)]
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        return [_plain_scalar(item, budget) for item in budget.some(scalar.values)]
    if isinstance(scalar, pa.StructScalar):
        return {name: _plain_scalar(scalar[name], budget) for name in scalar}
    value = python_values(pa.repeat(scalar, 1))[0] if pa.types.is_temporal(scalar.type) else scalar.as_py()
    if isinstance(value, str | bytes):
        value = value[: CELL_CHARACTERS_MAX + 1]
        budget.take(len(value))
    return value


def cell_text(value: Any) -> str:
    """A stored value as JSON text, of a large one its beginning, longer than CELL_CHARACTERS_MAX. Dicts are lists of pairs unless
    all of their keys are text."""
    plain = _plain(value, _Budget())
    return json.dumps(plain, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any, budget: _Budget) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {_plain(key, budget): _plain(member, budget) for key, member in budget.some(value.items())}
        return [[_plain(key, budget), _plain(member, budget)] for key, member in budget.some(value.items())]
    if isinstance(value, list | tuple):
        return [_plain(member, budget) for member in budget.some(value)]
    if isinstance(value, set | frozenset) and len(value) > CELL_CHARACTERS_MAX:
        return str(set(islice(value, CELL_CHARACTERS_MAX)))
    if isinstance(value, bytes | bytearray | memoryview):
        value = value[: CELL_CHARACTERS_MAX + 1].hex()
    if isinstance(value, str):
        value = value[: CELL_CHARACTERS_MAX + 1]
        budget.take(len(value))
    return value
