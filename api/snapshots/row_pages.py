"""One page of the rows of a state: little work, whatever the state's size, and little text, whatever its rows hold.

A position is a key group and how many of its rows were shown, so that the next page begins in the file that has that key group.
Rows of a snapshot are in an order that never changes. Operator state has no key groups: its entries are counted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from holdfast.api.snapshots.rows import rows_of
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.layout import KEY_GROUP
from holdfast.statebackends.snapshot.deltas import StatePart
from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import state_batches, state_schema

ROWS_MAX = 500
"""Rows of one page."""
PARTS_MAX = 64
"""Shares of old subtasks that are opened for one page; it ends behind them, perhaps without a row."""
PART_BYTES_MAX = 256 * 1024 * 1024
"""Of one share: each page reads all of its bytes, to check them."""
CELL_CHARACTERS_MAX = 1_000
"""Text of one value; what is longer is cut."""
SKIPPED_MAX = 10_000_000
"""Rows of one key group, or entries of operator state, in front of a page."""

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
        rows = batch.slice(start, left).to_pylist()
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


def cell_text(value: Any) -> str:
    """A stored value as JSON text. Dicts are lists of pairs unless all of their keys are text."""
    return json.dumps(_plain(value), ensure_ascii=False, default=_other).encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(member) for key, member in value.items()}
        return [[_plain(key), _plain(member)] for key, member in value.items()]
    return [_plain(member) for member in value] if isinstance(value, list | tuple) else value


def _other(value: Any) -> str:
    return value.hex() if isinstance(value, bytes | bytearray | memoryview) else str(value)
