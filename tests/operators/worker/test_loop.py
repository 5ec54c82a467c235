"""Whole jobs over real workers in one process: drained ends, exact cuts under random schedules, crashes at every store step."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from holdfast.barriers.exchange.channels import OutputGate
from holdfast.barriers.exchange.frames import EncodedFrame, Frame, FrameEncoder
from holdfast.barriers.jobgraph import RocksDBConfig
from holdfast.barriers.messages import (
    CancelTasks,
    CheckpointKind,
    ShutdownWorker,
    SubtaskKey,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
)
from holdfast.barriers.transport.port import LocalTransport
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.aggregates import count
from holdfast.operators.functions.process import ProcessFunction
from holdfast.operators.functions.windows.assigners import Tumbling
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.task.subtask import Subtask
from holdfast.operators.worker.deploy import SubtaskBuilder
from holdfast.operators.worker.loop import IDLE_WAIT_MS_MAX
from holdfast.statebackends.errors import InvariantError, StorageUnavailableError
from holdfast.statebackends.rocksdb.backend import RocksKeyedBackend
from holdfast.statebackends.rocksdb.write_buffer import WriteBuffer
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.storage.port import Operation, Storage
from tests.examples import examples
from tests.harness.mini import KilledError, MiniCluster
from tests.operators.ports import DictStorage

KEYS = 7
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("key", pa.int64(), nullable=False)])
COUNTS = pa.schema([pa.field("key", pa.int64(), nullable=False), pa.field("count", pa.int64(), nullable=False)])

OUTPUTS: dict[str, DictStorage] = {}
"""Sinks' storages by path: the plan is pickled, so it can only name them."""


def open_output(path: str) -> Storage:
    return OUTPUTS.setdefault(path, DictStorage(root=path))


def make_batch(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices % KEYS)], schema=SCHEMA)


class CountPerKey(ProcessFunction):
    """Emits the running count of each key: any loss or repetition shows in the output."""

    count = ValueStateDescriptor("count", int)
    states = (count,)
    returns = COUNTS

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        state = ctx.state(self.count)
        count = state.value(0) + 1
        state.update(count)
        out({"key": value["key"], "count": count})


def count_job(rows: int, path: str, *, parallelism: int = 2, batch_rows: int = 50, **options: Any) -> JobPlan:
    OUTPUTS.pop(path, None)
    env = Environment("count", parallelism=parallelism, channel_credit_batches=2, step_budget_ms=1, **options)
    source = GeneratorSource(make_batch, rows, SCHEMA, batch_rows=batch_rows)
    counts = env.from_source(source).uid("source").key_by("key").process(CountPerKey()).uid("count")
    counts.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    return env.build()


def committed(path: str) -> Counter[tuple[int, int]]:
    table = read_committed(path, "out", open_storage=open_output)
    return Counter(zip(table["key"].to_pylist(), table["count"].to_pylist(), strict=True))


def expected(*rows: int) -> Counter[tuple[int, int]]:
    """Of sources of so many rows each."""
    counts: Counter[int] = Counter()
    result: Counter[tuple[int, int]] = Counter()
    for index in itertools.chain(*map(range, rows)):
        counts[index % KEYS] += 1
        result[(index % KEYS, counts[index % KEYS])] += 1
    return result


