"""`hf.fsck` and `holdfast snapshot fsck` on real directories: what they print, their exit codes, who is left alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import holdfast as hf
from holdfast.api.cli.main import app
from holdfast.api.cli.stored_jobs import StoredJobs
from holdfast.api.directory_guard import DirectoryGuard, without_coordinator
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.run_record import RunRecord, write_run_record
from holdfast.coordinator.ha.records import ClaimRecord, ResultRecord, SubmissionRecord, derive_job_id, encode_record
from holdfast.coordinator.history.records import encode_line
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent
from tests.coordinator.doubles import submission, word_count
from tests.statebackends.snapshot_harness import SOME, files_below, write

NAME = "word count"
JOB = derive_job_id(NAME)
PATHS = JobPaths(JOB)
runner = CliRunner()


def run(*arguments: object, code: int = 0) -> Any:
    result = runner.invoke(app, ["snapshot", "fsck", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    assert "Traceback" not in result.stderr
    return result


def put(state: Path, path: str, content: bytes = b"x", *, age_s: float = 7_200) -> Path:
    LocalStorage(state).execute(PutIfAbsent(path, content))
    at = time.time() - age_s
    os.utime(state / path, (at, at))
    return state / path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A live job with one checkpoint, what a dropped one left behind, and files of nobody."""
    state = tmp_path / "state"
    write(tmp_path, PATHS.checkpoint(7), SOME, kind="filesystem", storage=LocalStorage(state))
    put(state, "_holdfast")
    put(state, PATHS.leader(1))
    put(state, PATHS.submission(1), encode_record(SubmissionRecord(1, 1, submission(word_count()), None, 1, "n")))
    claim = ClaimRecord(7, 1, 1, 1, CheckpointKind.CHECKPOINT, PATHS.checkpoint(7), "n")
    put(state, PATHS.claim(7), encode_record(claim))
    put(state, f"{PATHS.checkpoint(6)}/totals-0-1-n-count.arrow", b"left by a crash")
    put(state, f"{JOB}/shared/6-1-totals-0-n.sst", bytes(200_000))
    put(state, f"{PATHS.checkpoint(7)}/late", age_s=60)
    put(state, "README")
    (state / PATHS.checkpoint(5)).mkdir()
    return state


def end(state: Path) -> None:
    put(state, PATHS.result(1), encode_record(ResultRecord(1, "CANCELED", 1, "n", 7, 7)))


def test_a_report_changes_nothing_and_says_whose_everything_is(state: Path) -> None:
    before = files_below(state)
    shown = run(state, code=1).stdout
    assert f"orphan: {JOB}/chk-6/totals-0-1-n-count.arrow (15 B): checkpoint 6 has no claim" in shown
    assert f"orphan: {JOB}/shared/6-1-totals-0-n.sst (195.3 KiB): no retained checkpoint names it" in shown
    assert f"too young to be an orphan: {JOB}/chk-7/late" in shown
    assert "unknown: README" in shown
    assert shown.endswith("not clean: 2 orphans, 1 young, 1 unknown, 0 problems\n")
    report = hf.fsck(state)
    assert sum(cost.files for cost in report.costs) == len(before)
    assert sum(cost.size for cost in report.costs) == sum(map(len, before.values()))
    document = json.loads(run(state, "--json", code=1).stdout)
    assert [file["path"] for file in document["orphans"]] == [file.path for file in report.orphans]
    assert {(cost["job_id"], cost["kind"]) for cost in document["costs"]} == {
        (JOB, "checkpoints"),
        (JOB, "shared"),
        (JOB, "records"),
        ("", "records"),
        ("", "unknown"),
    }
    assert files_below(state) == before


def test_what_is_wrong_with_a_history_is_named_as_the_history_names_it(state: Path) -> None:
    hf.fsck(state, repair=True)
    put(state, PATHS.history(1, 1), encode_line(1, 100, "label", {}) + b"garbage\n")
    put(state, PATHS.history(1, 9), encode_line(9, 100, "label", {}))
    put(state, PATHS.history(2, 999_999), b"\x00\xffx")
    shown = run(state, code=1).stdout
    assert f"history: can't be read: {PATHS.history(1, 1)}, line 2: JSON is malformed" in shown
    assert f"history: can't be read: {PATHS.history(2, 999_999)}, line 1: " in shown
    assert f"history of job {JOB}: 6 records of epoch 1 are not there: those between 2 and 9" in shown
    assert f"history of job {JOB}: the leader of epoch 1 was cut off behind record 9" in shown
    assert shown.endswith("not clean: 0 orphans, 1 young, 1 unknown, 0 problems, 2 damaged places of histories\n")
    document = json.loads(run(state, "--json", code=1).stdout)["histories"][JOB]
    page = StoredJobs(state).history(JOB, limit=1_000)
    assert (document["damage"], document["gaps"]) == (list(page["damage"]), list(page["gaps"]))


