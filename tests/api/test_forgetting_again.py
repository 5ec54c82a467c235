"""A second forgetting of a stopped job goes on from the first one's result, wherever that is: no key comes back, and no newer state
goes for an older one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.cli.main import app
from holdfast.api.snapshots import forgetting
from holdfast.api.snapshots.forgetting import Certificate, forget
from holdfast.api.snapshots.snapshot import open_snapshot
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.records import (
    ClaimRecord,
    OwnerRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    encode_record,
)
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ownership.forgotten import read_forgettings
from holdfast.coordinator.ownership.labels import Mark, add_label, remove_label
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import OWNER_NAME, JobPaths
from holdfast.statebackends.snapshot.metadata import encode_metadata
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow
from tests.api.test_forgetting import EVERY, JOB, KEY, Death, Killer, files_with, make_job, renumber, values_of
from tests.coordinator.doubles import word_count
from tests.statebackends.snapshot_harness import Contents, write

PATHS = JobPaths(JOB)
FIRST, SECOND = "anna0", "eve9"
OLD = Contents(count={FIRST: 1, SECOND: 1, "UA": 1})
NEW = Contents(count={FIRST: 2, SECOND: 2, "UA": 2, "WN": 3})
"""WN: only the newest snapshot has it."""


def make_stopped(root: Path, kind: CheckpointKind = CheckpointKind.STOP_SAVEPOINT, *, label: bool = True) -> RoutedStorage:
    """A stopped job with checkpoint 6, which a label keeps, and savepoint 8, the newest. Returns its storage."""
    storage = LocalStorage(make_job(root))
    for old in (*(root / "savepoints").iterdir(), *(root / "state" / JOB).glob("chk-[4-7]")):
        shutil.rmtree(old)
    shutil.rmtree(root / "state" / JOB / "shared", ignore_errors=True)
    saved = str(root / "savepoints" / "savepoint-8")
    for number, each, folder in ((6, CheckpointKind.CHECKPOINT, PATHS.checkpoint(6)), (8, kind, saved)):
        claim = ClaimRecord(number, 1, 1, 1, each, folder, "n")
        storage.execute(PutIfAbsent(PATHS.claim(number), encode_record(claim)))
    renumber(write(root, PATHS.checkpoint(6), OLD, storage=storage), 6)
    renumber(write(root, "savepoint-8", NEW, canonical=True, storage=LocalStorage(root / "savepoints")), 8)
    storage.execute(PutIfAbsent(PATHS.decision(8), encode_record(SavepointRecord(8, saved, kind, 1, 1, "n"))))
    (root / "state" / PATHS.result(1)).write_bytes(encode_record(ResultRecord(1, "FINISHED", 1, "n", 8, 8)))
    if label:
        run_flow(add_label(PATHS, 6, "audit", Mark("n", 1)), RoutedStorage(storage))
    return RoutedStorage(storage)


def forgotten(root: Path, key: str, to: str = "savepoints", **options: Any) -> Certificate:
    return forget(root / "state", JOB, EVERY, key, to=root / to, **options)


def tree(root: Path) -> dict[str, bytes]:
    """All files but the audit log's and locks."""
    paths = [path for path in root.rglob("*") if path.is_file() and "_service" not in path.parts and path.name != "_lock"]
    return {str(path): path.read_bytes() for path in paths}


@pytest.mark.parametrize("to", ["savepoints", "elsewhere"])
def test_a_second_key_goes_from_the_newest_state_and_the_first_does_not_come_back(tmp_path: Path, to: str) -> None:
    make_stopped(tmp_path)
    first = forgotten(tmp_path, FIRST)
    assert values_of(first.result) == {SECOND: 2, "UA": 2, "WN": 3}
    second = forgotten(tmp_path, SECOND, to)
    assert values_of(second.result) == {"UA": 2, "WN": 3}
    assert Path(second.result).parent == tmp_path / to
    assert second.erased_rows == {"totals/count": 1}
    assert second.deleted == (first.result,)
    assert second.kept == {f"{tmp_path}/state/{JOB}/chk-6": "a label keeps it"}
    assert not second.is_complete


