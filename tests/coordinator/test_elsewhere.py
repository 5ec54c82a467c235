"""A job that another coordinator leads: who knows it, what clients are told, and when the job is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import Heartbeat, Registered, RegisterWorker
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.dispatcher import run_host_flow
from holdfast.coordinator.dispatcher.published import view_overview
from holdfast.coordinator.dispatcher.reading.queries import Queries
from holdfast.coordinator.dispatcher.submit import Starter, fence_ended
from holdfast.coordinator.ha.leadership import LEADER_GRACE_MS, OtherLeader, find_leader
from holdfast.coordinator.ha.records import ConfigRecord, LeaderRecord, ResultRecord, derive_job_id, encode_record
from holdfast.coordinator.ha.store import put_once, write_result
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.service import CoordinatorService
from holdfast.coordinator.views import JobOverviewView
from holdfast.statebackends.errors import FencedError, NotLeaderError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.flows import FIRST_BYTES
from holdfast.statebackends.storage.port import DeleteFolder, ListFolder, PutIfAbsent, ReadFile, StatFile, run_flow
from tests.coordinator.doubles import WAIT_S, leading, submission, wait_until, word_count
from tests.coordinator.stepping import Process, retry_recoveries
from tests.coordinator.world import DictStorage, Steps

JOB = derive_job_id("word count")
PATHS = JobPaths(JOB)
FIRST, SECOND, THIRD = "http://10.0.0.1:1", "http://10.0.0.2:1", "http://10.0.0.3:1"


def submitted(nonce: str = "driver") -> Submission:
    return submission(word_count(), driver_nonce=nonce)


def led_by(storage: DictStorage, url: str, seed: int = 0) -> Process:
    """A coordinator that leads the job on, if there is one."""
    return Process(storage, seed=seed, url=url).begin()


def referral(process: Process) -> dict[str, Any]:
    """What clients of the job are told."""
    with pytest.raises(NotLeaderError) as caught:
        process.host.registry.led(JOB)
    return dict(caught.value.fields)


def calls(process: Process) -> JobCalls:
    host = process.host
    return JobCalls(host.registry, host.recovery, 1_000, look_for=host.look_for)


def queries(process: Process) -> Queries:
    return Queries(calls(process), process.host.registry, process.host.recovery, process.root, process.clock)


def registration(process: Process, *, submission: int) -> RegisterWorker:
    return RegisterWorker(JOB, 0, submission, 0, "worker", 1, "localhost", "tcp://localhost:7000", process.host.directory_nonce)


def seen_state(process: Process) -> str:
    """Of the job, as its driver is told."""
    if process.host.registry.find(JOB) is None:
        return queries(process).job(JOB).overview.state
    view: JobOverviewView = process.wait_for(calls(process).led(JOB).query(view_overview))
    return view.state


def register(process: Process, *, submission: int) -> Registered:
    future: Future[Registered] = calls(process).register(registration(process, submission=submission))
    return process.wait_for(future)


@pytest.fixture
def storage() -> DictStorage:
    """A state directory whose one job is led by nobody who lives."""
    storage = DictStorage()
    led_by(storage, "http://10.0.0.9:1").submit(submitted())
    return storage


def fenced(storage: DictStorage) -> tuple[Process, Process]:
    """A coordinator that led the job and knows that the other one does now."""
    older = led_by(storage, FIRST, seed=1)
    newer = led_by(storage, SECOND, seed=2)
    older.drive(older.host.check_leaderships())
    older.settle()
    return older, newer


# ------------------------------------------------------------------------------------------------------ who knows what


def test_newest_leader_is_found_and_looked_for_once_while_there_is_none() -> None:
    storage = DictStorage()
    assert run_flow(find_leader(PATHS), storage) is None
    for epoch in range(1, 12):
        record = LeaderRecord(epoch, f"n{epoch}", f"http://{epoch}")
        run_flow(put_once(PATHS.leader(epoch), encode_record(record)), storage)
    found = run_flow(find_leader(PATHS, newer_than=4), storage)
    assert found is not None
    assert (found.epoch, found.url) == (11, "http://11")
    flow = find_leader(PATHS, newer_than=11)
    assert next(flow) == StatFile(PATHS.leader(12))
    with pytest.raises(StopIteration) as stop:
        flow.send(None)
    assert stop.value.value is None


def test_of_two_that_recover_a_job_at_once_the_loser_sends_clients_to_the_winner(storage: DictStorage) -> None:
    """The job used to count as one that can't be led where its recovery had been fenced: clients that were sent there starved."""
    fenced_while_recovering = 0
    for operations in range(1, 60):
        torn = DictStorage()
        torn.files = dict(storage.files)
        first = Process(torn, seed=1, url=FIRST)
        run_host_flow(first.host.open(), torn, wait_for=lambda future: future.result())
        recovering = Steps(first.host.recover_job(JOB), torn)
        for _ in range(operations):
            if not recovering.done:
                recovering.step()
        if recovering.done:
            break
        second = led_by(torn, SECOND, seed=2)
        recovering.run()
        fenced_while_recovering += first.host.registry.find(JOB) is None
        for each in (first, second):
            each.drive(each.host.check_leaderships())
            each.settle()
        leaders = [each for each in (first, second) if each.host.registry.elsewhere(JOB) is None]
        assert len(leaders) == 1
        epoch, url = leaders[0].service(JOB).epoch, FIRST if leaders[0] is first else SECOND
        assert referral(second if leaders[0] is first else first) == {"job": JOB, "epoch": epoch, "url": url}
    assert operations > 20
    assert fenced_while_recovering > 0


