"""Forgetting a key of a stopped job: whichever step it dies at, the next call finishes it, and no file decodes to the key."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.access.audit_log import AuditLog, read_audit
from holdfast.api.cli.main import app
from holdfast.api.directory_guard import without_coordinator
from holdfast.api.snapshots import forgetting
from holdfast.api.snapshots.forgetting import Certificate, ForgetCall, forget
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.dispatcher.submit import Starter, erase_checkpoints
from holdfast.coordinator.drills.records import DrillState, DrillView
from holdfast.coordinator.drills.store import keep_drill, read_drills
from holdfast.coordinator.ha.leadership import open_directory
from holdfast.coordinator.ha.records import (
    ClaimRecord,
    LeaderRecord,
    OwnerRecord,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    VoidRecord,
    encode_record,
)
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.history.records import encode_line
from holdfast.coordinator.history.store import HistoryQuery, erase_history, read_history
from holdfast.coordinator.ownership.erasures import GIVEN, HALF_DISPOSED
from holdfast.coordinator.ownership.labels import Mark, add_label, remove_label
from holdfast.statebackends.layout import JobPaths, label_path
from holdfast.statebackends.local_recovery.copies import LocalRecovery
from holdfast.statebackends.snapshot.metadata import encode_metadata
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.erase import count_rows, erase_key
from holdfast.statebackends.state_processor.writing import ClaimedFolder
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    PutIfAbsent,
    UploadFile,
    WriteFile,
    run_flow,
)
from tests.coordinator.doubles import word_count
from tests.statebackends.snapshot_harness import SOME, UID, Contents, write

JOB = "0" * 32
KEY = "forget-me-2f1b"
WITH = Contents(
    count={KEY: 1, "UA": 2, "WN": 3},
    labels={KEY: {"x": {"b"}}, "UA": {}},
    seen={KEY: ["one"], "WN": ["two"]},
    tags={KEY: {"t": 1}, "UA": {"t": 3}},
    windows={(KEY, 60): 5, ("WN", 60): 7},
    timers={(KEY, 1_000), ("UA", -5)},
    positions=[["a.parquet", 10]],
    rules=["r1"],
)
EVERY = [(UID, "*")]


def renumber(found: StoredSnapshot, number: int) -> None:
    """Give a snapshot that was just written another id."""
    path = Path(found.storage.root) / found.folder / "_metadata"
    path.write_bytes(encode_metadata(msgspec.structs.replace(found.metadata, checkpoint_id=number)))


def make_job(root: Path, kind: Any = "filesystem", *, state: str = "FAILED") -> Path:
    """An ended job with checkpoints 6 and 7, savepoint 4 with the key and savepoint 5 without. Returns its state directory."""
    directory = root / "state"
    storage, paths = LocalStorage(directory), JobPaths(JOB)
    run_flow(open_directory("directory"), storage)
    put = lambda path, record: storage.execute(PutIfAbsent(path, encode_record(record)))  # noqa: E731
    put(paths.leader(1), LeaderRecord(1, "n", "", 1))
    put(paths.submission(1), SubmissionRecord(1, 1, Submission(word_count(retained_checkpoints=2), job_id=JOB), None, 1, "n"))
    for number in (4, 5, 6, 7):
        is_savepoint = number < 6
        folder = str(root / "savepoints" / f"savepoint-{number}") if is_savepoint else paths.checkpoint(number)
        kind_of = CheckpointKind.SAVEPOINT if is_savepoint else CheckpointKind.CHECKPOINT
        put(paths.claim(number), ClaimRecord(number, 1, 1, 1, kind_of, folder, "n"))
        contents = SOME if number == 5 else WITH
        if is_savepoint:
            (root / "savepoints").mkdir(exist_ok=True)
            saved = LocalStorage(root / "savepoints")
            renumber(write(root, f"savepoint-{number}", contents, canonical=True, storage=saved, parallelism=2), number)
            put(paths.decision(number), SavepointRecord(number, folder, kind_of, 1, 1, "n"))
        else:
            renumber(write(root, folder, contents, kind=kind, storage=storage, parallelism=2), number)
    put(paths.result(1), ResultRecord(1, state, 1, "n", 7, 7))
    for number, text in enumerate((f"KeyError: {KEY!r}", "and more"), 1):
        facts = {"attempt": 1, "error": text, "restarts": 0, "restart_in_ms": None}
        storage.execute(PutIfAbsent(paths.history(1, number), encode_line(number, 1, "failure", facts)))
    drill = DrillView("d" * 32, 7, CheckpointKind.CHECKPOINT, "x", DrillState.FAILED, "user", 1, problems=(f"no row of {KEY}",))
    run_flow(keep_drill(paths, drill), storage)
    return directory


def forgotten(root: Path, key: str = KEY, states: list[tuple[str, str]] | None = None, **options: Any) -> Certificate:
    return forget(root / "state", JOB, states or EVERY, key, to=root / "savepoints", **options)


def values_of(location: str, state: str = "count") -> dict[str, int]:
    return {row["key"]: row["value"] for row in hf.Snapshot(location).rows(UID, state)}


def files_with(root: Path, key: str) -> list[str]:
    """Files that hold the key, read without the product: tables decoded, all others as bytes."""
    return [str(path) for path in sorted(root.rglob("*")) if path.is_file() and "local-" not in str(path) and _holds(path, key)]


def _holds(path: Path, key: str) -> bool:
    content = path.read_bytes()
    if key.encode() in content:
        return True
    table: pa.Table | None = None
    if content[:4] == b"PAR1" == content[-4:]:
        table = pq.read_table(path)
    elif content[:6] == b"ARROW1":
        table = pa.feather.read_table(path)
    return table is not None and key in json.dumps(table.to_pylist(), default=repr)


@pytest.mark.parametrize("kind", ["filesystem", "rocksdb"])
def test_no_file_decodes_to_the_key_and_everything_else_is_there(tmp_path: Path, kind: str) -> None:
    make_job(tmp_path, kind)
    assert files_with(tmp_path, KEY)
    certificate = forgotten(tmp_path)
    assert files_with(tmp_path, KEY) == []
    assert certificate.is_complete
    assert certificate.erased_rows == {f"{UID}/{name}": 1 for name in ("_timers", "count", "labels", "seen", "tags", "windows")}
    assert values_of(certificate.result) == {"UA": 2, "WN": 3}
    assert hf.Snapshot(certificate.result).verify().is_sound
    clean = str(tmp_path / "savepoints" / "savepoint-5")
    assert sorted(certificate.verified) == sorted([clean, certificate.result])
    assert len(certificate.deleted) == 3
    assert (certificate.remaining, certificate.kept) == ((), {})
    folder = f"{tmp_path}/state/{JOB}"
    assert certificate.erased_records == {f"{folder}/history": 2, f"{folder}/drills": 1}
    assert {"sources", "output", "copies", "other_jobs", "local_copies", "object_versions"} <= set(certificate.not_covered)
    job = run_flow(read_job(JobPaths(JOB)), LocalStorage(tmp_path / "state"))
    assert [number for number, each in job.checkpoints.items() if not isinstance(each.decision, SavepointRecord)] == []


def test_the_same_call_again_changes_nothing_and_finds_the_same_result(tmp_path: Path) -> None:
    make_job(tmp_path)
    first = forgotten(tmp_path)
    before = sorted(str(path) for path in (tmp_path / "savepoints").rglob("*"))
    second = forgotten(tmp_path)
    assert (second.result, second.is_complete, second.deleted, second.erased_rows) == (first.result, True, (), {})
    assert sorted(str(path) for path in (tmp_path / "savepoints").rglob("*")) == before
    other = forgotten(tmp_path, key="UA")
    assert other.is_complete
    assert values_of(other.result) == {"WN": 3}
    assert files_with(tmp_path / "savepoints", KEY) == []


def test_one_state_alone_and_the_certificate_says_where_the_key_is_still(tmp_path: Path) -> None:
    make_job(tmp_path)
    certificate = forgotten(tmp_path, states=[(UID, "count")])
    assert certificate.is_complete
    assert values_of(certificate.result) == {"UA": 2, "WN": 3}
    assert f"{certificate.result}: {UID}/tags" in certificate.remaining
    assert not any("/count" in each for each in certificate.remaining)


def test_the_key_is_in_no_certificate_error_or_audit_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_job(tmp_path)
    certificate = forgotten(tmp_path)
    lines = read_audit(str(directory))
    assert [line.request.split()[:2] for line in lines if line.kind == "request"] == [["FORGET", "begun"], ["FORGET", "complete"]]
    assert all(certificate.key_hash in line.request for line in lines if line.kind == "request")
    assert files_with(directory, KEY) == []
    assert KEY not in msgspec.json.encode(certificate).decode()
    with pytest.raises(hf.NotFoundError) as caught:
        forgotten(tmp_path, states=[("nothing", "count")])
    assert KEY not in str(caught.value)
    assert KEY not in capsys.readouterr().err


def test_history_and_drills_are_gone_and_an_empty_one_is_no_damage(tmp_path: Path) -> None:
    storage, paths = LocalStorage(make_job(tmp_path)), JobPaths(JOB)
    (tmp_path / "state" / paths.histories / "1-9.jsonl").write_text("damaged " + KEY)
    assert forgotten(tmp_path).is_complete
    page = run_flow(read_history(paths, HistoryQuery(), 1), storage)
    assert (page.entries, page.gaps, page.damage) == ((), (), ())
    assert run_flow(read_drills(paths), storage) == ((), ())
    again = forgotten(tmp_path)
    assert (again.is_complete, set(again.erased_records.values())) == (True, {0})


def test_a_history_that_is_to_stay_makes_the_certificate_incomplete(tmp_path: Path) -> None:
    directory = make_job(tmp_path)
    history = f"{directory}/{JOB}/history"
    kept = forgotten(tmp_path, keep_history=True)
    assert not kept.is_complete
    assert list(kept.kept) == [history]
    assert (history in kept.erased_records, len(list(Path(history).iterdir()))) == (False, 2)
    assert {Path(path).parent for path in files_with(tmp_path, KEY)} == {Path(history)}
    assert forgotten(tmp_path).is_complete
    assert forgotten(tmp_path, keep_history=True).is_complete, "there is none to keep"


def test_records_that_come_while_it_looks_again_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a leader that had still to write them."""
    directory = make_job(tmp_path)

    def late(paths: JobPaths) -> Any:
        count = yield from erase_history(paths)
        yield PutIfAbsent(paths.history(1, 3), KEY.encode())
        return count

    monkeypatch.setattr(forgetting, "erase_history", late)
    found = forgotten(tmp_path)
    assert (found.is_complete, found.kept) == (False, {f"{directory}/{JOB}/history": "it was written meanwhile: do it again"})
    monkeypatch.undo()
    assert forgotten(tmp_path).is_complete
    assert files_with(tmp_path, KEY) == []


