"""Sabotages by themselves: what they replace and put back, and, for most, the one thing that the product does otherwise then."""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast.operators.worker.deploy as deploy_module
from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.gate import Delivered, InputGate
from holdfast.barriers.alignment.handler import BarrierReceived, TriggerSnapshot
from holdfast.barriers.alignment.tracker import BarrierTracker
from holdfast.barriers.alignment.valve import StatusWatermarkValve
from holdfast.barriers.elements import Batch, CheckpointBarrier, Watermark
from holdfast.barriers.exchange.channels import OutputChannel, OutputSettings
from holdfast.barriers.exchange.credits import CreditAnnouncement, SenderCredit
from holdfast.barriers.exchange.frames import ChannelId
from holdfast.barriers.exchange.wiring import derive_inputs
from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.barriers.messages import Deployment, SubtaskDeployment, SubtaskKey
from holdfast.chaos.checkers import INVARIANTS
from holdfast.chaos.faults.faults import check_plan, expand_kinds
from holdfast.chaos.sabotage import SABOTAGES, Mutant, Sabotage, find_sabotage
from holdfast.chaos.workloads import ON_DEMAND, WORKLOADS
from holdfast.coordinator.restore import assign as restore_module
from holdfast.operators.sources.enumerator import EnumeratorReader
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.sources.split_source import SplitSourceReader
from holdfast.operators.sources.splits import Source, SourceReader, SourceSplit, SplitEnumerator
from holdfast.operators.task.rollback import KeptCheckpoints
from holdfast.operators.task.timers import TimerQueue
from holdfast.statebackends.columnar.state import FrozenColumns, NumpyColumnarState
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import InlineHandle, KeyedStateHandle, KeyGroupRange, OperatorSubtaskState, StateMeta
from holdfast.statebackends.heap.kept_slots import KeptSlots
from holdfast.statebackends.heap.slot_pages import PAGE_SLOTS, FrozenPages, SlotPages
from holdfast.statebackends.heap.state_table import CopyOnWriteStateTable
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.heap.ttl import StateTtl, TableTtl, TtlClock
from holdfast.statebackends.redistribute import keyed_redistribute
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.state import ColumnAggregate, ColumnarStateDescriptor, Ttl
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.filesystem import OsFileSystem
from holdfast.statebackends.storage.port import PutIfAbsent, ReadFile
from tests.operators.functions.windows import test_columnar as window_tests
from tests.operators.harness import OperatorHarness
from tests.operators.ports import ManualContext

BARRIER = CheckpointBarrier(1, 0)


def assert_changes(name: str, observe: Callable[[], Any], right: Any, wrong: Any) -> None:
    """With the sabotage, and with nothing else, the product does the wrong thing."""
    assert observe() == right
    with find_sabotage(name).apply():
        assert observe() == wrong
    assert observe() == right


# ------------------------------------------------------------------------------------------------------- all of them


def in_place(sabotage: Sabotage) -> list[Any]:
    """What its mutants' places hold, as it is stored there."""
    return [vars(mutant.owner).get(mutant.name) for mutant in sabotage.mutants]


@pytest.mark.parametrize("sabotage", SABOTAGES.values(), ids=SABOTAGES)
def test_it_replaces_its_places_and_restores_them(sabotage: Sabotage) -> None:
    before = in_place(sabotage)
    with sabotage.apply():
        during = in_place(sabotage)
        assert all(new is not old for new, old in zip(during, before, strict=True))
    assert all(new is old for new, old in zip(in_place(sabotage), before, strict=True))


@pytest.mark.parametrize("sabotage", SABOTAGES.values(), ids=SABOTAGES)
def test_an_error_restores_its_places_too(sabotage: Sabotage) -> None:
    before = in_place(sabotage)
    with pytest.raises(RuntimeError, match="in the middle"), sabotage.apply():
        raise RuntimeError("in the middle")
    assert all(new is old for new, old in zip(in_place(sabotage), before, strict=True))


