"""SHELL: spans to an OpenTelemetry collector, by OTLP over HTTP. Configured by OpenTelemetry's own variables (`OTEL_...`).

Telemetry, and no more: what a collector does not take in time is dropped by the library, and nothing waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.api.events.spans import SCOPE, Span, SpanDeriver
from holdfast.api.version import VERSION
from holdfast.coordinator.history.feed import HistoryFeed
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.errors import InvalidConfigError, NotLeaderError, RecoveringError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = logging.getLogger("holdfast.traces")

IDLE_S = 1.0
BATCH_MAX = 500
STOP_TIMEOUT_S = 2.0
FLUSH_TIMEOUT_MS = 1_500


def check_installed() -> None:
    """Raise InvalidConfigError where OpenTelemetry is not installed."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        text = "traces need OpenTelemetry: pip install 'holdfast[otel]', or leave --traces out"
        raise InvalidConfigError(f"{text} ({error})", setting="traces") from error


def open_provider() -> TracerProvider:
    """Provider that sends to the collector of the environment; `service.name` is `holdfast` unless `OTEL_SERVICE_NAME` says else.
    Raises InvalidConfigError."""
    check_installed()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    own = Resource({"service.name": "holdfast", "service.version": VERSION})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Traces:
    """Follows the jobs that are led here, and sends a span for each checkpoint and each initialization."""

    def __init__(self, service: Coordinator, provider: TracerProvider | None) -> None:
        """`provider` None: nothing is sent."""
        self._service = service
        self._provider = provider
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._feed: HistoryFeed | None = None
        self._place = 0
        self._deriver = SpanDeriver()
        self._leave: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._run, name="holdfast-traces", daemon=True)

    def start(self) -> None:
        if self._provider is not None:
            self._thread.start()

    def close(self) -> None:
        """Send what waits, for STOP_TIMEOUT_S at most. Idempotent."""
        self._stopping.set()
        self._ready.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        assert self._provider is not None
        while not self._stopping.is_set():
            try:
                if not self._turn():
                    self._ready.wait(IDLE_S)
                    self._ready.clear()
            except (NotLeaderError, RecoveringError):
                self._stopping.wait(IDLE_S)
            except Exception:
                log.critical("a span could not be made", exc_info=True)
                self._stopping.wait(IDLE_S)
        self._leave()
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        threading.Thread(target=self._provider.shutdown, name="holdfast-traces-end", daemon=True).start()  # it may hang

    def _turn(self) -> bool:
        """Whether there was anything."""
        feed = self._service.feed
        if feed is not self._feed:
            self._leave()
            self._feed, self._place, self._deriver = feed, feed.start, SpanDeriver()
            self._leave = feed.listen(self._ready.set)
        page = feed.read(self._place, BATCH_MAX)
        self._place = page.next
        for record in page.records:
            span = self._deriver.take(record)
            if span is not None:
                self._send(span)
        return bool(page.records)

    def _send(self, span: Span) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode

        assert self._provider is not None
        tracer = self._provider.get_tracer(SCOPE, VERSION)
        sent = tracer.start_span(span.name, Context(), attributes=dict(span.attributes), start_time=span.start_ms * 1_000_000)
        if span.error:
            sent.set_status(Status(StatusCode.ERROR, span.error))
        sent.end(span.end_ms * 1_000_000)


def _nothing() -> None:
    pass
