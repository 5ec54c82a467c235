"""A panic inside rocksdict, which is no Exception: it ends a task or a checkpoint, with its operator and state named, never the
worker. What ends a process still does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Options

from holdfast.barriers.jobgraph import RocksDBConfig
from holdfast.barriers.messages import CheckpointKind, FailureReason, TaskState
from holdfast.operators.functions.process import ProcessOperator
from holdfast.statebackends.errors import StateBackendError
from holdfast.statebackends.handles import KeyGroupRange
from holdfast.statebackends.panics import failure_of, is_panic
from holdfast.statebackends.rocksdb.backend import RocksKeyedBackend
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.row_keys import GROUP_AND_STATE
from tests.harness.mini import MiniCluster
from tests.operators.ports import DictStorage
from tests.operators.worker.test_loop import committed, count_job, expected


def panic() -> Any:
    """One of rocksdict's own."""
    Options().set_db_log_dir("a\0b")


@pytest.fixture
def a_panic(capfd: pytest.CaptureFixture[str]) -> BaseException:
    try:
        panic()
    except BaseException as error:
        capfd.readouterr()  # where Rust tells of it
        return error
    raise AssertionError("rocksdict takes any path now: find it another panic")


def database(store: RocksStore, **broken: Any) -> Any:
    """The database of a store, but for some methods."""
    real = store._db

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return broken.get(name) or getattr(real, name)

    return Broken()


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error

    return call


def test_which_are_panics(a_panic: BaseException) -> None:
    assert not isinstance(a_panic, Exception)
    assert is_panic(a_panic)
    assert failure_of(a_panic) is a_panic
    plain = ValueError("x")
    assert failure_of(plain) is plain
    for end in (KeyboardInterrupt(), SystemExit(1), GeneratorExit()):
        assert not is_panic(end)
        with pytest.raises(type(end)):
            failure_of(end)


@pytest.mark.parametrize("method", ["get", "iter", "write", "flush", "property_int_value", "delete_range", "close"])
def test_a_store_names_operator_and_state(tmp_path: Path, method: str, a_panic: BaseException) -> None:
    store = RocksStore(str(tmp_path / "db"), write_buffer_bytes=1 << 20, operator="totals")
    row = GROUP_AND_STATE.pack(3, store.state_id("sum")) + b"rest"
    store.write([(row, b"1")])
    real = store._db
    store._db = database(store, **{method: raising(a_panic)})
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get(row),
        "iter": lambda: list(store.rows(row)),
        "write": lambda: store.write([(row, b"2")]),
        "flush": lambda: store.link_copy(str(tmp_path / "copy")),
        "property_int_value": store.size,
        "delete_range": lambda: store.keep_only(KeyGroupRange(0, 1)),
        "close": store.close,
    }
    with pytest.raises(StateBackendError, match=r"operator 'totals'.*gave up") as raised:
        calls[method]()
    state = "sum" if method in ("get", "iter", "write") else ""
    assert raised.value.fields == {"operator": "totals", "state": state, "path": store.folder}
    real.close()


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_store_lets_pass_what_ends_a_process(tmp_path: Path, end: type[BaseException]) -> None:
    store = RocksStore(str(tmp_path / "db"), write_buffer_bytes=1 << 20)
    real = store._db
    store._db = database(store, get=raising(end()), write=raising(end()))
    with pytest.raises(end):
        store.get(b"x")
    with pytest.raises(end):
        store.write([(b"x", b"1")])
    real.close()


def break_stores(monkeypatch: pytest.MonkeyPatch, **broken: Any) -> None:
    """Those that are opened from now on, once they are open."""
    opened = RocksStore.__init__

    def open_broken(store: RocksStore, *arguments: Any, **options: Any) -> None:
        opened(store, *arguments, **options)
        store._db = database(store, **broken)

    monkeypatch.setattr(RocksStore, "__init__", open_broken)


def deployed(tmp_path: Path, path: str, **options: Any) -> MiniCluster:
    cluster = MiniCluster(count_job(400, path, state_backend="rocksdb", **options), DictStorage(), local_directory=str(tmp_path))
    cluster.deploy()
    return cluster


def to_its_end(cluster: MiniCluster) -> None:
    cluster.run_until(lambda: cluster.coordinator.all_drained)


def wait(cluster: MiniCluster) -> None:
    """With nothing to do."""
    for _ in range(10):
        cluster._pass_time()
        cluster.run_until(lambda: not cluster.reports)


def test_a_panic_while_state_is_read_fails_its_task_and_the_worker_goes_on(
    tmp_path: Path, a_panic: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = deployed(tmp_path, "mem://panic-read")
    with monkeypatch.context() as broken:
        break_stores(broken, get=raising(a_panic))
        with pytest.raises(AssertionError, match="StateBackendError: operator 'count', state 'count': RocksDB's library gave up"):
            to_its_end(cluster)
    cluster.deploy()  # to the same workers
    cluster.run_until(lambda: not cluster.coordinator.failure)
    cluster.run_to_end()
    assert committed("mem://panic-read") == expected(400)


def test_a_panic_in_a_pool_thread_declines_the_checkpoint(
    tmp_path: Path, a_panic: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = deployed(tmp_path, "mem://panic-write")
    coordinator = cluster.coordinator
    with monkeypatch.context() as broken:
        break_stores(broken, flush=raising(a_panic))
        to_its_end(cluster)
        coordinator.trigger(CheckpointKind.CHECKPOINT, cluster.clock.now_ms)
        cluster.run_until(lambda: bool(coordinator.declined))
    assert coordinator.declined[0].reason is FailureReason.ASYNC_EXCEPTION
    assert "StateBackendError: operator 'count': RocksDB's library gave up" in coordinator.declined[0].message
    assert all(status.state is TaskState.RUNNING for status in coordinator.statuses.values())


def test_a_panic_while_rows_are_written_behind_fails_the_task(
    tmp_path: Path, a_panic: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = deployed(tmp_path, "mem://panic-behind", rocksdb=RocksDBConfig(write_behind_rows=1))
    to_its_end(cluster)
    write_buffers = [
        node.context.keyed_backend.write_buffer
        for worker in cluster.workers
        if worker._attempt is not None
        for each in worker._attempt.subtasks
        for node in each.subtask.chain.nodes
        if isinstance(node.context.keyed_backend, RocksKeyedBackend)
    ]
    assert write_buffers
    for write_buffer in write_buffers:
        write_buffer.freeze(behind=True)
        write_buffer.store._db = database(write_buffer.store, write=raising(a_panic))
    with pytest.raises(AssertionError, match="StateBackendError: operator 'count', state 'count'"):
        wait(cluster)


def test_a_panic_of_a_users_own_library_fails_its_task(
    tmp_path: Path, a_panic: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a record is processed, and when the function is closed for it."""
    monkeypatch.setattr(ProcessOperator, "process_batch", raising(a_panic))
    monkeypatch.setattr(ProcessOperator, "close", raising(a_panic))
    cluster = deployed(tmp_path, "mem://panic-user")
    with pytest.raises(AssertionError, match="a subtask failed: PanicException"):
        to_its_end(cluster)


def test_an_interrupt_ends_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = deployed(tmp_path, "mem://interrupt")
    break_stores(monkeypatch, get=raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        to_its_end(cluster)
