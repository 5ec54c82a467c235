"""`/savepoint-disposal`: asked for once, polled, deleted once; what must stay stays, and no path leads out."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.snapshots import disposals
from holdfast.api.snapshots.disposals import Disposal, Disposals
from holdfast.api.snapshots.maintenance import dispose_confined
from holdfast.barriers.codec import ERROR_HEADER
from holdfast.coordinator.ha.records import OwnerRecord, encode_record
from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.api.fakes import FakeCoordinator, Served, serving
from tests.statebackends.snapshot_harness import SOME, files_below, write

ID, OTHER = "ab" * 16, "cd" * 16


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(FakeCoordinator(), tmp_path / "state", snapshot_dirs=(str(tmp_path / "kept"),)) as running:
        yield running


def savepoint(tmp_path: Path, name: str = "savepoint-7") -> Path:
    return Path(write(tmp_path, name, SOME, canonical=True, storage=LocalStorage(tmp_path / "kept")).location)


def ask(served: Served, path: Path | str, trigger_id: str | None = None, status: int = 202, prefix: str = "/v1") -> Any:
    body = {"savepoint-path": str(path), **({"triggerId": trigger_id} if trigger_id else {})}
    return served.json("POST", f"{prefix}/savepoint-disposal", body, status=status)


def ended(served: Served, trigger_id: str, prefix: str = "/v1") -> Any:
    """Poll, as Flink's clients do, until it is completed."""
    for _ in itertools.count():
        found = served.json("GET", f"{prefix}/savepoint-disposal/{trigger_id}")
        if found["status"]["id"] == "COMPLETED":
            return found
        assert found == {"status": {"id": "IN_PROGRESS"}, "operation": None}
    raise AssertionError


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_savepoint_is_deleted_and_nothing_beside_it(served: Served, tmp_path: Path, prefix: str) -> None:
    unwanted, neighbour = savepoint(tmp_path), savepoint(tmp_path, "savepoint-8")
    before = files_below(neighbour)
    answer = ask(served, unwanted, prefix=prefix)
    assert answer.keys() == {"request-id"}
    assert ended(served, answer["request-id"], prefix) == {"status": {"id": "COMPLETED"}, "operation": {}}
    assert not unwanted.exists()
    assert files_below(neighbour) == before


def test_a_repeated_request_is_answered_alike_and_disposes_of_nothing_again(served: Served, tmp_path: Path) -> None:
    unwanted = savepoint(tmp_path)
    assert ask(served, unwanted, ID) == {"request-id": ID}
    assert "failure-cause" not in ended(served, ID)["operation"]
    again = savepoint(tmp_path)
    assert ask(served, f"file://{again}/_metadata", ID) == {"request-id": ID}, "the same place in another form"
    assert ended(served, ID)["operation"] == {}
    assert (again / "_metadata").exists(), "it was disposed of once"
    assert "trigger id" in ask(served, savepoint(tmp_path, "savepoint-8"), ID, status=400)["errors"][0]
    assert (tmp_path / "kept" / "savepoint-8" / "_metadata").exists()


def test_what_must_stay_is_told_as_the_cause(served: Served, tmp_path: Path) -> None:
    claimed = savepoint(tmp_path)
    owner = encode_record(OwnerRecord(OTHER, "directory", "n", 0))
    LocalStorage(tmp_path / "kept").execute(PutIfAbsent("savepoint-7/_owner", owner))
    (tmp_path / "kept" / "empty").mkdir()
    checkpoint = write(tmp_path, f"{ID}/chk-7", SOME, storage=LocalStorage(tmp_path / "state"))
    submission = JobPaths(ID).submission(1)
    LocalStorage(tmp_path / "state").execute(PutIfAbsent(submission, b'{"void":true'))  # a job is there; its record is damaged
    before = {folder: files_below(tmp_path / folder) for folder in ("kept", "state")}
    for path, kind in (
        (claimed, "SnapshotClaimedError"),
        (tmp_path / "kept" / "empty", "NotFoundError"),
        (tmp_path / "kept" / "none", "NotFoundError"),
        (checkpoint.location, "CorruptStateError"),
    ):
        found = ended(served, ask(served, path)["request-id"])
        cause = found["operation"]["failure-cause"]
        assert (cause["class"], bool(cause["stack-trace"])) == (kind, True), path
        assert cause.keys() == {"class", "stack-trace", "serialized-throwable"}
    assert {folder: files_below(tmp_path / folder) for folder in before} == before


