"""Files of a job's directory that somebody made huge: nobody reads more of one than its kind can have.

A sparse file costs its maker nothing, and a coordinator that reads it whole all of its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.barriers.sinks.log import SinkPaths
from holdfast.barriers.sinks.reading import read_log_flow
from holdfast.coordinator.dispatcher.submit import Starter, start_submission
from holdfast.coordinator.ha import store
from holdfast.coordinator.ha.leadership import find_leader, open_directory
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedJob, Unreadable
from holdfast.coordinator.ha.records import AbortRecord, AttemptRecord, ClaimRecord, encode_record
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.store import list_jobs, put_once, read_checkpoint, read_job, write_attempt
from holdfast.coordinator.ownership import fsck
from holdfast.coordinator.ownership.claims import find_owner
from holdfast.coordinator.ownership.fsck import FsckRequest, check_directory
from holdfast.operators.sinks.files.committer import living_snapshots_flow
from holdfast.operators.sources.materialised import load_manifest_flow
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, ObjectMissingError
from holdfast.statebackends.layout import DIRECTORY_FILE, JobPaths
from holdfast.statebackends.snapshot import metadata
from holdfast.statebackends.snapshot import parts as snapshot
from holdfast.statebackends.storage import flows as whole
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.flows import FIRST_BYTES, RECORD_BYTES_MAX, make_durable, read_in_group, read_whole
from holdfast.statebackends.storage.port import Flow, InParallel, Operation, ReadFile, StatFile, drive, run_flow
from holdfast.statebackends.storage.transfers import ONE_BY_ONE
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.test_crashes import settle
from tests.coordinator.world import JOB, DictStorage, World

PATHS = JobPaths(JOB)
HUGE = 8 << 30
FEW, MANY = RECORD_BYTES_MAX, 4 << 20
ATTEMPT = AttemptRecord(attempt=1, epoch=1, submission=1, graph_hash="h", slots=1, restored=None, restarts=0, nonce="n")


class Bounded:
    """A directory of which nothing is read without a bound."""

    def __init__(self, root: Path) -> None:
        self._storage = LocalStorage(root)
        self.root = self._storage.root
        self.transfers = ONE_BY_ONE

    def at(self, location: str) -> Bounded:
        return Bounded(Path(location))

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, ReadFile):
            assert operation.length is not None, operation
            assert operation.length <= RECORD_BYTES_MAX, operation
        return self._storage.execute(operation)


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the largest: what is read in vain is read quickly."""
    monkeypatch.setattr(store, "SUBMISSION_BYTES_MAX", MANY)
    monkeypatch.setattr(metadata, "RECORD_BYTES_MAX", MANY)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a job whose leader died, with completed checkpoints."""
    world = World(seed=3)
    settle(world)
    assert world.storage.completed(JOB)
    for path, content in world.storage.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    return tmp_path


def newest(directory: Path) -> int:
    job: RecordedJob = run(read_job(PATHS), directory)
    return max(checkpoint.checkpoint_id for checkpoint in job.with_fact(CheckpointFact.COMPLETED))


def grow(path: Path, content: bytes | None = None) -> None:
    """Sparse: its length is all that it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    with path.open("ab") as file:
        file.truncate(HUGE)


def run(flow: Flow[Any], root: Path) -> Any:
    return run_flow(flow, Bounded(root))


class Together:
    """Drives a flow with all flows of a group at one time, step by step, and counts what they ask storage for at one time."""

    def __init__(self, root: Path) -> None:
        self._storage = LocalStorage(root)
        self.bytes_max = 0
        self.sizes: list[int] = []

    def run(self, flow: Flow[Any]) -> Any:
        return drive(flow, self._fulfil)

    def _fulfil(self, wanted: Operation | InParallel) -> Any:
        if not isinstance(wanted, InParallel):
            self._count([wanted])
            return self._storage.execute(wanted)
        self.sizes += wanted.sizes
        flows = list(wanted.flows)
        results: list[Any] = [None] * len(flows)
        steps: dict[int, Callable[[], Any]] = {index: partial(next, flow) for index, flow in enumerate(flows)}
        while steps:
            asked: dict[int, Operation] = {}
            for index, step in steps.items():
                try:
                    asked[index] = step()
                except StopIteration as stop:
                    results[index] = stop.value
            self._count(asked.values())
            steps = {index: self._answer(flows[index], operation) for index, operation in asked.items()}
        return results

    def _answer(self, flow: Any, operation: Operation) -> Callable[[], Any]:
        try:
            return partial(flow.send, self._storage.execute(operation))
        except ObjectMissingError as error:
            return partial(flow.throw, error)

    def _count(self, operations: Iterable[Operation]) -> None:
        asked = 0
        for operation in operations:
            if isinstance(operation, ReadFile):
                size = self._storage.execute(StatFile(operation.path)) or 0
                assert operation.length is not None
                asked += min(operation.length, max(0, size - operation.offset))
        self.bytes_max = max(self.bytes_max, asked)