def test_a_result_that_goes_while_it_looks_again_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_job(tmp_path)
    before = set((tmp_path / "savepoints").iterdir())

    def late(paths: JobPaths) -> Any:
        (result,) = set((tmp_path / "savepoints").iterdir()) - before
        shutil.rmtree(result)
        return (yield from erase_history(paths))

    monkeypatch.setattr(forgetting, "erase_history", late)
    found = forgotten(tmp_path)
    assert not found.is_complete
    assert "went while it was looked at" in found.kept[found.result]


@pytest.mark.parametrize(
    ("cause", "is_quoted"), [(f"KeyError: {KEY!r}", True), (f"no {KEY}", True), (f"x{KEY}y", False), ("Fault: else", False)]
)
def test_the_text_of_the_failure_that_ended_the_job_is_looked_at(tmp_path: Path, cause: str, is_quoted: bool) -> None:
    path = make_job(tmp_path) / JobPaths(JOB).result(1)
    path.write_bytes(encode_record(ResultRecord(1, "FAILED", 1, "n", 7, 7, cause=cause)))
    found = forgotten(tmp_path)
    assert (found.is_complete, list(found.kept)) == (not is_quoted, [str(path)] if is_quoted else [])
    assert KEY not in msgspec.json.encode(found).decode()


def test_a_clean_savepoint_with_a_label_that_quoted_the_key_goes(tmp_path: Path) -> None:
    storage = RoutedStorage(LocalStorage(make_job(tmp_path)))
    clean = str(tmp_path / "savepoints" / "savepoint-5")
    run_flow(add_label(JobPaths(JOB), 5, KEY, Mark("n", 1)), storage)
    found = forgotten(tmp_path)
    assert (found.is_complete, found.kept) == (False, {clean: "a label that quotes the key keeps it"})
    run_flow(remove_label(JobPaths(JOB), KEY, Mark("n", 2), 5), storage)
    assert clean in forgotten(tmp_path).deleted
    assert files_with(tmp_path, KEY) == []