@pytest.mark.parametrize("backend", ["memory", "filesystem"])
def test_bounded_job_drains_commits_and_finishes(tmp_path: Path, backend: str) -> None:
    path = f"mem://drain-{backend}"
    cluster = MiniCluster(count_job(1_000, path, state_backend=backend), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    cluster.run_to_end()
    assert committed(path) == expected(1_000)
    assert {status.state for status in cluster.coordinator.statuses.values()} == {TaskState.FINISHED}


def run_through_crashes(cluster: MiniCluster, crash_after: list[int], checkpoint_every: int = 40) -> None:
    """Run with checkpoints; after so many steps each, kill everything and go on from the newest checkpoint."""
    coordinator = cluster.coordinator
    for steps in [*crash_after, None]:
        cluster.deploy()
        cluster.run_until(lambda: coordinator.all_running)
        for step in range(10**6 if steps is None else steps):
            if coordinator.failure:
                raise AssertionError(coordinator.failure)
            if coordinator.all_drained:
                break
            if step % checkpoint_every == 0 and coordinator.pending is None:
                coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
            if not cluster.step() and not cluster.settle_once():
                cluster._pass_time()
        if steps is None:
            cluster.run_to_end()
        else:
            cluster.crash()


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    crashes=st.lists(st.integers(20, 900), min_size=1, max_size=3),
    maintain=st.sampled_from([0.0, 0.0003]),
)
def test_output_after_crashes_is_that_of_a_run_without(tmp_path: Path, seed: int, crashes: list[int], maintain: float) -> None:
    path = "mem://crashes"
    plan = count_job(400, path, batch_rows=9)
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path), seed=seed, tick_s=maintain)
    run_through_crashes(cluster, crashes)
    assert committed(path) == expected(400)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    crashes=st.lists(st.integers(60, 600), min_size=1, max_size=3),
    timeout_ms=st.sampled_from([0, 0, 3]),
    tick_s=st.sampled_from([0.0, 0.0004]),
    threshold=st.sampled_from([0, 20_480]),
)
def test_what_barriers_overtook_is_restored_once(
    tmp_path: Path, seed: int, crashes: list[int], timeout_ms: int, tick_s: float, threshold: int
) -> None:
    path = "mem://overtaken"
    options: dict[str, Any] = {"channel_credit_bytes": 400, "buffer_timeout_ms": 0, "inline_threshold": threshold}
    plan = count_job(600, path, batch_rows=40, **options)
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path), seed=seed, tick_s=tick_s)
    cluster.coordinator.aligned_timeout_ms = timeout_ms
    run_through_crashes(cluster, crashes, checkpoint_every=25)
    assert committed(path) == expected(600)


def hold_up(cluster: MiniCluster, vertex: str) -> list[Subtask]:
    """Subtasks of a vertex, which take no input any more: until their `_run_input` is deleted, or a crash."""
    subtasks = [each.subtask for worker in cluster.workers if worker._attempt for each in worker._attempt.subtasks]
    held = [each for each in subtasks if each.key.vertex == vertex]
    for subtask in held:
        subtask._run_input = lambda now_ms, deadline_s: (False, False, True)  # type: ignore[method-assign]
    return held


def test_barriers_overtake_full_queues_at_either_end(tmp_path: Path) -> None:
    """Of a job whose second step stands still the checkpoint completes, and holds what is queued in front of it."""
    path = "mem://full"
    options: dict[str, Any] = {"channel_credit_bytes": 400, "buffer_timeout_ms": 0}
    plan = count_job(2_000, path, batch_rows=40, **options)
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    coordinator = cluster.coordinator
    coordinator.aligned_timeout_ms = 0
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    vertex = plan.graph.vertices[1].vertex_id
    hold_up(cluster, vertex)
    for _ in range(200):
        cluster.step()
    coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
    cluster.run_until(lambda: coordinator.pending is None, steps_max=2_000)
    (completed,) = coordinator.completed
    sides = Counter({side: sum(each.rows for each in completed.channels if each.side == side) for side in ("input", "output")})
    assert min(sides["input"], sides["output"]) > 20
    cluster.crash()
    cluster.deploy()
    cluster.run_to_end()
    assert committed(path) == expected(2_000)