def test_no_path_leads_out_and_bad_requests_are_refused(served: Served, tmp_path: Path) -> None:
    secret = Path(write(tmp_path, "savepoint-9", SOME, canonical=True, storage=LocalStorage(tmp_path / "other")).location)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "link").symlink_to(secret)
    (tmp_path / "kept" / "inner").mkdir()
    (tmp_path / "kept" / "inner" / "_metadata").symlink_to(secret / "_metadata")
    before = files_below(tmp_path / "other")
    for path in (
        secret,
        f"file://{secret}",
        f"{tmp_path}/kept/../other/savepoint-9",
        tmp_path / "kept" / "link",
        tmp_path / "kept" / "inner" / "_metadata",
        tmp_path / "kept",
        tmp_path / "kept" / "_metadata",
        "ftp://x/y",
        "~/x",
        "a\0b",
        "x" * 5_000,
        "",
    ):
        response = served.request("POST", "/v1/savepoint-disposal", {"savepoint-path": str(path)})
        assert (response.status, response.headers[ERROR_HEADER]) == (400, "InvalidConfigError"), path
    assert files_below(tmp_path / "other") == before
    for body in ({}, {"savepoint-path": 5}, {"savepoint-path": "a", "triggerId": "A"}, {"savepoint-path": None}, b"["):
        assert served.request("POST", "/v1/savepoint-disposal", body).status == 400, body
    assert served.request("GET", f"/v1/savepoint-disposal/{OTHER}").headers[ERROR_HEADER] == "NotFoundError"
    assert served.json("GET", f"/v1/savepoint-disposal/{OTHER}", status=404)["errors"]
    assert served.request("GET", "/v1/savepoint-disposal/short").status == 400
    assert served.request("POST", "/v1/savepoint-disposal", {"savepoint-path": "a"}, token="another-token-of-length").status == 401


@pytest.fixture
def anywhere(tmp_path: Path) -> tuple[FakeCoordinator, Path]:
    """A coordinator with a job whose savepoints go to a directory that is not shown, and a savepoint in there."""
    written = write(tmp_path, "savepoint-7", SOME, canonical=True, storage=LocalStorage(tmp_path / "jobs-own"))
    return FakeCoordinator(), Path(written.location)


@pytest.mark.parametrize("form", ["{folder}", "file://{folder}", "{folder}/_metadata", "{folder}/"])
def test_a_savepoint_in_a_directory_of_a_job_is_deleted(anywhere: tuple[FakeCoordinator, Path], tmp_path: Path, form: str) -> None:
    coordinator, folder = anywhere
    with serving(coordinator, tmp_path / "state") as served:
        ask(served, form.format(folder=folder), status=400)
        coordinator.places = SavepointPlaces(directories=frozenset({"/elsewhere", f"file://{folder.parent}/"}))
        assert ended(served, ask(served, form.format(folder=folder))["request-id"])["operation"] == {}
    assert not folder.exists()


def test_a_savepoint_on_record_is_deleted_and_none_beside_it(anywhere: tuple[FakeCoordinator, Path], tmp_path: Path) -> None:
    coordinator, folder = anywhere
    beside = write(tmp_path, "savepoint-8", SOME, canonical=True, storage=LocalStorage(folder.parent)).location
    coordinator.places = SavepointPlaces(folders=frozenset({str(folder)}))
    with serving(coordinator, tmp_path / "state") as served:
        for path in (beside, f"{folder}/../savepoint-8", folder.parent, f"{folder}/inner", f"{folder}8"):
            ask(served, path, status=400)
        assert ended(served, ask(served, folder)["request-id"])["operation"] == {}
    assert not folder.exists()
    assert (Path(beside) / "_metadata").exists()