# ------------------------------------------------------------------------------------------------------- crash points


class Death(BaseException):
    """The process is gone."""


CHANGES = (PutIfAbsent, WriteFile, DeleteFile, DeleteFolder, UploadFile)


class Killer:
    """Dies before the n-th change of a file, or with n beyond the last one counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: int) -> None:
        self.seen = 0
        self._before = before
        execute = LocalStorage.execute

        def killing(storage: LocalStorage, operation: Any) -> Any:
            if isinstance(operation, CHANGES) and "_service" not in str(getattr(operation, "path", "")):
                if self.seen >= self._before:
                    raise Death
                self.seen += 1
            return execute(storage, operation)

        monkeypatch.setattr(LocalStorage, "execute", killing)


def die_at(root: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> bool:
    """Whether the call died."""
    with monkeypatch.context() as patched:
        Killer(patched, step)
        try:
            forgotten(root)
        except Death:
            return True
    return False


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("job")
    make_job(root)
    return root


STEPS_MAX = 120


CRASH_POINTS = [pytest.param(step, marks=() if step % 12 == 5 else pytest.mark.endurance) for step in range(STEPS_MAX)]


def moved(job: Path, root: Path) -> Path:
    """A copy of a job elsewhere: its records name the savepoints' old place."""
    shutil.copytree(job, root)
    for path in root.glob(f"state/{JOB}/chk-[45]/*"):
        path.write_bytes(path.read_bytes().replace(str(job).encode(), str(root).encode()))
    return root


