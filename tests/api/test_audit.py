"""The audit log: what is recorded, what a changed log looks like, and that nothing of it holds a request up."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from holdfast.api.access import audit
from holdfast.api.access import audit_log as audit_logs
from holdfast.api.access.audit import AuditLine, AuditRecorder, AuditReport, AuditVerifier, FileReady, Noted, in_order
from holdfast.api.access.audit_log import AuditLog, read_audit, verify_audit
from holdfast.api.cli.main import app
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import (
    AUDIT_FOLDER,
    DIRECTORY_FILE,
    audit_path,
    further_chain,
    is_directory_file,
    is_further_chain,
    parse_audit_path,
)
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import ListFiles, PutIfAbsent
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, serving

STOP = Noted("stop", job=JOB, credential="token ci", role="operator", peer="10.0.0.7:1", status=202)
REFUSED = Noted("GET /v1/jobs", peer="10.0.0.8:1", status=401)


def recorder(chain: str = "a1", heads: Mapping[str, str] | None = None) -> AuditRecorder:
    return AuditRecorder(chain, heads or {}, now_ms=0, wall_ms=1_000)


def files_of(recorder: AuditRecorder, now_ms: int = 10**9) -> list[FileReady]:
    """All files that it has, written at once."""
    found = []
    while (ready := recorder.take(now_ms=now_ms, wall_ms=now_ms, force=True)) is not None:
        found.append(ready)
        recorder.written()
    return found


def verified(files: list[tuple[str, bytes]]) -> AuditReport:
    verifier = AuditVerifier()
    contents = dict(files)
    for path in in_order([path for path, _ in files]):
        list(verifier.add(path, contents[path]))
    return verifier.report()


def chain_of(count: int, *, files: int = 1, name: str = "a1", heads: Mapping[str, str] | None = None) -> list[tuple[str, bytes]]:
    recording, found = recorder(name, heads), []
    for _ in range(files):
        for _ in range(count):
            recording.note(STOP, now_ms=1, wall_ms=2)
        found += [(each.path, each.content) for each in files_of(recording)]
    return found


# ------------------------------------------------------------------------------------------------------------ recorder


def test_lines_are_due_a_second_later_and_given_until_they_are_written() -> None:
    recording = recorder()
    recording.note(STOP, now_ms=5, wall_ms=1_005)
    assert recording.take(now_ms=audit.WRITE_EVERY_MS - 1, wall_ms=0) is None
    ready = recording.take(now_ms=audit.WRITE_EVERY_MS, wall_ms=0)
    assert ready is not None
    recording.note(STOP, now_ms=1_100, wall_ms=1_100)
    assert recording.take(now_ms=9_000, wall_ms=0) == ready
    recording.written()
    following = recording.take(now_ms=9_000, wall_ms=0)
    assert following is not None
    assert (ready.path, following.path) == (audit_path("a1", 0), audit_path("a1", 1))
    assert verified([(each.path, each.content) for each in (ready, following)]).is_whole


def test_a_line_says_who_did_what() -> None:
    recording = recorder()
    recording.note(STOP, now_ms=5, wall_ms=1_005)
    (ready,) = files_of(recording)
    first, second = (json.loads(line) for line in ready.content.splitlines())
    assert first == {"number": 0, "before": audit.NO_HASH, "time_ms": 1_000, "kind": "started"}
    assert second == {
        "number": 1,
        "before": audit.hash_of(ready.content.splitlines()[0]),
        "time_ms": 1_005,
        "kind": "request",
        "request": "stop",
        "job": JOB,
        "credential": "token ci",
        "role": "operator",
        "peer": "10.0.0.7:1",
        "status": 202,
    }


def test_refusals_are_counted_beyond_their_bound() -> None:
    recording = recorder()
    for number in range(audit.REFUSALS_MAX + 7):
        recording.note(msgspec.structs.replace(REFUSED, peer=f"10.0.{number}.8:1"), now_ms=1, wall_ms=1)
    recording.note(STOP, now_ms=2, wall_ms=2)
    (ready,) = files_of(recording, audit.REFUSALS_EVERY_MS)
    kinds = [json.loads(line)["kind"] for line in ready.content.splitlines()]
    assert kinds == ["started", *["refused"] * audit.REFUSALS_MAX, "request", "dropped"]
    assert json.loads(ready.content.splitlines()[-1])["count"] == 7


@pytest.mark.parametrize(
    "senders",
    [
        [f"10.0.0.8:{port}" for port in range(1_000)],
        [f"2001:db8:1:2:{number:x}::1:80" for number in range(1, 1_000)],
        [f"2001:db8::{number:x}:80" for number in range(1, 1_000)],
    ],
    ids=["ports", "addresses of one network", "addresses of one network, with zeros left out"],
)
def test_one_sender_does_not_use_up_the_refusals_of_all(senders: list[str]) -> None:
    recording = recorder()
    for peer in senders:
        recording.note(msgspec.structs.replace(REFUSED, peer=peer), now_ms=1, wall_ms=1)
    for _ in range(audit.REFUSALS_PER_SENDER_MAX + 1):
        recording.note(Noted("GET /v1/jobs", credential="token ci", peer=senders[0], status=403), now_ms=1, wall_ms=1)
    recording.note(msgspec.structs.replace(REFUSED, peer="10.9.9.9:1"), now_ms=1, wall_ms=1)
    lines = [json.loads(line) for line in files_of(recording)[0].content.splitlines()]
    found = [line.get("credential") or line["peer"] for line in lines if line["kind"] == "refused"]
    assert found == [*senders[: audit.REFUSALS_PER_SENDER_MAX], *["token ci"] * audit.REFUSALS_PER_SENDER_MAX, "10.9.9.9:1"]


def test_what_storage_does_not_take_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WAITING_BYTES_MAX", 2_000)
    recording = recorder()
    for _ in range(100):
        recording.note(STOP, now_ms=1, wall_ms=1)
    lines = [json.loads(line) for ready in files_of(recording) for line in ready.content.splitlines()]
    assert lines[-1]["kind"] == "dropped"
    assert lines[-1]["count"] + sum(line["kind"] == "request" for line in lines) == 100
    assert lines[-1]["count"] > 80


def test_long_texts_are_cut() -> None:
    recording = recorder()
    recording.note(Noted("x" * 10**6, subject="y" * 10**6, status=200), now_ms=1, wall_ms=1)
    (ready,) = files_of(recording)
    assert len(ready.content) < 2_000


ODD = Noted("submit", subject="ü\n\x00'\"", status=0)


@given(st.lists(st.sampled_from([STOP, REFUSED, ODD]), max_size=200), st.integers(200, 900))
def test_whatever_is_recorded_is_whole(noted: list[Noted], file_bytes: int) -> None:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(audit, "FILE_BYTES", file_bytes)
        recording = recorder()
        files: list[tuple[str, bytes]] = []
        for index, each in enumerate(noted):
            recording.note(each, now_ms=index * 100, wall_ms=index)
            if index % 7 == 0 and (ready := recording.take(now_ms=index * 100, wall_ms=index)) is not None:
                files.append((ready.path, ready.content))
                recording.written()
        files += [(each.path, each.content) for each in files_of(recording)]
    report = verified(files)
    assert report.is_whole
    assert report.lines >= len(noted) - max(0, len(noted) - audit.REFUSALS_PER_SENDER_MAX)


# ------------------------------------------------------------------------------------------------------ shares of changes


def shares(monkeypatch: pytest.MonkeyPatch, *, bytes_max: int = 10**9, files_max: int = 10**9) -> None:
    monkeypatch.setattr(audit, "CHANGES_BYTES_A_DAY", bytes_max)
    monkeypatch.setattr(audit, "CHANGES_FILES_A_DAY", files_max)


def test_a_sender_that_has_used_its_share_of_a_day_up_does_not_belong_here(monkeypatch: pytest.MonkeyPatch) -> None:
    shares(monkeypatch, bytes_max=1_000)
    recording, other = recorder(), msgspec.structs.replace(STOP, credential="token of another")
    taken = 0
    while recording.has_share(STOP, 1):
        recording.note(STOP, now_ms=1, wall_ms=1)
        taken += 1
    assert 1_000 <= len(files_of(recording)[0].content) < 1_400
    assert taken > 2
    assert recording.has_share(other, 1)
    assert recording.has_share(REFUSED, 1)
    assert not recording.has_share(msgspec.structs.replace(STOP, peer="10.9.9.9:1"), audit.DAY_MS - 1), "from elsewhere"
    assert recording.has_share(STOP, audit.DAY_MS)


def test_files_count_for_who_began_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shares(monkeypatch, files_max=3)
    recording, other = recorder(), msgspec.structs.replace(STOP, credential="token of another")
    files_of(recording)
    for _ in range(3):
        for _ in range(50):
            recording.note(STOP, now_ms=1, wall_ms=1)
        recording.note(other, now_ms=1, wall_ms=1)
        files_of(recording)
    assert (recording.has_share(STOP, 1), recording.has_share(other, 1)) == (False, True)


def test_senders_beyond_what_is_told_apart_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_SENDERS_MAX", 2)
    shares(monkeypatch, bytes_max=500)
    recording = recorder()
    for number in range(6):
        recording.note(msgspec.structs.replace(STOP, credential=f"t{number}"), now_ms=1, wall_ms=1)
    assert recording.has_share(msgspec.structs.replace(STOP, credential="t0"), 1)
    assert not recording.has_share(msgspec.structs.replace(STOP, credential="t9"), 1)


def test_further_changes_are_written_once_a_minute() -> None:
    further = recorder(further_chain("a" * 16))
    further.note(STOP, now_ms=0, wall_ms=0)
    assert further.take(now_ms=audit.FURTHER_WRITE_EVERY_MS - 1, wall_ms=0) is None
    ready = further.take(now_ms=audit.FURTHER_WRITE_EVERY_MS, wall_ms=0)
    assert ready is not None
    assert parse_audit_path(ready.path)[0] == "a" * 16 + "0f"
    assert is_directory_file(ready.path)
    assert verified([(ready.path, ready.content)]).is_whole


def test_one_sender_s_changes_push_nobody_else_s_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of others stay while one token changes something thousands of times, and the log can be verified all the time."""
    shares(monkeypatch, bytes_max=2_000)
    for name, value in (("FILE_BYTES", 1_000), ("KEPT_FILES_MAX", 12), ("FURTHER_FILES_MAX", 8)):
        monkeypatch.setattr(audit, name, value)
    monkeypatch.setattr(audit_logs, "WRITE_EVERY_MS", 1)
    monkeypatch.setattr(audit_logs, "PRUNE_EVERY_S", 0.0)
    loud = msgspec.structs.replace(STOP, credential="token loud")
    quiet = Noted("cancel", job=JOB, credential="token quiet", status=202)
    log = AuditLog(str(tmp_path))
    log.note(quiet)
    for _ in range(400):
        log.note(loud)
    until = time.monotonic() + 20
    while not any(line.kind == "pruned" for line in read_audit(str(tmp_path))) and time.monotonic() < until:
        log.note(loud)
        threading.Event().wait(0.01)
    log.note(quiet)
    log.close()
    lines, report = read_audit(str(tmp_path)), verify_audit(str(tmp_path))
    assert report.problems == ()
    assert report.pruned > 0, "the oldest of the further ones"
    assert [line.credential for line in lines if line.request == "cancel"] == ["token quiet"] * 2
    files = Counter(parse_audit_path(path)[0] for path in open_storage(str(tmp_path)).execute(ListFiles(AUDIT_FOLDER)))
    further = [chain for chain in files if is_further_chain(chain)]
    assert (len(files), len(further)) == (2, 1)
    assert files[further[0]] <= 8 + 2


