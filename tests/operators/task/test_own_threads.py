"""A blocking client's thread: calls in order, always on the same thread, and an end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

import holdfast as hf
from holdfast.operators.sources.fetching import FETCHES_AHEAD_MAX, FetchingReader
from holdfast.operators.task.context import CallsInOrder, Mailbox, PoolOutcome, SubtaskThread
from holdfast.operators.task.pool import ThreadPool

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])


def test_calls_run_in_order_on_one_thread_which_ends() -> None:
    pool = ThreadPool(1)
    thread = pool.open_thread("client")
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for number in range(3):
        thread.run(lambda number=number: (number, threading.current_thread()), lambda result, error: answers.put((result, error)))  # type: ignore[misc]
    thread.run(lambda: 1 // 0, lambda result, error: answers.put((result, error)))
    found = [answers.get(timeout=30) for _ in range(4)]
    assert [result[0] for result, error in found[:3]] == [0, 1, 2]
    assert len({result[1] for result, error in found[:3]}) == 1
    assert isinstance(found[3][1], ZeroDivisionError)
    thread.close()
    found[0][0][1].join(timeout=30)
    assert not found[0][0][1].is_alive()
    pool.close()


def test_calls_without_a_thread_keep_their_order() -> None:
    class Pool:
        def __init__(self) -> None:
            self.waiting: list[Any] = []

        def run(self, work: Any, ended: Any) -> None:
            self.waiting.append((work, ended))

    pool = Pool()
    calls, done = CallsInOrder(pool), []  # type: ignore[arg-type]
    for number in range(3):
        calls.run(lambda number=number: number, lambda result, error: done.append(result))  # type: ignore[misc]
    while pool.waiting:
        assert len(pool.waiting) == 1
        work, ended = pool.waiting.pop()
        ended(work(), None)
    assert done == [0, 1, 2]


class Part(hf.SourceSplit, frozen=True):
    """A split that stands for itself."""


class Endless(hf.SplitReader[Part]):
    """Counts from 0 on; `wake_up` ends a fetch that waits."""

    def __init__(self) -> None:
        self.fetched = 0
        self.threads: set[int] = set()
        self.waits = False
        self.woken = threading.Event()
        self.closed = threading.Event()

    def open(self) -> None:
        self.threads.add(threading.get_ident())

    def add_splits(self, splits: Sequence[hf.AssignedSplit[Part]]) -> None:
        self.threads.add(threading.get_ident())

    def fetch(self) -> Sequence[hf.SplitRecords]:
        self.threads.add(threading.get_ident())
        if self.waits:
            assert self.woken.wait(timeout=30)
            return ()
        numbers = np.array([self.fetched], np.int64)
        self.fetched += 1
        return [hf.SplitRecords("a", pa.RecordBatch.from_arrays([pa.array(numbers)], schema=SCHEMA), numbers + 1)]

    def wake_up(self) -> None:
        self.woken.set()

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed.set()


class Context:
    """A reader's surroundings, with real threads; mails are taken by the test."""

    uid, subtask, job_id, parallelism, attempt = "source", 0, "j", 1, 1

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.mailbox = Mailbox(self.arrived.set)
        self.pool = ThreadPool(1)

    def open_thread(self, name: str) -> SubtaskThread:
        return SubtaskThread(self.pool.open_thread(name), self.mailbox)

    def source_is_ready(self) -> None: ...

    def monotonic_ms(self) -> int:
        return 0

    def take_one(self) -> None:
        """The next outcome; waits for it."""
        while (mail := self.mailbox.take()) is None:
            assert self.arrived.wait(timeout=30)
            self.arrived.clear()
        assert isinstance(mail, PoolOutcome)
        mail.done(mail.result, mail.error)


def test_a_reader_fetches_ahead_on_its_thread_and_no_further() -> None:
    client, context = Endless(), Context()
    reader: FetchingReader[Part] = FetchingReader(client, splits_max=1)
    reader.open(context)
    reader.add_splits([hf.AssignedSplit(Part("a"))])
    numbers: list[int] = []
    while len(numbers) < 20:
        polled = reader.poll(10)
        if isinstance(polled, hf.SplitRecords):
            assert polled.columns is not None
            numbers += polled.columns.column("n").to_pylist()
        else:
            context.take_one()
        assert client.fetched - len(numbers) <= FETCHES_AHEAD_MAX
    assert numbers == list(range(20))
    client.waits = True
    reader.close()
    assert client.closed.wait(timeout=30)
    assert len(client.threads) == 1
    assert threading.get_ident() not in client.threads
    context.pool.close()