def test_fenced_leader_names_who_leads(storage: DictStorage) -> None:
    older, newer = fenced(storage)
    assert referral(older) == {"job": JOB, "epoch": newer.service(JOB).epoch, "url": SECOND}
    assert older.host.registry.find(JOB) is not None
    with pytest.raises(NotLeaderError):
        queries(older).job(JOB)


def test_leader_that_lost_a_write_finds_out_who_leads_once_somebody_asks(storage: DictStorage) -> None:
    older = led_by(storage, FIRST, seed=1)
    led_by(storage, SECOND, seed=2)
    for slot in range(2):
        message = replace(registration(older, submission=1), slot=slot, nonce=f"w{slot}")
        older.call(JOB, lambda ticket, message=message: job_events.RegistrationReceived(ticket, message))  # type: ignore[misc]
    older.settle()
    assert older.host.registry.led(JOB).suspended
    with pytest.raises(NotLeaderError, match=r"leads job .* no more") as caught:
        register(older, submission=1)
    assert "url" not in caught.value.fields
    assert older.host.astray == {JOB}
    older.drive(older.host.find_leaders())
    assert referral(older)["url"] == SECOND
    assert older.host.astray == set()


def test_requests_cost_no_look_at_storage_and_a_round_costs_one(storage: DictStorage) -> None:
    older, _ = fenced(storage)
    done = len(older.operations)
    for _ in range(100):
        with pytest.raises(NotLeaderError):
            queries(older).job(JOB)
    assert len(older.operations) == done
    older.drive(older.host.find_leaders())
    older.drive(older.host.find_leaders())
    assert older.operations[done:] == [StatFile(PATHS.leader(4))]


def test_referral_follows_the_next_leader(storage: DictStorage) -> None:
    older, _ = fenced(storage)
    newest = led_by(storage, THIRD, seed=3)
    with pytest.raises(NotLeaderError):
        queries(older).job(JOB)
    older.drive(older.host.find_leaders())
    assert referral(older) == {"job": JOB, "epoch": newest.service(JOB).epoch, "url": THIRD}


def test_leader_that_is_reached_where_we_are_is_not_named(storage: DictStorage) -> None:
    """Clients would be sent from here to here."""
    older = led_by(storage, FIRST, seed=1)
    led_by(storage, FIRST, seed=2)
    older.drive(older.host.check_leaderships())
    older.settle()
    assert older.host.registry.led(JOB).suspended
    with pytest.raises(NotLeaderError) as caught:
        older.call(JOB, job_events.CancelRequested)
    assert "url" not in caught.value.fields