def test_gaps_alone_are_named_and_clean(state: Path) -> None:
    """A leader that was killed leaves one, and so does one that made room."""
    hf.fsck(state, repair=True)
    put(state, PATHS.history(3, 5), encode_line(5, 100, "label", {}))
    shown = run(state).stdout
    assert f"history of job {JOB}: 4 records of epoch 3 are not there: those between 0 and 5" in shown
    assert hf.fsck(state).is_clean


def test_repair_deletes_the_orphans_and_nothing_else(state: Path) -> None:
    before = files_below(state)
    orphans = {file.path for file in hf.fsck(state).orphans}
    shown = run(state, "--repair").stdout
    assert "2 deleted (195.3 KiB)" in shown
    assert files_below(state) == {path: content for path, content in before.items() if path not in (*orphans, "_lock")} | {
        "_lock": b""
    }
    assert sorted(path.name for path in (state / JOB).iterdir()) == ["chk-7", "leader", "shared", "submissions"]
    assert hf.Snapshot(state / JOB / "chk-7").verify().is_sound
    again = hf.fsck(state, repair=True)
    assert (again.deleted, again.refused, again.is_clean) == ((), {}, True)


def test_files_of_tasks_have_a_line_of_their_own_and_stay(state: Path) -> None:
    """Also with the name of a shared file that nobody refers to, of a job that has ended, and when they are as old as can be."""
    files = [put(state, f"{JOB}/taskowned/{name}", bytes(1000)) for name in ("6-1-totals-0-n.sst", "log/0")]
    end(state)
    (line,) = [line.split() for line in run(state, code=1).stdout.splitlines() if "taskowned" in line]
    assert line == [JOB, "taskowned", "2", "2", "2.0", "KiB"]
    (cost,) = [cost for cost in hf.fsck(state).costs if cost.kind.value == "taskowned"]
    assert (cost.job_id, cost.files, cost.size) == (JOB, 2, 2000)
    assert len(hf.fsck(state, repair=True, safety_age_ms=60_000).deleted) == 3
    assert all(path.exists() for path in files)


def test_younger_files_go_when_the_safety_age_is_shorter(state: Path) -> None:
    assert len(hf.fsck(state, repair=True, safety_age_ms=60_000).deleted) == 3
    with pytest.raises(InvalidConfigError, match="at least 60000 ms for a repair"):
        hf.fsck(state, repair=True, safety_age_ms=59_999)
    assert hf.fsck(state, safety_age_ms=0).is_clean


def test_a_live_job_is_left_alone_while_a_coordinator_may_lead_it(state: Path) -> None:
    with DirectoryGuard(state, takeover=False):
        refused = run(state, "--repair", code=2)
        assert f"job {JOB} was left alone: its leader may be alive: another coordinator runs on {state}" in refused.stdout
        assert len(hf.fsck(state).orphans) == 2
        end(state)
        assert len(hf.fsck(state, repair=True).deleted) == 2, "an ended job has no leader"


def test_who_was_last_here_counts_as_much_as_the_lock(state: Path) -> None:
    def doubt(record: RunRecord) -> str:
        write_run_record(state, record)
        with without_coordinator(state) as reason:
            return reason

    dead = subprocess.Popen(["true"])
    dead.wait()
    here = socket.gethostname()
    assert doubt(RunRecord("http://x", dead.pid, here, 1)) == ""
    assert doubt(RunRecord("http://x", os.getpid(), here, 1)) == ""
    assert "process 1, which was the last coordinator, is alive" in doubt(RunRecord("http://x", 1, here, 1))
    assert "the last coordinator ran on elsewhere" in doubt(RunRecord("http://x", dead.pid, "elsewhere", 1))
    assert "its leader may be alive" in hf.fsck(state, repair=True).refused[JOB]
    (state / "_coordinator.json").write_text("{")
    with without_coordinator(state) as reason:
        assert "has no record of its last coordinator" in reason


def test_one_job_alone_by_id_or_name(state: Path) -> None:
    assert {cost.job_id for cost in hf.fsck(state, job=NAME).costs} == {JOB}
    assert hf.fsck(state, job=JOB).costs == hf.fsck(state, job=NAME).costs
    with pytest.raises(NotFoundError, match=f"no job 'other'; it has: {JOB}"):
        hf.fsck(state, job="other")


def test_checksums_find_what_lengths_do_not(state: Path) -> None:
    path = next((state / JOB / "chk-7").glob("*count*"))
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert hf.fsck(state, repair=True).problems == ()
    shown = run(state, "--checksums", code=1).stdout
    assert "operator 'totals' subtask 0" in shown
    assert "the checksum does not match" in shown
    path.unlink()
    (problem,) = hf.fsck(state).problems
    assert (problem.kind, problem.operator) == ("missing", "totals")


@pytest.mark.parametrize("arguments", [("--safety-age", "soon"), ("--safety-age", "1s", "--repair"), ("--job", "other")])
def test_wrong_usage_is_trouble(state: Path, arguments: tuple[str, ...]) -> None:
    assert run(state, *arguments, code=2).stderr


def test_a_place_that_is_no_state_directory_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path} is no state directory" in run(tmp_path, code=2).stderr
