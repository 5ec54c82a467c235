"""A worker's Spark job is submitted once, however often the connection to Spark is lost while it runs."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from holdfast.operators.spark import interrupts as spark_interrupt
from holdfast.operators.spark.interrupts import CONNECTION_LOSSES_MAX, CONNECTION_STANDS_S, WORKER_TAG, cancel_other_jobs, collect


class Rdd:
    """Whose job answers so."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.submitted = 0
        self._jrdd = SimpleNamespace(collectAsync=self._submit)

    def _submit(self) -> Any:
        self.submitted += 1
        return SimpleNamespace(get=self._get)

    def _get(self) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_interrupt, "RECONNECT_S", 0.0)


def test_a_lost_connection_is_no_end_of_the_worker() -> None:
    rdd = Rdd(Py4JError("lost"), Py4JNetworkError("refused"), [pickle.dumps(["left"])])
    assert collect(rdd) == ["left"]
    assert rdd.submitted == 1


def test_a_spark_that_has_gone_is_not_asked_for_ever() -> None:
    rdd = Rdd(*[Py4JNetworkError("refused")] * CONNECTION_LOSSES_MAX, Py4JError("gone"), [pickle.dumps([1])])
    with pytest.raises(Py4JError, match="gone"):
        collect(rdd)
    assert rdd.submitted == 1


def test_connections_that_stood_for_a_while_are_no_losses_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that runs for months sees more than a hundred interrupts."""
    times = itertools.count(0.0, CONNECTION_STANDS_S)
    monkeypatch.setattr(spark_interrupt, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=lambda _: None))
    rdd = Rdd(*[Py4JNetworkError("closed")] * (2 * CONNECTION_LOSSES_MAX), [pickle.dumps(["left"])])
    assert collect(rdd) == ["left"]


@pytest.mark.parametrize("busy", [False, True])
def test_jobs_that_are_no_workers_are_cancelled_also_while_listeners_are_busy(busy: bool) -> None:
    asked: list[str] = []
    cancelled: list[int] = []

    def wait(wait_ms: int) -> None:
        asked.append("heard")
        if busy:
            raise Py4JError("java.util.concurrent.TimeoutException: The event queue is not empty")

    def jobs_of_tag(tag: str) -> list[int]:
        asked.append(tag)
        return [0, 2, 7]

    tracker = SimpleNamespace(getActiveJobIds=lambda: [1, 2, 5], getJobIdsForTag=jobs_of_tag)
    scala = SimpleNamespace(
        listenerBus=lambda: SimpleNamespace(waitUntilEmpty=wait),
        statusTracker=lambda: tracker,
        cancelJob=lambda job, reason: cancelled.append(job),
    )
    cancel_other_jobs(SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala)))
    assert cancelled == [1, 5]
    assert asked == ["heard", WORKER_TAG]