def test_submission_here_takes_the_job_whoever_leads_it(storage: DictStorage) -> None:
    older, newer = fenced(storage)
    accepted = older.submit(submitted("second"))
    assert older.host.registry.led(JOB).epoch == accepted.epoch > newer.service(JOB).epoch
    newer.drive(newer.host.check_leaderships())
    assert referral(newer)["url"] == FIRST


# ----------------------------------------------------------------------------------------------------- not from zombies


def test_fenced_leader_takes_nothing_back_by_itself(storage: DictStorage) -> None:
    older, newer = fenced(storage)
    for _ in range(20):
        with pytest.raises(NotLeaderError):
            queries(older).job(JOB)
        older.drive(older.host.check_leaderships())
        older.drive(older.host.find_leaders())
        older.drive(retry_recoveries(older.host))
        older.pass_time(LEADER_GRACE_MS)
    newer.drive(newer.host.check_leaderships())
    assert not newer.service(JOB).suspended
    assert PATHS.leader(newer.service(JOB).epoch + 1) not in storage.files


def test_job_is_led_from_here_once_its_leader_is_not_to_be_found(storage: DictStorage) -> None:
    older, newer = fenced(storage)
    epoch = newer.service(JOB).epoch
    stale = older.host.registry.find(JOB)
    assert stale is not None
    older.host.leader_unreachable(JOB, epoch)
    assert older.host.unrecovered == set(), "a leader listens only when it has recovered every job"
    older.pass_time(LEADER_GRACE_MS)
    older.host.leader_unreachable(JOB, epoch - 1)
    assert older.host.unrecovered == set(), "it is another one that was not found"
    older.host.leader_unreachable(JOB, epoch)
    older.drive(retry_recoveries(older.host))
    assert older.host.registry.led(JOB).epoch == epoch + 1
    assert stale.closed
    assert older.host.unrecovered == set()
    newer.drive(newer.host.check_leaderships())
    assert referral(newer) == {"job": JOB, "epoch": epoch + 1, "url": FIRST}, "whoever was taken for dead sends clients here"


def test_question_about_a_job_that_another_one_started_does_not_take_it_away() -> None:
    """It used to: whoever asked a standby about a job made it fail over."""
    storage = DictStorage()
    standby = led_by(storage, FIRST, seed=1)
    leader = Process(storage, seed=2, url=SECOND).begin()
    leader.submit(submitted())
    epoch = leader.service(JOB).epoch
    standby.host.look_for(JOB)
    standby.drive(retry_recoveries(standby.host))
    assert referral(standby) == {"job": JOB, "epoch": epoch, "url": SECOND}
    assert standby.host.unrecovered == set()
    leader.drive(leader.host.check_leaderships())
    assert not leader.service(JOB).suspended
    standby.pass_time(LEADER_GRACE_MS)
    standby.host.leader_unreachable(JOB, epoch)
    standby.drive(retry_recoveries(standby.host))
    assert standby.host.registry.led(JOB).epoch == epoch + 1, "and once it is not to be found, the job is led from here"


def test_leader_that_is_given_up_may_have_a_successor(storage: DictStorage) -> None:
    older, newer = fenced(storage)
    newest = led_by(storage, THIRD, seed=3)
    older.pass_time(LEADER_GRACE_MS)
    older.host.leader_unreachable(JOB, newer.service(JOB).epoch)
    older.drive(retry_recoveries(older.host))
    assert referral(older)["url"] == THIRD
    assert older.host.unrecovered == set()
    newest.drive(newest.host.check_leaderships())
    assert not newest.service(JOB).suspended


def test_job_that_ended_under_a_leader_that_is_gone_is_remembered_as_ended(storage: DictStorage) -> None:
    older, newer = fenced(storage)
    epoch = newer.service(JOB).epoch
    run_flow(write_result(PATHS, ResultRecord(1, "FINISHED", epoch, "second", 0, 0)), storage)
    older.pass_time(LEADER_GRACE_MS)
    older.host.leader_unreachable(JOB, epoch)
    older.drive(retry_recoveries(older.host))
    assert queries(older).job(JOB).overview.state == "FINISHED"
    with pytest.raises(FencedError):
        register(older, submission=1)


