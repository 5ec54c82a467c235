"""One operator of one subtask, driven by hand: a real keyed backend, real timers, real snapshots; output is collected.

    with OperatorHarness(operator, key_type="utf8") as harness:
        harness.process([{"k": "a"}], timestamps=[10])
        harness.watermark(100)
        assert harness.output.rows() == [...]
        snapshot = harness.snapshot()

`OperatorHarness.restored(operator, [snapshot, ...], parallelism=3, subtask=1)` is a subtask after a restore, at any parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import cloudpickle
import numpy as np
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator
from holdfast.operators.task.context import Mailbox, RuntimeContext, SubtaskPool
from holdfast.operators.task.timers import EVENT_TIMERS, PROCESSING_TIMERS, InternalTimerService
from holdfast.statebackends.backend import KeyedStateBackend, RestoredOperatorState, SnapshotTarget
from holdfast.statebackends.backends.operator import ListOperatorStateBackend
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.handles import KeyedStateHandle
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.redistribute import (
    NewEntries,
    OldEntries,
    broadcast_redistribute,
    split_redistribute,
    union_redistribute,
)
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import OPERATOR_KINDS
from holdfast.statebackends.storage.port import run_flow
from tests.operators.ports import DictStorage
from tests.operators.runtime import ManualClock, ManualPool

_REDISTRIBUTIONS: dict[str, Callable[[OldEntries[bytes], int], NewEntries[bytes]]] = {
    "operator_list": split_redistribute,
    "operator_union": union_redistribute,
    "operator_broadcast": broadcast_redistribute,
}


@dataclass(frozen=True)
class HarnessSnapshot:
    """What one subtask stored."""

    keyed: tuple[KeyedStateHandle, ...]
    lists: dict[str, list[bytes]]
    storage: DictStorage


@dataclass
class Collected:
    """`base.Output` that keeps what it gets; as rows a batch and its columns agree."""

    elements: list[Batch | int] = field(default_factory=list)
    """Batches, and the operator's own watermarks, in order."""
    sides: dict[str, list[Batch]] = field(default_factory=dict)
    """Tag -> batches, of the side outputs that a test reads: it puts an empty list there."""
    idle: bool = False
    statuses: list[tuple[int, bool]] = field(default_factory=list)
    """(elements before it, idle) of each change."""

    def collect(self, batch: Batch) -> None:
        assert batch.num_rows, "an operator emitted an empty batch"
        assert batch.timestamps is None or len(batch.timestamps) == batch.num_rows
        self.elements.append(batch)

    def collect_side(self, tag: str, batch: Batch) -> None:
        assert batch.num_rows, "an operator emitted an empty batch"
        self.sides[tag].append(batch)

    def has_readers(self, tag: str) -> bool:
        return tag in self.sides

    def emit_watermark(self, timestamp_ms: int) -> None:
        self.elements.append(timestamp_ms)

    def emit_watermark_now(self, timestamp_ms: int) -> None:
        self.elements.append(timestamp_ms)

    def emit_status(self, *, idle: bool) -> None:
        if idle != self.idle:
            self.idle = idle
            self.statuses.append((len(self.elements), idle))

    @property
    def batches(self) -> list[Batch]:
        return [element for element in self.elements if isinstance(element, Batch)]

    @property
    def watermarks(self) -> list[int]:
        return [element for element in self.elements if isinstance(element, int)]

    def rows(self) -> list[Any]:
        return [row for batch in self.batches for row in batch.rows()]

    def timestamps(self) -> list[int | None]:
        """Event time of each row."""
        found: list[int | None] = []
        for batch in self.batches:
            found += [None] * batch.num_rows if batch.timestamps is None else batch.timestamps.tolist()
        return found

    def clear(self) -> None:
        self.elements.clear()