def test_without_the_label_all_is_gone(tmp_path: Path) -> None:
    storage = make_stopped(tmp_path)
    forgotten(tmp_path, FIRST)
    forgotten(tmp_path, SECOND, "elsewhere")
    run_flow(remove_label(PATHS, "audit", Mark("n", 2), 6), storage)
    last = forgotten(tmp_path, FIRST, "third")
    assert last.is_complete, last.kept
    assert files_with(tmp_path, FIRST) == []
    assert files_with(tmp_path, SECOND) == []
    assert values_of(last.result) == {"UA": 2, "WN": 3}
    assert [each.folder for each in run_flow(read_forgettings(PATHS), storage)] == [last.result]


def test_a_plain_savepoint_that_is_newer_than_all_checkpoints_is_what_the_result_is_made_of(tmp_path: Path) -> None:
    make_stopped(tmp_path, CheckpointKind.SAVEPOINT)
    assert values_of(forgotten(tmp_path, FIRST).result) == {SECOND: 2, "UA": 2, "WN": 3}


def own(folder: str, job_id: str = "c" * 32) -> None:
    """A job claims a savepoint."""
    record = OwnerRecord(job_id, "directory", "n2", 1, folder=folder, root=folder)
    Path(folder, OWNER_NAME).write_bytes(encode_record(record))


def claim_foreign(root: Path) -> Path:
    """The job was started from a savepoint of another job, and has claimed it."""
    place = root / "theirs"
    renumber(write(root, place.name, OLD, canonical=True, storage=LocalStorage(root)), 3)
    foreign = msgspec.structs.replace(hf.Snapshot(place).metadata, job_id="5" * 32)
    (place / "_metadata").write_bytes(encode_metadata(foreign))
    own(str(place), JOB)
    base = RestorePoint(3, str(place), 1, CheckpointKind.SAVEPOINT, explicit=True, claim="n2")
    record = SubmissionRecord(1, 1, Submission(word_count(retained_checkpoints=2), job_id=JOB), base, 4, "n")
    (root / "state" / PATHS.submission(1)).write_bytes(encode_record(record))
    return place


def test_a_claimed_savepoint_of_another_job_is_deleted_with_the_others(tmp_path: Path) -> None:
    make_stopped(tmp_path, label=False)
    place = claim_foreign(tmp_path)
    found = forgotten(tmp_path, FIRST)
    assert str(place) in {*found.deleted, *found.kept}
    assert found.is_complete is not place.exists()
    assert values_of(found.result) == {SECOND: 2, "UA": 2, "WN": 3}


def test_a_claimed_savepoint_of_another_job_is_no_base_and_nothing_is_written(tmp_path: Path) -> None:
    make_stopped(tmp_path, label=False)
    place = claim_foreign(tmp_path)
    shutil.rmtree(tmp_path / "savepoints" / "savepoint-8")
    shutil.rmtree(tmp_path / "state" / PATHS.checkpoint(6))
    refused(tmp_path, hf.ForgetError, f"{place} is a snapshot of job 5555")


def test_an_earlier_result_that_another_job_has_claimed_is_named_and_never_the_base_again(tmp_path: Path) -> None:
    make_stopped(tmp_path, label=False)
    first = forgotten(tmp_path, FIRST)
    own(first.result)
    second = forgotten(tmp_path, SECOND, "elsewhere")
    assert not second.is_complete
    assert list(second.kept) == [first.result]
    third = forgotten(tmp_path, "UA", "third")
    assert values_of(third.result) == {"WN": 3}, "made of the second result, which has the same id"
    assert list(third.kept) == [first.result]
    assert second.result in third.deleted


def test_a_result_of_an_earlier_version_is_found_in_its_directory(tmp_path: Path) -> None:
    make_stopped(tmp_path)
    first = forgotten(tmp_path, FIRST)
    shutil.rmtree(tmp_path / "state" / PATHS.forgettings)
    second = forgotten(tmp_path, SECOND)
    assert values_of(second.result) == {"UA": 2, "WN": 3}
    assert first.result in second.deleted


# -------------------------------------------------------------------------------------------------- where nothing is left