@pytest.mark.parametrize("timeout_ms", [0, 3])
@pytest.mark.parametrize("others", [0, 1_000])
def test_sources_that_have_ended_with_all_their_records_in_flight(tmp_path: Path, timeout_ms: int, others: int) -> None:
    """L02, L03, L10: an end that is queued behind them counts as the barrier, and behind a restore nothing is read again."""
    path, short = "mem://ended", 60
    OUTPUTS.pop(path, None)
    env = Environment("ended", parallelism=2, channel_credit_bytes=2_000, buffer_timeout_ms=0, step_budget_ms=1)
    first, second = (
        env.from_source(GeneratorSource(make_batch, rows, SCHEMA, batch_rows=40)).uid(uid)
        for rows, uid in ((short, "short"), (others, "long"))
    )
    counts = first.union(second).key_by("key").process(CountPerKey()).uid("count")
    counts.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    plan = env.build()
    sources, counting = plan.graph.vertices[:2], plan.graph.vertices[2]
    assert [each.operators[0].uid for each in (*sources, counting)] == ["short", "long", "count"]
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    coordinator = cluster.coordinator
    coordinator.aligned_timeout_ms = timeout_ms
    cluster.deploy()
    cluster.run_until(lambda: all(worker._attempt for worker in cluster.workers))
    hold_up(cluster, counting.vertex_id)
    for _ in range(200):
        cluster.step()
    ended = [[coordinator.statuses[SubtaskKey(each.vertex_id, subtask)].drained for subtask in range(2)] for each in sources]
    assert ended == [[True, True], [others == 0] * 2]
    coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
    cluster.run_until(lambda: coordinator.pending is None, steps_max=2_000)
    (completed,) = coordinator.completed
    stored = {name: sum(each.rows for each in completed.channels if each.source == name) for name in ("short", "long")}
    assert (stored["short"], stored["long"] > 0) == (short, others > 0)
    cluster.crash()
    cluster.deploy()
    cluster.run_to_end()
    assert committed(path) == expected(short, others)


IN_LINE: dict[str, Callable[[Stream], Stream]] = {
    "forward": lambda stream: stream.start_new_chain(),
    "rescale": lambda stream: stream.rescale(),
    "broadcast": lambda stream: stream.broadcast(),
}


@pytest.mark.parametrize("deal", [*IN_LINE, "rebalance"])
def test_c18_barriers_stay_in_line_on_edges_that_can_not_be_dealt_out_again(tmp_path: Path, deal: str) -> None:
    """The step behind the edge stands still: a checkpoint that may overtake waits for it, but for an edge that it can overtake."""
    path = f"mem://in-line-{deal}"
    OUTPUTS.pop(path, None)
    env = Environment("dealt", parallelism=2, channel_credit_bytes=400, buffer_timeout_ms=0, step_budget_ms=1)
    source = env.from_source(GeneratorSource(make_batch, 400, SCHEMA, batch_rows=40)).uid("source").disable_chaining()
    dealt = IN_LINE.get(deal, lambda stream: stream.rebalance())(source)
    dealt.filter(bool).uid("next").sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    plan = env.build()
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    coordinator = cluster.coordinator
    coordinator.aligned_timeout_ms = 0
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    behind = hold_up(cluster, plan.graph.vertices[1].vertex_id)
    for _ in range(200):
        cluster.step()
    coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
    for _ in range(500):
        if not cluster.step() and not cluster.settle_once():
            cluster._pass_time()
    overtook = deal not in IN_LINE
    assert (coordinator.pending is None) is overtook
    for subtask in behind:
        del subtask._run_input
    cluster.run_until(lambda: coordinator.pending is None)
    (completed,) = coordinator.completed
    assert (sum(each.rows for each in completed.channels) > 20) is overtook
    assert completed.channels if overtook else completed.channels == ()
    cluster.crash()
    cluster.deploy()
    cluster.run_to_end()
    copies = 2 if deal == "broadcast" else 1
    found = read_committed(path, "out", open_storage=open_output)
    assert Counter(found["id"].to_pylist()) == Counter(dict.fromkeys(range(400), copies))


