"""`/v1/snapshots`: what is shown, and that no path leads out of the directories whose snapshots are shown."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from holdfast.api.routes.lifecycle import snapshots
from holdfast.api.settings import server_settings
from holdfast.api.snapshots.served import SnapshotDirectories
from holdfast.barriers.codec import ERROR_HEADER
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.ha.records import SavepointRecord, encode_record
from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.api.fakes import FakeCoordinator, Served, serving
from tests.statebackends.snapshot_harness import SOME, UID, write


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


@pytest.fixture
def shown(tmp_path: Path, coordinator: FakeCoordinator) -> Iterator[Served]:
    with serving(coordinator, tmp_path / "state", snapshot_dirs=(str(tmp_path / "kept"),)) as running:
        yield running


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    stored = write(tmp_path, "job/chk-7", SOME, kind="filesystem", storage=LocalStorage(tmp_path / "state"))
    return Path(stored.location)


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    return Path(write(tmp_path, "savepoint-7", SOME, canonical=True, storage=LocalStorage(tmp_path / "kept")).location)


def inspect(shown: Served, path: Path | str, status: int = 200) -> Any:
    return shown.json("GET", f"/v1/snapshots?path={quote(str(path))}", status=status)


def verify(shown: Served, path: Path | str, status: int = 200) -> Any:
    return shown.json("POST", "/v1/snapshots/verify", {"path": str(path)}, status=status)


def test_a_snapshot_is_described_and_verified(shown: Served, checkpoint: Path, savepoint: Path) -> None:
    for path in (checkpoint, "job/chk-7", checkpoint / "_metadata", savepoint, f"file://{savepoint}"):
        summary = inspect(shown, path)
        assert [operator["uid"] for operator in summary["operators"]] == [UID]
        report = verify(shown, path)
        assert (report["sound"], report["problems"], report["problem_count"]) == (True, [], 0)
    assert inspect(shown, checkpoint)["location"] == str(checkpoint)
    assert verify(shown, savepoint)["files"] == len(list(savepoint.iterdir()))


def test_the_outcome_of_a_verification_is_told_to_the_job_and_its_refusal_harms_nothing(
    shown: Served, savepoint: Path, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify(shown, savepoint)
    next(savepoint.glob("*.parquet")).unlink()
    verify(shown, savepoint)
    sound, damaged = [call for call in coordinator.calls if call[0] == "note_verified"]
    assert sound[2] == damaged[2] == str(savepoint)
    assert (sound[3].checkpoint_id, sound[3].problem_count, sound[3].first_problem) == (7, 0, "")
    assert damaged[3].problem_count >= 1
    assert ".parquet" in damaged[3].first_problem
    assert damaged[3].began_ms >= sound[3].began_ms > 1_700_000_000_000

    def refuse(*_: Any) -> None:
        raise NotFoundError("it is of no job here")

    monkeypatch.setattr(coordinator, "note_verified", refuse)
    assert verify(shown, savepoint)["sound"] is False


def test_damage_is_an_answer_and_a_damaged_metadata_an_error(
    shown: Served, savepoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in savepoint.glob("*.parquet"):
        path.unlink()
    report = verify(shown, savepoint)
    assert not report["sound"]
    assert {problem["kind"] for problem in report["problems"]} == {"missing"}
    monkeypatch.setattr(snapshots, "PROBLEMS_MAX", 2)
    few = verify(shown, savepoint)
    assert (len(few["problems"]), few["problem_count"]) == (2, len(report["problems"]))
    (savepoint / "_metadata").write_bytes(b"{")
    response = shown.request("POST", "/v1/snapshots/verify", {"path": str(savepoint)})
    assert (response.status, response.headers[ERROR_HEADER]) == (400, "CorruptStateError")
    assert "holds no snapshot" in inspect(shown, savepoint.parent / "none", status=404)["errors"][0]


def outside(tmp_path: Path) -> dict[str, str]:
    """Ways to a sound snapshot that lies beside the directories."""
    secret = write(tmp_path, "savepoint-9", SOME, canonical=True, storage=LocalStorage(tmp_path / "other"))
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "state" / "one").symlink_to(secret.location)
    (tmp_path / "state" / "half").mkdir()
    (tmp_path / "state" / "half" / "_metadata").symlink_to(Path(secret.location) / "_metadata")
    LocalStorage(tmp_path / "statement").execute(PutIfAbsent("x", b"x"))
    return {
        "absolute": secret.location,
        "url": f"file://{secret.location}",
        "climbing": f"{tmp_path}/state/../other/savepoint-9",
        "climbing from a relative path": "../other/savepoint-9",
        "climbing in a url": f"file://{tmp_path}/state/../other/savepoint-9",
        "climbing, escaped": f"file://{tmp_path}/state/%2e%2e/other/savepoint-9",
        "doubled slashes": f"/{secret.location}",
        "through a link": "link/savepoint-9",
        "through a link to it": "one",
        "in a folder whose _metadata is a link": "half",
        "a directory that begins alike": f"{tmp_path}/statement",
        "the directory itself": str(tmp_path / "state"),
        "home": "~/savepoint",
        "another scheme": "http://localhost/x",
        "another bucket": "s3://bucket/savepoint-9",
        "nothing": " " * 5_000,
    }


def test_no_path_leads_out(shown: Served, tmp_path: Path) -> None:
    for what, path in outside(tmp_path).items():
        for status in (inspect(shown, path, status=400), verify(shown, path, status=400)):
            assert status["errors"], what
            assert UID not in str(status), what


def test_a_pointer_to_elsewhere_is_not_followed_for_others(shown: Served, tmp_path: Path, savepoint: Path) -> None:
    secret = write(tmp_path, "savepoint-9", SOME, canonical=True, storage=LocalStorage(tmp_path / "other"))
    state = LocalStorage(tmp_path / "state")
    for number, location in ((8, str(savepoint)), (9, secret.location)):
        record = SavepointRecord(number, location, CheckpointKind.SAVEPOINT, 0, 1, "n")
        state.execute(PutIfAbsent(f"job/chk-{number}/_metadata", encode_record(record)))
    assert inspect(shown, "job/chk-8")["location"] == str(savepoint)
    assert "lies in none of the directories" in inspect(shown, "job/chk-9", status=400)["errors"][0]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A savepoint in a directory that is not among those that are shown."""
    return Path(write(tmp_path, "savepoint-9", SOME, canonical=True, storage=LocalStorage(tmp_path / "jobs-own")).location)


