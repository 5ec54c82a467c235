"""`spark.readStream.format("holdfast")`: the committed rows of a file sink as a stream, each once.

An offset is a position in the sink's log, with a digest of the entry in front of it: a query that goes on finds that the log is the
one that it read, wherever its folder is now. A takeover is an entry without rows. A commit is in one batch, never in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, ReadMaxRows, SupportsTriggerAvailableNow

from holdfast.barriers.sinks.log import LogEntry, SinkPaths
from holdfast.barriers.sinks.reading import read_log_flow
from holdfast.operators.sinks.files.committed import admit, digest_of
from holdfast.operators.spark.datasource.batch_read import FORMAT, Output, OutputOptions, partitions_of, read_rows
from holdfast.statebackends.errors import InvalidConfigError, SourceDataLostError
from holdfast.statebackends.storage.port import run_flow

_Offset = dict[str, Any]
_BEGIN: _Offset = {"sequence": 0, "entry": ""}


class LogTail:
    """The end of a log, from the entry in front of a position on; read once as it grows."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._first = 0
        self._entries: list[LogEntry] = []

    def follow(self) -> None:
        """Read what was appended since. A log that was begun once more at this place meanwhile is read as a whole."""
        if self._entries:
            found = self._read(self._first + len(self._entries) - 1)
            if found and found[0] == self._entries[-1]:
                self._entries += found[1:]
                return
        self._entries = self._read(self._first)

    def _read(self, sequence: int) -> list[LogEntry]:
        return run_flow(read_log_flow(SinkPaths(self._output.sink_id), sequence), self._output.storage)

    @property
    def end(self) -> _Offset:
        return self.offset(self._first + len(self._entries)) if self._entries else dict(_BEGIN)

    def offset(self, sequence: int) -> _Offset:
        """Offset of a position that was read."""
        return {"sequence": sequence, "entry": digest_of(self._entries[sequence - 1 - self._first])} if sequence else dict(_BEGIN)

    def since(self, start: _Offset) -> list[LogEntry]:
        """Entries behind an offset; forgets those before. Raises SourceDataLostError when the log is not the one of the offset."""
        sequence, entry = _parsed(start)
        wanted = max(sequence - 1, 0)  # the entry in front of it says whether the log is the same
        if wanted < self._first or wanted > self._first + len(self._entries):
            self._first, self._entries = wanted, []
        self.follow()
        del self._entries[: wanted - self._first]
        self._first = wanted
        if sequence and (not self._entries or digest_of(self._entries[0]) != entry):
            raise SourceDataLostError(
                f"sink {self._output.sink_id} at {self._output.path}: the query has read its log up to entry {sequence}, and the "
                "log there has another entry, or none: it is another sink's, or was begun once more. Put it back, or start a query "
                "with a checkpoint of its own",
                connector=FORMAT,
                split=self._output.sink_id,
                position=(sequence,),
                reason="another log",
            )
        return self._entries[sequence - wanted :]


def _parsed(offset: _Offset) -> tuple[int, str]:
    sequence, entry = offset.get("sequence"), offset.get("entry")
    if type(sequence) is not int or sequence < 0 or not isinstance(entry, str):
        raise InvalidConfigError(f"{FORMAT}: {offset!r} is not an offset of a sink's log", setting="checkpointLocation")
    return sequence, entry


class OutputStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """Reads a sink's log as it grows."""

    def __init__(self, options: OutputOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._found: LogTail | None = None
        self._last: int | None = None
        """Position behind which nothing is read, for Trigger.AvailableNow."""

    @property
    def _tail(self) -> LogTail:
        if self._found is None:
            self._found = LogTail(self._options.open())
        return self._found

    def initialOffset(self) -> _Offset:
        if not self._options.starts_latest:
            return dict(_BEGIN)
        self._tail.follow()
        return self._tail.end

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.files_max is not None:
            return ReadMaxFiles(self._options.files_max)
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._tail.follow()
        self._last = self._tail.end["sequence"]

    def latestOffset(self, start: _Offset, limit: ReadLimit) -> _Offset:
        entries = self._tail.since(start)
        sequence, _ = _parsed(start)
        if self._last is not None:
            entries = entries[: max(self._last - sequence, 0)]
        taken = admit(
            entries,
            files_max=limit.max_files if isinstance(limit, ReadMaxFiles) else None,
            rows_max=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
        )
        return self._tail.offset(sequence + taken) if taken else start

    def reportLatestOffset(self) -> _Offset:
        self._tail.follow()
        return self._tail.end

    def partitions(self, start: _Offset, end: _Offset) -> list[InputPartition]:
        entries = self._tail.since(start)
        count = _parsed(end)[0] - _parsed(start)[0]
        output = self._options.open()
        if count > len(entries) or (count and digest_of(entries[count - 1]) != _parsed(end)[1]):
            raise SourceDataLostError(
                f"sink {output.sink_id} at {output.path}: the query has planned a batch up to entry {end['sequence']} of its log, "
                "and the log there has another entry, or none",
                connector=FORMAT,
                split=output.sink_id,
                position=(_parsed(start)[0],),
                reason="another log",
            )
        return partitions_of(output.storage, entries[:count], output.sink_id, self._options.partitions, behind=entries[count:])

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_rows(self._options, partition, self._schema)