def test_further_changes_can_t_be_deleted_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other coordinator has begun since: the chain of the same one names how far they go."""
    shares(monkeypatch, bytes_max=1)
    log = AuditLog(str(tmp_path))
    for _ in range(5):
        log.note(STOP)
    log.close()
    assert verify_audit(str(tmp_path)).is_whole
    paths = open_storage(str(tmp_path)).execute(ListFiles(AUDIT_FOLDER))
    for path in paths:
        if is_further_chain(parse_audit_path(path)[0]):
            (tmp_path / path).unlink()
    (problem,) = verify_audit(str(tmp_path)).problems
    assert "0f that it names is missing" in problem.problem


def test_the_end_of_further_changes_is_named_at_once_then_hourly() -> None:
    recording, chain = recorder(), further_chain("a" * 16)
    hour = audit.FURTHER_NAMED_EVERY_MS
    for now_ms, lines in ((1, 0), (2, 3), (3, 4), (hour, 5), (hour + 2, 6), (3 * hour, 6)):
        recording.name_further(chain, audit.ChainEnd(lines, f"{lines}" * 64), now_ms=now_ms, wall_ms=now_ms)
    recording.name_further(chain, audit.ChainEnd(7, "7" * 64), now_ms=3 * hour, wall_ms=0, force=True)
    found = [line for each in files_of(recording) for line in audit.AuditVerifier().add(each.path, each.content)]
    assert [(line.count, line.heads) for line in found if line.kind == "further"] == [
        (3, {chain: "3" * 64}),
        (6, {chain: "6" * 64}),
        (7, {chain: "7" * 64}),
    ]


def test_an_end_that_was_named_may_be_pruned() -> None:
    """Of further changes that were deleted for room a line tells the number alone, however often their end was named."""
    recording, chain = recorder(), further_chain("a" * 16)
    recording.name_further(chain, audit.ChainEnd(3, "3" * 64), now_ms=1, wall_ms=1)
    files = [(each.path, each.content) for each in files_of(recording)]
    missing = f"the end of chain {chain} that it names is missing"
    assert [each.problem for each in verified(files).problems] == [missing]
    recording.prune({chain: audit.PrunedChain(2, 4, "4" * 64)}, now_ms=2, wall_ms=2)
    files += [(each.path, each.content) for each in files_of(recording)]
    assert verified(files).is_whole
    recording.name_further(chain, audit.ChainEnd(6, "6" * 64), now_ms=2, wall_ms=2, force=True)
    files += [(each.path, each.content) for each in files_of(recording)]
    assert [each.problem for each in verified(files).problems] == [missing]


def test_what_the_next_coordinator_begins_names_the_end_of_further_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares(monkeypatch, bytes_max=1)
    for _ in range(2):
        log = AuditLog(str(tmp_path))
        log.note(STOP)
        log.note(STOP)
        log.close()
    assert [line.kind for line in read_audit(str(tmp_path))].count("request") == 4
    assert verify_audit(str(tmp_path)).is_whole
    named = max((line.heads for line in read_audit(str(tmp_path)) if line.kind == "started"), key=len)
    assert sorted(is_further_chain(chain) for chain in named) == [False, True]
    further = next(chain for chain in named if is_further_chain(chain))
    (tmp_path / audit_path(further, 0)).unlink()
    assert not verify_audit(str(tmp_path)).is_whole
    assert "further changes" in run("audit", "show", str(tmp_path))


def test_one_sender_does_not_take_all_places_while_storage_is_down(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path))
    (tmp_path / "_service").write_text("no folder")
    for _ in range(audit_logs.NOTED_MAX):
        log.note(msgspec.structs.replace(STOP, credential="token loud"))
    log.note(STOP)
    (tmp_path / "_service").unlink()
    log.close()
    found = Counter(line.credential for line in read_audit(str(tmp_path)) if line.request == "stop")
    assert found == {"token loud": audit_logs.NOTED_OF_ONE_MAX, "token ci": 1}


# ------------------------------------------------------------------------------------------------------------ verifier


def test_every_single_change_is_found() -> None:
    (path, content) = chain_of(4)[0]
    lines = content.splitlines(keepends=True)
    for index in range(len(lines)):
        if index < len(lines) - 1:
            assert not verified([(path, b"".join(lines[:index] + lines[index + 1 :]))]).is_whole, "taken out"
        assert not verified([(path, b"".join(lines[: index + 1] + lines[index:]))]).is_whole, "twice"
    for at in range(len(content) - len(lines[-1])):
        changed = bytearray(content)
        changed[at] ^= 1
        assert not verified([(path, bytes(changed))]).is_whole, f"byte {at}"


def test_a_missing_file_and_one_cut_off_are_found() -> None:
    files = chain_of(2, files=3)
    assert verified(files).is_whole
    report = verified([files[0], files[2]])
    assert report.problems[0].problem == "file 1 of chain a1 is missing"
    path, content = files[2]
    assert "cut off" in verified([*files[:2], (path, content[:-3])]).problems[0].problem


def test_an_end_that_was_cut_off_is_missed_by_a_later_chain() -> None:
    older = chain_of(2, files=2)
    verifier = AuditVerifier()
    for path, content in older:
        list(verifier.add(path, content))
    newer = chain_of(1, name="b2", heads=verifier.heads)
    assert verified([*older, *newer]).is_whole
    report = verified([older[0], *newer])
    assert [each.problem for each in report.problems] == ["the end of chain a1 that it names is missing"]
    assert report.problems[0].path == newer[0][0]
    assert not verified(newer).is_whole


@pytest.mark.parametrize("content", [b"x\n", b"[]\n", b"\xff\n", b"{}\n", b"[" * 50_000 + b"\n"])
def test_lines_that_are_none_are_named(content: bytes) -> None:
    report = verified([(audit_path("a1", 0), content)])
    assert report.problems[0].problem.startswith("no line of an audit log")


def test_files_that_are_deleted_while_they_are_verified_are_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, first = open_storage(str(tmp_path)), audit_path("a1", 0)
    for path, content in chain_of(2, files=3):
        storage.execute(PutIfAbsent(path, content))

    def delete() -> None:
        verifier, pruning = AuditVerifier(), recorder("b2")
        list(verifier.add(first, (tmp_path / first).read_bytes()))
        pruning.prune({"a1": audit.PrunedChain(1, verifier.numbers["a1"], verifier.heads["a1"])}, now_ms=1, wall_ms=1)
        (ready,) = files_of(pruning)
        storage.execute(PutIfAbsent(ready.path, ready.content))
        (tmp_path / first).unlink()

    class Deleting:
        """Has one file less behind the first listing of its files."""

        def __init__(self, location: str) -> None:
            assert location == str(tmp_path)

        def execute(self, operation: Any) -> Any:
            found = storage.execute(operation)
            if isinstance(operation, ListFiles) and (tmp_path / first).exists():
                delete()
            return found

    monkeypatch.setattr(audit_logs, "open_storage", Deleting)
    report = verify_audit(str(tmp_path))
    assert (report.problems, report.files) == ((), 3)
    (tmp_path / audit_path("a1", 1)).unlink()
    assert not verify_audit(str(tmp_path)).is_whole


def test_paths() -> None:
    assert parse_audit_path(audit_path("a1", 12)) == ("a1", 12)
    assert is_directory_file(audit_path("a1", 12))
    for other in (f"{AUDIT_FOLDER}/x.jsonl", f"{AUDIT_FOLDER}/a1-1.jsonl.tmp", f"other/{AUDIT_FOLDER}/a1-1.jsonl"):
        assert parse_audit_path(other) == ("", -1)
    assert in_order([audit_path("b", 0), audit_path("a", 10), audit_path("a", 9), "x"]) == [
        audit_path("a", 9),
        audit_path("a", 10),
        audit_path("b", 0),
    ]


# ------------------------------------------------------------------------------------------------------- over HTTP


def test_changes_and_refusals_of_a_service_are_on_record(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        served.json("POST", f"/v1/jobs/{JOB}/stop", {}, status=202)
        served.json("POST", "/v1/tokens", {"role": "viewer", "name": "grafana"}, status=201)
        served.request("GET", "/v1/jobs", token="a-wrong-token-here")
        served.request("GET", f"/v1/jobs/{JOB}/labels", token="a-wrong-token-here")
        served.request("POST", f"/flink/applications/{JOB}", {}, token="a-wrong-token-here")
        served.request("GET", f"/v1/jobs/{JOB}x", token="a-wrong-token-here")
        served.json("GET", "/v1/jobs")
    lines = read_audit(str(tmp_path))
    assert [(line.kind, line.request, line.status, line.role) for line in lines] == [
        ("started", "", 0, ""),
        ("request", "stop", 202, "admin"),
        ("request", "issue a token", 201, "admin"),
        ("refused", "GET /v1/jobs", 401, ""),
        ("refused", f"GET /v1/jobs/{JOB}/labels", 401, ""),
        ("refused", f"POST /flink/applications/{JOB}", 401, ""),
        ("refused", f"GET /v1/jobs/{JOB}x", 401, ""),
    ]
    assert [line.job for line in lines] == ["", JOB, "", "", JOB, JOB, ""]
    assert "of role viewer" in lines[2].subject
    content = b"".join(path.read_bytes() for path in (tmp_path / AUDIT_FOLDER).iterdir())
    for secret in (TOKEN, "a-wrong-token-here", "hft_"):
        assert secret.encode() not in content
    assert verify_audit(str(tmp_path)).is_whole


def test_changes_have_names_and_labels_are_told(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        served.request("PUT", f"/v1/jobs/{JOB}/labels/good", {"checkpoint": 41})
        served.request("DELETE", f"/v1/jobs/{JOB}/labels/good")
        served.request("POST", f"/v1/jobs/{JOB}/drills", {})
    found = [(line.request, line.subject, line.job) for line in read_audit(str(tmp_path)) if line.kind == "request"]
    assert found == [("label", "good", JOB), ("remove a label", "good", JOB), ("drill", "", JOB)]


def test_of_a_token_in_a_path_the_log_has_the_id_alone(tmp_path: Path) -> None:
    """Who revokes a token may give it in place of its id, and copies of the log go elsewhere."""
    token = f"hft_{'4a' * 8}_a-Secret_of-43"
    with serving(FakeCoordinator(), tmp_path) as served:
        served.request("DELETE", f"/v1/tokens/{token}", token="a-wrong-token-here")
        served.request("POST", f"/v1/tokenz/{token}", {})
    found = [line.request for line in read_audit(str(tmp_path)) if line.kind in ("refused", "request")]
    hidden = f"hft_{'4a' * 8}_***"
    assert sorted(found) == [f"DELETE /v1/tokens/{hidden}", f"POST /v1/tokenz/{hidden}"]


def test_a_service_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        served.json("GET", "/v1/jobs")
    assert not (tmp_path / AUDIT_FOLDER).exists()


def test_chains_of_successive_services_name_each_other(tmp_path: Path) -> None:
    for _ in range(3):
        with serving(FakeCoordinator(), tmp_path) as served:
            served.json("POST", f"/v1/jobs/{JOB}/stop", {}, status=202)
    report = verify_audit(str(tmp_path))
    assert (report.chains, report.is_whole) == (3, True)
    heads = [line.heads for line in read_audit(str(tmp_path)) if line.kind == "started"]
    assert [len(each) for each in heads] == [0, 1, 2]
    first = next(iter(heads[1]))
    (tmp_path / audit_path(first, 0)).unlink()
    assert not verify_audit(str(tmp_path)).is_whole


def test_a_storage_that_fails_holds_no_request_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(str(tmp_path))
    (tmp_path / "_service").write_text("no folder")
    for _ in range(10):
        log.note(STOP)
    log.close()
    assert caplog.text.count("the audit log can't be written") == 1


def test_logins_beyond_their_bound_are_a_stranger_s_and_no_changes(tmp_path: Path) -> None:
    """Each was a line among changes, of which one address may fill half a MiB a day, and any number of addresses all of it."""
    with serving(FakeCoordinator(), tmp_path) as service:
        answers = Counter(service.request("POST", "/ui/login", {"token": "x" * 40}).status for _ in range(40))
        assert answers[401] >= 10
        assert answers[429] >= 10
    lines = [line for line in read_audit(str(tmp_path)) if line.request]
    assert {line.kind for line in lines} == {"refused"}
    assert len(lines) <= audit.REFUSALS_PER_SENDER_MAX


def test_refusals_take_no_change_s_place_while_storage_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_logs, "_wall_ms", lambda: 5_000)
    kept = audit.REFUSALS_PER_SENDER_MAX
    log = AuditLog(str(tmp_path))
    (tmp_path / "_service").write_text("no folder")
    for _ in range(audit_logs.NOTED_MAX + audit.REFUSALS_MAX):
        log.note(REFUSED)
    for number in range(audit_logs.NOTED_MAX):
        log.note(msgspec.structs.replace(STOP, credential=f"token {number % 2}"))
    monkeypatch.setattr(audit_logs, "_wall_ms", lambda: 9_000_000)
    (tmp_path / "_service").unlink()
    log.close()
    lines = read_audit(str(tmp_path))
    assert [line.time_ms for line in lines if line.request == "stop"] == [5_000] * (audit_logs.NOTED_MAX - kept)
    assert sum(line.kind == "refused" for line in lines) == kept
    assert {line.count for line in lines if line.kind == "dropped"} == {kept}


def test_an_unexpected_failure_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, failed = open_storage, threading.Event()

    def fail_once(location: str) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError("out of descriptors")
        return opened(location)

    monkeypatch.setattr(audit_logs, "open_storage", fail_once)
    monkeypatch.setattr(audit_logs, "WRITE_EVERY_MS", 1)
    log = AuditLog(str(tmp_path))
    log.note(STOP)
    assert failed.wait(10)
    log.close()
    assert [line.request for line in read_audit(str(tmp_path))] == ["", "stop"]


def test_a_change_that_a_foreign_page_asks_for_is_on_record(tmp_path: Path) -> None:
    password = base64.b64encode(f"any:{TOKEN}".encode()).decode()
    with serving(FakeCoordinator(), tmp_path) as served:
        headers = {"Authorization": f"Basic {password}", "Origin": "http://elsewhere"}
        assert served.http.request("POST", f"{served.url}/v1/jobs/{JOB}/stop", headers=headers).status == 403
    assert [(line.kind, line.status) for line in read_audit(str(tmp_path))] == [("started", 0), ("refused", 403)]


# ------------------------------------------------------------------------------------------------------ command line


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def test_commands(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as running:
        running.json("POST", f"/v1/jobs/{JOB}/stop", {}, status=202)
    shown = run("audit", "show", str(tmp_path)).splitlines()
    assert "a coordinator began" in shown[1]
    assert f"stop {JOB}" in " ".join(shown[2].split())
    assert run("audit", "verify", str(tmp_path)) == "whole: 2 lines in 1 files of 1 chains\n"
    (path,) = (tmp_path / AUDIT_FOLDER).iterdir()
    path.write_bytes(path.read_bytes().replace(b'"stop"', b'"look"'))
    assert verify_audit(str(tmp_path)).is_whole, "the newest line: nothing follows it yet"
    path.write_bytes(path.read_bytes().replace(b'"started"', b'"begun"'))
    found: dict[str, Any] = json.loads(run("audit", "verify", str(tmp_path), "--json", code=1))
    assert found["problems"][0]["line"] == 2
    assert msgspec.json.encode(found)


@pytest.mark.parametrize("command", ["verify", "show"])
@pytest.mark.parametrize("place", ["nothing", "file", "folder"])
def test_a_place_that_is_no_state_directory_is_refused(tmp_path: Path, command: str, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "reports").mkdir(parents=True)
    result = CliRunner().invoke(app, ["audit", command, str(tmp_path / place)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path / place} is no state directory" in result.stderr
    assert result.stderr.endswith("[InvalidConfigError]\n")


def test_a_directory_that_never_recorded_anything_gets_no_good_verdict(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        served.json("GET", "/v1/jobs")
    (tmp_path / DIRECTORY_FILE).write_text("nonce")
    assert run("audit", "verify", str(tmp_path), code=3).startswith("empty: there is no audit log")
    assert json.loads(run("audit", "verify", str(tmp_path), "--json", code=3))["verdict"] == "empty"
    assert run("audit", "show", str(tmp_path)) == "no audit log\n"


def test_a_log_that_was_taken_out_whole_is_missed(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        served.json("POST", "/v1/tokens", {"role": "viewer"}, status=201)
    assert run("audit", "verify", str(tmp_path)).startswith("whole: 2 lines")
    shutil.rmtree(tmp_path / AUDIT_FOLDER)
    told = "missing: there is no audit log, but 1 issued token, which it would tell of\n"
    assert run("audit", "verify", str(tmp_path), code=1) == told
    (tmp_path / JOB / "leader").mkdir(parents=True)
    (tmp_path / JOB / "leader" / "1").touch()
    assert json.loads(run("audit", "verify", str(tmp_path), "--json", code=1))["untold"] == ["1 job", "1 issued token"]


def test_a_copy_of_the_log_alone_is_verified(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path / "state") as served:
        served.json("POST", f"/v1/jobs/{JOB}/stop", {}, status=202)
    shutil.copytree(tmp_path / "state" / AUDIT_FOLDER, tmp_path / "copy" / AUDIT_FOLDER)
    assert run("audit", "verify", str(tmp_path / "copy")).startswith("whole: 2 lines")


def test_the_directory_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        served.json("POST", f"/v1/jobs/{JOB}/stop", {}, status=202)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path))
    assert run("audit", "verify").startswith("whole: 2 lines")
    assert f"stop {JOB}" in " ".join(run("audit", "show").split())


# ------------------------------------------------------------------------------------------------------- pages of REST


def test_pages_of_the_log_have_every_line_once_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(str(tmp_path))
    for path, content in chain_of(4, files=3) + chain_of(2, name="b2"):
        storage.execute(PutIfAbsent(path, content))
    whole = Counter((line.kind, line.number, line.before) for line in read_audit(str(tmp_path)))
    for files_max, limit in ((100, 100), (100, 3), (1, 2)):
        monkeypatch.setattr(audit_logs, "PAGE_FILES_MAX", files_max)
        found: list[AuditLine] = []
        after = ""
        while True:
            page = audit_logs.read_audit_page(str(tmp_path), after, limit)
            assert len(page.lines) <= limit
            found += page.lines
            if not (after := page.next):
                break
        assert len(found) == 16
        assert Counter((line.kind, line.number, line.before) for line in found) == whole
    assert found[-1].number == 0
    with pytest.raises(InvalidConfigError, match="position"):
        audit_logs.read_audit_page(str(tmp_path), "x.y", 5)


def test_the_log_by_rest_is_for_administrators(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as served:
        viewer = served.json("POST", "/v1/tokens", {"role": "operator"}, status=201)["token"]
        assert served.http.request("GET", f"{served.url}/v1/audit", headers={"Authorization": f"Bearer {viewer}"}).status == 403
        until = time.monotonic() + 10
        while len(lines := served.json("GET", "/v1/audit?limit=2")["lines"]) < 2 or lines[0]["kind"] != "refused":
            assert time.monotonic() < until, lines
        assert [(line["kind"], line["status"], line["request"]) for line in lines] == [
            ("refused", 403, "GET /v1/audit"),
            ("request", 201, lines[1]["request"]),
        ]
        assert viewer not in str(lines)
        assert served.json("GET", "/v1/audit?after=nonsense", status=400)["errors"]


# ------------------------------------------------------------------------------------------------- refusals, again and again


def test_a_stranger_who_is_refused_for_hours_costs_two_lines_a_minute() -> None:
    """And one file in ten seconds at most, where it was one a second."""
    recording, files = recorder(), []
    for second in range(3_600):
        for port in range(20):
            recording.note(msgspec.structs.replace(REFUSED, peer=f"10.0.0.8:{port}"), now_ms=second * 1_000, wall_ms=second)
        if (ready := recording.take(now_ms=second * 1_000, wall_ms=second)) is not None:
            files.append(ready)
            recording.written()
    files += files_of(recording)
    lines = [json.loads(line) for ready in files for line in ready.content.splitlines()]
    assert len(lines) <= 1 + audit.REFUSALS_PER_SENDER_MAX + 2 * 60
    assert len(files) <= 2 * 60 + 2
    counted = [line for line in lines if line["kind"] == "dropped"]
    assert {(line["subject"], line["peer"]) for line in counted} == {(audit.REPEATED, "10.0.0.8")}
    assert sum(line["count"] for line in counted) + sum(line["kind"] == "refused" for line in lines) == 20 * 3_600
    assert verified([(each.path, each.content) for each in files]).is_whole


def test_refusals_for_weeks_push_no_change_out_of_the_log() -> None:
    """A stranger with one refusal in ten seconds: within every other bound, and 8,640 files a day, of 20,000 that are kept."""
    recording, files, days = recorder(), 0, 2
    for now_ms in range(0, days * audit.DAY_MS, 10_000):
        recording.note(REFUSED, now_ms=now_ms, wall_ms=now_ms)
        while recording.take(now_ms=now_ms + 1, wall_ms=now_ms + 1) is not None:
            files += 1
            recording.written()
    recording.note(STOP, now_ms=days * audit.DAY_MS, wall_ms=0)
    assert recording.take(now_ms=days * audit.DAY_MS + audit.WRITE_EVERY_MS, wall_ms=0) is not None
    assert files <= days * (audit.REFUSALS_FILES_A_DAY + 24 + 1)
    assert audit.KEPT_FILES_MAX * audit.PRUNED_SHARE / (files / days) > 90  # days


def test_refusals_beyond_a_day_s_bytes_are_counted_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "REFUSALS_BYTES_A_DAY", 20_000)
    recording, files = recorder(), []
    for second in range(6 * 3_600):
        for sender in range(3):
            odd = msgspec.structs.replace(REFUSED, request="GET /" + "\x01" * 600, peer=f"10.0.{second % 200}.{sender}:1")
            recording.note(odd, now_ms=second * 1_000, wall_ms=second)
        if (ready := recording.take(now_ms=second * 1_000, wall_ms=second)) is not None:
            files.append(ready)
            recording.written()
    files += files_of(recording)
    lines = [json.loads(line) for ready in files for line in ready.content.splitlines()]
    assert sum(len(ready.content) for ready in files) <= 20_000 + 4_000 + 7 * 22 * 300
    assert sum(line["kind"] == "refused" for line in lines) + sum(line.get("count", 0) for line in lines) == 3 * 6 * 3_600
    assert verified([(each.path, each.content) for each in files]).is_whole


def test_a_change_does_not_wait_as_long_as_refusals() -> None:
    recording = recorder()
    files_of(recording, 0)
    recording.note(REFUSED, now_ms=0, wall_ms=0)
    assert recording.take(now_ms=audit.REFUSALS_WRITE_EVERY_MS - 1, wall_ms=0) is None
    recording.note(STOP, now_ms=5_000, wall_ms=0)
    assert recording.take(now_ms=5_000 + audit.WRITE_EVERY_MS, wall_ms=0) is not None


# ---------------------------------------------------------------------------------------------------------- retention


class Pruned:
    """A directory with logs of two coordinators that have ended, and the log of one that finds them too large."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.storage = open_storage(str(folder))
        older = chain_of(4, files=6, name="a1")
        verifier = AuditVerifier()
        for path, content in older[:2]:
            list(verifier.add(path, content))
        first = dict(verifier.heads)  # an end of a1 that another chain names while a1 goes on
        newer = chain_of(4, files=3, name="b2", heads=first)
        for index, (path, content) in enumerate([*older, *newer]):
            self.storage.execute(PutIfAbsent(path, content))
            os.utime(folder / path, (1_000 + index, 1_000 + index))
        monkeypatch.setattr(audit, "KEPT_FILES_MAX", 8)
        monkeypatch.setattr(audit, "PRUNED_SHARE", 0.75)
        monkeypatch.setattr(audit_logs, "WRITE_EVERY_MS", 1)

    def run(self) -> None:
        """A coordinator records something, looks at the log, and ends."""
        found = AuditLog(str(self.folder))
        found.note(STOP)
        until = time.monotonic() + 10
        while found._looked_s < 0 and time.monotonic() < until:
            threading.Event().wait(0.01)
        found.close()

    def paths(self) -> list[str]:
        found: list[str] = self.storage.execute(ListFiles(AUDIT_FOLDER))
        return in_order(found)