def test_a_result_elsewhere_is_found_without_its_directory(tmp_path: Path) -> None:
    make_stopped(tmp_path, label=False)
    first = forgotten(tmp_path, FIRST)
    assert first.is_complete
    again = forgotten(tmp_path, FIRST, "mistyped")
    assert (again.result, again.is_complete, list(again.verified)) == (first.result, True, [first.result])
    second = forgotten(tmp_path, SECOND, "mistyped")
    assert second.is_complete
    assert (second.deleted, values_of(second.result)) == ((first.result,), {"UA": 2, "WN": 3})
    assert files_with(tmp_path, SECOND) == []


def test_nothing_is_certified_of_a_job_without_a_snapshot(tmp_path: Path) -> None:
    """A version without records has made the result, in another directory."""
    make_stopped(tmp_path, label=False)
    forgotten(tmp_path, FIRST)
    shutil.rmtree(tmp_path / "state" / PATHS.forgettings)
    before = tree(tmp_path)
    with pytest.raises(hf.ForgetError, match=r"has no snapshot, and .*/mistyped none that a forgetting made$"):
        forgotten(tmp_path, SECOND, "mistyped")
    assert tree(tmp_path) == before


def test_a_result_that_was_moved_is_asked_for_by_name_and_taken_where_it_is_given(tmp_path: Path) -> None:
    make_stopped(tmp_path, label=False)
    first = forgotten(tmp_path, FIRST)
    shutil.move(first.result, tmp_path / "moved")
    before = tree(tmp_path)
    with pytest.raises(hf.ForgetError, match=rf"{first.result}, which one made, is not there: .* --snapshot"):
        forgotten(tmp_path, SECOND)
    assert tree(tmp_path) == before
    second = forgotten(tmp_path, SECOND, snapshots=[tmp_path / "moved"])
    assert values_of(second.result) == {"UA": 2, "WN": 3}
    assert second.deleted == (str(tmp_path / "moved"),)
    assert first.result in second.not_covered["results"]


def test_a_certificate_says_that_a_newer_result_is_not_where_it_was(tmp_path: Path) -> None:
    make_stopped(tmp_path)
    first = forgotten(tmp_path, FIRST)
    shutil.move(first.result, tmp_path / "moved")
    second = forgotten(tmp_path, SECOND)
    assert first.result in second.not_covered["results"]
    assert (tmp_path / "moved").exists()


