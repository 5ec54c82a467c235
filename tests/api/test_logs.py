"""The coordinator's log: what its lines look like, what can't get into them, and who asked for what."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import pytest

from holdfast.api.client import RestClient
from holdfast.api.errors import BusyError
from holdfast.api.logs import LOGGERS, tail, writing_log
from holdfast.api.server.main import EmbeddedCoordinator
from holdfast.api.settings import ServerSettings, server_settings
from holdfast.barriers.jobgraph import Submission
from holdfast.coordinator.dispatcher.job_log import MESSAGE_CHARACTERS_MAX, JobLog, about, printable
from holdfast.coordinator.notes import AttemptFailed, StateChanged
from holdfast.statebackends.errors import (
    HoldfastError,
    InvalidConfigError,
    NotFoundError,
    NotLeaderError,
    RecoveringError,
    StorageUnavailableError,
)
from tests.api.conftest import Served
from tests.api.fakes import JOB, TOKEN, FakeCoordinator, make_graph

FORGED = "flights\n2026-01-01T00:00:00.000Z INFO holdfast.coordinator.jobs: all is well\x1b[31m\r\u2028"




@pytest.mark.parametrize("style", ["text", "json"])
def test_a_users_text_can_not_begin_a_line(style: str) -> None:
    stream = io.StringIO()
    with writing_log("info", style, stream=stream, everything=False):
        logger = logging.getLogger("holdfast.coordinator.jobs")
        logger.info("job %s fails: %s", FORGED, FORGED, extra={"fields": {"job_name": FORGED}})
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()
    assert "\\n2026-01-01T00:00:00.000Z INFO" in stream.getvalue()


def test_a_traceback_can_not_either() -> None:
    stream = io.StringIO()
    with writing_log("info", "text", stream=stream, everything=False):
        try:
            raise ValueError(FORGED)
        except ValueError:
            logging.getLogger("holdfast.coordinator.service").exception("it failed")
    first, *others = stream.getvalue().splitlines()
    assert first.endswith("ERROR holdfast.coordinator.service: it failed")
    assert others
    assert all(line.startswith("  | ") for line in others)


def test_json_lines_carry_the_facts_by_name() -> None:
    stream = io.StringIO()
    with writing_log("info", "json", stream=stream, everything=False):
        fields = {"event": "state_changed", "state": "RUNNING", "checkpoint_id": 7, "level": "not this one"}
        logging.getLogger("holdfast.coordinator.jobs").warning("it runs", extra={"fields": fields})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "WARNING",
        "logger": "holdfast.coordinator.jobs",
        "message": "it runs",
        "event": "state_changed",
        "state": "RUNNING",
        "checkpoint_id": 7,
    }


@pytest.mark.parametrize("style", ["text", "json"])
def test_the_token_is_never_written(style: str) -> None:
    stream = io.StringIO()
    with writing_log("debug", style, stream=stream, secrets=(TOKEN,), everything=False):
        logger = logging.getLogger("holdfast.api")
        logger.debug("the header was %s", TOKEN, extra={"fields": {"header": f"Bearer {TOKEN}"}})
        try:
            raise ValueError(TOKEN)
        except ValueError:
            logger.exception("it failed")
    assert TOKEN not in stream.getvalue()
    assert "***" in stream.getvalue()


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("shown", [f"hft_{'4a' * 8}_", f"hfw_{JOB}_3_"])
def test_of_an_issued_token_no_more_than_its_id_is_written(style: str, shown: str) -> None:
    """A line about a request has its path, where people put the token itself in place of its id."""
    stream, token = io.StringIO(), f"{shown}a-Secret_of-43"
    with writing_log("info", style, stream=stream, everything=False):
        fields = {"path": f"/v1/tokenz/{token}", "each": [token]}
        logging.getLogger("holdfast.requests").info("DELETE /v1/tokenz/%s: 404", token, extra={"fields": fields})
        kept = tail.read()
    assert kept is not None
    for text in (stream.getvalue(), kept[0]):
        assert f"/v1/tokenz/{shown}***" in text
        assert "Secret" not in text


@pytest.mark.parametrize("style", ["text", "json"])
def test_of_a_long_traceback_the_end_is_written(style: str) -> None:
    stream = io.StringIO()
    with writing_log("info", style, stream=stream, everything=False):
        try:
            try:
                raise ValueError("x" * 100_000)
            except ValueError as error:
                raise RuntimeError("what it came to") from error
        except RuntimeError:
            logging.getLogger("holdfast.coordinator.service").exception("it failed")
    assert "RuntimeError: what it came to" in stream.getvalue()
    assert len(stream.getvalue()) < 12 * MESSAGE_CHARACTERS_MAX


def test_the_token_is_not_in_what_is_no_text_either() -> None:
    stream, token = io.StringIO(), 'a"token\\of some length'
    fields = {"each": [token, {"of": token}], "path": Path(token), "error": ValueError(token)}
    with writing_log("info", "json", stream=stream, secrets=(token,), everything=False):
        logging.getLogger("holdfast.api").info("it failed", extra={"fields": fields})
    line = json.loads(stream.getvalue())
    assert (line["each"], line["path"], line["error"]) == (["***", {"of": "***"}], "***", "***")


def test_long_texts_are_clipped() -> None:
    stream = io.StringIO()
    with writing_log("info", "json", stream=stream, everything=False):
        logging.getLogger("holdfast.api").info("x" * 1_000_000, extra={"fields": {"error": "y" * 1_000_000}})
    assert len(stream.getvalue()) < 3 * MESSAGE_CHARACTERS_MAX
    assert printable("ab\0c" + "d" * 100, 20) == "ab\\x00c... (clipped)"


@pytest.mark.parametrize("text", [FORGED, FORGED * 100, "x" * 5_000, "\0" * 1_000, "\\n", ""])
def test_a_text_that_is_fit_for_a_line_stays_as_it_is(text: str) -> None:
    once = printable(text)
    assert once.isprintable()
    assert len(once) <= MESSAGE_CHARACTERS_MAX
    assert printable(once) == once


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_path_can_not_begin_a_line_of_somebody_elses_handler(
    served: Served, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """What ends a line or controls a terminal is no path of ours at all; what is none, but looks like a line, stays on its own."""
    caplog.set_level(logging.INFO)
    assert served.request(method, "/v1/nothing%0A2026-01-01%20INFO%20root:%20forged%1b[31m").status == 404
    assert [record for record in caplog.records if record.name == "holdfast.requests"] == []
    assert served.request(method, "/v1/nothing%E2%80%A82026-01-01%20INFO%20root:%20forged").status == 404
    told = [record for record in caplog.records if record.name.startswith("holdfast")]
    assert len([record for record in told if record.name == "holdfast.requests"]) == 1
    for record in told:
        assert record.getMessage().isprintable()
        assert all(value.isprintable() for value in record.__dict__["fields"].values() if isinstance(value, str))


def test_the_level_counts_and_everything_is_as_it_was_afterwards() -> None:
    before = [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in LOGGERS]
    stream = io.StringIO()
    with writing_log("warning", "text", stream=stream, everything=False):
        logging.getLogger("holdfast.coordinator.jobs").info("not this")
        logging.getLogger("holdfast.coordinator.jobs").warning("this")
    assert [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()] == ["this"]
    assert [(logging.getLogger(name).level, logging.getLogger(name).handlers[:]) for name in LOGGERS] == before


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_two_coordinators_in_one_process_share_the_log(first_leaves_first: bool) -> None:
    def state() -> list[tuple[int, bool, list[logging.Handler]]]:
        return [(logger.level, logger.propagate, logger.handlers[:]) for logger in map(logging.getLogger, LOGGERS)]

    before, logger = state(), logging.getLogger("holdfast.coordinator.jobs")
    streams, tokens = (io.StringIO(), io.StringIO()), ("token-of-the-first", "token-of-the-second")
    first, second = (
        writing_log("info", "text", stream=stream, secrets=(token,), everything=False)
        for stream, token in zip(streams, tokens, strict=True)
    )
    first.__enter__()
    second.__enter__()
    logger.info("both of %s and %s", *tokens)
    (first if first_leaves_first else second).__exit__(None, None, None)
    logger.info("one")
    (second if first_leaves_first else first).__exit__(None, None, None)
    told = [line.rpartition(": ")[2] for stream in streams for line in stream.getvalue().splitlines()]
    assert told == ["both of *** and ***", "one"]
    assert state() == before


def test_settings_by_flag_and_environment(tmp_path: Path) -> None:
    environment = {"HOLDFAST_LOG_LEVEL": "DEBUG", "HOLDFAST_LOG_FORMAT": "json"}
    found = server_settings(environment, state_dir=tmp_path)
    assert (found.log_level, found.log_format) == ("debug", "json")
    found = server_settings(environment, state_dir=tmp_path, log_level="error", log_format="text")
    assert (found.log_level, found.log_format) == ("error", "text")
    for setting in ("log_level", "log_format"):
        with pytest.raises(InvalidConfigError, match=setting):
            server_settings({}, state_dir=tmp_path, **{setting: "loud"})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- requests


def lines_of(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str, str, int]]:
    found = []
    for record in caplog.records:
        if record.name == "holdfast.requests":
            fields = record.__dict__["fields"]
            names = ("request", "job_id", "subject", "credential", "status")
            found.append(tuple(fields[name] for name in names))
            assert fields["peer"].startswith("127.0.0.1:")
            assert TOKEN not in record.getMessage()
    return found


def test_each_changing_request_is_told_and_no_other(
    served: Served, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast.requests")
    client = RestClient(served.url, str(served.token))
    client.jobs()
    client.job(JOB)
    client.preflight(Submission(make_graph()))
    assert lines_of(caplog) == []
    client.submit(Submission(make_graph()))
    client.cancel(JOB)
    client._call("POST", f"/v1/jobs/{JOB}/checkpoints", b"{}")
    client._call("POST", f"/v1/jobs/{JOB}/savepoints", b'{"target-directory": "/tmp/x"}')
    client._call("POST", f"/jobs/{JOB}/stop", b'{"targetDirectory": "/tmp/x"}')
    assert lines_of(caplog) == [
        ("submit", "", "job flights", "token", 202),
        ("cancel", JOB, "", "token", 202),
        ("checkpoint", JOB, "", "token", 202),
        ("savepoint", JOB, "", "token", 202),
        ("stop", JOB, "", "token", 202),
    ]
    client.close()


def test_refused_requests_are_told_with_their_status(
    served: Served, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="holdfast.requests")
    client = RestClient(served.url, str(served.token))
    coordinator.error = NotFoundError("no such job", job=JOB)
    with pytest.raises(HoldfastError):
        client.cancel(JOB)
    assert lines_of(caplog) == [("cancel", JOB, "", "token", 404)]
    with pytest.raises(HoldfastError):
        client._call("POST", "/v1/savepoint-disposal", b'{"savepoint-path": "/somewhere/else"}')
    assert lines_of(caplog)[1:] == [("dispose of a savepoint", "", "/somewhere/else", "token", 400)]
    client.close()


@pytest.mark.parametrize("error", [RecoveringError("not yet"), NotLeaderError("not here"), BusyError("not now", size=1)])
def test_who_is_to_ask_again_writes_no_log(
    served: Served, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture, error: HoldfastError
) -> None:
    coordinator.error = error
    assert served.request("GET", f"/jobs/{JOB}").status == 503
    assert caplog.records == []
    coordinator.error = StorageUnavailableError("the disk is gone")
    assert served.request("GET", f"/jobs/{JOB}").status == 503
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ------------------------------------------------------------------------------------------------------------- embedded


def test_a_coordinator_in_a_driver_writes_its_log_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for level in (None, "info"):
        settings = server_settings({}, state_dir=tmp_path, port=0, log_level=level, log_format="json" if level else None)
        with EmbeddedCoordinator(settings) as coordinator:
            client = RestClient(coordinator.url, coordinator.token)
            client.submit(Submission(make_graph(f"job of {level}")))
            client.close()
            token = str(coordinator.token)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line.get("job_name") for line in lines if line.get("event") == "leadership_taken"} == {"job of None", "job of info"}
    assert [line["subject"] for line in lines if line.get("event") == "request"] == ["job job of info"]
    assert token not in json.dumps(lines)
    assert not any(logging.getLogger(name).handlers for name in LOGGERS)


def test_a_start_that_fails_leaves_no_handler(tmp_path: Path) -> None:
    settings = server_settings({}, state_dir=tmp_path, port=0, log_level="info")

    def broken(_settings: ServerSettings, _url: str) -> FakeCoordinator:
        raise StorageUnavailableError("the disk is gone", path="x")

    with pytest.raises(StorageUnavailableError):
        EmbeddedCoordinator(settings, open_service=broken).start()
    assert not any(logging.getLogger(name).handlers for name in LOGGERS)


def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has configured nothing, as most drivers; called in the test, since pytest adds its own before."""
    for name in (None, "holdfast", "holdfast.coordinator", "holdfast.coordinator.jobs", "holdfast.requests"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])


