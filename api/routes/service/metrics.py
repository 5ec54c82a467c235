"""Prometheus metrics: the coordinator's counters at the moment of a scrape, and counts of HTTP requests. `docs/metrics.md` lists
them, written by `scripts/metrics_page.py` from what is here.

They have a registry of their own, so that an embedding driver's metrics don't mix with them. Counters of jobs restart with the
coordinator, as Prometheus expects."""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Iterable, Iterator

from msgspec import UNSET
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.events.stream import EventStreams
from holdfast.api.events.webhooks import Webhooks
from holdfast.api.http.connection_budget import CallerKind, CloseReason
from holdfast.api.http.protocol import ConnectionGuard
from holdfast.api.members.membership import Membership
from holdfast.api.version import VERSION
from holdfast.barriers.latency import BOUNDS_MS, LatencyHistogram, merge
from holdfast.barriers.messages import AckStatus, SubtaskMetrics
from holdfast.coordinator.interface import Coordinator
from holdfast.coordinator.totals import NOTHING, derive_job_totals
from holdfast.coordinator.views import CheckpointView, JobNumbersView

CONTENT_TYPE = CONTENT_TYPE_LATEST

JOBS_MAX = 1_000
"""Jobs in one scrape, at most, live ones first: labels by job must stay bounded."""

SUBTASKS_MAX = 10_000
"""Subtasks with gauges of their own in one scrape, at most."""

SPLITS_MAX = 1_000
"""Splits with gauges of their own in one scrape, at most."""

USER_COUNTERS_MAX = 10_000
"""Counters of users' functions in one scrape, at most."""

OPERATORS_MAX = 10_000
"""Operators with counters of their own in one scrape, at most."""

LATENCIES_MAX = 1_000
"""Pairs of a source and a vertex with a histogram of latencies in one scrape, at most."""

_LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


LEFT_OUT_KINDS = ("jobs", "subtasks", "splits", "operators", "user_counters", "latencies")
"""Values of the label `kind` of `holdfast_metrics_left_out`."""

_SAMPLES_OF_A_HISTOGRAM = len(BOUNDS_MS) + 3
"""Its buckets, that of infinity, count and sum."""

_MAY_SKIP = frozenset({"map", "filter", "flat_map", "timestamps"})
"""Kinds of operators with the option `on_error`."""
_MAY_BE_LATE = frozenset({"window", "row_window", "interval_join", "join", "temporal_join", "window_join", "cogroup"})
"""Kinds of operators that drop late records."""