def test_a_result_that_can_not_be_read_is_refused_with_what_to_do_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the newest snapshot: an older one must not take its place unseen."""
    make_stopped(tmp_path)
    first = forgotten(tmp_path, FIRST)
    real = open_snapshot

    def away(location: Any) -> Any:
        if str(location) == first.result:
            raise StorageUnavailableError("the bucket refuses access")
        return real(location)

    monkeypatch.setattr(forgetting, "open_snapshot", away)
    before = tree(tmp_path)
    with pytest.raises(hf.ForgetError, match=rf"{first.result}, .* can't be read: the bucket refuses .* delete the file in "):
        forgotten(tmp_path, SECOND)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("wrong", ["folder", "epoch"])
def test_a_record_that_names_what_no_forgetting_wrote_deletes_nothing(tmp_path: Path, wrong: str) -> None:
    make_stopped(tmp_path)
    forgotten(tmp_path, FIRST)
    (file,) = (tmp_path / "state" / JOB / "forgotten").iterdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "file").write_text("mine")
    record = json.loads(file.read_text())
    record[wrong] = str(tmp_path / "home") if wrong == "folder" else record["epoch"] + 1
    file.write_text(json.dumps(record))
    with pytest.raises(hf.CorruptStateError, match="is no record of a forgetting of this job"):
        forgotten(tmp_path, SECOND)
    assert (tmp_path / "home" / "file").read_text() == "mine"


# ------------------------------------------------------------------------------------------------------- crash points

STEPS_MAX = 40
CRASH_POINTS = [pytest.param(step, marks=() if step % 8 == 3 else pytest.mark.endurance) for step in range(STEPS_MAX)]


def die(root: Path, monkeypatch: pytest.MonkeyPatch, step: int, **options: Any) -> bool:
    """Whether the second forgetting died before its n-th change."""
    with monkeypatch.context() as patched:
        killer = Killer(patched, step)
        try:
            forgotten(root, SECOND, "elsewhere", **options)
        except Death:
            return True
        assert killer.seen <= STEPS_MAX
    return False


@pytest.mark.parametrize("to", ["elsewhere", "savepoints", "third"])
@pytest.mark.parametrize("step", CRASH_POINTS)
def test_whichever_step_it_dies_at_the_newest_state_is_there_and_no_key_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, to: str
) -> None:
    """Nor with another directory from then on."""
    storage = make_stopped(tmp_path)
    first = forgotten(tmp_path, FIRST)
    if not die(tmp_path, monkeypatch, step):
        return
    there = [values_of(str(path.parent)) for path in tmp_path.glob("*/forgotten-*/_metadata")]
    assert any("WN" in each for each in there), "nothing is lost"
    second = forgotten(tmp_path, SECOND, to)
    assert values_of(second.result) == {"UA": 2, "WN": 3}
    assert list(second.kept) == [f"{tmp_path}/state/{JOB}/chk-6"]
    assert not Path(first.result).exists()
    assert not [path for path in tmp_path.glob("*/forgotten-*") if not (path / "_metadata").exists()], "what it had begun is gone"
    run_flow(remove_label(PATHS, "audit", Mark("n", 2), 6), storage)
    assert forgotten(tmp_path, SECOND, to).is_complete
    assert files_with(tmp_path, FIRST) == files_with(tmp_path, SECOND) == []


@pytest.mark.parametrize("step", CRASH_POINTS)
def test_a_savepoint_that_was_given_and_is_gone_is_none_of_a_mistake_of_the_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    make_stopped(tmp_path, label=False)
    renumber(write(tmp_path, "further", OLD, canonical=True, storage=LocalStorage(tmp_path)), 5)
    given = {"snapshots": [tmp_path / "further" / "_metadata"]}
    if not die(tmp_path, monkeypatch, step, **given):
        return
    again = forgotten(tmp_path, SECOND, "elsewhere", **given)
    assert again.is_complete, again.kept
    assert files_with(tmp_path, SECOND) == []
    assert values_of(again.result) == {FIRST: 2, "UA": 2, "WN": 3}
    assert forgotten(tmp_path, SECOND, "elsewhere", **given).result == again.result


# ------------------------------------------------------------------------------------------------ what is wrong, at once


def refused(root: Path, error: type[Exception], message: str, **options: Any) -> None:
    """Raised with nothing written or deleted, not even the job's epoch."""
    before = tree(root)
    with pytest.raises(error, match=message):
        forget(root / "state", JOB, options.pop("states", EVERY), options.pop("key", KEY), **{"to": root / "savepoints"} | options)
    assert tree(root) == before


@pytest.mark.parametrize("place", ["/nope", "/nope/x", "{root}/savepoints", "{root}/savepoints/none", "{root}/nothing/_metadata"])
def test_a_snapshot_that_is_none_is_named(tmp_path: Path, place: str) -> None:
    make_stopped(tmp_path)
    named = place.format(root=tmp_path)
    refused(tmp_path, hf.NotFoundError, named.removesuffix("/_metadata") + " holds no snapshot", snapshots=[named])


def without_keyed_state(folder: Path, uid: str) -> None:
    """Add an operator to a snapshot that has lists alone."""
    path = folder / "_metadata"
    found = hf.Snapshot(path).metadata
    (operator,) = found.operators
    subtasks = tuple(msgspec.structs.replace(each, keyed=()) for each in operator.subtasks)
    other = msgspec.structs.replace(operator, uid=uid, operator_id="b" * 32, subtasks=subtasks)
    path.write_bytes(encode_metadata(msgspec.structs.replace(found, operators=(operator, other))))


def test_an_operator_without_keyed_state_is_refused_and_nothing_is_deleted(tmp_path: Path) -> None:
    make_stopped(tmp_path)
    without_keyed_state(tmp_path / "savepoints" / "savepoint-8", "orders")
    refused(tmp_path, hf.InvalidConfigError, "operator 'orders' has no keyed state", states=[("orders", "*")])
    refused(tmp_path, hf.InvalidConfigError, "is not keyed", states=[("orders", "positions")])
    assert values_of(forget(tmp_path / "state", JOB, EVERY, FIRST, to=tmp_path / "savepoints").result)["WN"] == 3