@pytest.fixture
def pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pruned:
    return Pruned(tmp_path, monkeypatch)


def test_a_log_that_is_too_large_loses_its_oldest_files_and_stays_whole(pruned: Pruned) -> None:
    before = verify_audit(str(pruned.folder))
    pruned.run()
    left = pruned.paths()
    assert audit_path("a1", 0) not in left
    assert {audit_path("a1", 5), audit_path("b2", 0)} <= set(left)
    report = verify_audit(str(pruned.folder))
    assert report.problems == ()
    assert report.pruned > 0
    assert report.lines + report.pruned == before.lines + 3, "what began, what was noted, and what was deleted"
    (line,) = [each for each in read_audit(str(pruned.folder)) if each.kind == "pruned"]
    assert set(line.pruned) == {"a1"}
    shown = run("audit", "verify", str(pruned.folder))
    assert f"{report.pruned} older lines were deleted to make room" in shown


def test_a_log_is_deleted_from_again_and_again(pruned: Pruned) -> None:
    for _ in range(20):
        pruned.run()
        assert verify_audit(str(pruned.folder)).problems == ()
    assert len(pruned.paths()) <= 10
    assert not [path for path in pruned.paths() if parse_audit_path(path)[0] in ("a1", "b2")]


def test_a_beginning_that_somebody_else_took_out_is_found(pruned: Pruned) -> None:
    pruned.run()
    (pruned.folder / audit_path("b2", 0)).unlink()
    report = verify_audit(str(pruned.folder))
    assert [each.problem for each in report.problems] == ["file 0 of chain b2 is missing"]


