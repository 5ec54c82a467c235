"""Several transfers at one time: their bounds, their order, what a failure among them leaves, and drivers that do one at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.operators.task.context import CancelToken, FlowCancelledError
from holdfast.operators.task.pool import drive
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.errors import InvariantError, StorageUnavailableError
from holdfast.statebackends.handles import FileHandle, InlineHandle
from holdfast.statebackends.snapshot.parts import HELD_BYTES_MAX, PartsWriter, WrittenPart, verify_file
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import (
    Flow,
    InParallel,
    ListFiles,
    Operation,
    ReadFile,
    Storage,
    UploadFile,
    WriteFile,
    one_by_one,
    perform,
    run_flow,
    transfers_of,
)
from holdfast.statebackends.storage.transfers import TransferPool

TARGET = SnapshotTarget(3, "job/chk-3", "op-0-1-n", canonical=False, inline_threshold=10, shared_prefix="3-1-op-0-n")


class Gauge:
    """Counts the calls under way, and lets them end when so many are."""

    def __init__(self, until: int) -> None:
        self._barrier = threading.Barrier(until, timeout=20)
        self._lock = threading.Lock()
        self.now = self.most = 0

    def call(self, result: int) -> int:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        self._barrier.wait()
        with self._lock:
            self.now -= 1
        return result


# -------------------------------------------------------------------------------------------------------------------- pool


def test_as_many_as_allowed_run_at_one_time_and_results_are_in_order() -> None:
    pool, gauge = TransferPool(4, 100, 100), Gauge(4)
    calls = [partial(gauge.call, number) for number in range(12)]
    assert pool.run(calls, [1] * 12) == list(range(12))
    assert gauge.most == 4


def test_bytes_in_memory_bound_what_runs_at_one_time() -> None:
    pool, gauge = TransferPool(8, 100, 60), Gauge(2)
    calls = [partial(gauge.call, number) for number in range(6)]
    assert pool.run(calls, [50] * 6) == list(range(6))
    assert gauge.most == 2
    single = Gauge(1)
    pool.run([lambda: single.call(0)] * 5, [10**9] * 5)  # each holds 60 at most, however large: one at one time
    assert single.most == 1


def test_one_that_is_larger_than_all_that_may_be_held_runs_alone() -> None:
    pool, gauge = TransferPool(8, 100, 1_000), Gauge(1)
    assert pool.run([partial(gauge.call, number) for number in range(5)], [500] * 5) == list(range(5))
    assert gauge.most == 1


def test_two_groups_share_the_bounds_and_none_waits_for_the_other_s_threads() -> None:
    pool, first = TransferPool(3, 100, 100), Gauge(3)
    results: list[list[int]] = []
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> int:
        inside.set()
        assert go_on.wait(20)
        return 7

    blocked = threading.Thread(target=lambda: results.append(pool.run([wait] * 3, [1] * 3)))
    blocked.start()
    assert inside.wait(20)
    alone = Gauge(1)
    while pool._threads_free:  # until the other group has taken all threads there are
        assert blocked.is_alive()
    assert pool.run([partial(alone.call, number) for number in range(4)], [1] * 4) == [0, 1, 2, 3]
    assert alone.most == 1
    go_on.set()
    blocked.join(20)
    assert results == [[7, 7, 7]]
    assert pool.run([partial(first.call, number) for number in range(3)], [1] * 3) == [0, 1, 2]
    assert first.most == 3


def test_a_group_within_another_one_s_call_waits_for_nothing() -> None:
    pool, found = TransferPool(2, 10, 10), list[list[list[int]]]()

    def outer() -> list[int]:
        return pool.run([lambda: 1, lambda: 2], [10, 10])  # all that may be held is held by whoever asks

    asked = threading.Thread(target=lambda: found.append(pool.run([outer] * 3, [10] * 3)), daemon=True)
    asked.start()
    asked.join(20)
    assert found == [[[1, 2]] * 3]


def test_the_first_failure_in_order_is_raised_when_all_under_way_have_ended_and_nothing_more_begins() -> None:
    pool, begun, ended = TransferPool(3, 100, 100), list[int](), list[int]()
    together = threading.Barrier(3, timeout=20)

    def call(number: int) -> None:
        begun.append(number)
        together.wait()
        if number in (1, 2):
            raise OSError(number, "gone")
        ended.append(number)

    with pytest.raises(OSError, match="1") as caught:
        pool.run([partial(call, number) for number in range(3)], [1] * 3)
    assert caught.value.errno == 1
    assert (sorted(begun), ended) == ([0, 1, 2], [0])

    def fail() -> None:
        raise OSError(9, "gone")

    left: list[int] = []
    alone = TransferPool(2, 1, 1)  # one at one time: what comes behind a failure waits for it
    with pytest.raises(OSError, match="9"):
        alone.run([fail, *[lambda number=number: left.append(number) for number in range(20)]], [1] * 21)
    assert len(left) <= 1  # of two that were taken either may have come first


def test_a_check_that_raises_stops_what_has_not_begun() -> None:
    for transfers_max in (1, 2):
        begun: list[int] = []

        def check(begun: list[int] = begun) -> None:
            if len(begun) == 2:
                raise FlowCancelledError("enough")

        pool = TransferPool(transfers_max, 1, 1)
        with pytest.raises(FlowCancelledError):
            pool.run([partial(begun.append, number) for number in range(9)], [1] * 9, check)
        assert sorted(begun) == [0, 1]


def test_a_system_without_threads_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = TransferPool(4, 100, 100)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert pool.run([partial(int, number) for number in range(5)], [1] * 5) == list(range(5))
    gauge = Gauge(4)
    pool.run([lambda: gauge.call(0)] * 4, [1] * 4)
    assert gauge.most == 4


def test_sizes_that_don_t_fit_are_a_bug() -> None:
    with pytest.raises(InvariantError, match="2 transfers have 1 sizes"):
        TransferPool(4, 100, 100).run([int, int], [1])


# ------------------------------------------------------------------------------------------------------------------- flows


class Scripted:
    """Storage that answers from a function, several at one time."""

    root = "scripted"

    def __init__(self, answer: Callable[[Operation], Any], transfers: TransferPool | None = None) -> None:
        self.asked: list[Operation] = []
        self._answer = answer
        self.transfers = transfers or TransferPool(4, 1 << 20, 1 << 20)

    def at(self, location: str) -> Storage:
        return self

    def execute(self, operation: Operation) -> Any:
        self.asked.append(operation)
        return self._answer(operation)


def two_steps(number: int, closed: list[int]) -> Flow[int]:
    try:
        first = yield ReadFile(f"{number}-a")
        second = yield ReadFile(f"{number}-b")
        return int(first + second)
    finally:
        closed.append(number)


def group(count: int, closed: list[int]) -> Flow[list[int]]:
    results: list[int] = yield InParallel([two_steps(number, closed) for number in range(count)], [1] * count)
    return results


def number_of(operation: Operation) -> int:
    assert isinstance(operation, ReadFile)
    return int(operation.path.split("-")[0])


@given(choices=st.lists(st.integers(0, 100), min_size=20, max_size=20), count=st.integers(0, 5))
def test_a_group_has_the_same_result_in_any_order(choices: list[int], count: int) -> None:
    storage = Scripted(number_of)
    source = itertools.cycle(choices)
    closed: list[int] = []
    assert run_flow(one_by_one(group(count, closed), lambda left: next(source) % left), storage) == [2 * n for n in range(count)]
    paths = [operation.path for operation in storage.asked if isinstance(operation, ReadFile)]
    assert sorted(paths) == sorted(f"{number}-{step}" for number in range(count) for step in "ab")
    assert all(paths.index(f"{number}-a") < paths.index(f"{number}-b") for number in range(count))
    assert run_flow(group(count, []), Scripted(number_of)) == [2 * n for n in range(count)]


@given(choices=st.lists(st.integers(0, 100), min_size=20, max_size=20), failing=st.integers(0, 7))
def test_a_failure_in_a_group_goes_to_whoever_asked_for_it_and_closes_the_others(choices: list[int], failing: int) -> None:
    closed: list[int] = []
    asked = itertools.count()
    source = itertools.cycle(choices)

    def answer(operation: Operation) -> int:
        if next(asked) == failing:
            raise StorageUnavailableError(f"{operation} is gone", path="x")
        return 1

    def patient() -> Flow[str]:
        try:
            return str((yield from group(4, closed)))
        except StorageUnavailableError:
            return "told"

    assert run_flow(one_by_one(patient(), lambda left: next(source) % left), Scripted(answer)) == "told"
    assert next(asked) == failing + 1
    assert sorted(set(closed)) == sorted(closed)


def test_closing_a_flow_closes_all_of_a_group() -> None:
    closed: list[int] = []
    flow = one_by_one(group(3, closed), lambda left: left - 1)
    next(flow)
    flow.send(1)
    flow.close()
    assert closed == [2]  # the only one that had begun


def test_a_cancelled_flow_begins_nothing_more_of_a_group_and_is_closed() -> None:
    token = CancelToken()
    closed: list[int] = []

    def answer(operation: Operation) -> int:
        token.cancel()
        return 1

    storage = Scripted(answer, TransferPool(2, 1, 1))
    ended: list[str] = []

    def flow() -> Flow[None]:
        try:
            yield from group(5, closed)
        finally:
            ended.append("closed")

    with pytest.raises(FlowCancelledError):
        drive(flow(), storage, token)
    assert ended == ["closed"]
    assert len(storage.asked) == 2  # of one flow: it ends, since it had begun
    assert len({number_of(operation) for operation in storage.asked}) == 1


def test_a_storage_that_says_nothing_of_transfers_is_asked_one_thing_at_a_time(tmp_path: Path) -> None:
    class Plain:
        root = "plain"

        def at(self, location: str) -> Storage:
            return self

        def execute(self, operation: Operation) -> Any:
            return threading.current_thread()

    assert transfers_of(Plain()).transfers_max == 1
    assert transfers_of(LocalStorage(tmp_path)).transfers_max > 1
    threads = perform(InParallel([read_one(str(n)) for n in range(5)], [1] * 5), Plain())
    assert set(threads) == {threading.current_thread()}


def read_one(path: str) -> Flow[Any]:
    return (yield ReadFile(path))


# ------------------------------------------------------------------------------------------------------------------- parts


def test_parts_are_inline_files_or_shared_files(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")
    (tmp_path / "1.sst").write_bytes(b"s" * 100)
    (tmp_path / "tiny").write_bytes(b"t" * 9)
    writer = PartsWriter(TARGET)
    parts = [
        writer.add(b"i" * 9, "inline"),
        writer.add(b"f" * 10, "a/b"),
        writer.add(b"f" * 10, "run", is_shared=True, inline_threshold=0),
        writer.add_file(str(tmp_path / "1.sst"), "1.sst", is_shared=True),
        writer.add_file(str(tmp_path / "tiny"), "tiny"),
    ]
    with pytest.raises(InvariantError, match="not stored"):
        _ = parts[1].handle
    run_flow(writer.store(), storage)
    assert [part.handle for part in parts if isinstance(part.handle, InlineHandle)] == [
        InlineHandle(b"i" * 9),
        InlineHandle(b"t" * 9),
    ]
    files = [part.handle for part in parts if isinstance(part.handle, FileHandle)]
    assert [(file.path, file.length) for file in files] == [
        ("op-0-1-n-a%2Fb", 10), ("../shared/3-1-op-0-n-run", 10), ("../shared/3-1-op-0-n-1.sst", 100),
    ]  # fmt: skip
    assert [run_flow(verify_file(file, "job/chk-3", "op", 0), storage) for file in files] == [None] * 3
    assert list(writer.store()) == []


def test_what_waits_in_memory_is_bounded() -> None:
    writer = PartsWriter(TARGET)
    piece = bytes(HELD_BYTES_MAX // 4)
    for number in range(4):
        writer.add(piece, str(number))
        assert not writer.is_full
    writer.add(piece, "4")
    assert writer.is_full
    next(writer.store())
    assert not writer.is_full


@pytest.mark.parametrize("failing", range(6))
def test_one_failing_transfer_among_many_fails_the_snapshot_and_names_its_file(tmp_path: Path, failing: int) -> None:
    real = LocalStorage(tmp_path / "state")

    def answer(operation: Operation) -> Any:
        if isinstance(operation, UploadFile) and operation.path.endswith(f"-{failing}.sst"):
            raise StorageUnavailableError(f"UploadFile {operation.path}: disk gone", path=operation.path)
        return real.execute(operation)

    parts = list[WrittenPart]()

    def snapshot() -> Flow[None]:
        writer = PartsWriter(TARGET)
        for number in range(6):
            local = tmp_path / f"{number}.sst"
            local.write_bytes(bytes([number]) * 1_000)
            parts.append(writer.add_file(str(local), f"{number}.sst", is_shared=True))
        yield from writer.store()

    with pytest.raises(StorageUnavailableError, match=f"3-1-op-0-n-{failing}.sst") as caught:
        run_flow(snapshot(), Scripted(answer))
    assert caught.value.path == f"job/shared/3-1-op-0-n-{failing}.sst"
    for part in parts:
        with pytest.raises(InvariantError, match="not stored"):
            _ = part.handle
    stored: list[str] = real.execute(ListFiles("job/shared"))
    assert f"job/shared/3-1-op-0-n-{failing}.sst" not in stored
    assert all(len(real.execute(ReadFile(path))) == 1_000 for path in stored)  # whole or not there


def test_a_group_is_durable_on_a_directory_when_it_ends(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "state")

    def write(number: int) -> Flow[int]:
        size: int = yield WriteFile(f"job/{number % 3}/{number}", [bytes(number)])
        return size

    assert perform(InParallel([write(n) for n in range(40)], list(range(40))), storage) == list(range(40))
    assert len(storage.execute(ListFiles("job"))) == 40
    assert list((tmp_path / "state/.tmp").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------- interrupts


def test_an_interrupt_is_not_lost_behind_a_failure_before_it() -> None:
    both = threading.Barrier(2, timeout=10)

    def fail(error: BaseException) -> None:
        both.wait()
        raise error

    with pytest.raises(KeyboardInterrupt):
        TransferPool(2, 1 << 20, 1 << 20).run([lambda: fail(OSError("disk")), lambda: fail(KeyboardInterrupt())], [0, 0])


class _Interrupted(threading.Thread):
    """A thread that is waited for in vain at first: Ctrl-C."""

    release = threading.Event()
    """Set when it was waited for, and the wait interrupted."""

    def join(self, timeout: float | None = None) -> None:
        if not self.release.is_set():
            self.release.set()
            raise KeyboardInterrupt
        super().join(timeout)


def test_an_interrupted_wait_goes_on_until_all_have_ended_and_gives_their_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.statebackends.storage.transfers.threading.Thread", _Interrupted)
    pool, caller = TransferPool(2, 1 << 20, 1 << 20), threading.current_thread()
    began, written = threading.Event(), []

    def slow() -> None:
        if threading.current_thread() is caller:
            assert began.wait(10)
        else:
            began.set()
            assert _Interrupted.release.wait(10)
            written.append(1)

    with pytest.raises(KeyboardInterrupt):
        pool.run([slow, slow], [0, 0])
    assert written == [1]
    assert pool._threads_free == TransferPool(2, 1 << 20, 1 << 20)._threads_free
