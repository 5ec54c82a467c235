"""Calls of users' sinks run on threads of their own: one that never returns holds up neither checkpoints nor a failover."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.api.testing.coordinator import InlinePool
from holdfast.operators.task.context import CallsInOrder
from holdfast.operators.task.pool import OwnThread

COLUMNS = {"i": int}
WAIT_S = 30


class World:
    """What the objects of one test share; they are pickled into its job, in this process."""

    def __init__(self) -> None:
        self.blocked: set[str] = set()
        """Calls that don't return."""
        self.release = threading.Event()
        self.entered: list[str] = []
        self.threads: set[int] = set()
        self.stored: hf.CommitPosition | None = None
        self.rows: list[int] = []
        self.transaction = threading.Lock()
        """An older attempt's call and a newer one's may come at one time."""

    def enter(self, call: str) -> None:
        self.threads.add(threading.get_ident())
        self.entered.append(call)
        if call in self.blocked:
            assert self.release.wait(WAIT_S)


WORLD = World()


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Only what blocks has a real thread: all else is done in turns, by the test's own."""
    global WORLD
    WORLD = World()
    threads: list[OwnThread] = []

    def open_thread(pool: InlinePool, name: str) -> Any:
        if "other" in name:
            return CallsInOrder(pool)
        threads.append(OwnThread(name))
        return threads[-1]

    monkeypatch.setattr(InlinePool, "open_thread", open_thread)
    yield WORLD
    WORLD.release.set()
    for thread in threads:
        thread.close()


class Target(hf.CommitTarget):
    def open(self, owner: hf.CommitOwner) -> hf.CommitPosition:
        WORLD.enter("open")
        with WORLD.transaction:
            WORLD.stored = owner.take(WORLD.stored)
            return WORLD.stored

    def apply(self, batches: Iterator[pa.RecordBatch], expected: hf.CommitPosition, position: hf.CommitPosition) -> None:
        WORLD.enter("apply")
        with WORLD.transaction:
            if WORLD.stored != expected:
                raise hf.FencedError("another owner")
            WORLD.rows += [row for batch in batches for row in batch.column("i").to_pylist()]
            WORLD.stored = position

    def close(self) -> None:
        WORLD.enter("close")


class Plain(hf.Sink):
    """By the low-level interface."""

    def create_writer(self, schema: pa.Schema | None) -> hf.SinkWriter:
        return Writer()

    def create_committer(self) -> hf.Committer:
        return Commits()


class Writer(hf.SinkWriter):
    def __init__(self) -> None:
        self.rows: list[int] = []

    def open(self, ctx: Any) -> None:
        WORLD.enter("open writer")

    def write(self, batch: pa.RecordBatch) -> None:
        WORLD.enter("write")
        self.rows += batch.column("i").to_pylist()

    def prepare_commit(self) -> Sequence[bytes]:
        WORLD.enter("prepare")
        rows, self.rows = self.rows, []
        return [str(row).encode() for row in rows]

    def flush(self, *, end_of_input: bool) -> None:
        WORLD.enter("flush")

    def close(self) -> None:
        WORLD.enter("close writer")


class Commits(hf.Committer):
    def open(self, ctx: Any) -> None:
        WORLD.enter("open committer")

    def commit(self, requests: Sequence[hf.CommitRequest]) -> None:
        WORLD.enter("commit")
        WORLD.rows += [int(request.committable) for request in requests]

    def close(self) -> None:
        WORLD.enter("close committer")


def job_of(sink: Any) -> tuple[hf.testing.Job, hf.testing.Feed, Any]:
    """Two sinks: the one under test, and an output that is well."""
    job = hf.testing.Job()
    feed = job.input("rows", COLUMNS)
    feed.stream.sink_to(sink, uid="blocked")
    other = job.output(feed.stream, uid="other")
    job.start()
    return job, feed, other