@pytest.mark.parametrize("step", CRASH_POINTS)
def test_whichever_step_it_dies_at_the_next_call_finishes_it(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    root = moved(job, tmp_path / "job")
    if not die_at(root, monkeypatch, step):
        return
    left = [path.parent for path in [*root.glob("savepoints/*/_metadata"), *root.glob(f"state/{JOB}/chk-[67]/_metadata")]]
    assert any(values_of(str(folder)).get("WN") == 3 and "UA" in values_of(str(folder)) for folder in left), "nothing is lost"
    certificate = forgotten(root)
    assert certificate.is_complete
    assert files_with(root, KEY) == []
    assert values_of(certificate.result) == {"UA": 2, "WN": 3}
    assert forgotten(root).result == certificate.result


def test_it_takes_so_many_steps_and_each_is_a_crash_point(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = moved(job, tmp_path / "job")
    with monkeypatch.context() as patched:
        killer = Killer(patched, 10**6)
        forgotten(root)
    assert 20 < killer.seen <= STEPS_MAX


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_job_that_may_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    directory = make_job(tmp_path)
    (directory / JobPaths(JOB).result(1)).unlink()
    before = sorted(str(path) for path in tmp_path.rglob("*") if "_service" not in str(path))
    with pytest.raises(hf.JobExistsError, match="has no recorded end, and may run"):
        forgotten(tmp_path)
    assert sorted(str(path) for path in tmp_path.rglob("*") if "_service" not in str(path) and path.name != "_lock") == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"states": [(UID, "nothing")]}, hf.NotFoundError, "nothing"),
        ({"states": [(UID, "rules")]}, hf.InvalidConfigError, "is not keyed"),
        ({"job": "1" * 32}, hf.NotFoundError, "there is no job"),
        ({"states": [(UID, "count")] * 101}, hf.InvalidConfigError, "states can be named"),
    ],
)
def test_what_can_not_be_forgotten(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    make_job(tmp_path)
    states, job_id = change.get("states", EVERY), change.get("job", JOB)
    with pytest.raises(error, match=message):
        forget(tmp_path / "state", job_id, states, KEY, to=tmp_path / "savepoints")
    assert len(files_with(tmp_path, KEY)) > 3, "nothing was erased"


def test_it_runs_beside_a_coordinator_and_a_submission_that_came_before_it_is_safe(tmp_path: Path) -> None:
    directory = make_job(tmp_path)
    with without_coordinator(directory):  # its lock is held, as by a coordinator
        assert forgotten(tmp_path).is_complete
    other = make_job(tmp_path / "other")
    storage, paths = LocalStorage(other), JobPaths(JOB)
    record = SubmissionRecord(2, 1, Submission(word_count(), job_id=JOB), None, 8, "n")
    storage.execute(PutIfAbsent(paths.submission(2), encode_record(record)))
    with pytest.raises(hf.JobExistsError):
        forgotten(tmp_path / "other")
    with pytest.raises(hf.JobExistsError):
        run_flow(erase_checkpoints(JOB, Starter("late", "", "", 1), 2), storage)
    assert (other / paths.checkpoint(7) / "_metadata").exists()


def test_what_a_label_keeps_or_another_job_has_stays_and_the_certificate_is_not_complete(tmp_path: Path) -> None:
    storage = LocalStorage(make_job(tmp_path))
    run_flow(add_label(JobPaths(JOB), 6, "audit", Mark("n", 1)), storage)
    run_flow(add_label(JobPaths(JOB), 4, "audited", Mark("n", 1)), RoutedStorage(storage))
    certificate = forgotten(tmp_path)
    assert not certificate.is_complete
    assert certificate.kept[f"{storage.root}/{JOB}/chk-6"] == "a label keeps it"
    assert "audited" in certificate.kept[str(tmp_path / "savepoints" / "savepoint-4")]
    for number, label in ((6, "audit"), (4, "audited")):
        run_flow(remove_label(JobPaths(JOB), label, Mark("n", 2), number), RoutedStorage(storage))
    assert forgotten(tmp_path).is_complete
    assert files_with(tmp_path, KEY) == []


def test_labels_that_drills_and_forgettings_left_keep_nothing_of_an_ended_job(tmp_path: Path) -> None:
    storage = LocalStorage(make_job(tmp_path))
    for number, label in ((6, f"drilling{'0f' * 8}"), (7, f"forgetting{'1f' * 8}"), (7, "audit")):
        run_flow(add_label(JobPaths(JOB), number, label, Mark("n", 1)), storage)
    kept = forgotten(tmp_path).kept
    assert kept == {f"{storage.root}/{JOB}/chk-7": "a label keeps it"}
    Path(storage.root, label_path(f"{JOB}/chk-7", 3)).write_bytes(b"{")
    assert forgotten(tmp_path).kept[f"{storage.root}/{JOB}/chk-7"] == "its labels can't be read, and may keep it"


@pytest.mark.parametrize("owner", ["c" * 32, ""])
def test_a_checkpoint_that_another_job_has_or_a_user_is_deleting_is_named(tmp_path: Path, owner: str) -> None:
    storage, paths = LocalStorage(make_job(tmp_path)), JobPaths(JOB)
    record = OwnerRecord(owner, "directory", "n2", 1, folder=f"{storage.root}/{paths.checkpoint(6)}", root=storage.root)
    storage.execute(PutIfAbsent(paths.submission(2), encode_record(VoidRecord(2, 1, "n2", given=6, owner=record))))
    certificate = forgotten(tmp_path)
    assert not certificate.is_complete
    assert certificate.kept == {f"{storage.root}/{paths.checkpoint(6)}": GIVEN if owner else HALF_DISPOSED}
    assert {Path(each).parent.name for each in files_with(tmp_path, KEY)} == {"chk-6"}


def test_nothing_is_deleted_before_the_audit_log_says_that_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_job(tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr(AuditLog, "store", lambda log, seconds: False)
    with pytest.raises(hf.StorageUnavailableError, match="nothing was deleted"):
        forgotten(tmp_path)
    assert before <= {path for path in tmp_path.rglob("*") if path.is_file()}


STEPS = ("erase_key", "_delete", "remove_passing", "erase_drills", "erase_history")
"""Of a call: before each of them another one runs as a whole."""


@pytest.mark.parametrize("step", STEPS)
def test_of_two_calls_the_later_one_goes_on_and_the_earlier_certifies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """For another key, so that what one has written the other must not take for clean."""
    make_job(tmp_path)
    others = list[Certificate]()
    place: Any = ForgetCall if step == "_delete" else forgetting
    one = getattr(place, step)

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(place, step, one)
        others.append(forgotten(tmp_path, key="UA"))
        return one(*arguments)

    monkeypatch.setattr(place, step, meanwhile)
    with pytest.raises(hf.ForgetError, match="another call or coordinator has begun to work on job"):
        forgotten(tmp_path)
    (later,) = others
    assert later.is_complete, later.kept
    assert "UA" not in values_of(later.result)
    assert values_of(later.result)["WN"] == 3
    again = forgotten(tmp_path)
    assert again.is_complete, again.kept
    assert set(values_of(again.result)) == {"WN"}
    assert files_with(tmp_path, KEY) == []


def test_an_unfinished_result_is_deleted_by_the_later_call_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of writing: what the earlier call goes on to write is none."""
    make_job(tmp_path)
    others, finish = list[Certificate](), ClaimedFolder.finish

    def meanwhile(folder: ClaimedFolder, *arguments: Any) -> Any:
        monkeypatch.setattr(ClaimedFolder, "finish", finish)
        others.append(forgotten(tmp_path, key="UA"))
        return finish(folder, *arguments)

    monkeypatch.setattr(ClaimedFolder, "finish", meanwhile)
    with pytest.raises((hf.ForgetError, hf.CorruptStateError)):
        forgotten(tmp_path)
    assert others[0].is_complete, others[0].kept
    again = forgotten(tmp_path)
    assert again.is_complete, again.kept
    assert set(values_of(again.result)) == {"WN"}
    assert len(list((tmp_path / "savepoints").glob("forgotten-*"))) == 1


def test_a_damaged_result_holds_up_no_later_call(tmp_path: Path) -> None:
    make_job(tmp_path)
    broken = Path(forgotten(tmp_path).result)
    shutil.rmtree(tmp_path / "state")
    shutil.rmtree(tmp_path / "savepoints" / "savepoint-5", ignore_errors=True)
    keep = tmp_path / "kept"
    shutil.move(broken, keep)
    make_job(tmp_path / "anew")
    shutil.move(keep, tmp_path / "anew" / "savepoints" / broken.name)
    next(path for path in (tmp_path / "anew" / "savepoints" / broken.name).glob("*.*") if path.stat().st_size).unlink()
    certificate = forgotten(tmp_path / "anew")
    assert certificate.is_complete, certificate.kept
    assert not (tmp_path / "anew" / "savepoints" / broken.name).exists()


@pytest.mark.parametrize("older", [False, True])
def test_a_damaged_result_that_is_all_the_job_has_is_not_deleted(tmp_path: Path, older: bool) -> None:
    """Nor is an older savepoint taken in its place."""
    make_job(tmp_path)
    broken = Path(forgotten(tmp_path).result)
    if not older:
        shutil.rmtree(tmp_path / "savepoints" / "savepoint-5")
    next(path for path in broken.glob("*.*") if path.stat().st_size).unlink()
    before = {path for path in tmp_path.rglob("*") if path.is_file() and "_service" not in path.parts}
    for key in (KEY, "UA"):
        with pytest.raises(hf.CorruptStateError, match="is the job's newest snapshot, and lacks files"):
            forgotten(tmp_path, key=key)
    assert {path for path in tmp_path.rglob("*") if path.is_file() and "_service" not in path.parts} == before


def test_a_request_that_is_wrong_ends_no_call_that_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_job(tmp_path)

    def meanwhile(*arguments: Any) -> Any:
        with pytest.raises(hf.NotFoundError):
            forgotten(tmp_path, states=[(UID, "no-such-state")])
        return erase_key(*arguments)

    monkeypatch.setattr(forgetting, "erase_key", meanwhile)
    assert forgotten(tmp_path).is_complete


def test_results_of_another_job_with_the_same_first_digits_stay(tmp_path: Path) -> None:
    make_job(tmp_path)
    other = f"{JOB[:8]}{'7' * 24}"
    folder = tmp_path / "savepoints" / f"forgotten-{other}-7-0a0a0a0a"
    short = tmp_path / "savepoints" / f"forgotten-{JOB[:8]}-7-0b0b0b0b"
    for each in (folder, short):
        found = write(tmp_path, each.name, SOME, canonical=True, storage=LocalStorage(tmp_path / "savepoints"))
        (each / "_metadata").write_bytes(encode_metadata(msgspec.structs.replace(found.metadata, job_id=other)))
    unfinished = tmp_path / "savepoints" / f"forgotten-{other}-8-0c0c0c0c"
    unfinished.mkdir()
    (unfinished / "part").write_bytes(b"x")
    assert forgotten(tmp_path).is_complete
    assert all((each / "_metadata").exists() for each in (folder, short))
    assert (unfinished / "part").exists()


def test_copies_on_this_host_are_deleted_unless_their_worker_lives(tmp_path: Path) -> None:
    storage = LocalStorage(make_job(tmp_path))
    local = tmp_path / "disk"
    recovery = LocalRecovery(str(local), job_id=JOB, state_directory="as workers see it, and its nonce", storage=storage)
    dead, living = (recovery.copies("vertex", 0, attempt, "n") for attempt in (1, 2))
    for copies in (dead, living):
        copies.open()
        copies.keep_bytes(7, f"{JOB}/chk-7/x", [KEY.encode()])
    dead.close()
    certificate = forgotten(tmp_path, local=[str(local)])
    assert (certificate.is_complete, list(certificate.kept)) == (False, [living.folder])
    living.close()
    assert forgotten(tmp_path, local=[str(local)]).is_complete
    assert files_with(tmp_path, KEY) == []


def test_a_snapshot_of_another_job_is_refused_by_name(tmp_path: Path) -> None:
    make_job(tmp_path)
    foreign = write(tmp_path, "savepoint-x", WITH, canonical=True, storage=LocalStorage(tmp_path / "savepoints"))
    path = tmp_path / "savepoints" / "savepoint-x" / "_metadata"
    path.write_bytes(encode_metadata(msgspec.structs.replace(foreign.metadata, job_id="5" * 32)))
    with pytest.raises(hf.ForgetError, match=r"savepoint-x is a snapshot of job 5555"):
        forgotten(tmp_path, snapshots=[path.parent])


def test_the_command_prints_the_certificate_and_its_exit_code_says_whether_it_is_complete(tmp_path: Path) -> None:
    directory = make_job(tmp_path)
    (tmp_path / "key").write_text(f"{KEY}\n")
    arguments = ("forget", JOB, "--state-dir", directory, "--to", tmp_path / "savepoints", "--state", UID, "*")
    both = (*arguments, "--key-file", tmp_path / "key", "--certificate", tmp_path / "certificate.json")
    done = CliRunner().invoke(app, list(map(str, both)))
    assert done.exit_code == 0, done.output
    without = CliRunner().invoke(app, list(map(str, arguments)))
    assert (without.exit_code, "give either --key or --key-file" in without.stderr) == (2, True)
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["format"] == "holdfast-forget-certificate"
    assert certificate["result"] in done.output
    assert KEY not in done.output


def test_a_certificate_that_can_not_be_written_is_refused_before_anything_is_erased(tmp_path: Path) -> None:
    directory = make_job(tmp_path)
    before = files_with(tmp_path, KEY)
    arguments = ("forget", JOB, "--state-dir", directory, "--to", tmp_path / "savepoints", "--state", UID, "*", "--key", KEY)
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "folder", tmp_path / "none" / "certificate.json"):
        done = CliRunner().invoke(app, list(map(str, (*arguments, "--certificate", place))))
        assert (done.exit_code, f"can't be written to {place}: " in done.stderr) == (2, True), done.output
    assert files_with(tmp_path, KEY) == before
    mistyped = ("forget", JOB, "--state-dir", directory, "--to", tmp_path / "savepoints", "--state", "x", "*", "--key", KEY)
    kept = tmp_path / "new.json"
    assert CliRunner().invoke(app, list(map(str, (*mistyped, "--certificate", kept)))).exit_code == 1
    assert not kept.exists(), "no empty certificate is left"


def test_a_certificate_whose_file_fails_at_the_end_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_job(tmp_path)

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    arguments = ("forget", JOB, "--state-dir", directory, "--to", tmp_path / "savepoints", "--state", UID, "*", "--key", KEY)
    done = CliRunner().invoke(app, list(map(str, (*arguments, "--json", "--certificate", tmp_path / "certificate.json"))))
    assert (done.exit_code, "certificate.json: No space left on device" in done.stderr) == (1, True), done.output
    assert json.loads(done.stdout)["is_complete"]


def test_the_result_is_read_once_and_before_anything_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_job(tmp_path)
    read: list[tuple[str, bool]] = []

    def counted(snapshot: StoredSnapshot, *arguments: Any) -> Any:
        read.append((snapshot.location, (directory / JobPaths(JOB).checkpoint(7) / "_metadata").exists()))
        return count_rows(snapshot, *arguments)

    monkeypatch.setattr(forgetting, "count_rows", counted)
    certificate = forgotten(tmp_path)
    assert [was_before for location, was_before in read if location == certificate.result] == [True]
    assert len({location for location, _ in read}) == len(read), "no snapshot is read twice"
    assert certificate.verified[certificate.result] > 0


@pytest.mark.parametrize("lost", [1, -1])
def test_a_result_with_other_rows_than_it_must_have_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    make_job(tmp_path)
    before = files_with(tmp_path, KEY)

    def off_by_one(*arguments: Any) -> Any:
        erased = erase_key(*arguments)
        return erased._replace(before={which: (rows, total + lost) for which, (rows, total) in erased.before.items()})

    monkeypatch.setattr(forgetting, "erase_key", off_by_one)
    with pytest.raises(hf.HoldfastError, match="has not the rows that it must have"):
        forgotten(tmp_path)
    assert files_with(tmp_path, KEY) == before
