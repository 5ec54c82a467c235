"""Viewers read no rows: not in the texts of errors either."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.api.access.quoted_rows import WITHHELD, without_rows, without_rows_in_json
from holdfast.api.flink.render_checkpoints import failure_cause
from holdfast.coordinator.views import JobView
from holdfast.operators.task.user_failures import error_line, stack_trace, user_error
from tests.api.fakes import JOB, FakeCoordinator, Served, serving
from tests.api.test_access import issue

BEGINNING = "UserFunctionError: operator 'big', subtask 0: f (job.py:19) raised ValueError: no such carrier"


class Poem:
    """A record whose repr has several lines."""

    def __repr__(self) -> str:
        return 'Poem("secret\none",\r\n"secret two")'


TEXTS = {
    f"{BEGINNING}; key 39, record {{'id': 1, 'name': 'secret \"x\" \\\\n'}}": f"{BEGINNING}; {WITHHELD}",
    f"{BEGINNING}; record ('secret', 2) (the function in front of it returned None)": f"{BEGINNING}; {WITHHELD}",
    "InvalidKeyError: operator 'a': bidder is null in record {'secret': 1}. A key is never null": (
        f"InvalidKeyError: operator 'a': bidder is null in {WITHHELD}"
    ),
    "InvalidRowError: table t: column c of row {'c': 'secret'}: a null": f"InvalidRowError: table t: column c of {WITHHELD}",
    "no key and no record is named; keyed state stays": "no key and no record is named; keyed state stays",
    "the record of the job": "the record of the job",
}


@pytest.mark.parametrize("text", list(TEXTS))
def test_the_text_ends_in_front_of_the_record(text: str) -> None:
    assert without_rows(text) == TEXTS[text]
    for escaped in (True, False):
        body = json.dumps({"a": text, "b": [1, "told"]}, ensure_ascii=escaped).encode()
        assert json.loads(without_rows_in_json(body)) == {"a": TEXTS[text], "b": [1, "told"]}


@pytest.mark.parametrize("record", [Poem(), {"secret": 'a"b\\'}, ["secret\n  File"], "; record secret", {"é": "secret \u2028"}])
def test_frames_behind_a_record_of_several_lines_stay(record: object) -> None:
    try:
        raise ValueError("no such carrier")
    except ValueError as raised:
        error = user_error(raised, operator="big", subtask=0, function=without_rows, record=record, key="'secret'")
    for text, frames in ((error_line(error), ""), (stack_trace(error), "in test_frames_behind")):
        body = json.dumps([text]).encode()
        for found in (without_rows(text), *json.loads(without_rows_in_json(body))):
            assert "secret" not in found.replace("secret\\n  File", "")
            assert found.split("\n")[0].endswith(WITHHELD)
            assert frames in found


def test_what_quotes_nothing_is_not_copied() -> None:
    body = b'{"a":"key 1 and record 2"}'
    assert without_rows_in_json(body) is body


def test_the_part_for_flinks_clients_quotes_nothing() -> None:
    found = failure_cause("UserFunctionError", f"{BEGINNING}; record {{'id': 'secret'}}")
    assert b"secret" not in base64.b64decode(found.serialized_throwable)
    assert "secret" in found.stack_trace


class Failed(FakeCoordinator):
    """Its job has failed on a record."""

    def job(self, job_id: str) -> JobView:
        text = f"{BEGINNING}; key 39, record {{'id': 'secret'}}"
        found = super().job(job_id)
        failure = replace(found.exceptions[0], error=text, traceback=f"{text}\n  File \"job.py\", line 19, in f")
        return replace(found, exceptions=(failure,), failure=text)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    coordinator = Failed()
    coordinator.state = "FAILED"
    with serving(coordinator, tmp_path) as running:
        yield running


@pytest.mark.parametrize("path", [f"/v1/jobs/{JOB}/exceptions", f"/v1/views?path=/v1/jobs/{JOB}/exceptions"])
def test_who_may_read_rows_is_told_the_record(path: str, service: Served) -> None:
    told = {role: service.request("GET", path, token=issue(service, role)["token"]) for role in ("viewer", "operator")}
    shown = {role: answer.data.decode() for role, answer in told.items()}
    assert "secret" in shown["operator"]
    assert "secret" not in shown["viewer"]
    assert "no such carrier" in shown["viewer"]
    assert WITHHELD in shown["viewer"]
    assert "job.py" in shown["viewer"]
    json.loads(shown["viewer"])
    assert "ETag" in told["operator"].headers
    assert "ETag" not in told["viewer"].headers
    assert service.request("GET", f"/v1/jobs/{JOB}/plan", token=issue(service, "viewer")["token"]).headers["ETag"]
