"""Viewers read no rows: not in the texts of errors either."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.api.access.quoted_rows import (
    QUOTES_NOTHING,
    WITHHELD,
    without_rows,
    without_rows_in_event,
    without_rows_in_json,
)
from holdfast.api.events.cloudevents import cloud_event
from holdfast.api.events.follower import Told
from holdfast.api.flink.render_checkpoints import failure_cause
from holdfast.barriers.messages import FailureReason
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.kept import describe_explanation, recall_explanation
from holdfast.coordinator.history.records import HistoryEntry
from holdfast.coordinator.views import JobView
from holdfast.operators.functions.selectors import _null_key
from holdfast.operators.task import user_failures
from holdfast.operators.task.user_failures import error_line, returned_none, shown, stack_trace, unsent_error, user_error
from holdfast.statebackends.errors import AsyncTimeoutError, InvalidRowError
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import stored_type
from tests.api.fakes import JOB, FakeCoordinator, Served, serving
from tests.api.test_access import issue
from tests.coordinator.explain.building import SINK, Built

BEGINNING = "UserFunctionError: operator 'big', subtask 0: f (job.py:19) raised ValueError: no such carrier"


class Poem:
    """A record whose repr has several lines."""

    def __repr__(self) -> str:
        return 'Poem("secret\none",\r\n"secret two")'


@dataclass
class Bid:
    """A record that is no dict."""

    card: str


CUT = f"UserFunctionError: operator 'big', subtask 0: f (job.py:19) raised ValueError: {WITHHELD}"
UNSENT = InvalidRowError("a row can't be sent to another process; record ('secret', <lock>)", reason="it can't be pickled")
TEXTS = {
    f"{BEGINNING}; key 39, record {{'id': 1, 'name': 'secret \"x\" \\\\n'}}": CUT,
    f"{BEGINNING}; record ('secret', 2) (the function in front of it returned None)": CUT,
    f"checkpoint 7 failed: {BEGINNING} secret": f"checkpoint 7 failed: {CUT}",
    "InvalidKeyError: operator 'op': key 'secret': str is not int64": f"InvalidKeyError: operator 'op': {WITHHELD}",
    "StateValueError: operator 'a', state 's': 'secret' (str) is not of the declared type": f"StateValueError: {WITHHELD}",
    "StorageUnavailableError: postgres says no DETAIL: Key (id)=(secret)": (
        f"StorageUnavailableError: postgres says no {WITHHELD}"
    ),
    "InvalidConfigError: state 's' can't be written; record Bid(card='secret')": (
        f"InvalidConfigError: state 's' can't be written; {WITHHELD}"
    ),
    error_line(unsent_error(UNSENT, operator="made", subtask=1, receiver="next", receiver_subtask=0)): (
        f"InvalidRowError: operator 'made', subtask 1: {WITHHELD}"
    ),
    "operator 'big', subtask 0: f (job.py:19) raised NoSuchCarrier: secret": (  # a class is known by where it stands, too
        f"operator 'big', subtask 0: f (job.py:19) raised NoSuchCarrier: {WITHHELD}"
    ),
    "operator 'big', subtask 0: f (job.py:19) raised error: secret": (
        f"operator 'big', subtask 0: f (job.py:19) raised error: {WITHHELD}"
    ),
    "the job has FAILED: NoSuchCarrier: secret; it keeps no checkpoint": f"the job has FAILED: NoSuchCarrier: {WITHHELD}",
    "the job has ended, FAILED: orders.NoSuchCarrier: secret": f"the job has ended, FAILED: orders.NoSuchCarrier: {WITHHELD}",
    "checkpoint 7 failed: NoSuchCarrier: secret": f"checkpoint 7 failed: NoSuchCarrier: {WITHHELD}",
    "the job failed over while it was pending: Boom: secret": f"the job failed over while it was pending: Boom: {WITHHELD}",
    "bbbb (0) declined: RowRefused: secret": f"bbbb (0) declined: RowRefused: {WITHHELD}",
    "a subtask declined it: bbbb (0) declined: RowRefused: secret": (
        f"a subtask declined it: bbbb (0) declined: RowRefused: {WITHHELD}"
    ),
    "the job has FAILED: WorkerLost: nothing was heard": "the job has FAILED: WorkerLost: nothing was heard",
    "checkpoint 7 failed after 82 ms: declined": "checkpoint 7 failed after 82 ms: declined",
    "psycopg.errors.UniqueViolation: duplicate secret": f"psycopg.errors.UniqueViolation: {WITHHELD}",
    "WorkerLost: nothing was heard from the worker in slot 1": "WorkerLost: nothing was heard from the worker in slot 1",
    "Source: bids -> Sink: secret": "Source: bids -> Sink: secret",
    "no key and no record is named; keyed state stays": "no key and no record is named; keyed state stays",
    "the record of the job, ended by UserFunctionError": "the record of the job, ended by UserFunctionError",
}


@pytest.mark.parametrize("text", list(TEXTS))
def test_the_class_and_the_place_are_told(text: str) -> None:
    assert without_rows(text, is_error=False) == TEXTS[text]
    for escaped in (True, False):
        body = json.dumps({"a": text, "b": [1, "told", {"c": None}]}, ensure_ascii=escaped).encode()
        assert json.loads(without_rows_in_json(body)) == {"a": TEXTS[text], "b": [1, "told", {"c": None}]}


def test_what_is_said_to_be_an_error_begins_with_its_class_whatever_that_is() -> None:
    fields = ("error", "failure_message", "last_failure", "reason")
    for field in fields:
        found = json.loads(without_rows_in_json(json.dumps({field: "Boom: secret", "name": "Boom: no secret"}).encode()))
        assert found == {field: f"Boom: {WITHHELD}", "name": "Boom: no secret"}
    assert json.loads(without_rows_in_json(b'{"errors":["Boom: secret"]}')) == {"errors": [f"Boom: {WITHHELD}"]}


def raised(record: object) -> list[Exception]:
    """Errors as those who raise them make them, each of which quotes a part of a record."""
    found: list[Exception] = []
    timed_out = {"operator": "op", "subtask": 0, "timeout_ms": 10, "record": shown(record)}
    nothing: dict[str, int] = {}
    calls: list[Callable[[], object]] = [
        lambda: _null_key("key_by column 'card'", record, "a filter", "op", 0),
        lambda: returned_none(operator="op", subtask=1, function=raised, record=record, wanted="a row"),
        lambda: AsyncTimeoutError.of(f"operator 'op', subtask 0: no answer; record {shown(record)}", timed_out),
        lambda: RuntimeError(f"no such card in {record!r}"),
        lambda: KeyType.of(int).encode("secret"),
        lambda: pa.array(["secret"]).cast(pa.int64()),
        lambda: stored_type("int").to_arrow(["secret"]),
        lambda: nothing["secret"],
    ]
    for call in calls:
        try:
            made = call()
            if isinstance(made, Exception):
                raise made
        except Exception as error:
            found.append(error)
    assert len(found) == len(calls)
    assert {type(each).__name__ for each in found} == {
        "ArrowInvalid", "AsyncTimeoutError", "InvalidKeyError", "KeyError", "RuntimeError", "StateValueError", "UserFunctionError",
    }  # fmt: skip
    return found


@pytest.mark.parametrize("record", [Poem(), {"secret": 'a"b\\'}, ["secret\n  File"], Bid("secret"), {"é": "secret \u2028"}])
def test_no_producer_of_errors_tells_a_viewer_a_record(record: object) -> None:
    for error in raised(record):
        located = user_error(error, operator="big", subtask=0, function=raised, record=record, key="'secret'")
        for each in (error, located):
            for text in (error_line(each), stack_trace(each)):
                found = without_rows(text)
                assert "secret" not in found, text
                assert type(each).__name__ in found
                (in_json,) = json.loads(without_rows_in_json(json.dumps([text]).encode()))
                assert "secret" not in in_json
                assert "secret" not in json.loads(without_rows_in_json(json.dumps({"stacktrace": text}).encode()))["stacktrace"]
        assert "in raised" in without_rows(stack_trace(located)), "frames stay"


@pytest.mark.parametrize("name", ["NoSuchCarrier", "error"])
def test_the_reason_why_a_row_was_skipped_is_told_without_it_whatever_the_class_is_called(name: str) -> None:
    error = type(name, (Exception,), {})("no such card as secret")
    located = user_error(error, operator="big", subtask=0, function=raised, record={"card": "secret"})
    told = json.loads(without_rows_in_json(json.dumps({"first_skipped": located.message}).encode()))["first_skipped"]
    assert "secret" not in told
    assert told.endswith(f"raised {name}: {WITHHELD}")


def test_what_quotes_nothing_is_not_copied() -> None:
    body = b'{"a":"key 1 and record 2","exceptionHistory":{"entries":[]}}'
    assert without_rows_in_json(body) is body


def test_events_are_told_without_records_and_what_is_no_json_is_not_told() -> None:
    event = b'id: 1\ndata: {"data":{"error":"' + BEGINNING.encode() + b'; record 1"}}\n\n'
    assert json.loads(without_rows_in_event(event).split(b"data: ")[1]) == {"data": {"error": CUT}}
    assert without_rows_in_event(event).startswith(b"id: 1\ndata: ")
    assert b"secret" not in without_rows_in_json(b'{"error":"ValueError: secret')


def test_every_class_that_quotes_nothing_is_one() -> None:
    known = {name for name in dir(hf) if name.endswith("Error")}
    assert QUOTES_NOTHING - {"WorkerLost", "PeerLostError"} <= known
    assert not QUOTES_NOTHING & {each.__name__ for each in user_failures._OF_ROWS}


def test_the_part_for_flinks_clients_quotes_nothing() -> None:
    found = failure_cause("UserFunctionError", f"{BEGINNING}; record {{'id': 'secret'}}")
    assert b"secret" not in base64.b64decode(found.serialized_throwable)
    assert "secret" in found.stack_trace


def test_a_kept_explanation_is_told_to_viewers_as_one_of_now_is_in_all_of_its_forms() -> None:
    it = Built(status="FAILED", reason=FailureReason.ASYNC_EXCEPTION, message=f"{BEGINNING}; key 39, record {{'id': 'secret'}}")
    it.missing(SINK, 1)
    then = replace(explain(it.made()), explained_ms=5)
    facts = describe_explanation(then)
    kept = recall_explanation(facts)
    assert kept is not None
    shown = msgspec.json.encode(explain(replace(it.made(), kept=kept)))
    entry = HistoryEntry(1, 7, 5, "explanation", facts)
    event = b"data: " + msgspec.json.encode(cloud_event(Told(JOB, "flights", entry)))
    for told in (without_rows_in_json(shown), without_rows_in_json(msgspec.json.encode(entry)), without_rows_in_event(event)):
        assert b"secret" not in told
        assert WITHHELD.encode() in told
        assert b"raised ValueError" in told
    assert b"secret" in shown


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
    texts = {role: answer.data.decode() for role, answer in told.items()}
    assert "secret" in texts["operator"]
    assert "secret" not in texts["viewer"]
    assert "raised ValueError" in texts["viewer"]
    assert WITHHELD in texts["viewer"]
    assert "job.py" in texts["viewer"]
    json.loads(texts["viewer"])
    assert "ETag" in told["operator"].headers
    assert "ETag" not in told["viewer"].headers
    assert service.request("GET", f"/v1/jobs/{JOB}/plan", token=issue(service, "viewer")["token"]).headers["ETag"]
