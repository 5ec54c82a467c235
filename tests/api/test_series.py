"""Series of a job's subtasks over REST and with the client."""

from __future__ import annotations

import pytest

from holdfast.api.client import RestClient
from holdfast.api.routes.series import METRIC_CHARS_MAX
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.reading.queries import Queries
from holdfast.coordinator.jobmaster.series import METRICS
from holdfast.statebackends.errors import InvalidConfigError, NotFoundError
from tests.api.fakes import JOB, FakeCoordinator, Served
from tests.coordinator.dispatcher.test_dispatcher import JOB as WORD_COUNT
from tests.coordinator.dispatcher.test_dispatcher import submitted
from tests.coordinator.stepping import Process
from tests.coordinator.world import DictStorage

VERTEX = "ab" * 16


def test_series_of_a_vertex(served: Served, coordinator: FakeCoordinator) -> None:
    body = served.json("GET", f"/v1/jobs/{JOB}/series?metric=busy_ratio&vertex={VERTEX}&subtasks=1,%200,1")
    assert coordinator.calls[-1] == ("series", JOB, VERTEX, "busy_ratio", (1, 0))
    (found,) = body["series"]
    assert (found["vertex"], found["metric"], found["resolution_ms"]) == (VERTEX, "busy_ratio", 5_000)
    assert (found["times_ms"], found["sum"], found["subtasks"]) == ([10], [3.0], {"0": [1.0], "1": [None]})
    assert body["as_of_ms"] == coordinator.moments.as_of_ms


def test_several_metrics_are_of_one_answer(served: Served, coordinator: FakeCoordinator) -> None:
    body = served.json("GET", f"/v1/jobs/{JOB}/series?metric=busy_ratio,%20idle_ratio,busy_ratio&vertex={VERTEX}")
    assert [each["metric"] for each in body["series"]] == ["busy_ratio", "idle_ratio"]
    assert [call[3] for call in coordinator.calls if call[0] == "series"] == ["busy_ratio", "idle_ratio"]
    assert len(",".join(METRICS)) < METRIC_CHARS_MAX


def test_client_asks_for_all_vertices(served: Served, coordinator: FakeCoordinator) -> None:
    client = RestClient(served.url, served.token, reconnect_timeout_s=0)
    assert client.series(JOB, "busy_ratio")[0]["avg"] == [1.5]
    assert coordinator.calls[-1] == ("series", JOB, None, "busy_ratio", ())


@pytest.mark.parametrize(
    "query",
    [
        "",
        f"metric={'x' * 257}",
        "metric=busy_ratio&vertex=x",
        "metric=busy_ratio&subtasks=-1",
        "metric=busy_ratio&subtasks=²",
        f"metric=busy_ratio&subtasks={'1,' * 101}",
    ],
)
def test_malformed_query_is_refused(query: str, served: Served) -> None:
    assert served.request("GET", f"/v1/jobs/{JOB}/series?{query}").status == 400


def test_unknown_metric_and_vertex_are_named_and_an_ended_job_has_empty_series() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    process.settle()
    host = process.host
    queries = Queries(JobCalls(host.registry, host.recovery, 1_000), host.registry, host.recovery, process.root, process.clock)
    _, coming = process.service(WORD_COUNT).look()
    assert coming is not None
    process.wait_for(coming)
    with pytest.raises(InvalidConfigError, match="busy_ratio"):
        queries.series(WORD_COUNT, None, "nonsense", ())
    with pytest.raises(NotFoundError, match="no vertex"):
        queries.series(WORD_COUNT, "f" * 32, "busy_ratio", ())
    assert [each.times_ms for each in queries.series(WORD_COUNT, None, "busy_ratio", ())] == [(), ()]
