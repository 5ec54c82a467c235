from __future__ import annotations

from typing import Any

from barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from operators.progress import Look, derive_progress, describe_restart, format_progress, registered_slots


def vertex(name: str, kind: str) -> JobVertex:
    return JobVertex(name, name, 1, 128, (OperatorDescription(name, name, name, kind),))


GRAPH = JobGraph("job", (vertex("a", "source"), vertex("b", "map"), vertex("c", "sink_writer")), (), JobConfig())


def look(at_ms: int, read: int, written: int, latest: dict[str, Any] | None = None) -> Look:
    vertices = [
        {"id": "a", "metrics": {"read-records": 0, "write-records": read}},
        {"id": "b", "metrics": {"read-records": read, "write-records": written}},
        {"id": "c", "metrics": {"read-records": written, "write-records": 0}},
    ]
    workers = {"restarts": 2, "workers": [{"slot": 0, "registered": True}, {"slot": 1, "registered": False}]}
    return Look(at_ms, {"state": "RUNNING", "vertices": vertices}, {"latest": {"completed": latest}}, workers)


def test_counters_that_fall_back_are_no_negative_rate() -> None:
    progress = derive_progress(GRAPH, look(1000, 10, 1), look(0, 5000, 400))
    assert (progress.records_in_per_second, progress.records_out_per_second) == (0, 0)


def test_a_first_look_has_no_rates() -> None:
    assert derive_progress(GRAPH, look(1000, 10, 1), None).records_in_per_second == 0


def test_rates_are_over_the_last_interval() -> None:
    progress = derive_progress(
        GRAPH,
        look(2000, 30_000, 50),
        look(1500, 10_000, 40),
    )
    assert (progress.records_in_per_second, progress.records_out_per_second) == (40_000, 20)
    assert (progress.records_in, progress.records_out, progress.restarts) == (30_000, 50, 2)


def test_the_line_says_what_matters() -> None:
    progress = derive_progress(GRAPH, look(2000, 2_500_000, 50, {"id": 7, "end_to_end_duration": 12}), look(1000, 0, 0))
    line = format_progress("job", progress, 1, 2)
    assert line == "job RUNNING  in 2.5 M/s  out 50/s  checkpoint 7 in 12 ms  restarts 2  1 of 2 workers"


def test_registered_slots_are_those_that_are_registered() -> None:
    assert registered_slots(look(0, 0, 0).workers) == {0}


def restarted(restarts: int, **failures: str | None) -> Look:
    return Look(0, {}, {}, {"restarts": restarts, **failures})


def test_a_restart_names_the_newest_failure_by_its_first_line() -> None:
    now = restarted(3, failure="UserFunctionError: no\nTraceback ...", last_failure="older")
    assert describe_restart("job", now, restarted(2)) == "job restart 3: UserFunctionError: no"


def test_a_restart_that_is_over_at_the_next_look_is_still_named() -> None:
    assert describe_restart("job", restarted(1, failure=None, last_failure="WorkerLost: slot 0"), restarted(0)) == (
        "job restart 1: WorkerLost: slot 0"
    )
    assert describe_restart("job", restarted(1), restarted(0)) == "job restart 1: its cause is not on record"


def test_no_restart_between_two_looks_is_no_line() -> None:
    assert describe_restart("job", restarted(2, failure="x"), restarted(2, failure="x")) is None
    assert describe_restart("job", restarted(2, failure="x"), None) is None, "a driver that comes later did not see it"