def takeover() -> Flow[Any]:
    return recover_job(PATHS, Takeover(9, "successor", 1))


def whole_report() -> Flow[Any]:
    return check_directory(FsckRequest(checksums=True, repair=True, nonce="n"), "here", 10**13)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("content", [None, b"", b"nothing of ours"], ids=["grown", "zeros", "other"])
def test_a_decision_without_end_is_unreadable_for_each_reader(directory: Path, content: bytes | None) -> None:
    number = newest(directory)
    grow(directory / PATHS.decision(number), content)
    for _ in range(2):
        job: RecordedJob = run(takeover(), directory)
        assert isinstance(job.checkpoints[number].decision, Unreadable)
        assert job.checkpoints[number].fact is CheckpointFact.COMPLETED  # nobody falls back behind it without being told to
    assert run(read_checkpoint(PATHS, number), directory) == job.checkpoints[number]
    report = run(whole_report(), directory)
    assert (directory / PATHS.decision(number)).exists(), report
    assert (number, 1) in run(living_snapshots_flow(JOB, 1, 0), directory)
    with pytest.raises(CorruptStateError, match=f"chk-{number}/_metadata"):
        job.checkpoints[number].restore_point()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["claim", "submission", "attempt", "result"])
def test_a_record_without_end_is_named_and_not_read(directory: Path, kind: str) -> None:
    number = newest(directory) if kind == "claim" else 1
    path: str = getattr(PATHS, kind)(number)
    grow(directory / path)
    with pytest.raises(CorruptStateError, match=f"{path}: longer than {FEW if kind != 'submission' else MANY} bytes") as caught:
        run(takeover(), directory)
    assert caught.value.path == path
    assert path in run(whole_report(), directory).damaged_jobs[JOB]


@pytest.mark.timeout(20)
def test_other_records_without_end_are_named_and_not_read(tmp_path: Path) -> None:
    manifest, log, owner = f"{JOB}/sources/a/manifest.json", SinkPaths("out").log(0), "sp/_owner"
    readers: dict[str, Callable[[], Flow[Any]]] = {
        DIRECTORY_FILE: lambda: open_directory("mine"),
        PATHS.leader(1): lambda: find_leader(PATHS),
        PATHS.attempt(1): lambda: write_attempt(PATHS, ATTEMPT),
        manifest: lambda: load_manifest_flow(manifest, "source"),
        log: lambda: read_log_flow(SinkPaths("out")),
        owner: lambda: find_owner("sp"),
        "any": lambda: make_durable("any"),
    }
    for path, read in readers.items():
        root = tmp_path / f"of-{len(path)}"
        grow(root / path, b"")
        with pytest.raises(CorruptStateError, match="longer than") as caught:
            run(read(), root)
        assert caught.value.path == path


