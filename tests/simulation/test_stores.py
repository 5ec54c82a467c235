"""One process's view of storage: what it is told, what happened at the store, and who hears of it."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos.checkers.observations import Observation, Stored
from holdfast.chaos.sim.disk import SimDisk
from holdfast.chaos.sim.kernel import Kernel, Process, Streams, Trace
from holdfast.chaos.sim.stores import EPOCH_MS, OK, SimStores, StoreClient, StoreDecision
from holdfast.statebackends.errors import AmbiguousWriteError, HoldfastError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.port import Operation, Storage
from tests.statebackends.storage_contract import DATA, PATH, StorageContract

ROOT = "/state"


@dataclass
class Scripted:
    """Faults as the test says: the next decisions, then none."""

    decisions: list[StoreDecision] = field(default_factory=list)
    asked: list[tuple[str, str, Operation]] = field(default_factory=list)

    def decide(self, actor: str, role: str, operation: Operation) -> StoreDecision:
        self.asked.append((actor, role, operation))
        return self.decisions.pop(0) if self.decisions else OK


class Bench:
    """A world of one process and its storage."""

    def __init__(self, *, objects: bool = False, wire: bool = False, seed: int = 7) -> None:
        self.trace = Trace(lambda: self.kernel.now_us)
        self.kernel = Kernel(Streams(7), self.trace)
        self.faults = Scripted()
        self.observed: list[Observation] = []
        rng = random.Random(seed) if wire else None
        self.stores = SimStores(self.kernel, self.faults, self.observed.append, ROOT, objects=objects, wire=rng)
        self.process = Process("worker-1.1", "worker")
        self.client = self.stores.client(self.process)
        self.view = self.stores.view(ROOT)

    def told(self, operation: Operation, decision: StoreDecision = OK, client: StoreClient | None = None) -> Any:
        """What the caller gets: a result, or the error."""
        self.faults.decisions = [decision]
        try:
            return (client or self.client).execute(operation)
        except HoldfastError as error:
            return error

    @property
    def last(self) -> Stored:
        assert isinstance(self.observed[-1], Stored)
        return self.observed[-1]

    def lines(self) -> list[str]:
        return [" ".join(line.split()[1:]) for line in self.trace.lines()]


@pytest.fixture(params=[False, True], ids=["disk", "objects"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(objects=request.param)


class TestContract(StorageContract):
    """Without faults a client is a storage like any other."""

    @pytest.fixture(params=["disk", "objects", "wire"])
    def storage(self, request: pytest.FixtureRequest) -> Storage:
        return Bench(objects=request.param != "disk", wire=request.param == "wire").client


CHANGES: list[Operation] = [
    ops.PutIfAbsent("job/new", DATA),
    ops.WriteFile("job/new", [DATA]),
    ops.LinkFile(PATH, "job/new"),
    ops.DeleteFile(PATH),
    ops.DeleteFolder("job"),
]
CREATING = (ops.PutIfAbsent, ops.WriteFile, ops.UploadFile, ops.LinkFile)


# ----------------------------------------------------------------------------------------------------------------- without


def test_each_operation_but_reads_is_seen_at_the_store_with_what_it_changed(bench: Bench) -> None:
    bench.kernel.now_us = 5_000
    told = [
        bench.told(operation)
        for operation in (
            ops.PutIfAbsent(PATH, DATA),
            ops.PutIfAbsent(PATH, b"other"),
            ops.LinkFile(PATH, "job/b"),
            ops.ReadFile(PATH),
            ops.ListFiles(""),
            ops.DeleteFile("job/b"),
            ops.DeleteFile("job/b"),
            ops.ReadFile("job/b"),
            ops.DeleteFolder("job"),
        )
    ]
    assert told[:7] == [True, False, True, DATA, ["job/b", PATH], True, False]
    assert isinstance(told[7], ObjectMissingError)
    assert told[8] == 1
    seen = [one for one in bench.observed if isinstance(one, Stored)]
    assert [one.result for one in seen] == [*told[:3], *told[5:]]
    assert [one.added for one in seen] == [(PATH,), (), ("job/b",), (), (), (), ()]
    assert [one.removed for one in seen] == [(), (), (), ("job/b",), (), (), (PATH,)]
    assert {(one.at_ms, one.actor, one.root) for one in seen} == {(5, "worker-1.1", ROOT)}
    assert seen[0].operation == ops.PutIfAbsent(PATH, DATA)


def test_the_trace_says_who_did_what_without_sizes_or_local_paths(bench: Bench, tmp_path: Path) -> None:
    local = tmp_path / "000007.sst"
    local.write_bytes(DATA)
    for operation in (
        ops.UploadFile(str(local), "shared/1"),
        ops.DownloadFile("shared/1", str(local)),
        ops.StatFile("shared/1"),
        ops.StatFile("shared/2"),
        ops.LinkFile("shared/1", "shared/2"),
        ops.ListFolder("shared"),
        ops.ReadFile("shared/3"),
        ops.DeleteFolder("shared"),
    ):
        bench.told(operation)
    bench.told(ops.PutIfAbsent("a", b""), client=bench.client.at("/sink"))
    bench.told(ops.PutIfAbsent("a", b""), StoreDecision("lie"))
    assert bench.lines() == [
        "worker-1.1 store UploadFile shared/1 done",
        "worker-1.1 store DownloadFile shared/1 done",
        "worker-1.1 store StatFile shared/1 exists",
        "worker-1.1 store StatFile shared/2 missing",
        "worker-1.1 store LinkFile shared/2 created",
        "worker-1.1 store ListFolder shared 2 names",
        "worker-1.1 store ReadFile shared/3 ObjectMissingError",
        "worker-1.1 store DeleteFolder shared 2 files",
        "worker-1.1 store PutIfAbsent /sink/a created 00000000",
        "worker-1.1 store PutIfAbsent a created 00000000 (lie)",
    ]


def test_an_operation_belongs_to_the_process_that_runs_unless_the_client_is_somebodys(bench: Bench) -> None:
    shared, driver = bench.stores.client(), Process("driver-1", "driver")
    bench.kernel.run_as(driver, lambda: shared.execute(ops.PutIfAbsent("a", b"")))
    bench.kernel.run_as(driver, lambda: shared.at("/sink").execute(ops.PutIfAbsent("a", b"")))
    bench.kernel.run_as(driver, lambda: bench.client.execute(ops.PutIfAbsent("b", b"")))
    shared.execute(ops.PutIfAbsent("c", b""))
    assert [asked[:2] for asked in bench.faults.asked] == [("driver-1", "driver")] * 2 + [("worker-1.1", "worker"), ("nobody", "")]
    assert [one.actor for one in bench.observed if isinstance(one, Stored)] == ["driver-1", "driver-1", "worker-1.1", "nobody"]


def test_what_a_process_asked_for_happens_when_it_is_dead(bench: Bench) -> None:
    bench.kernel.kill(bench.process)
    assert bench.told(ops.PutIfAbsent(PATH, DATA)) is True
    assert bench.last.actor == "worker-1.1"


def test_other_roots_are_reached_through_a_client_and_counted_apart(bench: Bench) -> None:
    sink = bench.client.at("file:///sink/")
    assert sink is bench.client.at("/sink") is sink.at("/sink")
    assert bench.client.at(ROOT) is bench.client
    assert bench.told(ops.PutIfAbsent("a", DATA), StoreDecision("lie"), sink).fields["path"] == "/sink/a"
    assert (bench.last.root, bench.last.added) == ("/sink", ("a",))
    assert (bench.stores.view("/sink").paths(), bench.view.paths()) == (["a"], [])
    assert bench.stores.client().at("/sink").execute(ops.ReadFile("a")) == DATA


def test_files_have_the_time_of_the_simulated_world() -> None:
    bench = Bench()
    bench.kernel.now_us = 9_000
    bench.client.execute(ops.PutIfAbsent("a", DATA))
    disk = bench.stores.medium
    assert isinstance(disk, SimDisk)
    assert disk.stat(f"{ROOT}/a").modified_ms == EPOCH_MS + 9


# -------------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("operation", CHANGES, ids=lambda operation: type(operation).__name__)
def test_a_failure_changes_nothing_and_says_so_as_a_directory_would(bench: Bench, operation: Operation) -> None:
    bench.told(ops.PutIfAbsent(PATH, DATA))
    error = bench.told(operation, StoreDecision("fail"))
    assert type(error) is StorageUnavailableError
    assert (error.errno, str(error.path) in str(operation)) == (errno.EIO, True)
    assert str(error) == f"{type(operation).__name__} {error.path} in {ROOT}: Input/output error"
    assert bench.view.paths() == [PATH]
    assert (bench.last.result, bench.last.added, bench.last.removed) == (error, (), ())
    assert isinstance(bench.told(operation), bool | int)


@pytest.mark.parametrize("operation", CHANGES, ids=lambda operation: type(operation).__name__)
def test_a_lie_happens_and_reports_a_failure(bench: Bench, operation: Operation) -> None:
    bench.told(ops.PutIfAbsent(PATH, DATA))
    before = bench.view.paths()
    error = bench.told(operation, StoreDecision("lie"))
    assert type(error) is (AmbiguousWriteError if isinstance(operation, CREATING) else StorageUnavailableError)
    assert not isinstance(bench.last.result, Exception)
    assert sorted({*before, *bench.last.added} - {*bench.last.removed}) == bench.view.paths() != before


def test_a_lie_about_what_failed_by_itself_is_that_failure(bench: Bench) -> None:
    error = bench.told(ops.ReadFile("none"), StoreDecision("lie"))
    assert isinstance(error, ObjectMissingError)
    assert bench.told(ops.PutIfAbsent(PATH, DATA)) is True
    assert isinstance(bench.told(ops.PutIfAbsent(PATH, b"other"), StoreDecision("lie")), AmbiguousWriteError)
    assert bench.view.peek(PATH) == DATA


@pytest.mark.parametrize("operation", CHANGES, ids=lambda operation: type(operation).__name__)
def test_a_late_operation_happens_after_its_caller_gave_up(bench: Bench, operation: Operation) -> None:
    bench.told(ops.PutIfAbsent(PATH, DATA))
    before, observed = bench.view.paths(), len(bench.observed)
    error = bench.told(operation, StoreDecision("late", delay_ms=70))
    assert type(error) is (AmbiguousWriteError if isinstance(operation, CREATING) else StorageUnavailableError)
    assert (bench.view.paths(), len(bench.observed)) == (before, observed + 1)
    assert (bench.last.fate, bench.last.result, bench.last.added, bench.last.removed) == ("postponed", error, (), ())
    bench.kernel.kill(bench.process)
    assert bench.kernel.step()
    assert (bench.last.at_ms, bench.last.actor) == (70, "worker-1.1")
    assert sorted({*before, *bench.last.added} - {*bench.last.removed}) == bench.view.paths() != before


def test_a_late_operation_that_comes_too_late_disturbs_nobody(bench: Bench, tmp_path: Path) -> None:
    bench.told(ops.WriteFile("a", [b"mine"]), StoreDecision("late", delay_ms=10))
    bench.told(ops.WriteFile("a", [b"other"]))
    while bench.kernel.step():
        pass
    assert bench.view.peek("a") == b"other"
    assert isinstance(bench.last.result, HoldfastError)


def test_a_late_upload_sends_what_the_local_file_held(bench: Bench, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(DATA)
    assert isinstance(bench.told(ops.UploadFile(str(local), "a"), StoreDecision("late", delay_ms=10)), AmbiguousWriteError)
    local.unlink()
    bench.kernel.step()
    assert bench.view.peek("a") == DATA
    missing = ops.UploadFile(str(local), "b")
    assert isinstance(bench.told(missing, StoreDecision("late", delay_ms=10)), ObjectMissingError)
    assert not bench.kernel.step()


@pytest.mark.parametrize("operation", [ops.ReadFile(PATH), ops.StatFile(PATH), ops.ListFiles(""), ops.ListFolder("job")])
@pytest.mark.parametrize("outcome", ["fail", "lie", "late"])
def test_reading_fails_in_one_way_only(bench: Bench, operation: Operation, outcome: Any) -> None:
    bench.told(ops.PutIfAbsent(PATH, DATA))
    assert type(bench.told(operation, StoreDecision(outcome, delay_ms=1))) is StorageUnavailableError
    assert not bench.kernel.step()


def test_nothing_that_was_on_its_way_outlives_the_power_of_a_disk() -> None:
    for objects in (False, True):
        bench = Bench(objects=objects)
        bench.told(ops.PutIfAbsent("a", DATA), StoreDecision("late", delay_ms=10))
        bench.stores.power_loss(random.Random(1))
        bench.kernel.step()
        assert bench.view.paths() == (["a"] if objects else [])


def test_a_full_store_takes_no_bytes_and_gives_back_those_it_has(bench: Bench) -> None:
    full = StoreDecision("full")
    bench.told(ops.PutIfAbsent(PATH, DATA))
    for operation in CHANGES[:3]:
        error = bench.told(operation, full)
        assert isinstance(error, StorageUnavailableError)
        assert not isinstance(error, AmbiguousWriteError), "nothing happened"
        assert "No space left on device" in str(error)
    assert bench.view.paths() == [PATH]
    assert bench.told(ops.ReadFile(PATH), full) == DATA
    assert bench.told(ops.PutIfAbsent(PATH, b"other"), full) is False or bench.stores.medium.calls_of_change == 1
    assert bench.told(ops.DeleteFolder("job"), full) == 1
    assert bench.told(ops.PutIfAbsent(PATH, b"other")) is True


def test_a_write_that_stops_on_its_way_leaves_its_name_whole_or_free() -> None:
    told: set[str] = set()
    torn = 0
    for operation in CHANGES[:3]:
        for step in range(20):
            bench = Bench()
            bench.told(ops.PutIfAbsent(PATH, DATA))
            answer = bench.told(operation, StoreDecision("partial", fraction=step / 20))
            told.add(type(answer).__name__)
            assert bench.view.peek("job/new") in (None, DATA)
            assert bench.last.added == (("job/new",) if bench.view.peek("job/new") else ())
            if isinstance(answer, StorageUnavailableError) and not isinstance(answer, AmbiguousWriteError):
                assert bench.last.added == ()
            left = bench.stores.view(f"{ROOT}/.tmp")
            torn += any(0 < (left.size(path) or 0) < len(DATA) for path in left.paths())
            assert bench.told(ops.PutIfAbsent("job/new", DATA)) in (True, False)
            assert bench.view.peek("job/new") == DATA
    assert told >= {"AmbiguousWriteError", "InputOutputError"}
    assert torn


def test_a_deletion_that_stops_on_its_way_leaves_the_rest(bench: Bench) -> None:
    for number in range(8):
        bench.told(ops.PutIfAbsent(f"job/{number}", DATA))
    assert isinstance(bench.told(ops.DeleteFolder("job"), StoreDecision("partial", fraction=0.5)), StorageUnavailableError)
    assert 0 < len(bench.last.removed) < 8
    assert bench.told(ops.DeleteFolder("job")) == 8 - len(bench.observed[-2].removed)  # type: ignore[union-attr]


def test_the_same_seed_leaves_the_same_trace(bench: Bench, tmp_path: Path) -> None:
    def run() -> str:
        fresh = Bench(objects=bench.stores.medium.calls_of_change == 1)
        rng = random.Random(3)
        for _ in range(300):
            operation = rng.choice(CHANGES)
            outcome: Any = rng.choice(["ok", "ok", "fail", "partial", "lie", "late", "full"])
            fresh.told(operation, StoreDecision(outcome, rng.random(), rng.randrange(20)))
            if rng.random() < 0.05:
                fresh.stores.power_loss(rng)
            if rng.random() < 0.2:
                fresh.kernel.step()
        return fresh.trace.digest()

    assert run() == run()


# -------------------------------------------------------------------------------------------------------- names not durable


@pytest.mark.parametrize("operation", [ops.PutIfAbsent("job/new", DATA), ops.WriteFile("job/new", [DATA])], ids=["put", "write"])
def test_a_name_that_is_not_durable_is_there_until_the_power_goes(operation: Operation) -> None:
    there = set()
    for seed in range(20):
        bench = Bench()
        assert isinstance(bench.told(operation, StoreDecision("unsynced")), AmbiguousWriteError)
        assert bench.view.peek("job/new") == DATA
        assert (bench.last.fate, bench.last.added) == ("unsynced", ("job/new",))
        bench.stores.power_loss(random.Random(seed))
        there.add(bench.view.peek("job/new") == DATA)
    assert there == {False, True}


def test_whoever_finds_such_a_name_makes_it_durable() -> None:
    for seed in range(20):
        bench = Bench()
        bench.told(ops.PutIfAbsent("job/new", DATA), StoreDecision("unsynced"))
        assert bench.told(ops.PutIfAbsent("job/new", DATA), StoreDecision("unsynced")) is False
        bench.stores.power_loss(random.Random(seed))
        assert bench.view.peek("job/new") == DATA


def test_an_object_is_durable_with_its_name_and_its_writer_is_not_told() -> None:
    bench = Bench(objects=True)
    assert isinstance(bench.told(ops.PutIfAbsent("job/new", DATA), StoreDecision("unsynced")), AmbiguousWriteError)
    assert bench.view.peek("job/new") == DATA
    assert bench.told(ops.PutIfAbsent("job/new", DATA), StoreDecision("unsynced")) is False


def test_what_makes_no_name_just_happens(bench: Bench) -> None:
    bench.told(ops.PutIfAbsent("job/new", DATA))
    assert bench.told(ops.ReadFile("job/new"), StoreDecision("unsynced")) == DATA
    assert bench.told(ops.DeleteFile("job/new"), StoreDecision("unsynced")) is True