def test_an_embedded_coordinator_tells_a_driver_without_logging_of_jobs_that_have_no_handle_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leads all jobs of its state directory; a driver's handle keeps back what it tells of its own."""
    no_handlers(monkeypatch)
    jobs = logging.getLogger("holdfast.coordinator.jobs")
    with EmbeddedCoordinator(server_settings({}, state_dir=tmp_path, port=0)):
        JobLog("theirs", "theirs").write([StateChanged("FAILED", "RUNNING", "why")])
    assert "job theirs (theirs): FAILED, was RUNNING: why" in capsys.readouterr().err
    assert not jobs.filters


def test_each_request_has_an_id_in_its_answer_and_in_what_it_brings(served: Served, coordinator: FakeCoordinator) -> None:
    stream = io.StringIO()
    with writing_log("info", "json", stream=stream, everything=False):
        mine = served.request("POST", f"/v1/jobs/{JOB}/checkpoints", {}, headers={"X-Request-Id": "my-own.1"})
        other = served.request("POST", f"/v1/jobs/{JOB}/checkpoints", {}, headers={"X-Request-Id": 'no"t fit'})
        refused = served.http.request("GET", f"{served.url}/v1/jobs/overview")
        coordinator.error = ZeroDivisionError("planted")
        failed = served.request("GET", f"/v1/jobs/{JOB}")
    assert mine.headers["X-Request-Id"] == "my-own.1"
    ids = [answer.headers["X-Request-Id"] for answer in (mine, other, refused, failed)]
    assert len(set(ids)) == 4
    assert all(re.fullmatch(r"[0-9a-f]{16}", each) for each in ids[1:])
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    told = [line["request_id"] for line in lines if line.get("event") == "request"]
    assert told == ids[:2]
    assert [line["request_id"] for line in lines if "ZeroDivisionError" in line.get("traceback", "")] == [ids[3]]


def test_a_line_about_a_worker_names_it_as_rest_does() -> None:
    stream = io.StringIO()
    with writing_log("info", "json", stream=stream, everything=False):
        log = JobLog(JOB, "flights")
        log.write([AttemptFailed(3, "ValueError: no", 1, 0, "v", 2, slot=1), AttemptFailed(4, "gone", 2, None)])
        logging.getLogger("holdfast.coordinator.x").warning("it fails", extra=about(JOB))
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["job_id"], first["attempt"], first["worker"]) == (JOB, 3, f"{JOB}_slot-1")
    assert "worker" not in second
    assert third["job_id"] == JOB
