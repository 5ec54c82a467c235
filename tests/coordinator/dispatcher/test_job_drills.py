"""Drills of a coordinator: a process of its own, whose death or silence is an outcome, and no job's concern (ADR 107)."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.job_drills import DELETED
from holdfast.coordinator.dispatcher.threads import SystemClock
from holdfast.coordinator.drills.records import DrillState, DrillView, Verification
from holdfast.coordinator.explain.records import Verdict
from holdfast.coordinator.history.store import HistoryQuery
from holdfast.coordinator.service import CoordinatorService
from holdfast.coordinator.views import DrillMark
from holdfast.statebackends.errors import NotFoundError, StorageUnavailableError
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import ListFolder
from tests.coordinator.dispatcher.test_diagnosis import running
from tests.coordinator.doubles import Crew, leading, wait_until

PRINT = "import sys; sys.stdin.read(); print({!r})"
REPORT = '{"operators": 2, "states": 3, "rows": 40, "size": 500}'


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CoordinatorService]:
    found = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0, drill_timeout_ms=60_000))
    yield found
    found.close()


def with_process(service: CoordinatorService, program: str) -> None:
    """The drill's process is another program."""
    service._drills._command = lambda: [sys.executable, "-c", program]


def pause() -> None:
    """Leave the processor to the drill, whose priority is low."""
    threading.Event().wait(0.02)


def outcome(service: CoordinatorService, job_id: str, begun: DrillView) -> DrillView:
    def found() -> DrillView:
        return next(each for each in service.drills(job_id) if each.drill_id == begun.drill_id)

    wait_until(lambda: found().state is not DrillState.RUNNING, pause, timeout_s=60, what="the drill's end")
    return found()


@pytest.fixture
def crew(service: CoordinatorService) -> Crew:
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(2)
    service.change_settings(crew.job_id, {"checkpoint_interval_ms": None})  # what is drilled stays
    crew.until(lambda: service.checkpoints(crew.job_id).counts.in_progress == 0, what="no pending checkpoint")
    return crew


def test_a_drill_of_the_newest_checkpoint_is_in_the_history_and_in_the_health(service: CoordinatorService, crew: Crew) -> None:
    job_id = crew.job_id
    assert service.health(job_id).safe.drilled_ms == -1
    begun = service.drill(job_id)
    assert (begun.state, begun.by) == (DrillState.RUNNING, "user")
    ended = outcome(service, job_id, begun)
    # the states that doubles store are no tables, and the drill says so; a real one is in tests/coordinator/drills/test_reading.py
    assert ended.state is DrillState.FAILED, ended
    assert ended.problem_count > 0
    health = service.health(job_id)
    assert health.safe.verdict is Verdict.BAD
    assert f"a drill of checkpoint {begun.checkpoint_id} found" in health.safe.why
    with_process(service, PRINT.format(REPORT))
    again = outcome(service, job_id, service.drill(job_id, begun.checkpoint_id))
    assert (again.state, again.rows, again.states) == (DrillState.PASSED, 40, 3)
    health = service.health(job_id)
    assert health.safe.verdict is not Verdict.BAD
    assert health.safe.drilled_ms == health.safe.verified_ms == again.started_ms
    assert [each.state for each in service.drills(job_id)] == [DrillState.PASSED, DrillState.FAILED]


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import time; time.sleep(600)", "took longer than 1 s"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("raise SystemExit(3)", "exit code 3"),
        (PRINT.format("no report"), "without a word"),
        (PRINT.format('{"error": "storage is away"}'), "storage is away"),
        (PRINT.format('{"rows": "many"}'), "without a word"),
        ("print('x' * 10_000_000)", "said more than 1048576 bytes"),
    ],
)
def test_a_process_that_hangs_dies_or_talks_nonsense(service: CoordinatorService, crew: Crew, program: str, error: str) -> None:
    service._drills._seconds_max = 1 if "sleep" in program else 30
    with_process(service, program)
    ended = outcome(service, crew.job_id, service.drill(crew.job_id))
    assert ended.state is DrillState.ERROR
    assert error in ended.error
    assert service.job(crew.job_id).overview.state == "RUNNING"
    assert service.health(crew.job_id).safe.drilled_ms == -1


def test_a_program_that_is_not_there(service: CoordinatorService, crew: Crew) -> None:
    service._drills._command = lambda: ["/nowhere/python"]
    assert "could not be started" in outcome(service, crew.job_id, service.drill(crew.job_id)).error