def test_an_older_snapshot_whose_operator_had_no_keyed_state_yet_is_looked_at(tmp_path: Path) -> None:
    make_stopped(tmp_path)
    for folder in (tmp_path / "savepoints" / "savepoint-8", tmp_path / "state" / JOB / "chk-6"):
        without_keyed_state(folder, "orders")
    path = tmp_path / "state" / JOB / "chk-6" / "_metadata"
    found = hf.Snapshot(path).metadata
    uids = {"totals": "orders", "orders": "totals"}
    swapped = tuple(msgspec.structs.replace(each, uid=uids[each.uid]) for each in found.operators)
    path.write_bytes(encode_metadata(msgspec.structs.replace(found, operators=swapped)))
    assert list(forgotten(tmp_path, FIRST).kept) == [f"{tmp_path}/state/{JOB}/chk-6"]


# ------------------------------------------------------------------------------------------------------ the empty key

EMPTY = Contents(count={"": 1, "UA": 2})


def asked(root: Path, *options: object) -> Any:
    arguments = ("forget", JOB, "--state-dir", root / "state", "--to", root / "savepoints", "--state", "totals", "*", *options)
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_the_empty_text_is_a_key_and_must_be_asked_for(tmp_path: Path) -> None:
    make_stopped(tmp_path, label=False)
    folder = tmp_path / "savepoints" / "savepoint-8"
    shutil.rmtree(folder)
    renumber(write(tmp_path, folder.name, EMPTY, canonical=True, storage=LocalStorage(folder.parent)), 8)
    (tmp_path / "key").write_text("\n")
    before = tree(tmp_path)
    for options in (("--key", ""), ("--key-file", tmp_path / "key")):
        found = asked(tmp_path, *options)
        assert (found.exit_code, "the key is empty: give --empty-key" in found.stderr) == (2, True), found.output
    both = asked(tmp_path, "--key", "UA", "--empty-key")
    assert (both.exit_code, "give either --key or --key-file, or --empty-key" in both.stderr) == (2, True)
    assert tree(tmp_path) == before
    done = asked(tmp_path, "--empty-key", "--json")
    assert done.exit_code == 0, done.output
    certificate = json.loads(done.stdout)
    assert certificate["erased_rows"] == {"totals/count": 1}
    assert values_of(certificate["result"]) == {"UA": 2}


# ------------------------------------------------------------------------------------------------------ the audit log


def test_the_audit_log_says_what_began(tmp_path: Path) -> None:
    make_stopped(tmp_path, label=False)
    forgotten(tmp_path, FIRST)
    shown = CliRunner().invoke(app, ["audit", "show", str(tmp_path / "state")])
    assert shown.exit_code == 0
    assert "a forgetting of a key began" in shown.stdout
    assert "a coordinator began" not in shown.stdout


def test_places_that_are_not_what_they_are_given_for_are_named(tmp_path: Path) -> None:
    make_stopped(tmp_path)
    file = tmp_path / "file"
    file.write_text("x")
    refused(tmp_path, hf.InvalidConfigError, "'/' is not the folder of a snapshot", snapshots=["/"])
    refused(tmp_path, hf.InvalidConfigError, "'/nope/zz' is no folder of this host", local=["/nope/zz"])
    refused(tmp_path, hf.InvalidConfigError, "is no folder of this host", local=[str(file)])
    refused(tmp_path, hf.InvalidConfigError, f"{file} is no folder", to=file)
    refused(tmp_path, hf.InvalidConfigError, "lies in the directory of job", to=tmp_path / "state" / JOB / "x")


def test_a_snapshot_of_another_job_is_named_before_anything_is_written(tmp_path: Path) -> None:
    make_stopped(tmp_path)
    make_job(tmp_path / "other")
    path = tmp_path / "other" / "savepoints" / "savepoint-4" / "_metadata"
    foreign = msgspec.structs.replace(hf.Snapshot(path).metadata, job_id="5" * 32)
    path.write_bytes(encode_metadata(foreign))
    refused(tmp_path, hf.ForgetError, "savepoint-4 is a snapshot of job 5555", snapshots=[path.parent])