def reads(path: Path | str) -> list[tuple[str, str, Any]]:
    """Every request that reads a snapshot."""
    place = quote(str(path))
    return [
        ("GET", f"/v1/snapshots?path={place}", None),
        ("GET", f"/v1/snapshots/rows?path={place}&uid={UID}&state=count", None),
        ("GET", f"/v1/snapshots/diff?path={place}&other={place}", None),
        ("POST", "/v1/snapshots/verify", {"path": str(path)}),
    ]


@pytest.mark.parametrize("form", ["{folder}", "file://{folder}", "{folder}/_metadata", "{folder}/", "job/chk-9"])
def test_a_savepoint_of_a_job_is_read_wherever_the_job_has_it(
    shown: Served, coordinator: FakeCoordinator, tmp_path: Path, elsewhere: Path, form: str
) -> None:
    """Whatever the page of a job lists can be opened there, by its pointer in the state directory, too."""
    record = SavepointRecord(9, str(elsewhere), CheckpointKind.SAVEPOINT, 0, 1, "n")
    LocalStorage(tmp_path / "state").execute(PutIfAbsent("job/chk-9/_metadata", encode_record(record)))
    path = form.format(folder=elsewhere)
    for method, place, body in reads(path):
        assert "lies in none of the directories" in shown.json(method, place, body, status=400)["errors"][0]
    for places in (SavepointPlaces(frozenset({str(elsewhere.parent)})), SavepointPlaces(folders=frozenset({str(elsewhere)}))):
        coordinator.places = places
        for method, place, body in reads(path):
            assert shown.json(method, place, body)
        assert inspect(shown, path)["location"] == str(elsewhere)


def test_what_a_job_names_opens_no_way_out(shown: Served, coordinator: FakeCoordinator, tmp_path: Path, elsewhere: Path) -> None:
    """A setting comes from whoever submits a job: no root, nothing relative, and links are followed before it is judged."""
    named = tmp_path / "named"
    (named / "inner").mkdir(parents=True)
    (named / "link").symlink_to(elsewhere)
    (named / "inner" / "_metadata").symlink_to(elsewhere / "_metadata")
    (named / "_metadata").write_bytes((elsewhere / "_metadata").read_bytes())
    record = SavepointRecord(9, str(elsewhere), CheckpointKind.SAVEPOINT, 0, 1, "n")
    LocalStorage(named).execute(PutIfAbsent("pointer/_metadata", encode_record(record)))
    folders = frozenset({f"{elsewhere}8", f"{named}/inner", f"{named}/../jobs-own/savepoint-9", "/"})
    directories = frozenset({"/", "file:///", ".", "..", "s3://", f"{named}/../jobs-own", str(named)})
    coordinator.places = SavepointPlaces(directories, folders)
    ways = ("link", "inner", "", "_metadata", "../jobs-own/savepoint-9", "pointer")
    others = (str(elsewhere), "../jobs-own/savepoint-9", f"file://{named}/%2e%2e/jobs-own/savepoint-9")
    for path in (*others, *(f"{named}/{way}" for way in ways)):
        for method, place, body in reads(path):
            answer = shown.json(method, place, body, status=400)
            assert "lies in none of the directories" in answer["errors"][0], (method, place)