def until(job: hf.testing.Job, condition: Callable[[], bool], what: str) -> None:
    """Answers of real threads come when they like."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        job.advance(by_ms=1)


SINKS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "target": (lambda: hf.StagedSink(Target()), ("open", "apply")),
    "low level": (Plain, ("open committer", "commit")),
}


@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind, (_, calls) in SINKS.items() for call in calls])
def test_a_call_that_never_returns_holds_up_no_checkpoint_and_no_failover(kind: str, call: str, world: World) -> None:
    world.blocked.add(call)
    job, feed, other = job_of(SINKS[kind][0]())
    with job:
        feed.add([{"i": 1}])
        checkpoint(job)
        until(job, lambda: call in world.entered, "it is called")
        feed.add([{"i": 2}])
        checkpoint(job)
        assert [row["i"] for row, _ in other.committed()] == [1, 2]
        job.fail()
        assert job.status == "RUNNING"
        checkpoint(job)
        assert threading.get_ident() not in world.threads
        world.blocked.clear()
        world.release.set()
        until(job, lambda: sorted(set(world.rows)) == [1, 2], "the next attempt commits")
        until(job, lambda: any(each.startswith("close") for each in world.entered), "what was let go is closed behind its call")


@pytest.mark.parametrize("call", ["open writer", "write", "prepare", "flush"])
def test_a_writer_that_never_returns_holds_up_no_failover(call: str, world: World) -> None:
    world.blocked.add(call)
    job, feed, _ = job_of(Plain())
    with job:
        feed.add([{"i": 1}])
        with pytest.raises(hf.CheckpointFailedError, match="waits"):
            job.checkpoint()
        until(job, lambda: call in world.entered, "it is called")
        job.fail()
        assert job.status == "RUNNING"
        world.blocked.clear()
        world.release.set()
        checkpoint(job)
        until(job, lambda: world.rows == [1], "the next attempt commits")


def test_a_barrier_waits_for_a_flush_and_input_waits_behind_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.operators.sinks.connector.HELD_BYTES_MAX", 64)
    job, feed, _ = job_of(Plain())
    with job:
        feed.add([{"i": 1}])
        checkpoint(job)
        world.blocked.add("flush")
        with pytest.raises(hf.CheckpointFailedError, match="waits"):
            job.checkpoint()
        until(job, lambda: world.entered.count("flush") == 2, "it flushes")
        for row in range(2, 100):
            feed.add([{"i": row}])
        read = job.progress("blocked").records_in
        assert read < 50, "rows wait upstream, not in memory"
        world.blocked.clear()
        world.release.set()
        checkpoint(job)
        until(job, lambda: job.progress("blocked").records_in == 99, "input goes on")
        checkpoint(job)
        until(job, lambda: world.rows == [*range(1, 100)], "all rows are committed, in order")


def test_a_checkpoint_that_ran_out_of_time_leaves_its_committables_to_the_next_one(world: World) -> None:
    job, feed, _ = job_of(Plain())
    with job:
        feed.add([{"i": 1}])
        world.blocked.add("prepare")
        with pytest.raises(hf.CheckpointFailedError, match="waits"):
            job.checkpoint()
        until(job, lambda: "prepare" in world.entered, "it prepares")
        job.advance(by_ms=11 * 60_000)
        assert world.rows == []
        world.blocked.clear()
        world.release.set()
        feed.add([{"i": 2}])
        checkpoint(job)
        until(job, lambda: world.rows == [1, 2], "both are committed, once")


def checkpoint(job: hf.testing.Job) -> None:
    """One, however long its writers take."""
    before = newest(job)
    with contextlib.suppress(hf.CheckpointFailedError):  # it waits for a thread
        job.checkpoint()
    until(job, lambda: newest(job) != before, "the checkpoint completes")


def newest(job: hf.testing.Job) -> str:
    try:
        return str(job.snapshot().location)
    except hf.NotFoundError:
        return ""