def test_more_than_was_deleted_is_found_and_so_is_a_changed_beginning(pruned: Pruned) -> None:
    pruned.run()
    first = next(path for path in pruned.paths() if parse_audit_path(path)[0] == "a1")
    content = (pruned.folder / first).read_bytes()
    (pruned.folder / first).unlink()
    assert [each.problem for each in verify_audit(str(pruned.folder)).problems] == ["file 0 of chain a1 is missing"]
    (pruned.folder / first).write_bytes(b"".join(content.splitlines(keepends=True)[1:]))
    problems = [each.problem for each in verify_audit(str(pruned.folder)).problems]
    assert problems == ["the beginning of chain a1 is not what was left when its oldest lines were deleted"]


def test_a_deletion_that_was_cut_off_leaves_a_whole_log(pruned: Pruned, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {path: (pruned.folder / path).read_bytes() for path in pruned.paths()}
    pruned.run()
    gone = [path for path in kept if path not in pruned.paths()]
    assert len(gone) > 1
    for path in reversed(gone):  # as if the process had died in front of each one
        (pruned.folder / path).write_bytes(kept[path])
        assert verify_audit(str(pruned.folder)).problems == (), path


def test_what_was_changed_is_not_deleted(pruned: Pruned) -> None:
    """It is evidence."""
    path = pruned.folder / audit_path("a1", 1)
    path.write_bytes(path.read_bytes().replace(b'"stop"', b'"look"', 1))
    found = verify_audit(str(pruned.folder)).problems
    pruned.run()
    assert set(found) <= set(verify_audit(str(pruned.folder)).problems)
    assert audit_path("a1", 0) in pruned.paths()


def test_a_beginning_that_somebody_took_out_is_not_deleted_from(pruned: Pruned) -> None:
    """Else a line of the log itself would tell of what was taken out."""
    (pruned.folder / audit_path("a1", 0)).unlink()
    found = verify_audit(str(pruned.folder)).problems
    assert [each.problem for each in found] == ["file 0 of chain a1 is missing"]
    for _ in range(6):
        pruned.run()
    assert set(found) <= set(verify_audit(str(pruned.folder)).problems)
    assert audit_path("a1", 1) in pruned.paths()


@pytest.mark.parametrize("damage", ["empty", "changed", "beginning"])
def test_evidence_holds_up_no_other_deletion(pruned: Pruned, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    monkeypatch.setattr(audit, "KEPT_FILES_MAX", 2)
    path = pruned.folder / audit_path("a1", 0 if damage == "beginning" else 1)
    if damage == "beginning":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes().replace(b'"stop"', b'"look"', 1))
    found = verify_audit(str(pruned.folder)).problems
    assert found
    pruned.run()
    left = pruned.paths()
    assert len([each for each in left if parse_audit_path(each)[0] == "a1"]) == (5 if damage == "beginning" else 6)
    assert len([each for each in left if parse_audit_path(each)[0] == "b2"]) < 3
    after = set(verify_audit(str(pruned.folder)).problems)
    assert {each for each in found if "a1" in each.path} <= after <= set(found)
    lines = [each for each in read_audit(str(pruned.folder)) if each.kind == "pruned"]
    assert [set(each.pruned) for each in lines] == [{"b2"}]
    pruned.run()
    assert len([each for each in read_audit(str(pruned.folder)) if each.kind == "pruned"]) <= 2


def test_the_end_that_the_first_line_which_is_left_names_is_looked_for() -> None:
    """A stopped process's last file is one line, which names the end of its further changes."""
    recording = recorder("c3")
    recording.note(STOP, now_ms=0, wall_ms=0)
    files = [(ready.path, ready.content) for ready in files_of(recording)]
    recording.name_further("c30f", audit.ChainEnd(5, "1" * 64), now_ms=10_000, wall_ms=3)
    last = [(ready.path, ready.content) for ready in files_of(recording)]
    deleted, pruning = AuditVerifier(), recorder("d4")
    for path, content in files:
        list(deleted.add(path, content))
    number = parse_audit_path(last[0][0])[1]
    pruning.prune(audit.mark_pruned({"c3": number}, deleted, {}, {"c3"}), now_ms=1, wall_ms=1)
    verifier = AuditVerifier()
    for path, content in [*last, *((ready.path, ready.content) for ready in files_of(pruning))]:
        list(verifier.add(path, content))
    assert [each.problem for each in verifier.report().problems] == ["the end of chain c30f that it names is missing"]


def test_what_was_noted_is_stored_at_once_where_somebody_waits_for_it(tmp_path: Path) -> None:
    log = AuditLog(str(tmp_path), prunes=False)
    log.note(STOP)
    assert log.store(10)
    assert [line.request for line in read_audit(str(tmp_path)) if line.request] == [STOP.request]
    log.close()
