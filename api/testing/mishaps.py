"""Mishaps of a sink under check: which call they happen at, and the wrappers of users' objects in which they do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from holdfast.barriers.sinks.log import ROOT_FOLDER
from holdfast.operators.sinks.connector import CommitRequest, Committer, Sink, SinkWriter
from holdfast.operators.sinks.files.parquet import FileSink
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import AmbiguousWriteError, InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.storage.port import (
    DeleteFile,
    LinkFile,
    Operation,
    PutIfAbsent,
    Storage,
    WriteFile,
    copies_links,
    path_of,
)

MISHAPS = ("dies before", "dies behind", "fails before", "fails behind", "dies within", "fails within")
"""What happens at a call: the process dies, or the call has no answer. Within: between two rows that a target takes."""

RESTARTS = ("server restarts before", "server restarts within", "server restarts behind")
"""The server is killed there, and comes back with its data."""


class Died(BaseException):
    """The process of a sink died: nothing of it handles this."""


class LostAnswer(Exception):
    """A call has no answer: whether it took effect is unknown."""


@dataclass(slots=True)
class Script:
    """The mishap of one run: at which call, and what."""

    call: int | None = None
    """0, 1, 2 ...: over the calls of all incarnations; None: none, or it has happened."""
    mishap: str = ""
    restart: Callable[[], None] | None = None
    """Restarts the server."""
    calls: int = 0
    names: list[str] = field(default_factory=list)
    """Of the calls so far."""

    def strike(self, when: str) -> None:
        """What the script has for this place, once."""
        if self.call != self.calls - 1 or not self.mishap.endswith(when):
            return
        self.call = None
        if self.mishap.startswith("dies"):
            raise Died
        if self.mishap.startswith("fails"):
            raise LostAnswer(f"{self.names[-1]} {'did not happen' if when == 'before' else f'has no answer, {when} it'}")
        assert self.restart is not None
        self.restart()

    @contextlib.contextmanager
    def around(self, name: str) -> Iterator[None]:
        """One call."""
        self.calls += 1
        self.names.append(name)
        self.strike("before")
        yield
        self.strike("behind")


SCRIPTS: dict[str, Script] = {}
"""By the output's name: what is wrapped is pickled into its job, and stays in this process."""


class WatchedTarget(CommitTarget):
    """A target to which the script's mishap happens."""

    def __init__(self, target: CommitTarget, name: str) -> None:
        self._target = target
        self._name = name

    @property
    def place(self) -> str:
        return self._target.place

    @property
    def identity(self) -> str:
        return self._target.identity

    def check(self, schema: pa.Schema) -> None:
        self._target.check(schema)

    def staged_schema(self, schema: pa.Schema) -> pa.Schema:
        return self._target.staged_schema(schema)

    def stage(self, columns: pa.RecordBatch) -> pa.RecordBatch:
        return self._target.stage(columns)

    def open(self, owner: CommitOwner) -> CommitPosition:
        with SCRIPTS[self._name].around("open"):
            return self._target.open(owner)

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        with SCRIPTS[self._name].around("apply"):
            self._target.apply(self._rows(batches), expected, position)

    def close(self) -> None:
        with SCRIPTS[self._name].around("close"):
            self._target.close()

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Row by row, so that a mishap may fall between two."""
        for batch in batches:
            for row in range(batch.num_rows):
                yield batch.slice(row, 1)
                SCRIPTS[self._name].strike("within")


class WatchedSink(Sink):
    """A sink of a SinkWriter with a Committer, to whose calls the mishap happens."""

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink = sink
        self._name = name
        self.name = sink.name
        self.sink_id = sink.sink_id
        self.needs_columns = sink.needs_columns

    def create_writer(self, schema: pa.Schema | None) -> SinkWriter:
        writer = self._sink.create_writer(schema)
        if not isinstance(writer, SinkWriter):
            raise _unchecked(self._sink)
        return _WatchedWriter(writer, self._name)

    def create_committer(self) -> Committer:
        committer = self._sink.create_committer()
        if not isinstance(committer, Committer):
            raise _unchecked(self._sink)
        return _WatchedCommitter(committer, self._name)


def _unchecked(sink: Sink) -> InvalidConfigError:
    return InvalidConfigError(
        f"check_sink checks a StagedSink, a file sink, or a sink of a SinkWriter with a Committer: {type(sink).__name__} is none "
        "of them",
        setting="make_sink",
    )


class _WatchedWriter(SinkWriter):
    def __init__(self, writer: SinkWriter, name: str) -> None:
        self._writer = writer
        self._name = name

    def open(self, ctx: Any) -> None:
        with SCRIPTS[self._name].around("open writer"):
            self._writer.open(ctx)

    def write(self, batch: pa.RecordBatch) -> None:
        with SCRIPTS[self._name].around("write"):
            self._writer.write(batch)

    def prepare_commit(self) -> Sequence[bytes]:
        with SCRIPTS[self._name].around("prepare_commit"):
            return self._writer.prepare_commit()

    def flush(self, *, end_of_input: bool) -> None:
        with SCRIPTS[self._name].around("flush"):
            self._writer.flush(end_of_input=end_of_input)

    def close(self) -> None:
        with SCRIPTS[self._name].around("close writer"):
            self._writer.close()


class _WatchedCommitter(Committer):
    def __init__(self, committer: Committer, name: str) -> None:
        self._committer = committer
        self._name = name

    def open(self, ctx: Any) -> None:
        with SCRIPTS[self._name].around("open committer"):
            self._committer.open(ctx)

    def commit(self, requests: Sequence[CommitRequest]) -> None:
        with SCRIPTS[self._name].around("commit"):
            self._committer.commit(requests)

    def close(self) -> None:
        with SCRIPTS[self._name].around("close committer"):
            self._committer.close()


_CHANGES = (PutIfAbsent, WriteFile, LinkFile, DeleteFile)


class WatchedStorage:
    """Storage of a file sink's output, to whose changes the mishap happens."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name

    @property
    def root(self) -> str:
        return self._storage.root

    @property
    def copies_links(self) -> bool:
        return copies_links(self._storage)

    def at(self, location: str) -> Storage:
        return self._storage.at(location)

    def execute(self, operation: Operation) -> Any:
        if not isinstance(operation, _CHANGES):
            return self._storage.execute(operation)
        folders = path_of(operation).split("/")
        call = f"{type(operation).__name__} in {folders[2] if folders[0] == ROOT_FOLDER else 'the folder'}"
        done = False
        try:
            with SCRIPTS[self._name].around(call):
                result = self._storage.execute(operation)
                done = True
            return result
        except LostAnswer as lost:
            raise (AmbiguousWriteError if done else StorageUnavailableError)(str(lost), path=path_of(operation)) from lost


def watched(sink: Sink, name: str, rows_per_commit: int | None = None) -> Sink:
    """The sink, with the mishap of its script. Raises InvalidConfigError for one whose calls can't be watched."""
    if isinstance(sink, StagedSink):
        return sink.watched(lambda target: WatchedTarget(target, name), rows_per_commit)
    if isinstance(sink, FileSink):
        return sink.watched(partial(WatchedStorage, name=name))
    return WatchedSink(sink, name)