def test_what_a_job_names_opens_no_way_out(anywhere: tuple[FakeCoordinator, Path], tmp_path: Path) -> None:
    """A setting comes from whoever submits a job: no root, nothing relative, and links are followed before it is judged."""
    coordinator, folder = anywhere
    named = tmp_path / "named"
    named.mkdir()
    (named / "link").symlink_to(folder)
    (named / "inner").mkdir()
    (named / "inner" / "_metadata").symlink_to(folder / "_metadata")
    (named / "_metadata").write_bytes((folder / "_metadata").read_bytes())
    places = ("/", "file:///", ".", "..", f"{named}/../jobs-own", "ftp://x/y", "s3://", "http://[", "a\0b", str(named))
    coordinator.places = SavepointPlaces(directories=frozenset(places))
    before = {place: files_below(place) for place in (folder, named)}
    with serving(coordinator, tmp_path / "state") as served:
        for path in (
            folder,
            f"{named}/../jobs-own/savepoint-7",
            named / "link",
            named / "inner",
            named,
            f"{named}/_metadata",
            f"file://{named}/%2e%2e/jobs-own/savepoint-7",
            "../jobs-own/savepoint-7",
        ):
            assert "lies in none of the directories" in ask(served, path, status=400)["errors"][0], path
    assert {place: files_below(place) for place in before} == before


def test_a_place_that_a_link_has_taken_since_it_was_judged_is_left_alone(anywhere: tuple[FakeCoordinator, Path]) -> None:
    _, folder = anywhere
    judged = folder.with_name("judged")
    judged.symlink_to(folder)
    with pytest.raises(NotFoundError, match="is a link by now"):
        dispose_confined(str(judged))
    assert (folder / "_metadata").exists()
    assert dispose_confined(str(folder)) == str(folder)


def test_openapi_describes_it(served: Served) -> None:
    paths = served.json("GET", "/openapi.json")["paths"]
    asked = paths["/v1/savepoint-disposal"]["post"]
    assert asked["requestBody"]["required"] is True
    assert "savepoint-path" in asked["requestBody"]["content"]["application/json"]["schema"]["required"]
    assert "202" in asked["responses"]
    answer = paths["/v1/savepoint-disposal/{triggerid}"]["get"]["responses"]["200"]
    assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/DisposalStatus")


# ------------------------------------------------------------------------------------------------------ under way


class Held:
    """Disposals that wait until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.done: list[str] = []

    def __call__(self, location: str) -> None:
        assert self.go.wait(10)
        self.done.append(location)
        if location.endswith("bug"):
            raise RuntimeError("what a bug")


def finished(register: Disposals, trigger_id: str) -> Disposal:
    for thread in threading.enumerate():
        if thread.name == f"disposal-{trigger_id[:8]}":
            thread.join(10)
    return register.status(trigger_id)


def test_few_run_at_one_time_and_a_bug_ends_as_a_cause(caplog: pytest.LogCaptureFixture) -> None:
    held = Held()
    register = Disposals(held)
    begun = [register.begin(f"/kept/{number}", None) for number in range(disposals.DISPOSALS_MAX - 1)]
    begun.append(register.begin("/kept/bug", ID))
    assert register.begin("/kept/bug", ID) == ID, "a repeat is none more"
    with pytest.raises(StorageUnavailableError, match="try again later"):
        register.begin("/kept/more", OTHER)
    with pytest.raises(NotFoundError):
        register.status(OTHER)
    assert {register.status(each).in_progress for each in begun} == {True}
    held.go.set()
    assert [finished(register, each).failure_kind for each in begun] == [""] * (len(begun) - 1) + ["RuntimeError"]
    assert len(held.done) == disposals.DISPOSALS_MAX
    assert "what a bug" in register.status(ID).failure
    assert not finished(register, register.begin("/kept/more", OTHER)).failure


def test_one_that_the_system_gives_no_thread_is_refused_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    register = Disposals(Held())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(disposals.DISPOSALS_MAX + 1):
            with pytest.raises(StorageUnavailableError, match="can't start new thread"):
                register.begin("/kept/a", ID)
    with pytest.raises(NotFoundError):
        register.status(ID)


def test_the_oldest_that_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disposals, "REMEMBERED_MAX", 2)
    held = Held()
    held.go.set()
    register = Disposals(held)
    for number in range(3):
        finished(register, register.begin(f"/kept/{number}", f"{number:032x}"))
    assert [register.status(f"{number:032x}").location for number in (1, 2)] == ["/kept/1", "/kept/2"]
    with pytest.raises(NotFoundError):
        register.status(f"{0:032x}")
    with pytest.raises(InvalidConfigError):
        register.begin("/kept/else", f"{2:032x}")