def test_one_drill_runs_at_a_time_and_ends_with_the_coordinator(service: CoordinatorService, crew: Crew) -> None:
    with_process(service, "import time; time.sleep(600)")
    service.drill(crew.job_id)
    with pytest.raises(StorageUnavailableError, match="one runs at a time"):
        service.drill(crew.job_id)
    found: list[int] = []

    def is_started() -> bool:
        process = service._drills._process
        if process is not None and (pid := process.pid) is not None:
            found.append(pid)
        return bool(found)

    wait_until(is_started, pause, what="the process")
    service.close()
    with pytest.raises(ProcessLookupError):
        os.kill(found[0], 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drill-")]


def labels_of(service: CoordinatorService, job_id: str) -> list[tuple[str, int]]:
    return [(view.label, view.checkpoint_id) for view in service.labels(job_id).labels]


def test_what_is_drilled_stays_though_the_job_goes_on(service: CoordinatorService, tmp_path: Path) -> None:
    """A job may take checkpoints faster than one is read, and keep one alone."""
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(2)
    gate = tmp_path / "gate"
    with_process(service, f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint({REPORT!r})")
    begun = service.drill(crew.job_id)
    crew.until_completed(begun.checkpoint_id + 3)
    assert (Path(begun.location) / "_metadata").exists()
    ((label, number),) = labels_of(service, crew.job_id)
    assert (label.startswith("drilling"), number) == (True, begun.checkpoint_id)
    gate.touch()
    assert outcome(service, crew.job_id, begun).state is DrillState.PASSED
    assert labels_of(service, crew.job_id) == []
    crew.until(lambda: not Path(begun.location).exists(), what="the end of what nobody keeps any more")


def test_a_label_that_a_drill_left_over_is_removed_by_the_next_one(service: CoordinatorService, crew: Crew) -> None:
    with_process(service, PRINT.format(REPORT))
    newest = outcome(service, crew.job_id, service.drill(crew.job_id)).checkpoint_id
    service.add_label(crew.job_id, newest, "drilling0123456789abcdef")
    service.add_label(crew.job_id, newest, "drilling-mine")
    assert outcome(service, crew.job_id, service.drill(crew.job_id)).state is DrillState.PASSED
    assert labels_of(service, crew.job_id) == [("drilling-mine", newest)]


def test_a_look_leaves_the_label_of_the_drill_under_way(service: CoordinatorService, tmp_path: Path) -> None:
    crew = running(service, checkpoint_interval_ms=20, drill_interval_ms=60_000)
    crew.until_completed(2)
    gate = tmp_path / "gate"
    with_process(service, f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\nprint({REPORT!r})")
    begun = service.drill(crew.job_id)
    service._drills._preloaded.clear()  # as of a job that is led since a moment
    service._drills.look()
    assert len(labels_of(service, crew.job_id)) == 1
    gate.touch()
    assert outcome(service, crew.job_id, begun).state is DrillState.PASSED
    assert labels_of(service, crew.job_id) == []


def test_what_a_user_has_labelled_gets_no_further_label(service: CoordinatorService, crew: Crew) -> None:
    """A snapshot's labels can be changed so many times, and scheduled drills would use them up."""
    with_process(service, PRINT.format(REPORT))
    newest = outcome(service, crew.job_id, service.drill(crew.job_id)).checkpoint_id
    service.add_label(crew.job_id, newest, "mine")
    with_process(service, "import time; time.sleep(600)")
    service.drill(crew.job_id, newest)
    assert labels_of(service, crew.job_id) == [("mine", newest)]


def test_a_drill_goes_on_without_a_label_where_none_can_be_given(
    service: CoordinatorService, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageUnavailableError("it hangs")

    monkeypatch.setattr(service._labels, "add", refuse)
    with_process(service, PRINT.format(REPORT))
    assert outcome(service, crew.job_id, service.drill(crew.job_id)).state is DrillState.PASSED


def test_what_can_not_be_drilled_is_named(service: CoordinatorService, crew: Crew) -> None:
    with pytest.raises(NotFoundError, match="has no checkpoint 999 to drill"):
        service.drill(crew.job_id, 999)
    with pytest.raises(NotFoundError):
        service.drill("e" * 32)


@pytest.mark.parametrize("is_led", [True, False])
def test_the_newest_of_an_ended_job_is_what_its_stop_or_a_label_has_left(
    service: CoordinatorService, crew: Crew, tmp_path: Path, is_led: bool
) -> None:
    job_id = crew.job_id
    service.add_label(job_id, service.health(job_id).resume.checkpoint_id, "mine")
    trigger = service.stop(job_id, str(tmp_path / "savepoints"))
    crew.until_state("FINISHED")
    stopped = service.trigger_status(job_id, trigger)
    asked = service
    if not is_led:
        service.close()
        asked = leading(ServiceConfig(str(tmp_path / "state"), seed=2, view_interval_ms=0))
    with_process(asked, PRINT.format(REPORT))
    try:
        ended = outcome(asked, job_id, asked.drill(job_id))
    finally:
        asked.close()
    assert (ended.state, ended.checkpoint_id, ended.location) == (DrillState.PASSED, stopped.checkpoint_id, stopped.location)


def test_a_job_that_keeps_nothing_has_nothing_to_drill(service: CoordinatorService) -> None:
    crew = running(service, checkpoint_interval_ms=20, retention_on_cancel="delete")
    crew.until_completed(2)
    service.cancel(crew.job_id)
    crew.until_state("CANCELED")
    with pytest.raises(NotFoundError, match="has no completed checkpoint to drill"):
        service.drill(crew.job_id)


def test_a_snapshot_that_is_deleted_meanwhile_is_not_damaged(service: CoordinatorService, crew: Crew) -> None:
    begun = service.drill(crew.job_id)
    ended = outcome(service, crew.job_id, begun)
    (Path(begun.location) / "_claim").unlink()
    with_process(service, PRINT.format('{"problem_count": 1, "problems": ["gone"]}'))
    drills = service._drills
    assert ended.state is DrillState.FAILED
    assert drills._judged(begun, drills._execute(begun.location)).error == DELETED


def test_a_snapshot_that_was_gone_before_is_not_drilled(service: CoordinatorService, crew: Crew, tmp_path: Path) -> None:
    """Nothing was deleted while it was read, and no label could have kept it."""
    trigger = service.request_savepoint(crew.job_id, str(tmp_path / "savepoints"))
    crew.until(lambda: not service.trigger_status(crew.job_id, trigger).in_progress, what="the savepoint")
    done = service.trigger_status(crew.job_id, trigger)
    assert done.checkpoint_id is not None
    assert done.location is not None
    number = done.checkpoint_id
    shutil.rmtree(done.location)
    told = f"savepoint {number} of job {crew.job_id} can't be drilled: {done.location} was deleted or moved"
    with pytest.raises(NotFoundError, match=re.escape(told)):
        service.drill(crew.job_id, number)
    assert service.drills(crew.job_id) == ()
    assert labels_of(service, crew.job_id) == []
    with_process(service, PRINT.format(REPORT))
    assert outcome(service, crew.job_id, service.drill(crew.job_id)).state is DrillState.PASSED, "another one may begin"


def test_drills_are_scheduled_and_outlive_their_coordinator(service: CoordinatorService, tmp_path: Path) -> None:
    crew = running(service, checkpoint_interval_ms=20, drill_interval_ms=60_000)
    crew.until_completed(2)
    with_process(service, PRINT.format(REPORT))
    service._drills.look()
    assert service.drills(crew.job_id) == ()
    service._drills._seen_ms[crew.job_id] -= 60_000
    service._drills.look()
    begun = service.drills(crew.job_id)[0]
    assert begun.by == "schedule"
    assert outcome(service, crew.job_id, begun).state is DrillState.PASSED
    service.close()
    again = leading(ServiceConfig(str(tmp_path / "state"), seed=2, view_interval_ms=0))
    try:
        page = again.history(crew.job_id, HistoryQuery(kinds=frozenset({"drill"})))
        assert [entry.facts["rows"] for entry in page.entries] == [40]
        first = again.health(crew.job_id).safe
        assert (first.drilled_ms, first.are_drills_known) in ((-1, False), (begun.started_ms, True)), "from memory alone"
        wait_until(lambda: again.health(crew.job_id).safe.are_drills_known, pause, what="drills on record")
        assert [each.drill_id for each in again.drills(crew.job_id)] == [begun.drill_id]
        assert again.health(crew.job_id).safe.drilled_ms == begun.started_ms
    finally:
        again.close()


def test_a_coordinator_that_is_started_anew_puts_no_drill_off(service: CoordinatorService, tmp_path: Path) -> None:
    crew = running(service, checkpoint_interval_ms=20, drill_interval_ms=60_000)
    crew.until_completed(2)
    service._drills.look()
    assert service.drills(crew.job_id) == ()
    service.close()
    again = leading(ServiceConfig(str(tmp_path / "state"), seed=2, view_interval_ms=0))
    try:
        with_process(again, PRINT.format(REPORT))
        again.job(crew.job_id)
        again._drills._clock = Later(90_000)
        again._drills.look()
        (begun,) = again.drills(crew.job_id)
        assert (begun.by, outcome(again, crew.job_id, begun).state) == ("schedule", DrillState.PASSED)
    finally:
        again.close()


class Later(SystemClock):
    """The clock of some time later."""

    def __init__(self, by_ms: int) -> None:
        super().__init__()
        self._by_ms = by_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self._by_ms


class DrillsStuck(LocalStorage):
    """Storage that does not answer where drills are listed, before it is released."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.released, self.is_asked = threading.Event(), threading.Event()

    def execute(self, operation: Any) -> Any:
        if isinstance(operation, ListFolder) and operation.prefix.endswith("/drills"):
            self.is_asked.set()
            assert self.released.wait(60)
        return super().execute(operation)


def test_a_status_does_not_wait_for_the_drills_on_record(tmp_path: Path) -> None:
    storage = DrillsStuck(tmp_path / "state")
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, view_interval_ms=0), storage)
    try:
        crew = running(service, checkpoint_interval_ms=20)
        crew.until_completed(1)
        for _ in range(3):
            safe = service.health(crew.job_id).safe
            assert (safe.are_drills_known, safe.drilled_ms, safe.verdict) == (False, -1, Verdict.OK)
        assert storage.is_asked.wait(10), "somebody reads them meanwhile"
        assert service.numbers()[0].drill == DrillMark()
    finally:
        storage.released.set()
    try:
        wait_until(lambda: service.health(crew.job_id).safe.are_drills_known, pause, what="drills on record")
    finally:
        service.close()


def test_marks_tell_of_the_last_drill_and_of_one_that_is_overdue(service: CoordinatorService) -> None:
    crew = running(service, checkpoint_interval_ms=20, drill_interval_ms=60_000)
    crew.until_completed(2)

    def mark() -> DrillMark:
        return next(each.drill for each in service.numbers() if each.overview.job_id == crew.job_id)

    assert mark() == DrillMark()
    drills = service._drills
    drills.look()
    assert mark() == DrillMark(overdue_ms=0), "it has a schedule"
    with_process(service, "import time; time.sleep(600)")
    drills._is_busy = True  # another job's drill takes all night
    drills._seen_ms[crew.job_id] -= 90_000
    drills.look()
    assert 30_000 <= mark().overdue_ms < 60_000
    drills._is_busy = False
    with_process(service, PRINT.format('{"rows": 3, "problem_count": 1, "problems": ["x.parquet: damaged"]}'))
    drills.look()
    begun = service.drills(crew.job_id)[0]
    assert outcome(service, crew.job_id, begun).state is DrillState.FAILED
    service.change_settings(crew.job_id, {"checkpoint_interval_ms": None})
    drills.look()
    assert mark() == DrillMark(begun.started_ms, has_failed=True, overdue_ms=0)


def drills_told(service: CoordinatorService, job_id: str) -> str:
    """What the tag of a job's health has of them."""
    now = service.moment_now(job_id, diagnosed=True)
    assert now.moment is not None
    return now.moment.tag.rsplit("-", 2)[1]


def test_the_tag_of_a_job_s_health_is_another_one_whenever_its_drills_are(service: CoordinatorService, crew: Crew) -> None:
    with_process(service, PRINT.format(REPORT))
    job_id, place = crew.job_id, service.health(crew.job_id).resume
    tags = [drills_told(service, job_id)]
    begun = service.drill(job_id)
    tags.append(drills_told(service, job_id))
    outcome(service, job_id, begun)
    tags.append(drills_told(service, job_id))
    service.note_verified(job_id, place.location, Verification(place.checkpoint_id, 5_000))
    tags.append(drills_told(service, job_id))
    assert len(set(tags)) == len(tags)
    assert drills_told(service, job_id) == tags[-1]


def test_a_verification_counts_where_the_snapshot_is_the_job_s_own(service: CoordinatorService, crew: Crew, tmp_path: Path) -> None:
    job_id = crew.job_id
    place = service.health(job_id).resume
    found = Verification(place.checkpoint_id, 5_000)
    service.note_verified(job_id, str(tmp_path / "elsewhere"), found)  # it says that it is this checkpoint
    with pytest.raises(NotFoundError):
        service.note_verified(job_id, place.location, Verification(999, 5_000))
    with pytest.raises(NotFoundError):
        service.note_verified("e" * 32, place.location, found)
    assert service.health(job_id).safe.verified_ms == -1
    (tmp_path / "link").symlink_to(tmp_path / "state")
    service.note_verified(job_id, place.location.replace("/state/", "/link/"), found)
    assert service.health(job_id).safe.verified_ms == 5_000
    assert service.health(job_id).safe.drilled_ms == -1
    damaged = Verification(place.checkpoint_id, 6_000, 1, "x: missing")
    service.note_verified(job_id, place.location, damaged)
    assert (service.health(job_id).safe.verdict, service.drills(job_id)) == (Verdict.BAD, ())
    service.note_verified(job_id, place.location, Verification(place.checkpoint_id, 7_000))
    (Path(place.location) / "_metadata").unlink()
    (Path(place.location) / "_claim").unlink()
    with pytest.raises(NotFoundError):
        service.note_verified(job_id, place.location, damaged)
    assert service.health(job_id).safe.verdict is not Verdict.BAD, "it was deleted while it was read"
