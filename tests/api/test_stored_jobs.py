"""Jobs and checkpoints of a state directory whose coordinator is gone: told from its records, and nothing in it is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from holdfast.api.cli.main import app
from holdfast.api.cli.stored_jobs import StoredJobs
from holdfast.api.client import RestClient
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import ServerSettings
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.barriers.run_record import RunRecord, write_run_record
from holdfast.coordinator.ha.records import (
    AbortRecord,
    AttemptRecord,
    ClaimRecord,
    LeaderRecord,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    encode_record,
)
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.layout import METADATA_NAME, JobPaths
from holdfast.statebackends.snapshot.metadata import decode_metadata, encode_metadata
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFiles, PutIfAbsent, StatFile, Storage, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.ownership.test_claims import contents
from tests.golden.in_flight_snapshot import GOLDEN
from tests.s3_server import bucket as bucket
from tests.s3_server import connection as connection
from tests.s3_server import server as server

FINISHED, FAILED, LIVE, DAMAGED = ("ab" * 16, "cd" * 16, "ef" * 16, "09" * 16)
NOBODY = "http://127.0.0.1:9"
TOKEN = "stored-jobs-token-0123456789"

runner = CliRunner()


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "TOKEN", "TOKEN_FILE", "STATE_DIR"):
        monkeypatch.delenv(f"HOLDFAST_{name}", raising=False)


def put(storage: Storage, path: str, record: msgspec.Struct | bytes) -> None:
    content = record if isinstance(record, bytes) else encode_record(record)
    assert storage.execute(PutIfAbsent(path, content))


def put_job(storage: Storage, job_id: str, state: str = "", *, cause: str = "", created_ms: int = 1_000) -> None:
    """Checkpoint 3 complete, 4 aborted, 5 not decided."""
    paths = JobPaths(job_id)
    put(storage, paths.leader(1), LeaderRecord(1, "n"))
    graph = word_count(name=f"job {job_id[:2]}")
    put(storage, paths.submission(1), SubmissionRecord(1, 1, submission(graph, job_id=job_id), None, 1, "n", created_ms))
    put(storage, paths.attempt(3), AttemptRecord(3, 1, 1, "h", 2, None, 2, "n", created_ms))
    for number in (3, 4, 5):
        claim = ClaimRecord(number, 1, 1, 3, CheckpointKind.CHECKPOINT, paths.checkpoint(number), "n", created_ms=created_ms)
        put(storage, paths.claim(number), claim)
    metadata = contents(kind="checkpoint", job_id=job_id, checkpoint_id=3, trigger_timestamp_ms=created_ms + 500)
    put(storage, paths.decision(3), encode_metadata(metadata))
    put(storage, paths.decision(4), AbortRecord(4, FailureReason.EXPIRED, 1, "n", "took too long", created_ms + 700))
    if state:
        put(storage, paths.result(1), ResultRecord(1, state, 1, "n", 5, 3, cause, created_ms, created_ms + 2_000))


@pytest.fixture(params=["folder", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found = f"{request.getfixturevalue('bucket')}/state" if request.param == "s3" else str(tmp_path / "state")
    storage = open_storage(found)
    put(storage, "_holdfast", b"directory")
    put_job(storage, FINISHED, "FINISHED", created_ms=4_000)
    put_job(storage, FAILED, "FAILED", cause="ValueError: no such carrier", created_ms=3_000)
    put_job(storage, LIVE, created_ms=2_000)
    put(storage, JobPaths(DAMAGED).submission(1), b"{")
    return found


def holdfast(*arguments: str, code: int = 0) -> Result:
    result = runner.invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_jobs_of_a_directory_whose_coordinator_is_gone(location: str) -> None:
    before = open_storage(location).execute(ListFiles(""))
    result = holdfast("jobs", "--state-dir", location, "--offline")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in lines[:5]] == ["JOB", FINISHED, FAILED, LIVE, DAMAGED], "newest first"
    assert [line[3] for line in lines[1:4]] == ["FINISHED", "FAILED", "UNKNOWN"]
    assert lines[4][2] == "UNREADABLE"
    assert f"{FAILED}: FAILED after 2 restarts: ValueError: no such carrier" in result.stdout
    assert "submissions/1.json can't be decoded" in result.stdout
    assert "UNKNOWN: no end recorded" in result.stderr
    jobs: list[dict[str, Any]] = json.loads(holdfast("jobs", "--state-dir", location, "--offline", "--json").stdout)
    assert [job["duration"] for job in jobs] == [2_000, 2_000, 500, -1], "of a job without an end, up to what is on record"
    assert open_storage(location).execute(ListFiles("")) == before, "nothing is written"


def test_checkpoints_of_a_directory_whose_coordinator_is_gone(location: str) -> None:
    before = open_storage(location).execute(ListFiles(""))
    for job in (LIVE, "job ef", LIVE[:3]):
        output = holdfast("checkpoints", job, "--state-dir", location, "--offline").stdout
        assert [line.split()[:3] for line in output.splitlines()[1:4]] == [
            ["5", "CHECKPOINT", "IN_PROGRESS"],
            ["4", "CHECKPOINT", "FAILED"],
            ["3", "CHECKPOINT", "COMPLETED"],
        ]
    assert f"{location}/{LIVE}/chk-3" in output, "what restore= and inspect take"
    assert "expired: took too long" in output
    last = output.splitlines()[-1]
    assert last.startswith("on record: 1 completed, 1 failed, 1 in progress; older ones"), "no count of what no record tells"
    ended = json.loads(holdfast("checkpoints", FAILED, "--state-dir", location, "--offline", "--json").stdout)
    assert ended["counts"]["in_progress"] == 0, "nobody is at it any more"
    assert ended["history"][2]["state_size"] == contents().size > 0
    holdfast("checkpoints", "no such job", "--state-dir", location, "--offline", code=1)
    with pytest.raises(NotFoundError, match="has no job"):
        StoredJobs(location).checkpoints("12" * 16)
    assert open_storage(location).execute(ListFiles("")) == before


def test_a_checkpoint_that_an_older_leader_began_is_nobodys(tmp_path: Path) -> None:
    """One that was stopped, and woke behind its successor, may have claimed an id that was free again."""
    storage = open_storage(str(tmp_path))
    put(storage, "_holdfast", b"directory")
    put_job(storage, LIVE)
    put(storage, JobPaths(LIVE).leader(2), LeaderRecord(2, "m"))
    left, *_ = StoredJobs(str(tmp_path)).checkpoints(LIVE)["history"]
    assert (left["id"], left["status"]) == (5, "FAILED")
    output = holdfast("checkpoints", LIVE, "--state-dir", str(tmp_path), "--offline").stdout
    assert "leader_changed: epoch 2 leads" in output
    assert output.splitlines()[-1].startswith("on record: 1 completed, 2 failed; ")


def test_an_id_that_a_new_leader_took_to_fence_the_one_before_is_no_failed_checkpoint(tmp_path: Path) -> None:
    storage, paths = open_storage(str(tmp_path)), JobPaths(LIVE)
    put(storage, "_holdfast", b"directory")
    put_job(storage, LIVE)
    before = StoredJobs(str(tmp_path)).checkpoints(LIVE)
    put(storage, paths.leader(2), LeaderRecord(2, "m"))
    run_flow(recover_job(paths, Takeover(2, "m", 9_000)), RoutedStorage(storage))
    assert storage.execute(StatFile(paths.claim(6))) is not None
    after = StoredJobs(str(tmp_path)).checkpoints(LIVE)
    assert [each["id"] for each in after["history"]] == [each["id"] for each in before["history"]] == [5, 4, 3]
    assert after["counts"]["failed"] == before["counts"]["failed"] + 1, "that which was in progress"


def test_a_savepoint_on_record_has_no_size_rather_than_none_at_all(tmp_path: Path) -> None:
    storage, paths = open_storage(str(tmp_path)), JobPaths(FAILED)
    put(storage, "_holdfast", b"directory")
    put_job(storage, FAILED, "FAILED")
    put(storage, paths.claim(6), ClaimRecord(6, 1, 1, 3, CheckpointKind.SAVEPOINT, "/sp/savepoint-6", "n"))
    put(storage, paths.decision(6), SavepointRecord(6, "/sp/savepoint-6", CheckpointKind.SAVEPOINT, 5_000, 1, "n"))
    output = holdfast("checkpoints", FAILED, "--state-dir", str(tmp_path), "--offline").stdout
    assert "0 B" not in output
    row = output.splitlines()[1].split()
    assert (row[0], row[1], row[-3:]) == ("6", "SAVEPOINT", ["-", "-", "/sp/savepoint-6"])


def test_an_unaligned_checkpoint_of_a_job_that_has_ended_is_told_as_such(tmp_path: Path) -> None:
    storage, paths = open_storage(str(tmp_path)), JobPaths(FAILED)
    put(storage, "_holdfast", b"directory")
    put_job(storage, FAILED, "FAILED")
    content = (GOLDEN / "chk-7" / METADATA_NAME).read_bytes()
    put(storage, paths.claim(7), ClaimRecord(7, 1, 1, 3, CheckpointKind.CHECKPOINT, paths.checkpoint(7), "n"))
    put(storage, paths.decision(7), content)
    metadata = decode_metadata(content, METADATA_NAME)
    stored = sum(channel.part.length for channel in metadata.in_flight)
    flown, *_, aligned = StoredJobs(str(tmp_path)).checkpoints(FAILED)["history"]
    assert (flown["id"], flown["checkpoint_type"], flown["persisted_data"]) == (7, "UNALIGNED_CHECKPOINT", stored)
    assert flown["state_size"] == flown["checkpointed_size"] == metadata.size + stored
    assert stored > 0
    assert (aligned["id"], aligned["checkpoint_type"], aligned["persisted_data"]) == (3, "CHECKPOINT", 0)


@pytest.mark.parametrize("served", [False, True])
def test_where_no_coordinator_answers_the_directory_is_read(tmp_path: Path, served: bool) -> None:
    state = tmp_path / "state"
    put(open_storage(str(state)), "_holdfast", b"directory")
    put_job(open_storage(str(state)), FINISHED, "FINISHED")
    if served:
        write_run_record(state, RunRecord(NOBODY, 1, "here", 9))
    for arguments in (["jobs"], ["checkpoints", FINISHED]):
        result = holdfast(*arguments, "--state-dir", str(state))
        assert "FINISHED" in result.stdout or "COMPLETED" in result.stdout
        why = f"can't reach the coordinator at {NOBODY}" if served else f"no coordinator has served {state}"
        assert why in result.stderr
        assert f"What follows is what {state} holds" in result.stderr


def test_a_directory_named_by_the_environment_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(open_storage(str(tmp_path / "state")), "_holdfast", b"directory")
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    assert holdfast("jobs").stdout == "no jobs\n"
    monkeypatch.setenv("HOLDFAST_URL", NOBODY)
    assert "give --state-dir" in holdfast("jobs", code=1).stderr, "the URL goes before it"


@pytest.mark.parametrize("arguments", [["jobs"], ["checkpoints", "flights"]])
def test_a_coordinator_that_can_not_be_reached_is_told_with_what_to_do(arguments: list[str]) -> None:
    error = holdfast(*arguments, "--url", NOBODY, code=1).stderr
    assert f"can't reach the coordinator at {NOBODY}" in error
    assert "To read what its state directory holds without it, give --state-dir" in error


def test_what_is_no_state_directory_is_told_and_not_made(tmp_path: Path) -> None:
    for arguments in (["--offline"], []):
        error = holdfast("jobs", "--state-dir", str(tmp_path / "nothing"), *arguments, code=2).stderr
        assert f"{tmp_path / 'nothing'} is no state directory: it has no _holdfast" in error
    assert not (tmp_path / "nothing").exists()
    assert "give --state-dir" in holdfast("jobs", "--offline", code=2).stderr


def test_beside_a_coordinator_its_answers_go_first_and_reading_takes_nothing_from_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    put(open_storage(str(state)), "_holdfast", b"directory")
    put_job(open_storage(str(state)), LIVE)
    coordinator = EmbeddedCoordinator(ServerSettings(state, token=TOKEN))
    coordinator.start()
    try:
        assert RestClient(coordinator.url, TOKEN).jobs(), "it has recovered the job"
        asked = ("jobs", "--state-dir", str(state))
        environment = {"HOLDFAST_TOKEN": TOKEN}
        answered = runner.invoke(app, [*asked, "--json"], env=environment)
        [job] = json.loads(answered.stdout)
        assert (job["jid"], "failure" in job, answered.stderr) == (LIVE, False, "")
        leaders = sorted(path.name for path in (state / LIVE / "leader").iterdir())
        [told] = json.loads(holdfast(*asked, "--offline", "--json").stdout)
        assert (told["jid"], told["state"]) == (LIVE, "UNKNOWN")
        assert sorted(path.name for path in (state / LIVE / "leader").iterdir()) == leaders, "who reads does not lead"
    finally:
        coordinator.stop()