def test_killed_at_every_operation_of_the_stores(tmp_path: Path) -> None:
    """The worker side of the issue's first step: whatever operation was the last one, the output is exact."""
    rows, kills = 1_500, 0
    path = "mem://every"
    while True:
        plan = count_job(rows, path, parallelism=1, batch_rows=2, state_backend="filesystem", inline_threshold=0)
        fuse = Fuse(kills)
        cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path), seed=kills, before_operation=fuse)
        try:
            run_with_checkpoints(cluster)
        except KilledError:
            cluster.crash()
            run_with_checkpoints(cluster)
        assert committed(path) == expected(rows), f"killed before operation {kills}"
        if not fuse.blown:
            break
        kills += 1
    assert kills > 10, "the store was hardly used"


class Fuse:
    """Kills the process before one operation of the stores, once."""

    def __init__(self, operations: int) -> None:
        self._left = operations
        self.blown = False

    def __call__(self, operation: Operation) -> None:
        if self.blown:
            return
        if self._left == 0:
            self.blown = True
            raise KilledError
        self._left -= 1


def run_with_checkpoints(cluster: MiniCluster) -> None:
    coordinator = cluster.coordinator
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    for _ in range(2):
        cluster.settle_once()
        if not coordinator.all_drained and coordinator.pending is None:
            coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
            cluster.run_until(lambda: coordinator.pending is None)
    cluster.run_to_end()


