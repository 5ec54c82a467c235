"""`/v1/jobs/:jobid/forget`: for administrators, one at a time, in a process of its own; the key is nowhere but in the request."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.api.access.audit_log import read_audit
from holdfast.api.client import RestClient, _forget_error
from holdfast.api.snapshots.forget_process import ForgetRequest
from holdfast.api.snapshots.forgettings import Forgetting, Forgettings
from holdfast.api.snapshots.live_erasure import LiveErasure
from holdfast.statebackends.errors import ForgetError, InvalidConfigError, NotFoundError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from tests.api.fakes import FakeCoordinator, Served, serving
from tests.api.test_forgetting import JOB, KEY, UID, files_with, make_job, values_of

PATH = f"/v1/jobs/{JOB}/forget"


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    make_job(tmp_path)
    with serving(FakeCoordinator(), tmp_path / "state", snapshot_dirs=(str(tmp_path / "savepoints"),)) as running:
        yield running


def body(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {"states": [{"operator": UID, "state": "*"}], "key": KEY, "to": str(tmp_path / "savepoints"), **changes}


def ended(served: Served) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def has_ended() -> bool:
        found[:] = served.json("GET", PATH)["forgettings"]
        return found[0]["state"] != "running"

    wait_until(has_ended, timeout_s=60)
    return found[0]


def test_a_key_is_forgotten_and_stands_in_no_answer_and_no_line(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = served.json("POST", PATH, body(tmp_path), status=202)
    assert (begun["state"], begun["certificate"]) == ("running", None)
    found = ended(served)
    assert (found["forget_id"], found["state"], found["error"]) == (begun["forget_id"], "complete", "")
    assert files_with(tmp_path, KEY) == []
    assert values_of(found["certificate"]["result"]) == {"UA": 2, "WN": 3}
    assert KEY not in json.dumps(found) + caplog.text
    wanted = ("forget a key", f"FORGET complete {found['certificate']['key_hash']}")

    def is_audited() -> bool:
        lines = [line.request for line in read_audit(str(tmp_path / "state")) if line.kind == "request"]
        return all(any(line.startswith(each) for line in lines) for each in wanted)

    wait_until(is_audited, timeout_s=30)  # the log is written behind


def test_the_empty_text_is_a_key_that_is_asked_for(served: Served, tmp_path: Path) -> None:
    served.json("POST", PATH, body(tmp_path, key="", empty_key=True), status=202)
    found = ended(served)
    assert (found["state"], found["certificate"]["erased_rows"]) == ("complete", {})


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        ([("nope", "*")], NotFoundError, "^the snapshot has no operator 'nope'; it has: totals$"),
        ([(UID, "rules")], InvalidConfigError, "is not keyed$"),
    ],
)
def test_the_client_raises_what_the_command_does(
    served: Served, tmp_path: Path, states: list[tuple[str, str]], error: type[Exception], message: str
) -> None:
    client = RestClient(served.url, served.token)
    with pytest.raises(error, match=message) as caught:
        client.forget(JOB, states, KEY, to=str(tmp_path / "savepoints"))
    assert type(caught.value) is error
    assert len(files_with(tmp_path, KEY)) > 3, "nothing was erased"


def test_what_is_no_error_of_ours_is_told_by_its_kind() -> None:
    for kind in ("ProcessDied", "TimeoutError", "annotations", "HoldfastErro"):
        error = _forget_error(kind, "it died", JOB)
        assert (type(error), error.message) == (ForgetError, f"{kind}: it died")


def test_what_a_process_says_no_to_is_told_by_name(served: Served, tmp_path: Path) -> None:
    (tmp_path / "state" / JobPaths(JOB).result(1)).unlink()
    served.json("POST", PATH, body(tmp_path), status=202)
    found = ended(served)
    assert (found["state"], found["error_kind"], found["certificate"]) == ("error", "JobExistsError", None)
    assert "has no recorded end" in found["error"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "/etc"}, "lies in none of the directories"),
        ({"to": ""}, "a stopped job needs a directory"),
        ({"to": "state"}, "is within the state directory"),
        ({"key": ""}, "key: it is empty; say `empty_key`"),
        ({"empty_key": True}, "key: there is one"),
        ({"key": [KEY]}, "key:"),
        ({"states": []}, "states:"),
        ({KEY: 1, "key": 1}, "key:"),
    ],
)
def test_bad_requests_begin_nothing(served: Served, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    answer = served.json("POST", PATH, body(tmp_path, **changes), status=400)
    assert message in answer["errors"][0]
    assert served.json("GET", PATH) == {"forgettings": []}
    assert len(files_with(tmp_path, KEY)) > 3, "nothing was erased"


class NeverErasing(LiveErasure):
    """Of a job that must not be asked for a checkpoint."""

    def __init__(self) -> None: ...

    def run(self) -> int:
        raise AssertionError("the job was asked for a checkpoint, behind which all older ones go")


@pytest.mark.parametrize(
    ("states", "kind", "message"),
    [
        ((("nope", "*"),), "NotFoundError", "the snapshot has no operator 'nope'; it has: totals"),
        (((UID, "rules"),), "InvalidConfigError", "is not keyed"),
    ],
)
def test_a_running_job_is_asked_for_no_checkpoint_by_mistake(
    tmp_path: Path, states: tuple[tuple[str, str], ...], kind: str, message: str
) -> None:
    (make_job(tmp_path) / JobPaths(JOB).result(1)).unlink()
    known = Forgettings()
    known.begin(ForgetRequest(str(tmp_path / "state"), JOB, states, KEY, "", False, 60), "f" * 32, 1, NeverErasing())
    wait_until(lambda: known.of(JOB)[0].state != "running", timeout_s=60)
    found = known.of(JOB)[0]
    assert (found.state, found.error_kind, message in found.error) == ("error", kind, True), found


# ------------------------------------------------------------------------------------------------ the process's shell

REQUEST = ForgetRequest("/state", JOB, ((UID, "*"),), KEY, "/saved", False, 1)


def told(code: str, **options: Any) -> tuple[Forgettings, Forgetting]:
    """What is told of a process that runs this code."""
    known = Forgettings(command=lambda: [sys.executable, "-c", code], **options)
    known.begin(REQUEST, "f" * 32, 1)
    wait_until(lambda: known.of(JOB)[0].state != "running", timeout_s=30)
    return known, known.of(JOB)[0]


@pytest.mark.parametrize(
    ("code", "options", "kind", "message"),
    [
        ("import os; os._exit(3)", {}, "ProcessDied", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", {}, "ProcessDied", "signal 9"),
        ("print('x')", {}, "ProcessDied", "without a word"),
        ("import time; time.sleep(60)", {"seconds_max": 0.2}, "TimeoutError", "took longer than 0.2 s"),
    ],
)
def test_a_process_that_dies_or_hangs_is_an_outcome(code: str, options: dict[str, Any], kind: str, message: str) -> None:
    _, found = told(code, **options)
    assert (found.state, found.error_kind, found.certificate) == ("error", kind, None)
    assert message in found.error


def test_one_at_a_time_and_none_behind_the_end() -> None:
    known = Forgettings(command=lambda: [sys.executable, "-c", "import time; time.sleep(60)"])
    known.begin(REQUEST, "1" * 32, 1)
    with pytest.raises(StorageUnavailableError, match="one at a time"):
        known.begin(msgspec.structs.replace(REQUEST, job_id="5" * 32), "2" * 32, 2)
    began = time.monotonic()
    known.close()
    wait_until(lambda: known.of(JOB)[0].state == "error", timeout_s=20)
    assert time.monotonic() - began < 20
    with pytest.raises(StorageUnavailableError):
        known.begin(REQUEST, "3" * 32, 3)
    assert [each.forget_id for each in known.of(JOB)] == ["1" * 32]


def test_twenty_are_remembered_and_the_key_in_none() -> None:
    known = Forgettings(command=lambda: ["/nothing/there"])
    for number in range(22):
        known.begin(REQUEST, f"{number:032x}", number)
        wait_until(lambda: known.of(JOB)[0].state == "error", timeout_s=20)
    assert [each.started_ms for each in known.of(JOB)] == list(range(21, 1, -1))
    assert KEY not in repr(known.of(JOB)) + repr(REQUEST)
