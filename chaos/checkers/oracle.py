"""The committed output of a job, read from outside: the log of a sink as JSON, its files as Parquet, without code of the product.

It finds rows that are missing, extra or out of order; what the rows should be is the scenario's."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.chaos.checkers.observations import StoreView
from holdfast.chaos.pipelines.rows import Row
from holdfast.chaos.workloads.scenario import CutStates, Possibly, RowsInAnyOrder, SinkExpectation

SHOWN_MAX = 5
"""Rows named by a message."""


class OutputDamagedError(Exception):
    """A committed file, or the log that names it, is unreadable or has changed."""

    invariant = "I19"


class MergeWrongError(OutputDamagedError):
    """A file that replaced committed ones does not have their rows."""

    invariant = "I43"


@dataclass(frozen=True, slots=True)
class CommittedFile:
    """A file named by the log."""

    checkpoint_id: int
    name: str
    rows: list[Row]
    digest: bytes
    """Digest of the file's content."""


class CommittedOutput:
    """The committed files of one sink, in commit order. Log and files only grow in number, so each is read once."""

    def __init__(self, view: StoreView, sink_id: str) -> None:
        self._view = view
        self._folder = f"_holdfast/{quote(sink_id, safe='')}"
        self._sink_id = sink_id
        self._entries: list[bytes] = []
        self._names: set[str] = set()
        self._replaced: dict[str, tuple[str, int]] = {}
        """Replaced file -> (the one that has its rows, number of its first row there)."""
        self._merged: dict[str, bytes] = {}
        """File that replaced others -> digest of its content."""
        self.files: list[CommittedFile] = []
        """As they were committed, whatever replaced them."""

    def refresh(self) -> list[CommittedFile]:
        """Read the entries committed since the last call; returns their files. Raises OutputDamagedError."""
        known = len(self.files)
        entries: list[dict[str, Any]] = []
        while (content := self._view.peek(self._log(len(self._entries)))) is not None:
            self._entries.append(content)
            entries.append(msgspec.json.decode(content))
        merges = [entry for entry in entries if entry["type"] == "merge"]
        for entry in merges:
            start = 0
            for file in entry["replaced"]:
                self._replaced[file["name"]] = entry["file"]["name"], start
                start += file["rows"]
        for entry in entries:
            if entry["type"] == "commit":
                self.files += [self._read(entry["checkpoint_id"], file["name"], file["rows"]) for file in entry["files"]]
        for entry in merges:
            self._check_merge(entry)
        return self.files[known:]

    def _check_merge(self, entry: dict[str, Any]) -> None:
        """A merged file has the rows of those that it replaced, in their order."""
        name, rows = entry["file"]["name"], {file.name: file.rows for file in self.files}
        content = self._view.peek(self._data(name))
        if content is None:
            raise MergeWrongError(f"sink {self._sink_id}: {name} has replaced committed files and does not exist")
        wanted = [row for file in entry["replaced"] for row in rows.get(file["name"], ())]
        if parquet_rows(content) != wanted or len(wanted) != entry["file"]["rows"]:
            raise MergeWrongError(f"sink {self._sink_id}: {name} has not the rows of the files that it replaced")
        self._merged[name] = _digest(content)

    def _log(self, sequence: int) -> str:
        return f"{self._folder}/log/{sequence:012d}.json"

    def _data(self, name: str) -> str:
        return f"{self._folder}/data/{name}"

    def _read(self, checkpoint_id: int, name: str, rows: int) -> CommittedFile:
        where = f"sink {self._sink_id}: {name} of checkpoint {checkpoint_id}"
        if name in self._names:
            raise OutputDamagedError(f"{where} is committed twice")
        self._names.add(name)
        merged, start = self._replaced.get(name, ("", 0))
        content = self._view.peek(self._data(merged or name))
        if content is None:
            raise OutputDamagedError(f"{where} is committed and does not exist")
        try:
            found = parquet_rows(content)
            found = found[start : start + rows] if merged else found
        except (pa.ArrowException, OSError) as error:
            raise OutputDamagedError(f"{where} is committed and can't be read: {error}") from error
        if len(found) != rows:
            raise OutputDamagedError(f"{where} has {len(found)} rows, {rows} were committed")
        return CommittedFile(checkpoint_id, name, found, _digest(content))

    def recheck(self) -> None:
        """Check that every file committed so far is unchanged. Raises OutputDamagedError."""
        for sequence, content in enumerate(self._entries):
            if self._view.peek(self._log(sequence)) != content:
                raise OutputDamagedError(f"sink {self._sink_id}: entry {sequence} of its log has changed or is gone")
        current = {file.name: file.digest for file in self.files if file.name not in self._replaced} | self._merged
        for name, digest in current.items():
            content_now = self._view.peek(self._data(name))
            if content_now is None or _digest(content_now) != digest:
                raise OutputDamagedError(f"sink {self._sink_id}: {name} was committed and has changed or is gone")


def committed(view: StoreView, sink_id: str) -> list[CommittedFile]:
    """Committed files of the sink, in the order of their commits. Raises OutputDamagedError."""
    output = CommittedOutput(view, sink_id)
    output.refresh()
    return output.files