def job_of_two(tmp_path: Path, path: str, rows: int = 5_000, **options: Any) -> MiniCluster:
    cluster = MiniCluster(count_job(rows, path, **options), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    cluster.run_until(lambda: cluster.coordinator.all_running)
    return cluster


def test_lost_peer_fails_every_subtask_of_the_survivor_once(tmp_path: Path) -> None:
    cluster = job_of_two(tmp_path, "mem://peer")
    victim = cluster.workers.pop()
    victim._transport.close()
    survivor = cluster.workers[0]
    cluster.reports.clear()
    for _ in range(50):
        survivor.run_once(0)
    failed = [item for item in cluster.reports if isinstance(item, SubtaskStatus) and item.state is TaskState.FAILED]
    assert len(failed) == len({(item.vertex, item.subtask) for item in failed}) == 3
    assert all(item.error.startswith("PeerLostError: the worker in slot 1 is gone") for item in failed)


def test_next_attempt_is_deployed_in_place_once_the_old_one_is_gone(tmp_path: Path) -> None:
    cluster = job_of_two(tmp_path, "mem://redeploy")
    coordinator = cluster.coordinator
    coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
    cluster.run_until(lambda: coordinator.pending is None)
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    cluster.run_to_end()
    assert committed("mem://redeploy") == expected(5_000)
    assert all(worker.cancelling_since_ms is None for worker in cluster.workers)


def test_cancelled_tasks_are_reported_canceled_and_hold_nothing(tmp_path: Path) -> None:
    cluster = job_of_two(tmp_path, "mem://cancel")
    coordinator = cluster.coordinator
    coordinator.broadcast(CancelTasks(1))
    cluster.run_until(lambda: {status.state for status in coordinator.statuses.values()} == {TaskState.CANCELED})
    assert cluster.pool.tasks == []
    for worker in cluster.workers:
        worker.run_once(0)
        assert worker.cancelling_since_ms is None


def test_shutdown_leaves_when_everything_is_gone(tmp_path: Path) -> None:
    cluster = job_of_two(tmp_path, "mem://shutdown")
    worker = cluster.workers[0]
    worker.post(ShutdownWorker("the job is over"))
    for _ in range(50):
        worker.run_once(0)
        while cluster.pool.tasks:
            cluster.pool.step(0)
    assert worker.has_left
    assert worker.run() == ShutdownWorker("the job is over")


def test_stop_without_drain_and_restore_loses_and_repeats_nothing(tmp_path: Path) -> None:
    cluster = job_of_two(tmp_path, "mem://stop", 20_000, batch_rows=5)
    coordinator = cluster.coordinator
    coordinator.trigger(CheckpointKind.STOP_SAVEPOINT, cluster.clock.now_ms)
    cluster.run_until(lambda: coordinator.all_finished)
    stopped = committed("mem://stop")
    assert 0 < sum(stopped.values()) < 20_000
    cluster.crash()
    cluster.deploy()
    cluster.run_until(lambda: coordinator.all_running)
    cluster.run_to_end()
    assert committed("mem://stop") == expected(20_000)


class EncodingTransport(LocalTransport):
    """As between processes, what is for another worker is encoded."""

    def send(self, frame: Frame) -> None:
        if frame.target_slot == self._slot:
            super().send(frame)
        else:
            self._hand_over(frame.target_slot, EncodedFrame.of(FrameEncoder().encode(frame)))


SPOILED: dict[str, Callable[[], Any]] = {}
"""What rows become, by the job's path: the plan is pickled, so it can only name it."""


def spoil(path: str, row: Any) -> Any:
    return SPOILED[path]() if path in SPOILED and row["id"] >= 700 else row


def spoiling_job(path: str, *, returns: Any = None, **options: Any) -> JobPlan:
    OUTPUTS.pop(path, None)
    env = Environment("spoiling", parallelism=2, step_budget_ms=1, **options)
    rows = env.from_source(GeneratorSource(make_batch, 1_000, SCHEMA, batch_rows=50)).uid("source")
    spoiled = rows.map(partial(spoil, path), returns=returns).uid("spoil")
    taken = spoiled.rebalance().map(lambda row: {"id": 1, "key": isinstance(row, dict) + 0}, returns=SCHEMA).uid("next")
    taken.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    return env.build()


NOT_PICKLED = "InvalidRowError: operator 'spoil', subtask {0}: to operator 'next', subtask {1}: a row can't be sent"
UNSENT = [
    (threading.Lock, None, NOT_PICKLED),
    (lambda: (number for number in range(3)), None, NOT_PICKLED),
    (lambda: {"id": 1, "key": "x"}, SCHEMA, "SchemaMismatchError: operator 'spoil': row "),
]


@pytest.mark.parametrize(("made", "returns", "told"), UNSENT, ids=["lock", "generator", "misfit"])
@pytest.mark.parametrize("rows_max", [65_536, 8], ids=["small batches wait", "batches go at once"])
def test_a_row_that_can_not_be_sent_fails_who_made_it_and_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, returns: Any, told: str, rows_max: int
) -> None:
    monkeypatch.setattr("tests.harness.mini.LocalTransport", EncodingTransport)
    path = f"mem://unsent-{tmp_path.name}"
    plan = spoiling_job(path, returns=returns, batch_rows_max=rows_max)
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    coordinator, workers = cluster.coordinator, list(cluster.workers)
    monkeypatch.setitem(SPOILED, path, made)
    cluster.deploy()
    with pytest.raises(AssertionError, match="a subtask failed"):
        cluster.run_until(lambda: coordinator.all_drained)
    failed = [status for status in coordinator.statuses.values() if status.state is TaskState.FAILED]
    assert [status.error.startswith(told.format(status.subtask, 1 - status.subtask)) for status in failed] == [True] * len(failed)
    assert {coordinator.graph.vertex(status.vertex).operators[-1].uid for status in failed} == {"spoil"}
    assert all("File" not in status.traceback for status in failed), "frames of ours say nothing of a row"
    monkeypatch.delitem(SPOILED, path)
    cluster.deploy()
    cluster.run_to_end()
    assert workers == cluster.workers
    assert read_committed(path, "out", open_storage=open_output).num_rows == 1_000


