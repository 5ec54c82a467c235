"""Spans of checkpoints and initializations: Flink's names, right times, and nothing without the extra."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.events import traces
from holdfast.api.events.spans import SCOPE, Span, SpanDeriver
from holdfast.api.settings import server_settings
from holdfast.coordinator.history.feed import FedRecord
from holdfast.coordinator.history.records import encode_line
from holdfast.statebackends.errors import InvalidConfigError
from tests.api.fakes import JOB, FakeCoordinator, serving
from tests.api.test_protocol import eventually

CHECKPOINT = {
    "id": 42,
    "checkpoint_kind": "checkpoint",
    "status": "COMPLETED",
    "triggered_ms": 5_000,
    "duration_ms": 74,
    "checkpointed_size": 10,
    "state_size": 100,
    "unaligned": True,
    "reason": "",
    "message": "",
}
RESTART = {"attempt": 3, "checkpoint_id": 42, "folder": "/x", "savepoint": False, "replayed": 12}


def spans(*records: tuple[int, str, dict[str, Any]]) -> list[Span]:
    deriver = SpanDeriver()
    found = [deriver.take(fed(number, at_ms, kind, facts)) for number, (at_ms, kind, facts) in enumerate(records, 1)]
    return [span for span in found if span is not None]


def fed(number: int, at_ms: int, kind: str, facts: dict[str, Any]) -> FedRecord:
    return FedRecord(JOB, "flights", 1, number, encode_line(number, at_ms, kind, facts))


def test_a_checkpoint() -> None:
    (span,) = spans((6_000, "checkpoint", CHECKPOINT))
    assert (span.name, span.start_ms, span.end_ms, span.error) == ("Checkpoint", 5_000, 5_074, "")
    assert span.attributes == {
        "jobId": JOB,
        "jobName": "flights",
        "startTs": 5_000,
        "endTs": 5_074,
        "checkpointId": 42,
        "checkpointedSize": 10,
        "fullSize": 100,
        "checkpointStatus": "COMPLETED",
        "checkpointType": "checkpoint",
        "isUnaligned": True,
    }


def test_a_failed_checkpoint_says_why() -> None:
    failed = {**CHECKPOINT, "status": "FAILED", "reason": "expired", "message": "after 10 s"}
    (span,) = spans((6_000, "checkpoint", failed))
    assert (span.attributes["checkpointStatus"], span.error) == ("FAILED", "expired: after 10 s")
    assert spans((6_000, "checkpoint", {"id": 1, "status": "FAILED", "reason": "x"})) == [], "it was never triggered"


def test_an_initialization_is_from_its_deployment_until_the_job_runs() -> None:
    *_, span = spans((6_000, "checkpoint", CHECKPOINT), (7_000, "restart", RESTART), (7_900, "initialized", {"attempt": 3}))
    assert (span.name, span.start_ms, span.end_ms, span.error) == ("JobInitialization", 7_000, 7_900, "")
    assert span.attributes == {
        "jobId": JOB,
        "jobName": "flights",
        "startTs": 7_000,
        "endTs": 7_900,
        "attempt": 3,
        "initializationStatus": "COMPLETED",
        "checkpointId": 42,
        "fullSize": 100,
        "replayedRecords": 12,
    }


def test_a_failed_initialization_and_what_is_none() -> None:
    (span,) = spans((7_000, "restart", {**RESTART, "checkpoint_id": 0}), (7_100, "failure", {"error": "ValueError: no"}))
    assert (span.attributes["initializationStatus"], span.error) == ("FAILED", "ValueError: no")
    assert not {"checkpointId", "fullSize"} & set(span.attributes)
    assert spans((7_000, "initialized", {"attempt": 3}), (8_000, "failure", {"error": "x"})) == []


def test_it_is_refused_by_name_where_the_extra_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidConfigError, match=r"holdfast\[otel\]"):
        traces.open_provider()
    with serving(FakeCoordinator(), tmp_path) as served:
        assert served.request("GET", "/v1/overview").status == 200, "without the flag nothing of it is loaded"


def test_the_setting(tmp_path: Path) -> None:
    assert server_settings({}, state_dir=tmp_path).traces == "off"
    assert server_settings({"HOLDFAST_TRACES": "OTLP"}, state_dir=tmp_path).traces == "otlp"
    with pytest.raises(InvalidConfigError, match="traces"):
        server_settings({}, state_dir=tmp_path, traces="jaeger")


def test_spans_reach_an_exporter() -> None:
    reason = "opentelemetry-sdk, of the extra `otel`, is not installed"
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=reason)
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason=reason)
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=reason).InMemorySpanExporter()
    provider = sdk.TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    service = FakeCoordinator()
    started = traces.Traces(service, provider)
    started.start()
    try:
        service.feed.publish(fed(1, 6_000, "checkpoint", CHECKPOINT))
        service.feed.publish(fed(2, 7_000, "restart", RESTART))
        service.feed.publish(fed(3, 7_100, "failure", {"error": "ValueError: no"}))
        eventually("both are sent", lambda: len(memory.get_finished_spans()) == 2)
    finally:
        started.close()
    checkpoint, failed = memory.get_finished_spans()
    assert (checkpoint.name, checkpoint.start_time, checkpoint.end_time) == ("Checkpoint", 5_000_000_000, 5_074_000_000)
    assert (checkpoint.parent, checkpoint.instrumentation_scope.name) == (None, SCOPE)
    assert checkpoint.attributes["checkpointedSize"] == 10
    assert (failed.name, failed.status.status_code.name) == ("JobInitialization", "ERROR")
    assert failed.status.description == "ValueError: no"
    assert checkpoint.context.trace_id != failed.context.trace_id


def test_a_provider_sends_by_otlp_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "opentelemetry-exporter-otlp-proto-http, of the extra `otel`, is not installed"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason=reason)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    provider = traces.open_provider()
    try:
        assert provider.resource.attributes["service.name"] == "mine"
        assert "holdfast" not in str(provider.resource.attributes["service.name"])
    finally:
        provider.shutdown()