class OperatorHarness:
    """A subtask of one operator."""

    def __init__(
        self,
        operator: Operator,
        *,
        key_type: str | None = None,
        subtask: int = 0,
        parallelism: int = 1,
        max_parallelism: int = 128,
        now_ms: int = 0,
    ) -> None:
        self.operator: Any = cloudpickle.loads(cloudpickle.dumps(operator))
        self.clock = ManualClock(now_ms)
        self.pool = ManualPool()
        self.storage = DictStorage()
        self.output = Collected()
        mailbox = Mailbox(lambda: None)
        self.context = RuntimeContext(
            job_id="job",
            uid="op",
            name="the operator",
            subtask=subtask,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            attempt=1,
            nonce="n",
            restored_checkpoint_id=0,
            storage=self.storage,
            clock=self.clock,
            pool=SubtaskPool(self.pool, mailbox),
            mailbox=mailbox,
        )
        self._key_type = None if key_type is None else KeyType.parse(key_type)
        self._lists = ListOperatorStateBackend(operator.declared_states(), operator="op")
        self._keyed = self._keyed_backend()
        self._checkpoint_id = 0
        self._is_open = self._is_behind = False

    # --------------------------------------------------------------------------------------------------------- life

    @classmethod
    def restored(
        cls, operator: Operator, snapshots: Sequence[HarnessSnapshot], *, parallelism: int = 1, subtask: int = 0, **settings: Any
    ) -> Self:
        """A subtask that starts from what the subtasks of an earlier run stored."""
        harness = cls(operator, parallelism=parallelism, subtask=subtask, **settings)
        kinds = {descriptor.name: descriptor.kind for descriptor in operator.declared_states()}
        for kind, redistribute in _REDISTRIBUTIONS.items():
            names = {name for snapshot in snapshots for name in snapshot.lists if kinds.get(name, "operator_list") == kind}
            old = {name: [snapshot.lists.get(name, []) for snapshot in snapshots] for name in names}
            harness._lists.restore(RestoredOperatorState(redistribute(old, parallelism)[subtask]))
        for snapshot in snapshots:
            harness.storage.files.update(snapshot.storage.files)
        harness._is_behind = True
        if harness._keyed is not None:
            harness._keyed.restore([handle for snapshot in snapshots for handle in snapshot.keyed], harness.storage, "chk")
        return harness

    def open(self) -> Self:
        self.context.operator_backend = self._lists
        self.context.keyed_backend = self._keyed
        if self._keyed is not None:
            timers = InternalTimerService(self._keyed, self.clock.wall_ms, operator="op")
            if self.operator.uses_timers:
                for name, queue in ((EVENT_TIMERS, timers.event), (PROCESSING_TIMERS, timers.processing)):
                    self._keyed.register_timers(name, TimerRows(queue.table, queue.load))
            self.context.timer_service = timers
        self.operator.setup(self.context, self.output)
        self.operator.initialize_state()
        self.operator.open()
        self._is_open = True
        return self

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.operator.close()
        if self._keyed is not None:
            self._keyed.dispose()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------------------- input

    def process(
        self,
        data: Sequence[Any] | pa.RecordBatch,
        timestamps: Sequence[int] | None = None,
        schema: pa.Schema | None = None,
        input_index: int = 0,
    ) -> None:
        """One batch, of rows or of columns, with all of its output."""
        for _ in self.process_slices(data, timestamps, schema, input_index):
            pass

    def process_slices(
        self,
        data: Sequence[Any] | pa.RecordBatch,
        timestamps: Sequence[int] | None = None,
        schema: pa.Schema | None = None,
        input_index: int = 0,
    ) -> Iterator[None]:
        """One batch; what it leaves of its output comes slice by slice, and a barrier may fall between two."""
        stamps = None if timestamps is None else np.array(timestamps, np.int64)
        if isinstance(data, pa.RecordBatch):
            batch = Batch(columns=data, timestamps=stamps)
        else:
            batch = Batch(rows=list(copy.deepcopy(data)), schema=schema, timestamps=stamps)
        return self.take_slices(batch, input_index)

    def take_slices(self, batch: Batch, input_index: int = 0) -> Iterator[None]:
        """As `process_slices`."""
        self._catch_up()
        self._set_processing_time()
        self.operator.process_batch(batch, input_index)
        return self.operator.remaining_output() or iter(())

    def catch_up_slices(self) -> Iterator[None]:
        """Behind a restore the runtime does at first, before it reads anything, what is due by the clock."""
        is_behind, self._is_behind = self._is_behind, False
        due = self.operator.next_processing_time_ms() if is_behind else None
        if due is None or due > self.clock.now_ms:
            return iter(())
        slices: Iterator[None] = self.operator.process_processing_time(self.clock.now_ms)
        return slices

    def _catch_up(self) -> None:
        for _ in self.catch_up_slices():
            pass

    def _set_processing_time(self) -> None:
        """As the runtime does before each unit of work."""
        if self._keyed is not None:
            self._keyed.set_processing_time(self.clock.wall_ms())

    def watermark(self, watermark_ms: int) -> None:
        self._catch_up()
        self._set_processing_time()
        for _ in self.operator.process_watermark(watermark_ms):
            pass

    def watermark_slices(self, watermark_ms: int) -> Iterator[None]:
        """Advance slice by slice; a barrier may fall between two."""
        self._catch_up()
        slices: Iterator[None] = self.operator.process_watermark(watermark_ms)
        return slices

    def processing_time(self, now_ms: int) -> None:
        """The clock moves, and the alarm rings if it is due."""
        self.clock.now_ms = now_ms
        self._set_processing_time()
        due = self.operator.next_processing_time_ms()
        if due is not None and due <= now_ms:
            for _ in self.operator.process_processing_time(now_ms):
                pass

    # ----------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> HarnessSnapshot:
        """A barrier: nothing may be emitted from `snapshot_state` on."""
        self._checkpoint_id += 1
        self.operator.prepare_snapshot(self._checkpoint_id)
        before = len(self.output.elements)
        self.operator.snapshot_state(self._checkpoint_id)
        prefix = f"op-{self.context.subtask}-{self._checkpoint_id}"
        target = SnapshotTarget(self._checkpoint_id, "chk", prefix, canonical=False, inline_threshold=0)
        keyed: tuple[KeyedStateHandle, ...] = ()
        if self._keyed is not None:
            pending = self._keyed.snapshot(self._checkpoint_id)
            keyed = run_flow(pending.flow(target), self.storage)
            pending.release()
        lists = {name: list(self._lists.list_state(name).entries) for name in self._list_names()}
        assert len(self.output.elements) == before, "an operator emitted during its snapshot"
        return HarnessSnapshot(keyed, lists, self.storage)

    def _list_names(self) -> list[str]:
        return [descriptor.name for descriptor in self.operator.declared_states() if descriptor.kind in OPERATOR_KINDS]

    def _keyed_backend(self) -> KeyedStateBackend | None:
        if self._key_type is None:
            return None
        context = self.context
        return create_keyed_backend(
            "memory",
            descriptors=self.operator.declared_states(),
            key_type=self._key_type,
            key_groups=assign_key_groups(context.max_parallelism, context.parallelism, context.subtask),
            max_parallelism=context.max_parallelism,
            operator="op",
            subtask=context.subtask,
            local_dir="",
            now_ms=self.clock.wall_ms(),
        )