def test_leader_that_lost_an_id_to_a_stale_one_leads_on(storage: DictStorage) -> None:
    """A zombie's claim of the next id came first: the leader gave up, and nobody else led the job."""
    process = led_by(storage, FIRST, seed=1)
    epoch = process.service(JOB).epoch
    stale = process.host.registry.led(JOB)
    stale.post(job_events.LeadershipEnded("epoch 1 claimed checkpoint 5"))
    process.settle()
    with pytest.raises(NotLeaderError):
        register(process, submission=1)
    process.drive(process.host.find_leaders())
    process.drive(retry_recoveries(process.host))
    assert (process.service(JOB).epoch, stale.closed) == (epoch + 1, True)
    assert register(process, submission=1).epoch == epoch + 1


def test_job_whose_core_failed_is_not_led_again_by_itself(storage: DictStorage) -> None:
    """What nobody foresaw would come again, and each time would write an epoch."""
    process = led_by(storage, FIRST, seed=1)
    process.host.registry.led(JOB).post(job_events.AttemptPrepared)  # type: ignore[arg-type]  # no event at all
    process.settle()
    with pytest.raises(NotLeaderError):
        register(process, submission=1)
    process.drive(process.host.find_leaders())
    assert process.host.unrecovered == set()


def test_storage_that_fails_while_a_leader_is_looked_for_changes_nothing(storage: DictStorage) -> None:
    older, newer = fenced(storage)

    def away(operation: object) -> Any:
        raise StorageUnavailableError("away")

    with pytest.raises(NotLeaderError):
        queries(older).job(JOB)
    older.pass_time(LEADER_GRACE_MS)
    older.host.leader_unreachable(JOB, newer.service(JOB).epoch)
    working, older.execute = older.execute, away  # type: ignore[method-assign]
    older.drive(older.host.find_leaders())
    older.drive(retry_recoveries(older.host))
    assert older.host.unrecovered == {JOB}, "nobody can tell whether there is a newer leader"
    newer.execute = away  # type: ignore[method-assign]
    newer.drive(newer.host.check_leaderships())
    older.execute = working  # type: ignore[method-assign]
    assert referral(older)["url"] == SECOND
    assert not newer.service(JOB).suspended


@pytest.mark.parametrize(
    ("unreachable", "waited_ms", "given_up"),
    [(4, LEADER_GRACE_MS, True), (5, LEADER_GRACE_MS, True), (3, LEADER_GRACE_MS, False), (4, LEADER_GRACE_MS - 1, False)],
)
def test_when_a_leader_is_given_up(unreachable: int, waited_ms: int, given_up: bool) -> None:
    assert OtherLeader(4, SECOND, 1_000).is_given_up(unreachable, 1_000 + waited_ms) is given_up


# ------------------------------------------------------------------------------------- fenced by what is no coordinator


def fence(storage: DictStorage, nonce: str) -> int:
    """As a forgetting does, before it deletes what an ended job has."""
    return run_flow(fence_ended(JOB, Starter(nonce, "", "", 1)), storage)


def test_an_ended_job_that_a_forgetting_has_fenced_is_answered_from_its_records(storage: DictStorage) -> None:
    process = led_by(storage, FIRST, seed=1)
    process.service(JOB).post(job_events.CancelRequested(0))
    process.settle()
    runner = process.service(JOB)
    assert runner.ended.is_set()
    fence(storage, "f" * 32)
    assert calls(process).led(JOB) is runner, "it has ended here: whether it goes on elsewhere is looked up"
    process.drive(process.host.find_leaders())
    assert (process.host.registry.find(JOB), runner.closed) == (None, True)
    assert process.host.registry.elsewhere(JOB) is None
    assert queries(process).job(JOB).overview.state == "CANCELED"
    with pytest.raises(FencedError, match="CANCELED"):
        register(process, submission=1)
    assert process.submit(replace(submitted("again"), fresh=True)).epoch > 2
    assert calls(process).led(JOB) is process.service(JOB)