class Unmade:
    """A row that is pickled, and raises where it is made anew."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __setstate__(self, state: Any) -> None:
        raise KeyError("gone")


def test_a_row_that_can_not_be_taken_in_fails_its_receiver_alone_and_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.mini.LocalTransport", EncodingTransport)
    path = f"mem://unmade-{tmp_path.name}"
    cluster = MiniCluster(spoiling_job(path), DictStorage(), local_directory=str(tmp_path))
    coordinator, workers = cluster.coordinator, list(cluster.workers)
    monkeypatch.setitem(SPOILED, path, partial(Unmade, 1))
    cluster.deploy()
    with pytest.raises(AssertionError, match="a subtask failed"):
        cluster.run_until(lambda: coordinator.all_drained)
    failed = [status for status in coordinator.statuses.values() if status.state is TaskState.FAILED]
    told = NOT_PICKLED.replace("sent", "taken in by another process, it can't be unpickled: KeyError: 'gone'")
    strange = [each.error for each in failed if not each.error.startswith(told.format(1 - each.subtask, each.subtask))]
    assert strange == []
    assert {coordinator.graph.vertex(status.vertex).operators[0].uid for status in failed} == {"next"}
    assert all("test_loop.py" in status.traceback and "in __setstate__" in status.traceback for status in failed)
    monkeypatch.delitem(SPOILED, path)
    cluster.deploy()
    cluster.run_to_end()
    assert workers == cluster.workers
    assert read_committed(path, "out", open_storage=open_output).num_rows == 1_000


def test_what_goes_wrong_in_the_transport_itself_still_ends_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(transport: LocalTransport, frame: Frame) -> None:
        raise InvariantError("no peer of this attempt")

    cluster = MiniCluster(count_job(400, "mem://transport"), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    monkeypatch.setattr(LocalTransport, "send", refuse)
    with pytest.raises(InvariantError, match="no peer of this attempt"):
        cluster.run_until(lambda: cluster.coordinator.all_drained)


def test_what_fails_while_output_is_gathered_fails_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gate: OutputGate) -> None:
        raise ArithmeticError("too large together")

    cluster = MiniCluster(count_job(400, "mem://gathered"), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    monkeypatch.setattr(OutputGate, "take_frames", fail)
    with pytest.raises(AssertionError, match="a subtask failed: ArithmeticError: too large together"):
        cluster.run_until(lambda: cluster.coordinator.all_drained)


def test_plan_without_an_operator_of_the_graph_fails_the_deployment(tmp_path: Path) -> None:
    plan = count_job(10, "mem://plan")
    del plan.operators["count"]
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    with pytest.raises(AssertionError, match="GraphError: the plan has no operator 'count'"):
        cluster.run_until(lambda: cluster.coordinator.all_running)


def test_a_module_that_ends_its_process_when_it_is_loaded_fails_the_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(builder: SubtaskBuilder, deployment: Any) -> None:
        raise SystemExit("usage: job.py [options]")

    monkeypatch.setattr(SubtaskBuilder, "begin", load)
    cluster = MiniCluster(count_job(10, "mem://exits"), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    with pytest.raises(AssertionError, match=r"SystemExit: usage: job.py \[options\]"):
        cluster.run_until(lambda: cluster.coordinator.all_running)


def window_job(rows: int, path: str) -> JobPlan:
    """Event time is the record's id: windows of 10 ms, 7 keys, fired in slices of one row, so that barriers fall in between."""
    OUTPUTS.pop(path, None)
    env = Environment("windows", parallelism=2, channel_credit_batches=2, step_budget_ms=1)
    stream = env.from_source(GeneratorSource(make_batch, rows, SCHEMA, batch_rows=15)).uid("source")
    keyed = stream.assign_timestamps("id", max_out_of_orderness_ms=40).uid("stamps").key_by("key")
    counts = keyed.window(Tumbling(10)).aggregate(count=count()).uid("windows")
    counts.sink_to(ParquetSink(path, "out", open_storage=open_output), uid="sink")
    plan = env.build()
    plan.operators["windows"].rows_per_slice_max = 1  # type: ignore[attr-defined]
    return plan