def is_replaced(store: Callable[[str], StoreView], places: Iterable[str]) -> bool:
    """Whether a file that a snapshot names was committed, and another one has its rows by now."""
    for place in places:
        root, folder, rest = place.partition("/_holdfast/")
        if not folder:
            continue
        sink, _, name = rest.partition("/")
        view, sequence = store(root), 0
        while (content := view.peek(f"_holdfast/{sink}/log/{sequence:012d}.json")) is not None:
            sequence += 1
            entry = msgspec.json.decode(content)
            if entry["type"] == "merge" and name.partition("/")[2] in {file["name"] for file in entry["replaced"]}:
                return True
    return False


def parquet_rows(content: bytes) -> list[Row]:
    """Rows of a Parquet file; timestamps as integers, us since the epoch."""
    # read_table takes three times as long for files of a few rows
    with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
        table = file.read(use_threads=False)
    return list(zip(*(_plain(column) for column in table.columns), strict=True))


def _plain(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


# -------------------------------------------------------------------------------------------------------------- verdicts


def counted(files: Iterable[CommittedFile], sink: SinkExpectation) -> Counter[Row]:
    """Rows of some files as the expectation counts them: the compared columns, or only the last row of each key."""
    rows: Iterable[Row] = chain.from_iterable(file.rows for file in files)
    if sink.last_of_key and sink.ordered_by is not None:
        key, sequence = sink.ordered_by
        last: dict[Any, Row] = {}
        for row in rows:
            if row[key] not in last or last[row[key]][sequence] < row[sequence]:
                last[row[key]] = row
        rows = last.values()
    if sink.compared is not None:
        rows = _columns(rows, sink.compared)
    return Counter(rows)


def _columns(rows: Iterable[Row], columns: tuple[int, ...]) -> Iterable[Row]:
    # the most expensive part of a run's verdict: once for each row of the output
    if len(columns) > 1:
        return map(itemgetter(*columns), rows)
    return (tuple(row[column] for column in columns) for row in rows)


def compare(expected: Counter[Row], actual: Counter[Row], *, partly: bool = False) -> str | None:
    """The first missing or extra rows; None if there are none. `partly`: more rows may come, so none is missing yet."""
    if dict.__eq__(actual, expected) or actual == expected:  # the first test is much cheaper, and true of every good run
        return None
    extra, missing = actual - expected, Counter() if partly else expected - actual
    parts = [f"{rows.total()} {what}: {_shown(rows)}" for what, rows in (("missing", missing), ("too many", extra)) if rows.total()]
    return f"{actual.total()} of {expected.total()} rows; {'; '.join(parts)}" if parts else None


def _shown(rows: Counter[Row]) -> str:
    first = sorted(rows.items(), key=lambda item: repr(item[0]))[:SHOWN_MAX]
    text = ", ".join(f"{row}" if count == 1 else f"{row} x{count}" for row, count in first)
    return text if len(rows) <= SHOWN_MAX else f"{text} ..."


class Sequences:
    """Checks the order of a sink's output (I3) and its steps (I5), file by file in the order of commits."""

    def __init__(self, sink: SinkExpectation) -> None:
        self._columns = sink.ordered_by
        self._steps = sink.steps_by_one
        self._last: dict[Any, Any] = {}

    def add(self, file: CommittedFile) -> tuple[str, str] | None:
        """(invariant, problem) of the first row out of place; None if there is none."""
        if self._columns is None:
            return None
        key_column, column = self._columns
        for row in file.rows:
            key, sequence = row[key_column], row[column]
            last = self._last.get(key)
            self._last[key] = sequence
            if last is not None and not last < sequence:
                broken = "I3"
            elif self._steps and sequence != (0 if last is None else last) + 1:
                broken = "I5"
            else:
                continue
            return broken, f"key {key!r} has {sequence!r} after {last!r} in {file.name} of checkpoint {file.checkpoint_id}"
        return None


def compare_states(expected: CutStates, actual: Mapping[str, Mapping[Any, Any]]) -> str | None:
    """The first entries of keyed state that differ from the cut's; None if there are none."""
    for state, wanted in expected.items():
        found = actual.get(state, {})
        if isinstance(wanted, RowsInAnyOrder):
            if (problem := wanted.problem(found)) is not None:
                return f"state {state!r}: {problem}"
            continue
        if found == wanted:
            continue
        wrong = []
        for key in sorted({*wanted, *found}, key=repr):
            value, held = wanted.get(key, _ABSENT), found.get(key, _ABSENT)
            if isinstance(value, Possibly):
                value = value.value if key in found else _ABSENT
            if held != value:
                wrong.append(f"{key!r} is {held!r}, not {value!r}")
        if wrong:
            rest = f" and {len(wrong) - SHOWN_MAX} more" if len(wrong) > SHOWN_MAX else ""
            return f"state {state!r}: {'; '.join(wrong[:SHOWN_MAX])}{rest}"
    return None


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()