def test_what_a_forgetting_deletes_is_seen_whenever_it_does(storage: DictStorage) -> None:
    run_flow(write_result(PATHS, ResultRecord(1, "FINISHED", 1, "dead", 0, 0)), storage)
    for number in (1, 2):
        storage.execute(PutIfAbsent(f"{JOB}/chk-{number}/_metadata", b"{"))
        storage.execute(PutIfAbsent(PATHS.config(number), encode_record(ConfigRecord(number, 1, 1, {}, "n"))))
    process = led_by(storage, FIRST, seed=1)
    fence(storage, "f" * 32)

    def looked() -> tuple[Any, int]:
        done = len(process.operations)
        queries(process).job(JOB)
        process.drive(process.host.find_leaders())
        return process.host.registry.recorded(JOB), len(process.operations) - done

    last, _ = looked()
    assert looked() == (last, 2), "a submission, and the names in the folder"
    for number in (1, 2):
        process.pass_time(24 * 3_600_000)
        storage.execute(DeleteFolder(f"{JOB}/chk-{number}"))
        found, _ = looked()
        assert found is not last, "read anew"
        last = found
        assert looked() == (last, 2)


def test_a_running_job_that_nobody_with_an_address_leads_is_not_taken_for_ended(storage: DictStorage) -> None:
    process = led_by(storage, FIRST, seed=1)
    epoch = process.service(JOB).epoch
    run_flow(put_once(PATHS.leader(epoch + 1), encode_record(LeaderRecord(epoch + 1, "n" * 32, ""))), storage)
    process.drive(process.host.check_leaderships())
    process.settle()
    assert process.host.registry.recorded(JOB) is None
    assert "url" not in referral(process)


# ------------------------------------------------------------------------------------------------ newer than what we know


def test_worker_of_a_newer_submission_is_not_sent_home_by_a_leader_that_slept(storage: DictStorage) -> None:
    """409 would end it, and with it the driver: as if the newer submission were the older one."""
    older = led_by(storage, FIRST, seed=1)
    newer = led_by(storage, SECOND, seed=2)
    number = newer.submit(submitted("second")).submission
    with pytest.raises(NotLeaderError):
        register(older, submission=number)
    older.drive(older.host.find_leaders())
    older.settle()
    assert older.host.registry.find(JOB).suspended  # type: ignore[union-attr]
    with pytest.raises(NotLeaderError) as caught:
        register(older, submission=number)
    assert caught.value.url == SECOND


def test_worker_of_a_newer_submission_is_not_sent_home_by_one_that_remembers_the_end_of_an_older(storage: DictStorage) -> None:
    run_flow(write_result(PATHS, ResultRecord(1, "FINISHED", 1, "dead", 0, 0)), storage)
    older = led_by(storage, FIRST, seed=1)
    assert older.host.registry.recorded(JOB) is not None
    newer = led_by(storage, SECOND, seed=2)
    number = newer.submit(replace(submitted("second"), fresh=True)).submission
    with pytest.raises(FencedError, match="FINISHED"):
        register(older, submission=1)
    with pytest.raises(NotLeaderError):
        register(older, submission=number)
    older.drive(older.host.find_leaders())
    with pytest.raises(NotLeaderError) as caught:
        register(older, submission=number)
    assert caught.value.url == SECOND


def test_end_that_was_read_between_the_epoch_and_the_submission_of_another_leader_is_read_again(storage: DictStorage) -> None:
    """It slept in between: its epoch was there when the end was read, and its submission was not."""
    run_flow(write_result(PATHS, ResultRecord(1, "FINISHED", 1, "dead", 0, 0)), storage)
    newer = led_by(storage, SECOND, seed=2)
    starting = Steps(newer.host.submit(replace(submitted("second"), fresh=True)), storage)
    while PATHS.leader(2) not in storage.files:
        starting.step()
    older = Process(storage, seed=1, url=FIRST).begin()
    assert older.host.registry.recorded(JOB) is not None
    accepted = starting.run()
    with pytest.raises(NotLeaderError):
        register(older, submission=accepted.submission)
    older.drive(older.host.find_leaders())
    assert referral(older) == {"job": JOB, "epoch": 2, "url": SECOND}