@settings(max_examples=examples(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), crashes=st.lists(st.integers(50, 700), min_size=1, max_size=2))
def test_windows_fire_once_though_barriers_fall_between_their_rows(tmp_path: Path, seed: int, crashes: list[int]) -> None:
    rows, path = 300, "mem://windows"
    cluster = MiniCluster(window_job(rows, path), DictStorage(), local_directory=str(tmp_path), seed=seed)
    run_through_crashes(cluster, crashes)
    table = read_committed(path, "out", open_storage=open_output)
    starts = [int(start.timestamp() * 1000 + 0.5) for start in table["window_start"].to_pylist()]
    counted = Counter(zip(table["key"].to_pylist(), starts, table["count"].to_pylist(), strict=True))
    wanted = Counter((index % KEYS, index // 10 * 10) for index in range(rows))
    assert counted == Counter((key, start, total) for (key, start), total in wanted.items())


def test_last_states_tell_all_that_was_counted(tmp_path: Path) -> None:
    plan = count_job(1_000, "mem://counters")
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    cluster.run_to_end()
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for status in cluster.coordinator.statuses.values():
        assert status.metrics is not None, "a job may end before its first heartbeat"
        read[status.vertex] += status.metrics.records_in
        written[status.vertex] += status.metrics.records_out
    source, counts = plan.graph.vertices[:2]
    assert (written[source.vertex_id], read[counts.vertex_id]) == (1_000, 1_000)


def test_cancellation_that_meets_an_idle_round_is_still_timed(tmp_path: Path) -> None:
    """The control thread posts while the loop is between two rounds; a hung cancellation must not escape its timeout."""
    cluster = MiniCluster(count_job(1_000, "mem://race"), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    cluster.run_until(lambda: cluster.coordinator.all_running)
    worker = cluster.workers[0]

    class Overtaken(deque[Any]):
        def append(self, command: Any) -> None:
            worker.run_once(0)
            super().append(command)

    worker._commands = Overtaken()
    worker.post(CancelTasks(1))
    assert worker.cancelling_since_ms is not None


STANDING: list[tuple[SubtaskMetrics, ...]] = []


class StandsOnce(ProcessFunction):
    """One call of it lasts for twelve seconds, within which the control thread looks three times."""

    returns = COUNTS
    look: Callable[[int], tuple[SubtaskMetrics, ...]]
    clock: Any

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        if value["id"] == 500:
            for passed_ms in (300, 900, 10_800):
                StandsOnce.clock.now_ms += passed_ms
                STANDING.append(StandsOnce.look(1))
        out({"key": value["key"], "count": 1})


def test_a_step_that_does_not_end_is_told_while_it_lasts(tmp_path: Path) -> None:
    """The loop counts time between two steps; what the control thread tells would be that of before the call, for as long as it
    lasts."""
    env = Environment("stands", parallelism=1, step_budget_ms=1)
    source = GeneratorSource(make_batch, 1_000, SCHEMA, batch_rows=50)
    stream = env.from_source(source).uid("source").key_by("key").process(StandsOnce()).uid("stands")
    stream.sink_to(ParquetSink("mem://stands", "out", open_storage=open_output), uid="sink")
    plan = env.build()
    vertices = [vertex.vertex_id for vertex in plan.graph.vertices]
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    StandsOnce.look, StandsOnce.clock = cluster.workers[0].metrics_of, cluster.clock
    STANDING.clear()
    cluster.deploy()
    cluster.run_until(lambda: bool(STANDING))
    soon, later, last = ({each.vertex: each for each in told} for told in STANDING)
    stands = next(each.vertex for each in last.values() if each.step_ms is not UNSET)
    assert stands == vertices[1]
    assert [each.step_ms for each in soon.values()] == [UNSET] * len(soon), "a step of normal length"
    assert (later[stands].step_ms, last[stands].step_ms) == (1_200, 12_000)
    for told in (later, last):
        shares = told[stands]
        assert (shares.busy_ms_per_second, shares.idle_ms_per_second, shares.backpressured_ms_per_second) == (1_000, 0, 0)
    assert last[stands].busy_ms - later[stands].busy_ms == 10_800
    others = [each for each in last.values() if each.vertex != stands and each.busy_ms_per_second is not UNSET]
    assert others
    for each in others:
        assert each.step_ms is UNSET
        assert 1_000 in (each.busy_ms_per_second, each.idle_ms_per_second, each.backpressured_ms_per_second), "nothing of before"
    totals = last[stands].busy_ms
    cluster.run_until(lambda: all(each.step_ms is UNSET for each in cluster.workers[0].metrics_of(1)))
    cluster.run_to_end()
    ended = {status.vertex: status.metrics for status in cluster.coordinator.statuses.values()}[stands]
    assert ended is not None
    assert ended.busy_ms >= totals, "what was told of it is never taken back"


FIRED: list[int] = []
HOUR_MS = 3_600_000


class FiresInAnHour(ProcessFunction):
    """One timer of processing time per row."""

    returns = COUNTS

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        ctx.timers.register_processing_time_timer(ctx.processing_time + HOUR_MS)

    def on_timer(self, timestamp_ms: int, ctx: Any, out: Any) -> None:
        FIRED.append(timestamp_ms)


def test_timer_fires_soon_after_the_wall_clock_was_set_ahead(tmp_path: Path) -> None:
    """When an alarm is due is told in monotonic time; a machine that slept, or was set right, must not make it wait once more."""
    env = Environment("alarm", parallelism=1, step_budget_ms=1)
    source = GeneratorSource(make_batch, 2, SCHEMA, batch_rows=1, rows_per_second=1 / (100 * 3_600))
    env.from_source(source).uid("source").key_by("key").process(FiresInAnHour()).uid("alarm").sink_to(
        ParquetSink("alarm-out", "out", open_storage=open_output), uid="sink"
    )
    cluster = MiniCluster(env.build(), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    cluster.run_until(lambda: any(each.records_in for worker in cluster.workers for each in worker.metrics_of(1)[1:]))
    FIRED.clear()
    clock, began = cluster.clock, cluster.clock.now_ms
    clock.wall_ms = lambda: clock.now_ms + 2 * HOUR_MS  # type: ignore[method-assign]
    while clock.now_ms < began + 2 * IDLE_WAIT_MS_MAX and not FIRED:
        for worker in cluster.workers:
            worker.run_once(0)
        clock.now_ms += 100
    assert len(FIRED) == 1


def test_a_worker_with_nothing_to_do_writes_behind(tmp_path: Path) -> None:
    """Rows reach the database before any barrier, and the job is what it was."""
    path = "mem://behind"
    plan = count_job(400, path, state_backend="rocksdb", rocksdb=RocksDBConfig(write_behind_rows=1))
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()

    def write_buffers() -> list[WriteBuffer]:
        subtasks = [each.subtask for worker in cluster.workers if worker._attempt is not None for each in worker._attempt.subtasks]
        backends = [node.context.keyed_backend for subtask in subtasks for node in subtask.chain.nodes]
        return [backend._opened for backend in backends if isinstance(backend, RocksKeyedBackend) and backend._opened is not None]

    cluster.run_until(lambda: any(write_buffer.rows_frozen for write_buffer in write_buffers()) and cluster.coordinator.all_drained)
    for _ in range(10):
        cluster._pass_time()
    assert all(not table.active and not table.immutable for write_buffer in write_buffers() for table in write_buffer.tables)
    cluster.run_to_end()
    assert committed(path) == expected(400)


def test_what_fails_behind_fails_its_task_and_not_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: RocksKeyedBackend) -> bool:
        raise StorageUnavailableError("the disk is full")

    plan = count_job(400, "mem://full", state_backend="rocksdb")
    cluster = MiniCluster(plan, DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    cluster.run_until(lambda: cluster.coordinator.all_running)
    monkeypatch.setattr(RocksKeyedBackend, "write_behind", fail)
    for worker in cluster.workers:
        worker.prepare_wait()
    with pytest.raises(AssertionError, match="a subtask failed: StorageUnavailableError: the disk is full"):
        cluster.run_until(lambda: cluster.coordinator.all_drained)
