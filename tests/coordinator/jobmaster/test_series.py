"""Series of subtasks: what a point says, what a restart and a silence do, and how much memory a job takes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import SubtaskMetrics
from holdfast.coordinator.jobmaster.series import (
    METRICS,
    RESOLUTIONS_MS,
    SERIES_BYTES_MAX,
    SPAN_MS,
    SubtaskSeries,
    choose_resolution,
)
from holdfast.coordinator.views import SeriesView
from tests.coordinator.doubles import word_count
from tests.coordinator.rig import Rig

WALL_MS = 1_700_000_000_000


def wide(parallelism: int) -> JobGraph:
    graph = word_count()
    vertices = tuple(replace(vertex, parallelism=parallelism, max_parallelism=32_768) for vertex in graph.vertices)
    return replace(graph, vertices=vertices)


class Job:
    """A job whose subtasks read 100 records a second each, and are busy for half of the time."""

    def __init__(self, graph: JobGraph) -> None:
        self.series = SubtaskSeries(graph)
        self.vertex = graph.vertices[0].vertex_id
        self.attempt = 1
        self.began_s = 0

    def beat(self, at_s: int, *subtasks: int, lag_ms: int = 70) -> None:
        ran_s = at_s - self.began_s
        metrics = [
            SubtaskMetrics(
                self.vertex,
                subtask,
                records_in=100 * ran_s,
                records_out=50 * ran_s,
                bytes_in=1_000 * ran_s,
                bytes_out=2_000 * ran_s,
                busy_ms=500 * ran_s,
                idle_ms=300 * ran_s,
                backpressured_ms=200 * ran_s,
                watermark_lag_ms=lag_ms,
            )
            for subtask in subtasks
        ]
        self.series.sample(self.attempt, metrics, 1_000 * at_s, WALL_MS + 1_000 * at_s)

    def view(self, metric: str, at_s: int, *subtasks: int) -> SeriesView:
        return self.series.capture().view(self.vertex, metric, subtasks, WALL_MS + 1_000 * at_s)


def test_point_has_the_rates_since_the_one_before() -> None:
    job = Job(word_count())
    for at_s in range(0, 30, 2):
        job.beat(at_s, 0, 1)
    expected = {
        "records_in_per_second": 100.0,
        "records_out_per_second": 50.0,
        "bytes_in_per_second": 1_000.0,
        "bytes_out_per_second": 2_000.0,
        "watermark_lag_ms": 70.0,
        "busy_ratio": 0.5,
        "idle_ratio": 0.3,
        "backpressured_ratio": 0.2,
    }
    assert set(expected) == set(METRICS)
    for metric, value in expected.items():
        view = job.view(metric, 30, 1)
        assert view.times_ms == tuple(WALL_MS + at_ms for at_ms in (5_000, 10_000, 15_000, 20_000, 25_000))
        assert view.subtasks == {1: (pytest.approx(value),) * 5}
        assert (view.min, view.max, view.avg) == ((pytest.approx(value),) * 5,) * 3
        assert view.sum == (pytest.approx(2 * value, abs=0.002),) * 5


def test_subtask_that_is_not_heard_is_not_known_and_the_others_are() -> None:
    job = Job(word_count())
    job.beat(0, 0, 1)
    job.beat(6, 0)
    job.beat(12, 0, 1)
    view = job.view("records_in_per_second", 12, 0, 1)
    assert view.subtasks == {0: (100.0, 100.0), 1: (None, 100.0)}
    assert (view.sum, view.avg) == ((100.0, 200.0), (100.0, 100.0))


def test_new_attempt_counts_from_the_start_and_its_series_go_on() -> None:
    job = Job(word_count())
    job.beat(0, 0)
    job.beat(6, 0)
    job.attempt, job.began_s = 2, 8
    job.beat(11, 0)
    job.beat(16, 0)
    assert job.view("records_in_per_second", 16, 0).subtasks[0] == (100.0, 100.0)


def test_counter_that_falls_and_what_is_not_told_are_unknown() -> None:
    job = Job(word_count())
    job.beat(100, 0)
    job.began_s = 90
    job.beat(106, 0)
    assert job.view("records_in_per_second", 106, 0).subtasks[0] == (None,)
    assert job.view("busy_ratio", 106, 0).subtasks[0] == (None,)
    assert job.view("watermark_lag_ms", 106, 0).subtasks[0] == (70.0,)


def test_rings_keep_fifteen_minutes_and_a_quiet_job_shows_nothing_older() -> None:
    job = Job(word_count())
    for at_s in range(0, 2_000, 2):
        job.beat(at_s, 0)
    view = job.view("records_in_per_second", 2_000)
    assert len(view.times_ms) == SPAN_MS // view.resolution_ms
    assert view.times_ms[0] == WALL_MS + 2_000_000 - SPAN_MS
    assert job.view("records_in_per_second", 2_500).times_ms[0] >= WALL_MS + 2_500_000 - SPAN_MS - view.resolution_ms
    assert job.view("records_in_per_second", 9_000).times_ms == ()


def test_capture_does_not_change_and_shares_what_is_over() -> None:
    job = Job(word_count())
    for at_s in (0, 6, 11):
        job.beat(at_s, 0)
    older = job.series.capture()
    job.beat(12, 1)
    job.beat(16, 0, 1)
    newer = job.series.capture()
    assert older.view(job.vertex, "records_in_per_second", (1,), WALL_MS).subtasks[1] == (None, None)
    assert len(newer.view(job.vertex, "records_in_per_second", (), WALL_MS).times_ms) == 3
    assert older._rows[job.vertex][0] is newer._rows[job.vertex][0]


@pytest.mark.parametrize(("subtasks", "resolution_ms"), [(1, 5_000), (5_000, 5_000), (10_000, 10_000), (40_000, 60_000)])
def test_large_jobs_have_longer_points(subtasks: int, resolution_ms: int) -> None:
    assert choose_resolution(subtasks) == resolution_ms
    assert choose_resolution(10**7) == RESOLUTIONS_MS[-1]


def test_rings_of_ten_thousand_subtasks_keep_within_their_bound() -> None:
    job = Job(wide(10_000))
    resolution_s = job.series.resolution_ms // 1_000
    for bucket in range(2 * SPAN_MS // job.series.resolution_ms):
        job.beat(bucket * resolution_s, 0)  # a row is as large for one subtask as for all
    rows = job.series.capture()._rows
    size = sum(row.values.itemsize * len(row.values) for ring in rows.values() for row in ring)
    assert SERIES_BYTES_MAX // 4 < size <= SERIES_BYTES_MAX


def test_unknown_vertices_and_subtasks_are_ignored() -> None:
    job = Job(word_count())
    for at_s in (0, 6):
        job.beat(at_s, -1, 2, 10**9)
        job.series.sample(1, [SubtaskMetrics("f" * 32, 0)], at_s * 1_000, WALL_MS)
    assert job.view("busy_ratio", 6, 2).times_ms == ()


def test_heartbeats_of_a_running_job_are_sampled() -> None:
    rig = Rig().run()
    vertex = rig.graph.vertices[0].vertex_id
    for count in (0, 600):
        rig.heartbeat(0, metrics=(SubtaskMetrics(vertex, 0, records_in=count),))
        rig.pass_time(6_000)
    view = rig.master.series.capture().view(vertex, "records_in_per_second", (0,), rig.wall_ms)
    assert view.subtasks[0] == (100.0,)
