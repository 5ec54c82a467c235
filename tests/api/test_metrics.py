"""/metrics: where the time of subtasks goes, and what is in their queues."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.api.flink.render_metrics import job_metrics
from holdfast.api.routes.service import metrics
from holdfast.api.routes.service.metrics import CoordinatorCollector
from holdfast.coordinator.views import DrillMark
from tests.api.fakes import JOB, NAME, SINK, SOURCE, FakeCoordinator, Served, make_overview

OF_PRESSURE = (
    "holdfast_subtask_time_ratio",
    "holdfast_subtask_input_queue_bytes",
    "holdfast_subtask_output_queue_bytes",
    "holdfast_subtask_input_allocation_bytes",
    "holdfast_subtask_input_overshoot_bytes",
    "holdfast_subtask_time_to_consume_seconds",
)


def test_the_numbers_of_a_job_under_pressure(served: Served) -> None:
    shown = served.request("GET", "/metrics").data.decode().splitlines()
    label = f'job_id="{JOB}",job_name="{NAME}",subtask="0",vertex='
    assert sorted(line for line in shown if line.startswith(OF_PRESSURE)) == sorted(
        [
            *(
                f'holdfast_subtask_time_ratio{{activity="{activity}",{label}"{vertex}"}} {ratio}'
                for vertex, ratios in ((SOURCE, (0.24, 0.0, 0.76)), (SINK, (0.9, 0.1, 0.0)))
                for activity, ratio in zip(("busy", "idle", "backpressured"), ratios, strict=True)
            ),
            f'holdfast_subtask_output_queue_bytes{{{label}"{SOURCE}"}} 4096.0',
            f'holdfast_subtask_input_queue_bytes{{{label}"{SINK}"}} 65536.0',
            f'holdfast_subtask_input_allocation_bytes{{{label}"{SINK}"}} 32768.0',
            f'holdfast_subtask_input_overshoot_bytes{{{label}"{SINK}"}} 1024.0',
            f'holdfast_subtask_time_to_consume_seconds{{{label}"{SINK}"}} 1.5',
        ]
    )


def test_drills_of_jobs_that_had_one_or_have_a_schedule(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(mark: DrillMark) -> dict[str, str]:
        jobs = tuple(replace(job, drill=mark) for job in numbers)
        monkeypatch.setattr(coordinator, "numbers", lambda: jobs)
        lines = served.request("GET", "/metrics").data.decode().splitlines()
        return {line.split("{")[0]: line.rsplit(" ")[-1] for line in lines if "drill" in line and f'{{job_id="{JOB}"' in line}

    numbers = coordinator.numbers()
    assert shown(DrillMark()) == {}
    assert shown(DrillMark(overdue_ms=0)) == {"holdfast_drill_overdue_seconds": "0.0"}
    assert shown(DrillMark(5_000, has_failed=True, overdue_ms=2_500)) == {
        "holdfast_last_drill_timestamp_seconds": "5.0",
        "holdfast_last_drill_failed": "1.0",
        "holdfast_drill_overdue_seconds": "2.5",
    }
    assert shown(DrillMark(5_000))["holdfast_last_drill_failed"] == "0.0"


def test_of_a_checkpoint_of_an_earlier_leader_no_made_up_numbers_are_shown(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = (each for each in coordinator.numbers() if each.overview.job_id == JOB)
    assert job.latest_completed is not None
    recalled = replace(job.latest_completed, end_to_end_ms=-1, checkpointed_size=-1, state_size=-1, latest_ack_ms=-1)
    monkeypatch.setattr(coordinator, "numbers", lambda: (replace(job, latest_completed=recalled),))
    lines = served.request("GET", "/metrics").data.decode().splitlines()
    shown = {line.split("{")[0]: float(line.rsplit(" ")[-1]) for line in lines if line.startswith("holdfast_last_checkpoint")}
    assert shown == {
        "holdfast_last_checkpoint_id": recalled.checkpoint_id,
        "holdfast_last_checkpoint_timestamp_seconds": recalled.trigger_ms / 1000,
    }
    whole = coordinator.whole_job(JOB)
    texts = job_metrics(whole.job, replace(whole.checkpoints, latest_completed=recalled), "/state")
    assert texts["lastCompletedCheckpointId"] == str(recalled.checkpoint_id)
    assert not {"lastCheckpointDuration", "lastCheckpointSize", "lastCheckpointCompletedTimestamp"}.intersection(texts)


def test_labels_by_subtask_are_bounded_over_all_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SUBTASKS_MAX", 3)
    service = FakeCoordinator(overviews=tuple(make_overview(job_id=f"{number:032x}", start_ms=number) for number in range(5)))
    families = {family.name: family for family in CoordinatorCollector(service).collect()}
    shares = [(each.labels["job_id"][-1], each.labels["vertex"]) for each in families["holdfast_subtask_time_ratio"].samples]
    assert shares == [place for place in (("4", SOURCE), ("4", SINK), ("3", SOURCE)) for _ in range(3)], "newest jobs first"
    assert all(len(families[name].samples) <= 9 for name in OF_PRESSURE)


def test_what_no_subtask_has_told_is_left_out(
    served: Served, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tuple(replace(job, subtasks=()) for job in coordinator.numbers())
    monkeypatch.setattr(coordinator, "numbers", lambda: silent)
    shown = served.request("GET", "/metrics").data.decode().splitlines()
    assert not [line for line in shown if line.startswith(OF_PRESSURE)]
    (job,) = served.json("GET", "/v1/totals")["jobs"]
    assert job["backpressure"] is None