@pytest.mark.timeout(20)
def test_long_files_are_looked_at_one_after_another(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pool counts of each is what a transfer in pieces holds: six of 1 GiB would be in memory at one time."""
    monkeypatch.setattr(metadata, "METADATA_BYTES_MAX", 8 * FIRST_BYTES)
    promise = b'{"format":"holdfast-snapshot","version":1,"length":%d,"checksum":"xxh3_128:%s","snapshot":' % (1 << 30, b"0" * 32)
    folders = [f"savepoints/sp-{number}" for number in range(6)]
    manifests = [f"{JOB}/sources/a/{number}/manifest.json" for number in range(6)]
    for folder, manifest in zip(folders, manifests, strict=True):
        grow(directory / folder / "_metadata", promise)
        grow(directory / manifest, b"{}")
    for number in range(101, 107):
        grow(directory / PATHS.decision(number), promise)
        claim = ClaimRecord(number, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(number), "n")
        (directory / PATHS.claim(number)).write_bytes(encode_record(claim))
    together = Together(directory)
    for flow in (read_job(PATHS), takeover()):
        job: RecordedJob = together.run(flow)
        assert all(isinstance(job.checkpoints[number].decision, Unreadable) for number in range(101, 107))
    found = together.run(fsck.look("here"))
    assert found.savepoints == dict.fromkeys(folders)
    assert found.jobs[JOB].inputs == {manifest.rpartition("/")[0]: None for manifest in manifests}
    assert len(found.jobs[JOB].snapshots) == len(job.with_fact(CheckpointFact.COMPLETED)) - 6 > 0
    assert 6 * FIRST_BYTES <= together.bytes_max <= RECORD_BYTES_MAX
    assert set(together.sizes) == {0, FIRST_BYTES}


def test_a_snapshot_of_more_than_a_first_read_is_found(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run(fsck.look("here"), directory).jobs[JOB]
    assert before.snapshots
    for module in (whole, snapshot):
        monkeypatch.setattr(module, "FIRST_BYTES", 128)
    assert run(fsck.look("here"), directory).jobs[JOB] == before


def test_folders_that_are_no_checkpoints_are_passed_over(directory: Path) -> None:
    expected = run(living_snapshots_flow(JOB, 1, 0), directory)
    for name in ("chk-²", "chk-x", "chk-"):
        (directory / JOB / name).mkdir()
    assert run(living_snapshots_flow(JOB, 1, 0), directory) == expected
    assert run(read_job(PATHS), directory).checkpoints


def test_every_read_of_an_intact_job_has_a_bound(directory: Path) -> None:
    """`Bounded` refuses one without."""
    assert run(list_jobs(), directory) == [JOB]
    settled = run(takeover(), directory)
    assert run(whole_report(), directory).is_clean
    assert settled.with_fact(CheckpointFact.COMPLETED)
    assert run(find_leader(PATHS), directory).epoch == 2


def test_a_record_of_more_than_a_first_read_is_read_whole(tmp_path: Path) -> None:
    """A checkpoint whose abort has a long story stays ABORTED; cut, it would pass for a completed one."""
    for length in (0, 1, FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, 3 * FIRST_BYTES):
        (tmp_path / "record").write_bytes(b"x" * length)
        assert run(read_whole("record"), tmp_path) == b"x" * length
        assert run(read_whole("record", length), tmp_path) == b"x" * length
        with pytest.raises(CorruptStateError, match=f"record: longer than {length - 1} bytes"):
            run(read_whole("record", length - 1), tmp_path)
    record = AbortRecord(checkpoint_id=4, reason=FailureReason.EXPIRED, epoch=1, nonce="n", message="long " * 300_000)
    run(put_once(PATHS.decision(4), encode_record(record)), tmp_path)
    assert run(read_checkpoint(PATHS, 4), tmp_path).decision == record


def test_only_what_reads_a_long_file_is_begun_again(tmp_path: Path) -> None:
    lengths = (0, FIRST_BYTES, 10, 2 * FIRST_BYTES + 1, FIRST_BYTES - 1)
    begun: list[int] = []
    for index, length in enumerate(lengths):
        (tmp_path / str(index)).write_bytes(b"x" * length)

    def read(index: int) -> Flow[int]:
        begun.append(index)
        try:
            return len((yield from read_whole(str(index))))
        except ObjectMissingError:
            return -1

    assert run(read_in_group([partial(read, index) for index in range(6)]), tmp_path) == [*lengths, -1]
    assert begun == [0, 1, 2, 3, 4, 5, 1, 3]
    with pytest.raises(ObjectMissingError, match="7 does not exist"):
        run(read_in_group([partial(read_whole, name) for name in ("3", "7")]), tmp_path)
    (tmp_path / "3").write_bytes(b"x" * (RECORD_BYTES_MAX + 1))
    with pytest.raises(CorruptStateError, match="3: longer than"):
        run(read_in_group([partial(read, index) for index in (3, 0)]), tmp_path)


def test_a_submission_that_nobody_would_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SUBMISSION_BYTES_MAX", 1000)
    storage = DictStorage()
    with pytest.raises(InvalidConfigError, match=r"the submission of job .* at most 1000 are stored"):
        run_flow(start_submission(JOB, submission(word_count(), job_id=JOB), Starter("n", "", "directory", 0)), storage)
    assert not [path for path in storage.files if path.startswith(PATHS.submissions)]