class JobMetrics:
    """Metric families of jobs in one scrape, filled job by job."""

    def __init__(self) -> None:
        labels = ("job_id", "job_name")
        of_subtasks = (*labels, "vertex", "subtask")
        self._add_families_of_jobs(labels)
        self._add_families_of_operators(labels)
        self._add_families_of_time(of_subtasks)
        self._add_families_of_queues(of_subtasks)
        self._add_families_of_sources(of_subtasks)
        self._add_families_of_sinks(of_subtasks)
        self._add_families_of_splits((*of_subtasks, "split"))
        self._add_families_of_checkpoints(labels)
        self._add_families_of_drills(labels)
        self.left_out = GaugeMetricFamily(
            "holdfast_metrics_left_out",
            "What this scrape leaves out because of the bounds of its labels, by kind.",
            labels=("kind",),
        )
        self._left_out = dict.fromkeys(LEFT_OUT_KINDS, 0)

    def _add_families_of_jobs(self, labels: tuple[str, ...]) -> None:
        """Called once, as all of these."""
        self.state = GaugeMetricFamily("holdfast_job_state", "1 for the state that a job is in.", labels=(*labels, "state"))
        self.tasks = GaugeMetricFamily("holdfast_job_tasks", "Subtasks in each state.", labels=(*labels, "state"))
        self.slots = GaugeMetricFamily("holdfast_job_slots", "Slots that a job needs.", labels=labels)
        self.workers = GaugeMetricFamily("holdfast_job_workers", "Slots that a worker holds.", labels=labels)
        self.restarts = CounterMetricFamily("holdfast_job_restarts", "Failovers of a job.", labels=labels)
        self.attempt = GaugeMetricFamily("holdfast_job_attempt", "Number of the current attempt.", labels=labels)
        self.records_in = CounterMetricFamily("holdfast_job_source_records", "Records read by the sources.", labels=labels)
        self.records_out = CounterMetricFamily("holdfast_job_sink_records", "Records taken by the sinks.", labels=labels)
        self.frames_refused = CounterMetricFamily(
            "holdfast_job_frames_refused",
            "Frames that data ports dropped because their sender had no reason to send them.",
            labels=labels,
        )

    def _add_families_of_operators(self, labels: tuple[str, ...]) -> None:
        self.late = CounterMetricFamily(
            "holdfast_operator_late_records_dropped",
            "Records dropped as late by the operator.",
            labels=(*labels, "operator"),
        )
        self.skipped = CounterMetricFamily(
            "holdfast_operator_rows_skipped",
            'Rows that the operator left out because of on_error="skip".',
            labels=(*labels, "operator"),
        )
        self.user = CounterMetricFamily(
            "holdfast_user_counter",
            "Counters of the user's functions.",
            labels=(*labels, "operator", "counter"),
        )
        self.latency = HistogramMetricFamily(
            "holdfast_latency_seconds",
            "How long latency markers of a source were under way to a vertex.",
            labels=(*labels, "source", "vertex"),
        )

    def _add_families_of_time(self, of_subtasks: tuple[str, ...]) -> None:
        self.lag = GaugeMetricFamily(
            "holdfast_subtask_watermark_lag_seconds", "Wall clock less event time of the subtask.", labels=of_subtasks
        )
        self.time = GaugeMetricFamily(
            "holdfast_subtask_time_ratio",
            "Share of the subtask's last second by what it did: busy, idle or backpressured; they sum to 1.",
            labels=(*of_subtasks, "activity"),
        )

    def _add_families_of_queues(self, of_subtasks: tuple[str, ...]) -> None:
        self.queued_in = GaugeMetricFamily(
            "holdfast_subtask_input_queue_bytes", "Bytes received and not taken yet.", labels=of_subtasks
        )
        self.queued_out = GaugeMetricFamily(
            "holdfast_subtask_output_queue_bytes", "Bytes emitted and not sent yet.", labels=of_subtasks
        )
        self.allocated_in = GaugeMetricFamily(
            "holdfast_subtask_input_allocation_bytes", "Bytes that may be under way to the subtask.", labels=of_subtasks
        )
        self.overshoot_in = GaugeMetricFamily(
            "holdfast_subtask_input_overshoot_bytes", "Bytes held beyond the allocation.", labels=of_subtasks
        )
        self.to_consume = GaugeMetricFamily(
            "holdfast_subtask_time_to_consume_seconds", "Estimate for what is held of its slowest channel.", labels=of_subtasks
        )

    def _add_families_of_sources(self, of_subtasks: tuple[str, ...]) -> None:
        self.emit_lag = GaugeMetricFamily(
            "holdfast_source_emit_event_time_lag_seconds",
            "Wall clock less event time of the source's last record, when it was emitted.",
            labels=of_subtasks,
        )
        self.silence = GaugeMetricFamily("holdfast_source_idle_seconds", "Since the source's last record.", labels=of_subtasks)
        self.idle = GaugeMetricFamily(
            "holdfast_source_idle", "1 for a source that is idle and holds nobody's event time, else 0.", labels=of_subtasks
        )
        self.splits = GaugeMetricFamily("holdfast_source_splits", "Splits that the source's reader has.", labels=of_subtasks)
        self.pending_records = GaugeMetricFamily(
            "holdfast_source_pending_records", "Records that are known to wait in the reader's splits.", labels=of_subtasks
        )

    def _add_families_of_sinks(self, of_subtasks: tuple[str, ...]) -> None:
        self.uncommitted = GaugeMetricFamily(
            "holdfast_sink_uncommitted_checkpoints", "Complete checkpoints whose output is not committed yet.", labels=of_subtasks
        )
        self.uncommitted_rows = GaugeMetricFamily(
            "holdfast_sink_uncommitted_rows", "Staged rows of complete checkpoints that are not committed yet.", labels=of_subtasks
        )
        self.committables = GaugeMetricFamily(
            "holdfast_sink_pending_committables", "Things to commit of complete checkpoints, such as files.", labels=of_subtasks
        )
        self.commit_lag = GaugeMetricFamily(
            "holdfast_sink_commit_lag_seconds", "Since the oldest uncommitted checkpoint was complete.", labels=of_subtasks
        )

    def _add_families_of_splits(self, of_splits: tuple[str, ...]) -> None:
        self.split_lag = GaugeMetricFamily(
            "holdfast_split_watermark_lag_seconds", "Wall clock less event time of the split.", labels=of_splits
        )
        self.split_idle = GaugeMetricFamily(
            "holdfast_split_idle", "1 for a split that event time does not wait for, else 0.", labels=of_splits
        )
        self.split_pending = GaugeMetricFamily(
            "holdfast_split_pending_records", "Records that are known to wait in the split.", labels=of_splits
        )

    def _add_families_of_checkpoints(self, labels: tuple[str, ...]) -> None:
        self.checkpoints = CounterMetricFamily("holdfast_checkpoints", "Decided checkpoints.", labels=(*labels, "outcome"))
        self.pending = GaugeMetricFamily("holdfast_checkpoints_in_progress", "Checkpoints in progress.", labels=labels)
        self.last_id = GaugeMetricFamily("holdfast_last_checkpoint_id", "Id of the newest completed checkpoint.", labels=labels)
        self.last_duration = GaugeMetricFamily(
            "holdfast_last_checkpoint_duration_seconds", "From trigger to completion of the newest one.", labels=labels
        )
        self.last_size = GaugeMetricFamily(
            "holdfast_last_checkpoint_size_bytes", "Bytes that the newest completed checkpoint wrote.", labels=labels
        )
        self.last_full_size = GaugeMetricFamily(
            "holdfast_last_checkpoint_state_bytes", "Bytes of state in the newest completed checkpoint.", labels=labels
        )
        self.last_time = GaugeMetricFamily(
            "holdfast_last_checkpoint_timestamp_seconds",
            "When the newest one was complete, since 1970; of one that an earlier leader completed, when it was triggered.",
            labels=labels,
        )

    def _add_families_of_drills(self, labels: tuple[str, ...]) -> None:
        self.last_drill = GaugeMetricFamily(
            "holdfast_last_drill_timestamp_seconds", "When the newest drill that told anything began, since 1970.", labels=labels
        )
        self.drill_failed = GaugeMetricFamily(
            "holdfast_last_drill_failed", "1 if that drill found a snapshot that can't be restored, else 0.", labels=labels
        )
        self.drill_overdue = GaugeMetricFamily(
            "holdfast_drill_overdue_seconds",
            "Since a scheduled drill should have told something; 0: it still has time. Of jobs with a schedule.",
            labels=labels,
        )

    def add(self, job: JobNumbersView) -> None:
        overview = job.overview
        labels = (overview.job_id, overview.name)
        self.state.add_metric((*labels, overview.state), 1)
        for state, count in sorted(overview.task_counts.items()):
            self.tasks.add_metric((*labels, state.lower()), count)
        self.slots.add_metric(labels, overview.slots_required)
        self.workers.add_metric(labels, overview.slots_registered)
        self.restarts.add_metric(labels, job.restarts)
        self.attempt.add_metric(labels, job.attempt)
        self._add_totals(job, labels)
        self._add_subtasks(job, labels)
        self.frames_refused.add_metric(labels, job.frames_refused)
        self.checkpoints.add_metric((*labels, "completed"), job.counts.completed)
        self.checkpoints.add_metric((*labels, "failed"), job.counts.failed)
        self.pending.add_metric(labels, job.counts.in_progress)
        if job.latest_completed is not None:
            self._add_newest(job.latest_completed, labels)
        if job.drill.last_ms >= 0:
            self.last_drill.add_metric(labels, job.drill.last_ms / 1000)
            self.drill_failed.add_metric(labels, int(job.drill.has_failed))
        if job.drill.overdue_ms >= 0:
            self.drill_overdue.add_metric(labels, job.drill.overdue_ms / 1000)

    def _add_newest(self, newest: CheckpointView, labels: tuple[str, str]) -> None:
        """The newest completed checkpoint. Of one that an earlier leader completed it is known when it was triggered, and little
        else: it is no younger than that."""
        self.last_id.add_metric(labels, newest.checkpoint_id)
        if newest.trigger_ms >= 0:
            self.last_time.add_metric(labels, (newest.trigger_ms + max(0, newest.end_to_end_ms)) / 1000)
        for family, number, per in (
            (self.last_duration, newest.end_to_end_ms, 1000),
            (self.last_size, newest.checkpointed_size, 1),
            (self.last_full_size, newest.state_size, 1),
        ):
            if number >= 0:
                family.add_metric(labels, number / per)

    def _add_totals(self, job: JobNumbersView, labels: tuple[str, str]) -> None:
        total = derive_job_totals(job.graph, job.reached)
        self.records_in.add_metric(labels, total.records_in)
        self.records_out.add_metric(labels, total.records_out)
        for operator in (each for vertex in job.graph.vertices for each in vertex.operators):
            entry = job.reached.get(operator.uid, NOTHING)
            if max(len(self.late.samples), len(self.skipped.samples)) >= OPERATORS_MAX:
                self.leave_out("operators")
                continue
            if operator.kind in _MAY_BE_LATE or entry.late_dropped:  # shown from 0 on, or an alert would miss the first ones
                self.late.add_metric((*labels, operator.uid), entry.late_dropped)
            if operator.kind in _MAY_SKIP or entry.rows_skipped:
                self.skipped.add_metric((*labels, operator.uid), entry.rows_skipped)
            for name, count in sorted(entry.counters.items()):
                if len(self.user.samples) < USER_COUNTERS_MAX:
                    self.user.add_metric((*labels, operator.uid, name), count)
                else:
                    self.leave_out("user_counters")

    def _add_subtasks(self, job: JobNumbersView, labels: tuple[str, str]) -> None:
        """Gauges of subtasks; latencies are added up over the subtasks of a vertex."""
        latencies: dict[str, list[LatencyHistogram]] = {}
        self.leave_out("subtasks", job.subtasks_beyond)
        for metrics in job.subtasks:
            if metrics.latencies:
                latencies.setdefault(metrics.vertex, []).extend(metrics.latencies)
            seen = (len(self.lag.samples), len(self.silence.samples), len(self.committables.samples), len(self.time.samples) // 3)
            if max(seen) >= SUBTASKS_MAX:
                self.leave_out("subtasks")
                continue
            place = (*labels, metrics.vertex, str(metrics.subtask))
            self._add_subtask(metrics, place)
            self._add_splits(metrics, place)
        self._add_latencies(latencies, labels)

    def _add_subtask(self, metrics: SubtaskMetrics, place: tuple[str, ...]) -> None:
        """What the subtask has told."""
        for family, told_ms in (
            (self.lag, metrics.watermark_lag_ms),
            (self.emit_lag, metrics.emit_lag_ms),
            (self.silence, metrics.source_idle_ms),
            (self.commit_lag, metrics.commit_lag_ms),
            (self.to_consume, metrics.time_to_consume_ms),
        ):
            if told_ms is not UNSET:
                family.add_metric(place, told_ms / 1000)
        if metrics.idle is not UNSET:
            self.idle.add_metric(place, int(metrics.idle))
        for family, number in (
            (self.uncommitted, metrics.uncommitted_checkpoints),
            (self.uncommitted_rows, metrics.uncommitted_rows),
            (self.committables, metrics.pending_committables),
            (self.queued_in, metrics.queued_in_bytes),
            (self.queued_out, metrics.queued_out_bytes),
            (self.allocated_in, metrics.allocated_in_bytes),
            (self.overshoot_in, metrics.overshoot_in_bytes),
        ):
            if number is not UNSET:
                family.add_metric(place, number)
        for activity, spent_ms in (
            ("busy", metrics.busy_ms_per_second),
            ("idle", metrics.idle_ms_per_second),
            ("backpressured", metrics.backpressured_ms_per_second),
        ):
            if spent_ms is not UNSET:
                self.time.add_metric((*place, activity), spent_ms / 1000)

    def _add_latencies(self, latencies: dict[str, list[LatencyHistogram]], labels: tuple[str, str]) -> None:
        for vertex, found in latencies.items():
            for source, histogram in merge(found).items():
                if len(self.latency.samples) >= LATENCIES_MAX * _SAMPLES_OF_A_HISTOGRAM:
                    self.leave_out("latencies")
                    continue
                bounds = [*(str(bound_ms / 1000) for bound_ms in BOUNDS_MS), "+Inf"]
                buckets = list(zip(bounds, map(float, itertools.accumulate(histogram.counts)), strict=True))
                self.latency.add_metric((*labels, source, vertex), buckets, histogram.sum_ms / 1000)

    def _add_splits(self, metrics: SubtaskMetrics, place: tuple[str, ...]) -> None:
        if metrics.splits is not UNSET:
            self.splits.add_metric(place, metrics.splits)
        if metrics.pending_records is not UNSET:
            self.pending_records.add_metric(place, metrics.pending_records)
        for split in () if metrics.slowest_splits is UNSET else metrics.slowest_splits:
            if len(self.split_idle.samples) >= SPLITS_MAX:
                self.leave_out("splits")
                continue
            if split.watermark_lag_ms is not UNSET:
                self.split_lag.add_metric((*place, split.split), split.watermark_lag_ms / 1000)
            self.split_idle.add_metric((*place, split.split), int(split.idle))
            if split.pending_records is not UNSET:
                self.split_pending.add_metric((*place, split.split), split.pending_records)

    def leave_out(self, kind: str, count: int = 1) -> None:
        """Count what has no labels in this scrape. `kind`: one of LEFT_OUT_KINDS."""
        self._left_out[kind] += count

    def families(self) -> Iterator[Metric]:
        for kind, count in self._left_out.items():
            self.left_out.add_metric((kind,), count)
        yield from (family for family in vars(self).values() if isinstance(family, Metric))


class CoordinatorCollector(Collector):
    """Reads the coordinator's counters at each scrape, without visiting tasks or history."""

    def __init__(self, service: Coordinator) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        jobs = self._service.numbers()
        by_state = GaugeMetricFamily("holdfast_jobs", "Jobs in each state.", labels=("state",))
        for state in sorted({job.overview.state for job in jobs}):
            by_state.add_metric((state,), sum(job.overview.state == state for job in jobs))
        yield by_state
        yield GaugeMetricFamily(
            "holdfast_jobs_unreadable",
            "Jobs that nobody leads, since their records can't be read; they have no other metrics.",
            value=len(self._service.broken_jobs()),
        )
        metrics = JobMetrics()
        for job in sorted(jobs, key=_live_first)[:JOBS_MAX]:
            metrics.add(job)
        metrics.leave_out("jobs", max(0, len(jobs) - JOBS_MAX))
        yield from metrics.families()
        yield GaugeMetricFamily(
            "holdfast_ready", "1 once every live job of the state directory is recovered.", value=int(self._service.ready)
        )
        built = GaugeMetricFamily("holdfast_build_info", "1, with the version of this coordinator.", labels=("version",))
        built.add_metric((VERSION,), 1)
        yield built


def _live_first(job: JobNumbersView) -> tuple[bool, int]:
    return job.overview.is_terminal, -job.overview.start_ms


class ConnectionCollector(Collector):
    """Connections and bodies of one server, counted as they change; read from another thread, each number by itself."""

    def __init__(self, guard: ConnectionGuard) -> None:
        self._guard = guard

    def collect(self) -> Iterable[Metric]:
        budget, bodies = self._guard.budget, self._guard.bodies
        opened = GaugeMetricFamily("holdfast_connections", "Open connections, by what their callers proved.", labels=("standing",))
        for caller in CallerKind:
            opened.add_metric((caller.name.lower(),), budget.count(caller))
        yield opened
        closed = CounterMetricFamily("holdfast_connections_closed", "Connections closed from here.", labels=("reason",))
        for reason in CloseReason:
            closed.add_metric((reason.value,), budget.closed[reason])
        yield closed
        text = "Requests that were not HTTP, or whose head was too large."
        yield CounterMetricFamily("holdfast_requests_malformed", text, value=self._guard.malformed)
        yield GaugeMetricFamily("holdfast_request_body_bytes", "Bytes held of large request bodies.", value=bodies.held)
        yield CounterMetricFamily("holdfast_request_bodies_refused", "Bodies there was no room for.", value=bodies.refused)


class HttpMetrics:
    """Counts requests by route and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "holdfast_http_requests", "HTTP requests answered.", ("method", "route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "holdfast_http_request_seconds",
            "Time to answer, streams left out.",
            ("method", "route"),
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self._acknowledgements = Counter(
            "holdfast_acknowledgements", "Acknowledgements and declines, by answer.", ("answer",), registry=registry
        )

        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram | None]] = {}
        """As few as there are routes, methods and statuses: finding them costs more than counting."""

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        found = self._children.get((method, route, status))
        if found is None:
            timed = None if route.endswith(_STREAMS) else self._seconds.labels(method, route)
            found = self._children[method, route, status] = (self._requests.labels(method, route, str(status)), timed)
        found[0].inc()
        if found[1] is not None:
            found[1].observe(seconds)

    def count_answers(self, answers: Iterable[AckStatus]) -> None:
        for status, count in collections.Counter(answers).items():
            self._acknowledgements.labels(status).inc(count)


class MeasureRequests:
    """ASGI middleware that counts requests; routes by template, so that labels stay few."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500
        began = time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.observe(method, route, status, time.perf_counter() - began)


_STREAMS = ("/commands", "/events")
"""Ends of routes whose answers last."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class MemberCollector(Collector):
    """This process as one of several members."""

    def __init__(self, membership: Membership | None) -> None:
        """None: it is not one of several, and has no such metrics."""
        self._membership = membership

    def collect(self) -> Iterable[Metric]:
        if self._membership is None:
            return
        active = self._membership.active()
        yield GaugeMetricFamily(
            "holdfast_member_active", "1 for the active member, 0 for one that stands by.", value=int(self._membership.is_active)
        )
        if active is not None:
            yield GaugeMetricFamily(
                "holdfast_member_epoch",
                "Epoch of the active member, as far as this one knows: one more with each change.",
                value=active.epoch,
            )


class EventCollector(Collector):
    """Event streams and webhooks of one server."""

    def __init__(self, streams: EventStreams, webhooks: Webhooks) -> None:
        self._streams = streams
        self._webhooks = webhooks

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("holdfast_event_streams", "Open event streams.", value=self._streams.count)
        closed = CounterMetricFamily(
            "holdfast_event_streams_closed",
            "Event streams that ended, by reason: reader (left), slow, access (revoked), leader (lost), storage, stopping.",
            labels=("reason",),
        )
        for reason, count in sorted(dict(self._streams.closed).items()):
            closed.add_metric((reason,), count)
        yield closed
        tries = CounterMetricFamily(
            "holdfast_webhook_events", "Tries to deliver an event by outcome, and given_up events.", labels=("webhook", "outcome")
        )
        failing = GaugeMetricFamily(
            "holdfast_webhook_failing_seconds", "Since the webhook takes no events; 0 while it does.", labels=("webhook",)
        )
        for name, counts, failing_s in self._webhooks.numbers():
            for outcome, count in sorted(counts.items()):
                tries.add_metric((name, outcome), count)
            failing.add_metric((name,), failing_s)
        yield tries
        yield failing


def make_registry(
    service: Coordinator,
    guard: ConnectionGuard,
    streams: EventStreams,
    webhooks: Webhooks,
    membership: Membership | None = None,
) -> tuple[CollectorRegistry, HttpMetrics]:
    """All metrics of one server."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(CoordinatorCollector(service))
    registry.register(ConnectionCollector(guard))
    registry.register(EventCollector(streams, webhooks))
    registry.register(MemberCollector(membership))
    ProcessCollector(registry=registry)
    return registry, HttpMetrics(registry)


def render(registry: CollectorRegistry) -> bytes:
    """Format the registry as Prometheus text."""
    return generate_latest(registry)