@pytest.mark.parametrize("led", [True, False], ids=["ended here", "on record"])
def test_driver_of_a_newer_submission_is_sent_on_by_one_that_remembers_an_older(storage: DictStorage, led: bool) -> None:
    """Nobody else asked: it was told of the older submission for ever, and never learned how its own one ended."""
    older = led_by(storage, FIRST, seed=1)
    older.call(JOB, job_events.CancelRequested)
    older.settle()
    if not led:
        older = led_by(storage, FIRST, seed=3)
    newer = led_by(storage, SECOND, seed=2)
    newer.submit(replace(submitted("second"), fresh=True))
    assert seen_state(older) == "CANCELED"
    older.drive(older.host.find_leaders())
    with pytest.raises(NotLeaderError) as caught:
        seen_state(older)
    assert caught.value.url == SECOND


@pytest.mark.parametrize(("led", "requests"), [(True, 1), (False, 2)], ids=["ended here", "on record"])
def test_look_for_what_is_newer_of_an_ended_job_is_small(storage: DictStorage, led: bool, requests: int) -> None:
    process = led_by(storage, FIRST, seed=1)
    process.call(JOB, job_events.CancelRequested)
    process.settle()
    if not led:
        process = led_by(storage, FIRST, seed=3)
    done = len(process.operations)
    for _ in range(2):
        seen_state(process)
    process.drive(process.host.find_leaders())
    process.drive(process.host.find_leaders())
    looks = process.operations[done:]
    assert len(looks) == requests
    assert all(isinstance(look, StatFile) for look in looks)
    assert seen_state(process) == "CANCELED"


def test_worker_that_claims_a_submission_that_nobody_took_changes_nothing(storage: DictStorage) -> None:
    run_flow(write_result(PATHS, ResultRecord(1, "FINISHED", 1, "dead", 0, 0)), storage)
    process = led_by(storage, FIRST, seed=1)
    with pytest.raises(NotLeaderError):
        register(process, submission=7)
    process.drive(process.host.find_leaders())
    assert queries(process).job(JOB).overview.state == "FINISHED"


# ------------------------------------------------------------------------------------------------------------ with threads


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CoordinatorService]]:
    monkeypatch.setattr("holdfast.coordinator.service.RECOVERY_RETRY_S", 0.01)
    opened: list[CoordinatorService] = []
    yield opened
    for service in opened:
        service.close()


def test_service_refers_to_the_leader_and_takes_over_from_one_that_is_gone(
    services: list[CoordinatorService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.coordinator.ha.leadership.LEADER_GRACE_MS", 0)
    for seed, url in enumerate((FIRST, SECOND)):
        services.append(leading(ServiceConfig(str(tmp_path / "state"), url=url, seed=seed)))
        if seed == 0:
            job_id = services[0].submit(submission(word_count())).job_id
    first, second = services

    def told() -> str:
        try:
            first.heartbeat_async(job_id, Heartbeat(0, "", 0)).result(WAIT_S)
        except (NotLeaderError, FencedError) as error:
            return str(error.fields.get("url", ""))
        return ""

    wait_until(lambda: told() == SECOND, lambda: None, what="the referral")
    second.close()
    first.leader_unreachable(job_id, 2)
    wait_until(lambda: first._registry.elsewhere(job_id) is None, lambda: None, what="the job being led again")
    wait_until(lambda: first._registry.find(job_id) is not None, lambda: None, what="the job being led again")
    assert first.job(job_id).epoch == 3


def test_reading_the_leader_is_all_that_a_look_does(storage: DictStorage) -> None:
    older = led_by(storage, FIRST, seed=1)
    led_by(storage, SECOND, seed=2)
    done = len(older.operations)
    older.drive(older.host.check_leaderships())
    read = ReadFile(PATHS.leader(3), 0, FIRST_BYTES)
    assert older.operations[done:] == [StatFile(PATHS.leader(3)), ListFolder(PATHS.leaders), read]
    assert not any(isinstance(operation, PutIfAbsent) for operation in older.operations[done:])