@pytest.mark.parametrize("sabotage", SABOTAGES.values(), ids=SABOTAGES)
def test_it_names_what_exists(sabotage: Sabotage) -> None:
    assert SABOTAGES[sabotage.name] is sabotage
    assert sabotage.meaning
    assert "\n" not in sabotage.meaning
    assert sabotage.invariants
    assert set(sabotage.invariants) <= set(INVARIANTS)
    assert set(sabotage.workloads) <= {*WORKLOADS, *ON_DEMAND}
    assert expand_kinds(sabotage.kinds)
    check_plan(sabotage.plan or ())
    assert 1 <= sabotage.seeds_max <= 200


def test_what_replaces_a_function_of_a_module_is_looked_up_there() -> None:
    """A function that moved to another module, or is called under a name of that one, leaves a mutant without effect behind."""
    for sabotage in SABOTAGES.values():
        for mutant in sabotage.mutants:
            if isinstance(mutant.owner, ModuleType):
                tree = ast.walk(ast.parse(inspect.getsource(mutant.owner)))
                names = {node.id for node in tree if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
                assert mutant.name in names, f"{sabotage.name}: {mutant.owner.__name__} does not look {mutant.name} up"


def test_an_attribute_that_a_class_inherits_is_not_left_behind() -> None:
    class Base:
        def answer(self) -> int:
            return 1

    class Derived(Base):
        pass

    with Mutant(Derived, "answer", lambda original: lambda self: original(self) + 1).applied():
        assert (Derived().answer(), Base().answer()) == (2, 1)
    assert Derived().answer() == 1
    assert "answer" not in vars(Derived)


def test_an_unknown_name_is_answered_with_the_choices() -> None:
    with pytest.raises(InvalidConfigError, match=r"there is no sabotage 'coffee'; choose from .*early_notice.*unblocked_channel"):
        find_sabotage("coffee")


# ---------------------------------------------------------------------------------------------------------- channels


def read_through_alignment() -> list[str]:
    """Channel 0 delivers its barrier and a record, then channel 1 a record and its barrier."""
    gate = InputGate(Aligner(2))
    for channel, element in ((0, BARRIER), (0, Batch(rows=("late",))), (1, Batch(rows=("early",))), (1, BARRIER)):
        gate.offer(channel, element)
    told = []
    while (output := gate.poll(now_ms=0)) is not None:
        told.append(output.element.rows()[0] if isinstance(output, Delivered) else "snapshot")  # type: ignore[union-attr]
    return told


def test_unblocked_channel() -> None:
    assert_changes("unblocked_channel", read_through_alignment, ["early", "snapshot", "late"], ["late", "early", "snapshot"])


def test_hasty_alignment() -> None:
    def snapshots() -> list[int]:
        aligner = Aligner(2)
        gate = InputGate(aligner)
        gate.offer(0, BARRIER)
        output = gate.poll(now_ms=0)
        return [output.barrier.checkpoint_id] if isinstance(output, TriggerSnapshot) else []

    assert_changes("hasty_alignment", snapshots, [], [1])


def test_hasty_tracker() -> None:
    def snapshots() -> list[Any]:
        tracker = BarrierTracker(2)
        return [type(each) for each in tracker.handle(BarrierReceived(0, BARRIER), now_ms=0, wall_ms=0)]

    assert_changes("hasty_tracker", snapshots, [], [TriggerSnapshot])


def test_broadcast_read_on() -> None:
    def handler() -> str:
        plan = WORKLOADS["at_least_once"].make(random.Random(2)).plan(2)
        committer = next(each for each in plan.graph.vertices if each.operators[0].kind == "sink_committer")
        channels = derive_inputs(plan.graph, committer.vertex_id, 0)
        return type(deploy_module._barrier_handler(plan.graph, channels)).__name__

    assert_changes("broadcast_read_on", handler, "Aligner", "BarrierTracker")


def opened_channel() -> OutputChannel:
    channel = OutputChannel(ChannelId(0, 0, 0), attempt=1, settings=OutputSettings())
    channel.announced(CreditAnnouncement(1_000_000, 100, 0, 0))
    return channel


def test_overtaking_barrier() -> None:
    def order() -> list[str]:
        channel = opened_channel()
        channel.add(Batch(rows=("small",)), now_ms=0)
        channel.add_event(BARRIER)
        channel.flush()
        return [type(frame.payload).__name__ for frame in channel.take_frames()]

    assert_changes("overtaking_barrier", order, ["Batch", "CheckpointBarrier"], ["CheckpointBarrier", "Batch"])


def test_fastest_watermark() -> None:
    def watermarks() -> list[Any]:
        valve = StatusWatermarkValve(2)
        return [*valve.handle(0, Watermark(10)), *valve.handle(1, Watermark(5))]

    assert_changes("fastest_watermark", watermarks, [Watermark(5)], [Watermark(10)])


def test_unlimited_credit() -> None:
    def sent() -> int:
        credit = SenderCredit()
        credit.announced(CreditAnnouncement(100, 2, 0, 0))
        count = 0
        while count < 5 and credit.can_send(40):
            credit.sent(40)
            count += 1
        return count

    assert_changes("unlimited_credit", sent, 2, 5)


def late_records() -> tuple[int, int, list[int]]:
    """Records of a window that has fired, of one that is open, and behind the watermark; a restored operator gets such ones, too.

    (dropped, restored and dropped, what fires)"""
    rows = window_tests.columns(("a", 1), ("a", 2), ("a", 3))
    with OperatorHarness(window_tests.operator(), key_type="utf8") as harness:
        harness.watermark(14)
        harness.process(rows, [9, 12, 15])
        dropped, snapshot = harness.context.counters.late_dropped, harness.snapshot()
    with OperatorHarness.restored(window_tests.operator(), [snapshot], key_type="utf8") as harness:
        harness.process(rows, [8, 16, 17])
        harness.watermark(19)
        fired = [total for _, _, _, total in window_tests.shown(harness)]
        return dropped, harness.context.counters.late_dropped, fired


def test_sabotages_of_late_records() -> None:
    right = (1, 1, [10])
    assert_changes("revived_window", late_records, right, (0, 0, [1, 1, 10]))  # what was due comes before what is read
    assert_changes("forgotten_watermark", late_records, right, (1, 0, [1, 10]))
    assert_changes("hasty_lateness", late_records, right, (2, 1, [8]))
    assert_changes("uncounted_late", late_records, right, (0, 0, [10]))


# -------------------------------------------------------------------------------------------------- timers and sources


def test_forgotten_timer() -> None:
    def stored() -> int:
        queue = TimerQueue()
        for time in (3, 1, 2):
            queue.add((time, b"key", b"", 0))
        frozen = TimerRows(queue.table, queue.load).freeze()
        return len(list(frozen.rows()))

    assert_changes("forgotten_timer", stored, 3, 2)


SCHEMA = pa.schema([("i", pa.int64())])


def first_after_restore() -> int:
    """A reader of one stripe is restored at record 7: which one does it give first?"""
    source = GeneratorSource(lambda indices: pa.RecordBatch.from_arrays([pa.array(indices)], schema=SCHEMA), 20, SCHEMA)
    reader = source.create_reader(0, 1, 1)
    reader.open(ManualContext(), None)
    reader.poll(7, 0)
    again = source.create_reader(0, 1, 1)
    again.open(ManualContext(), reader.snapshot())
    batch = again.poll(1, 0).batch
    assert batch is not None
    return int(batch.columns().column("i")[0].as_py())


def test_replayed_and_skipped_record() -> None:
    assert_changes("replayed_record", first_after_restore, 7, 6)
    assert_changes("skipped_record", first_after_restore, 7, 8)


class Part(SourceSplit, frozen=True):
    """A split that stands for itself."""


class Parts(SplitEnumerator[Part]):
    def discover(self) -> list[Part]:
        return [Part("a"), Part("b")]


class NoRecords(SourceReader[Part]):
    def add_splits(self, splits: Any) -> None: ...

    def poll(self, rows_max: int) -> None: ...


class PartSource(Source[Part]):
    split_type = Part
    schema = SCHEMA

    def create_enumerator(self) -> Parts:
        return Parts()

    def create_reader(self, context: Any) -> NoRecords:
        return NoRecords()


def places_of_a_split() -> tuple[int, int]:
    """Two splits are found, one is handed out: how many are in the state of the enumerator, and of the reader?"""
    enumerator, context = EnumeratorReader(PartSource(), 1), ManualContext()
    enumerator.open(context, None)
    enumerator.split_requested(0, 1)
    enumerator.poll(1, 0)
    context.run_pool()
    batch = enumerator.poll(1, 0).batch
    assert batch is not None
    reader = SplitSourceReader(PartSource())
    reader.open(context, None)
    reader.add_splits(batch.columns().column("split").to_pylist())
    return len(enumerator.snapshot_of(1)) - 1, len(reader.snapshot_of(1))


def test_split_twice_and_forgotten() -> None:
    assert_changes("split_twice", places_of_a_split, (1, 1), (2, 1))
    assert_changes("split_forgotten", places_of_a_split, (1, 1), (1, 0))


# -------------------------------------------------------------------------------------------------------------- state


def test_shared_generation() -> None:
    def frozen() -> Any:
        table = CopyOnWriteStateTable()
        table.active["key"] = 1
        layers = table.freeze()
        table.active["key"] = 2
        seen = layers[0]["key"]
        table.release(len(layers))
        assert table.find("key") == (2, False)
        return seen

    assert_changes("shared_generation", frozen, 1, 2)


def of_slots(*, from_barrier: bool) -> Any:
    """Of a slot that is written behind a barrier: what that one stored, or what the next one finds changed."""
    pages = SlotPages()
    pages.reserve(1)
    pages.put(0, 1)
    first = FrozenPages(pages, 1, lambda: None)
    first.checkpoint_started(1, 0)
    pages.put(0, 2)
    assert pages.get(0) == 2
    if from_barrier:
        return [list(values) for _, values in first.batches(PAGE_SLOTS)]
    second = FrozenPages(pages, 1, lambda: None)
    second.checkpoint_started(2, 1)
    return [values for _, values in second.changes(1, PAGE_SLOTS)]


def test_shared_page() -> None:
    assert_changes("shared_page", lambda: of_slots(from_barrier=True), [[1]], [[2]])


def test_unmarked_page() -> None:
    assert_changes("unmarked_page", lambda: of_slots(from_barrier=False), [[2]], [])


def test_unpinned_rollback() -> None:
    def kept() -> Any:
        pages = SlotPages()
        pages.reserve(1)
        pages.put(0, 1)
        pages.freeze(1)
        kept = KeptSlots(lambda: None, {"count": pages}, KeyGroupRange(0, 1))  # type: ignore[arg-type, return-value]
        pages.release()
        pages.put(0, 2)
        assert pages.get(0) == 2
        return kept.pages_of("count")[0][0]

    assert_changes("unpinned_rollback", kept, 1, 2)


def test_aborted_rollback() -> None:
    def restores(restored: int, stored: int) -> Any:
        kept, key = KeptCheckpoints(), SubtaskKey("v", 0)
        meta, groups = StateMeta("count", "value", "int", "int64"), KeyGroupRange(0, 1)
        tables = {
            number: OperatorSubtaskState((KeyedStateHandle(groups, "arrow", (meta,), (InlineHandle(b"%d" % number),)),))
            for number in (7, 8)
        }
        for number, table in tables.items():
            kept.froze(key, 1, number, {"op": KeptSlots(lambda: None, {"count": SlotPages()}, KeyGroupRange(0, 1))})  # type: ignore[arg-type, return-value]
            kept.acknowledged(key, number, {"op": table})
        kept.aborted(key, 8)
        deployment = Deployment(
            2,
            JobGraph("job", (), (), JobConfig()),
            (SubtaskDeployment("v", 0),),
            {},
            restored_checkpoint_id=restored,
            restored_folder=f"job/chk-{restored}",
        )
        kept.deployed(deployment)
        return sorted(kept.claims(key, {"op": tables[stored]}))

    assert restores(7, 7) == ["op"]
    assert_changes("aborted_rollback", lambda: (restores(8, 8), restores(7, 8)), ([], []), (["op"], ["op"]))


def test_shown_expired() -> None:
    def shows() -> bool:
        state_ttl = StateTtl(SimpleNamespace(kind="value"), Ttl(10), TtlClock(0))  # type: ignore[arg-type]
        return TableTtl(state_ttl).shows_expired

    assert_changes("shown_expired", shows, False, True)


def test_refired_timer() -> None:
    def left() -> int:
        timers = TimerQueue()
        timers.add((5, b"key", b"", 0))
        assert timers.take_due(5) is not None
        return len(timers)

    assert_changes("refired_timer", left, 0, 1)


def test_shared_columns() -> None:
    def frozen() -> list[int]:
        column = np.array([1, 2, 3])
        rows = FrozenColumns([column], 3)
        rows.protect(np.array([1]))
        column[1] = 9
        (copy,) = rows.copy()
        assert copy is not None
        return [int(value) for value in copy]

    assert_changes("shared_columns", frozen, [1, 2, 3], [1, 9, 3])


def test_shared_panes() -> None:
    def frozen() -> list[int]:
        key_type = KeyType.of(int)
        aggregates = (ColumnAggregate("count", None, "n"),)
        state = NumpyColumnarState(
            ColumnarStateDescriptor("s", aggregates),
            key_type.arrow_types,
            lambda arrays: key_type.column(arrays, max_parallelism=1),
            "op",
        )
        keys = key_type.column([pa.array([1, 1])], max_parallelism=1)
        state.update(keys, 0, [None])
        rows = state.freeze()
        state.update(keys, 0, [None])
        counts: list[int] = rows.columns()[2][0].to_pylist()
        return counts

    assert_changes("shared_panes", frozen, [2], [4])


def test_lost_and_repeated_list_entry() -> None:
    def dealt() -> list[list[bytes]]:
        return [subtask["s"] for subtask in restore_module.split_redistribute({"s": [[b"a", b"b", b"c"], [b"d", b"e"]]}, 3)]  # type: ignore[attr-defined]

    right = [[b"a", b"b"], [b"c", b"d"], [b"e"]]
    assert_changes("lost_list_entry", dealt, right, [[b"a"], [b"b"], [b"c"]])
    assert_changes("repeated_list_entry", dealt, right, [[b"a", b"b"], [b"b", b"c", b"d"], [b"d", b"e"]])


def test_key_groups_rounded_down() -> None:
    def shares() -> list[int]:
        ranges = (KeyGroupRange(0, 2), KeyGroupRange(2, 4), KeyGroupRange(4, 6), KeyGroupRange(6, 8))
        old = [OperatorSubtaskState(keyed=(KeyedStateHandle(each, "arrow", (), ()),)) for each in ranges]
        return [len(subtask) for subtask in keyed_redistribute(old, 8, 3)]

    assert_changes("key_groups_rounded_down", shares, [2, 2, 1], [1, 2, 2])


# -------------------------------------------------------------------------------------------------------------- stores


class Calls(OsFileSystem):
    """Notes which calls were made."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def fsync(self, descriptor: int) -> None:
        self.names.append("fsync")
        super().fsync(descriptor)

    def link(self, source: str, target: str) -> None:
        self.names.append("link")
        super().link(source, target)


def test_unsynced_write(tmp_path: Path) -> None:
    numbers = iter(range(9))

    def calls() -> list[str]:
        files = Calls()
        LocalStorage(tmp_path, file_system=files).execute(PutIfAbsent(f"file-{next(numbers)}", b"content"))
        return files.names

    assert_changes("unsynced_write", calls, ["fsync", "link"], ["link"])


def test_overwriting_put(tmp_path: Path) -> None:
    def second() -> tuple[bool, bytes]:
        storage = LocalStorage(tmp_path)
        (tmp_path / "register").write_bytes(b"one")
        created = storage.execute(PutIfAbsent("register", b"two"))
        return created, storage.execute(ReadFile("register"))

    assert_changes("overwriting_put", second, (False, b"one"), (True, b"two"))
