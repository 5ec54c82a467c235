"""Jobs of one source and one `StagedSink` on one target, driven step by step; each state directory is a storage of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.barriers.sinks.staged import STAGED_CHECKPOINTS, CommitPosition
from holdfast.operators.sinks.targets.positions import CommitOwner
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.operators.sinks.targets.target import CommitTarget
from holdfast.statebackends.errors import FencedError, ObjectMissingError
from tests.operators.ports import Collected, DictStorage, ManualContext
from tests.operators.sinks.files.minijob import SCHEMA, MiniJob, MortalStorage, Snapshot


class Outside:
    """What is beyond all jobs: rows, and the position beside them."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.stored: CommitPosition | None = None
        self.commits = 0
        self.calls = 0
        self.mute_next = False
        self.deaf_from: int | None = None
        """Number of the call from which on none takes effect."""

    def call(self, act: Any) -> Any:
        self.calls += 1
        if self.deaf_from is not None and self.calls > self.deaf_from:
            raise ConnectionError("no answer")
        result = act()
        if self.mute_next:
            self.mute_next = False
            raise ConnectionError("no answer")
        return result

    def open(self, owner: CommitOwner) -> CommitPosition:
        self.stored = owner.take(self.stored)
        return self.stored

    def apply(self, rows: list[int], expected: CommitPosition, position: CommitPosition) -> None:
        if self.stored != expected:
            raise FencedError(f"{expected.sink_id} has another owner", sink=expected.sink_id)
        self.rows += rows
        self.stored = position
        self.commits += 1

    @property
    def seen(self) -> list[int]:
        """Rows that others see, in order."""
        return self.rows

    def sink_of(self, options: dict[str, Any]) -> StagedSink:
        """The sink of one attempt."""
        return StagedSink(OutsideTarget(self), "out", **options)

    def lose(self) -> None:
        """Rows and position are gone."""
        self.rows, self.stored = [], None


class OutsideTarget(CommitTarget):
    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def open(self, owner: CommitOwner) -> CommitPosition:
        taken: CommitPosition = self._outside.call(lambda: self._outside.open(owner))
        return taken

    def apply(self, batches: Iterator[pa.RecordBatch], expected: CommitPosition, position: CommitPosition) -> None:
        rows = [row for batch in batches for row in batch.column("i").to_pylist()]
        self._outside.call(lambda: self._outside.apply(rows, expected, position))


class Directories(MortalStorage):
    """One state directory, from which the others are seen at their places."""

    def __init__(self, root: str, known: dict[str, Directories]) -> None:
        super().__init__({}, root)
        self._known = known
        known[root] = self

    def at(self, location: str) -> Any:
        for root, storage in self._known.items():
            if location.startswith(f"{root}/"):
                return _Below(storage, location[len(root) + 1 :])
        raise AssertionError(location)


class _Below:
    def __init__(self, storage: DictStorage, folder: str) -> None:
        self._storage = storage
        self._folder = folder

    def execute(self, operation: Any) -> Any:
        return self._storage.execute(msgspec.structs.replace(operation, path=f"{self._folder}/{operation.path}"))


class TargetJob(MiniJob):
    """The job of one name in one state directory."""

    def __init__(self, outside: Outside, state: Directories, job_id: str, options: dict[str, Any]) -> None:
        super().__init__(state, state, job_id)
        self.outside = outside
        self.options = options
        self.snapshots: dict[int, Snapshot] = {}
        self.time_ms = 1_000_000
        self.died: Any = None

    def start(self, flows: int | None = None) -> None:
        self.died = getattr(self, "committer", None), getattr(self, "contexts", None)
        self.attempt += 1
        sink = self.outside.sink_of(self.options)
        self.committables = Collected()
        self.contexts = [self._context(), self._context()]
        for context in self.contexts:
            context.time_ms = self.time_ms
        writer: Any = sink.create_writer(SCHEMA)
        committer: Any = sink.create_committer()
        self.writer, self.committer = writer, committer
        committer.allow_output_repeat = self.allow_output_repeat
        writer.setup(self.contexts[0], self.committables)
        committer.setup(self.contexts[1], Collected())
        self.contexts[1].operator_state.list_state(STAGED_CHECKPOINTS).update(self.completed.committer)
        committer.initialize_state()
        committer.open()
        writer.open()
        self.position = self.completed.position
        self.run_pool()

    def _context(self) -> ManualContext:
        context = super()._context()
        context.nonce = f"n-{self.state.root[1:]}-{self.job_id[-1]}-{self.attempt}"
        return context

    def snapshot(self) -> Snapshot:
        taken = super().snapshot()
        entries = copy.copy(self.contexts[1].operator_state.list_state(STAGED_CHECKPOINTS).entries)
        self.snapshots[taken.checkpoint_id] = Snapshot(taken.checkpoint_id, taken.position, entries)
        return self.snapshots[taken.checkpoint_id]

    def restore(self, snapshot: Snapshot, *, allowed: bool = False) -> None:
        self.completed = snapshot
        self.checkpoint_id = max(self.checkpoint_id, snapshot.checkpoint_id)
        self.allow_output_repeat = allowed
        self.start()

    def wake(self) -> None:
        """The attempt before this one hears of all that is complete."""
        committer, contexts = self.died
        committer.notify_checkpoint_complete(self.checkpoint_id)
        contexts[1].run_pool()
        if contexts[1].failures:
            raise contexts[1].failures[0]

    def later(self, ms: int) -> None:
        """Processing time goes on; the committer's timer fires."""
        self.time_ms += ms
        for context in self.contexts:
            context.time_ms = self.time_ms
        due = self.committer.next_processing_time_ms()
        if due is not None and due <= self.time_ms:
            list(self.committer.process_processing_time(self.time_ms))
        self.run_pool()

    def lose_staged(self) -> None:
        doomed = [path for path in self.state.files if "/staged/" in path]
        if not doomed:
            raise ObjectMissingError("nothing is staged", path="staged")
        for path in doomed:
            del self.state.files[path]