def test_who_may_read_does_not_depend_on_where_a_savepoint_lies(
    shown: Served, coordinator: FakeCoordinator, elsewhere: Path
) -> None:
    coordinator.places = SavepointPlaces(folders=frozenset({str(elsewhere)}))

    def statuses(**token: Any) -> list[int]:
        issued = shown.json("POST", "/v1/tokens", token, status=201)["token"]
        return [shown.request(method, place, body, token=issued).status for method, place, body in reads(elsewhere)]

    assert statuses(role="operator") == [200, 200, 200, 200]
    assert statuses(role="viewer") == [200, 403, 403, 200]
    assert statuses(role="operator", job="ab" * 16) == [403, 403, 403, 403]


def test_s3_prefixes_are_compared_by_whole_names() -> None:
    directories = SnapshotDirectories(("s3://bucket/state", "/data/kept"))
    assert directories.confine("s3://bucket/state/job/chk-1") == "s3://bucket/state/job/chk-1"
    assert directories.confine("job/chk-1") == "s3://bucket/state/job/chk-1"
    assert directories.confine("/data/kept/a/") == "/data/kept/a"
    for path in ("s3://bucket/statement/a", "s3://bucket/state/../a", "s3://bucket/state", "s3://other/state/a", "../a", "/data/a"):
        with pytest.raises(InvalidConfigError):
            directories.confine(path)


def test_places_of_savepoints_on_s3_are_those_of_jobs_alone() -> None:
    places = SavepointPlaces(frozenset({"s3://bucket/own/", "s3://bucket/../x", "s3://"}), frozenset({"s3://other/once/savepoint-1"}))
    shown = SnapshotDirectories(("s3://bucket/state",), places=lambda: places)
    for path in ("s3://bucket/own/savepoint-1", "s3://bucket/own/savepoint-1/_metadata", "s3://other/once/savepoint-1/_metadata"):
        with pytest.raises(InvalidConfigError):
            shown.confine(path)
        assert shown.confine_savepoint(path) == path.removesuffix("/_metadata")
    for path in ("s3://bucket/owner/a", "s3://bucket/own", "s3://bucket/own/../a", "s3://other/once/savepoint-2", "s3://other/once"):
        with pytest.raises(InvalidConfigError):
            shown.confine_savepoint(path)


def test_verifications_are_bounded(shown: Served, savepoint: Path) -> None:
    semaphore: threading.BoundedSemaphore = snapshots._verifying
    for _ in range(snapshots.VERIFICATIONS_MAX):
        assert semaphore.acquire(blocking=False)
    try:
        assert "try again later" in verify(shown, savepoint, status=503)["errors"][0]
    finally:
        for _ in range(snapshots.VERIFICATIONS_MAX):
            semaphore.release()
    assert verify(shown, savepoint)["sound"]


def test_bodies_and_tokens(shown: Served) -> None:
    assert "path" in shown.json("POST", "/v1/snapshots/verify", {}, status=400)["errors"][0]
    assert "path" in shown.json("GET", "/v1/snapshots", status=400)["errors"][0]
    assert shown.request("GET", "/v1/snapshots?path=a", token="another-token-of-length").status == 401
    assert "/v1/snapshots/verify" in shown.json("GET", "/openapi.json")["paths"]


def test_further_directories_are_a_setting(tmp_path: Path) -> None:
    environment = {"HOLDFAST_STATE_DIR": str(tmp_path), "HOLDFAST_SNAPSHOT_DIRS": "/data/kept, s3://bucket/kept"}
    assert server_settings(environment).snapshot_dirs == ("/data/kept", "s3://bucket/kept")
    with pytest.raises(InvalidConfigError, match="HOLDFAST_SNAPSHOT_DIRS names 'kept'"):
        server_settings({**environment, "HOLDFAST_SNAPSHOT_DIRS": "kept"})


def test_a_read_takes_no_turn_of_a_job_and_a_deletion_trusts_no_view(
    shown: Served, coordinator: FakeCoordinator, elsewhere: Path
) -> None:
    coordinator.places = SavepointPlaces(folders=frozenset({str(elsewhere)}))
    for method, place, body in reads(elsewhere):
        assert shown.json(method, place, body)
    assert ("savepoint_places",) not in coordinator.calls
    shown.json("POST", "/v1/savepoint-disposal", {"savepoint-path": str(elsewhere)}, status=202)
    assert ("savepoint_places",) in coordinator.calls
