"""The typed client: calls, waiting, retries while the coordinator is away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.api.client import RestClient
from holdfast.api.errors import ConnectionLostError
from holdfast.barriers.codec import UNREACHABLE_HEADER
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.barriers.run_record import RunRecord, write_run_record
from holdfast.barriers.tunable import CheckpointMode
from holdfast.coordinator.jobmaster.stopping import CUT_OFF
from holdfast.coordinator.views import TriggerView
from holdfast.operators.worker.leader_retrieval import Target
from holdfast.statebackends.errors import CheckpointFailedError, InvalidConfigError, NotFoundError, NotLeaderError, ProtocolError
from holdfast.statebackends.layout import DIRECTORY_FILE
from tests.api.fakes import JOB, SOURCE, TOKEN, TRIGGER, FakeCoordinator, Served, make_graph, serving


@pytest.fixture
def client(served: Served) -> Iterator[RestClient]:
    made = RestClient(f"{served.url}/v1/", served.token, reconnect_timeout_s=0)
    yield made
    made.close()


def test_submit(client: RestClient) -> None:
    accepted = client.submit(Submission(make_graph(parallelism=3)))
    assert (accepted.job_id, accepted.slots, accepted.directory_nonce) == (JOB, 3, "nonce")


def test_reading(client: RestClient) -> None:
    assert client.job_state(JOB) == "RUNNING"
    assert client.job(JOB)["name"] == "flights"
    assert [job["jid"] for job in client.jobs()] == [JOB]
    assert client.checkpoints(JOB)["counts"]["completed"] == 2
    assert client.checkpoint(JOB, 3)["status"] == "FAILED"
    assert client.checkpoint_config(JOB)["interval"] == 1_000
    assert client.workers(JOB)["workers"][0]["pid"] == 4242
    assert client.exceptions(JOB)["exceptionHistory"]["entries"]
    assert client.plan(JOB)["plan"]["name"] == "flights"
    assert client.watermarks(JOB, SOURCE) == {}
    assert client.overview()["slots-total"] == 2


def test_waiting_for_a_checkpoint(client: RestClient, coordinator: FakeCoordinator) -> None:
    done = TriggerView(TRIGGER, CheckpointKind.CHECKPOINT, False, checkpoint_id=7)
    timer = threading.Timer(0.05, lambda: setattr(coordinator, "trigger", done))
    timer.start()
    assert client.trigger_checkpoint(JOB, timeout_s=10) == 7
    timer.join()
    assert sum(call[0] == "request_checkpoint" for call in coordinator.calls) == 1


def test_a_vertex_s_part_of_a_checkpoint_tells_where_its_time_went(client: RestClient) -> None:
    found = client.checkpoint_subtasks(JOB, 1, SOURCE)
    assert [each["className"] for each in found["subtasks"]] == ["completed", "pending"]
    with pytest.raises(NotFoundError):
        client.checkpoint_subtasks(JOB, 1, "d" * 32)


def test_a_checkpoint_s_own_mode(client: RestClient, coordinator: FakeCoordinator) -> None:
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.CHECKPOINT, False, checkpoint_id=7)
    assert client.trigger_checkpoint(JOB, unaligned=True, aligned_timeout_ms=0) == 7
    (asked,) = (call for call in coordinator.calls if call[0] == "request_checkpoint")
    assert asked[3] == CheckpointMode(unaligned=True, aligned_timeout_ms=0)
    with pytest.raises(InvalidConfigError) as caught:
        client.trigger_checkpoint(JOB, aligned_timeout_ms=5)
    assert caught.value.fields["setting"] == "alignedCheckpointTimeout"


def test_a_failed_one_is_raised_with_its_reason(client: RestClient, coordinator: FakeCoordinator) -> None:
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.CHECKPOINT, False, failure="too slow", failure_reason="expired")
    for ask in (client.trigger_checkpoint, client.savepoint, client.stop):
        with pytest.raises(CheckpointFailedError, match="too slow") as caught:
            ask(JOB)
        assert caught.value.reason == "expired"


def test_a_bare_reason_is_said_in_words(client: RestClient, coordinator: FakeCoordinator) -> None:
    reason = "not_all_required_tasks_running"
    coordinator.trigger = TriggerView(TRIGGER, CheckpointKind.SAVEPOINT, False, failure_reason=reason)
    with pytest.raises(CheckpointFailedError, match="not all tasks of the job run") as caught:
        client.savepoint(JOB)
    assert caught.value.reason == reason


@pytest.mark.parametrize("reason", sorted(CUT_OFF | {FailureReason.SUSPENDED, FailureReason.COORDINATOR_SHUTDOWN}))
def test_a_stop_that_is_given_up_is_said_in_words_with_its_tries(
    client: RestClient, coordinator: FakeCoordinator, reason: FailureReason
) -> None:
    for failure in (None, reason.value):
        coordinator.trigger = TriggerView(
            TRIGGER, CheckpointKind.STOP_SAVEPOINT, False, failure=failure, failure_reason=reason.value, tries=3
        )
        with pytest.raises(CheckpointFailedError, match="the stop was tried 3 times") as caught:
            client.stop(JOB)
        assert reason.value not in caught.value.message
        assert " " in caught.value.message.split("(")[0].strip()


def test_what_a_coordinator_says_stays_and_gets_the_number_of_tries(client: RestClient, coordinator: FakeCoordinator) -> None:
    coordinator.trigger = TriggerView(
        TRIGGER, CheckpointKind.STOP_SAVEPOINT, False, failure="PeerLost: x", failure_reason="job_failure", tries=2
    )
    with pytest.raises(CheckpointFailedError, match=r"PeerLost: x \(.*tried 2 times"):
        client.stop(JOB)


def test_waiting_ends(client: RestClient) -> None:
    with pytest.raises(TimeoutError, match="request id"):
        client.savepoint(JOB, timeout_s=0.02)


def test_a_driver_that_leaves_says_which_submission_was_its_own(served: Served, coordinator: FakeCoordinator) -> None:
    client = RestClient(served.url, served.token)
    client.leave(JOB, 3)
    assert coordinator.calls == [("leave", JOB, 3)]
    for body in (b"", b"{}", b'{"submission": "3"}', b'{"submission": 3.5}'):
        served.json("POST", f"/v1/jobs/{JOB}/leave", body, status=400)
    assert len(coordinator.calls) == 1
    client.close()


def test_who_leaves_does_not_wait_for_a_coordinator_that_is_gone() -> None:
    client = RestClient("http://127.0.0.1:1", TOKEN, reconnect_timeout_s=3_600)
    with pytest.raises(ConnectionLostError):
        client.leave(JOB, 3)


def test_who_leaves_does_not_wait_for_a_coordinator_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.api.client.LEAVE_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = RestClient(f"http://127.0.0.1:{silent.getsockname()[1]}", TOKEN)
        with pytest.raises(ConnectionLostError, match=r"read timeout=0\.0"):
            client.leave(JOB, 3)


def test_unknown_job(client: RestClient) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.job("d" * 32)
    assert caught.value.job == "d" * 32


def test_a_call_outlives_a_restart(tmp_path: Path) -> None:
    with serving(FakeCoordinator(), tmp_path) as first:
        client = RestClient(first.url, TOKEN, reconnect_timeout_s=20)
        assert client.job_state(JOB) == "RUNNING"
    port = int(first.url.rpartition(":")[2])
    states: list[str] = []
    waiting = threading.Thread(target=lambda: states.append(client.job_state(JOB)))
    waiting.start()
    with serving(FakeCoordinator(state="RECONCILING"), tmp_path, port=port):
        waiting.join(20)
    client.close()
    assert states == ["RECONCILING"]


def test_not_ready_is_asked_again(served: Served, coordinator: FakeCoordinator) -> None:
    coordinator.error = NotLeaderError("recovering")
    client = RestClient(served.url, TOKEN, reconnect_timeout_s=20)
    timer = threading.Timer(0.1, lambda: setattr(coordinator, "error", None))
    timer.start()
    assert client.job_state(JOB) == "RUNNING"
    timer.join()
    client.close()


def test_nobody_there() -> None:
    client = RestClient("http://127.0.0.1:9", reconnect_timeout_s=0.2)
    with pytest.raises(ConnectionLostError, match="can't reach the coordinator at http"):
        client.jobs()


def test_none_of_several_there_is_told_of_each() -> None:
    client = RestClient("http://127.0.0.1:9,http://127.0.0.1:13", reconnect_timeout_s=0)
    with pytest.raises(ConnectionLostError) as raised:
        client.jobs()
    assert all(f"can't reach the coordinator at http://127.0.0.1:{port}: " in raised.value.message for port in (9, 13))


def test_somebody_else_there(client: RestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_exchange", lambda method, path, body: b"<html>")
    with pytest.raises(ProtocolError):
        client.jobs()


def test_other_json_is_somebody_else_too(client: RestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_call", lambda *_: b'{"jobs": [{"id": 1}]}')
    for ask in (client.jobs, lambda: client.job_state(JOB)):
        with pytest.raises(ProtocolError):
            ask()


def test_the_token_is_not_shown(client: RestClient) -> None:
    assert TOKEN not in repr(client)


def test_a_long_absence_of_the_coordinator_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.api.client.SAY_WAITING_S", 0.1)
    with pytest.raises(ConnectionLostError):
        RestClient("http://127.0.0.1:9", reconnect_timeout_s=0.6).jobs()
    assert len([record for record in caplog.records if record.name == "holdfast.client"]) == 1
    assert "trying for 1 s at most" in caplog.text


# --------------------------------------------------------------------------------------------------- led by another one


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[tuple[FakeCoordinator, Served]]:
    """Another coordinator, with the same token."""
    coordinator = FakeCoordinator(state="RESTARTING")
    with serving(coordinator, tmp_path) as running:
        yield coordinator, running


def led_by(url: str, epoch: int = 4) -> NotLeaderError:
    return NotLeaderError("led elsewhere", job=JOB, epoch=epoch, url=url)


def test_the_leader_that_is_named_is_asked_at_once(
    client: RestClient, coordinator: FakeCoordinator, leader: tuple[FakeCoordinator, Served]
) -> None:
    coordinator.error = led_by(leader[1].url)
    assert client.job_state(JOB) == "RESTARTING"
    client.cancel(JOB)
    assert client.checkpoints(JOB)["counts"]
    assert [call[0] for call in coordinator.calls] == ["job"], "who leads is remembered"
    assert [call[0] for call in leader[0].calls] == ["job", "cancel", "checkpoints"]
    assert [job["state"] for job in client.jobs()] == ["RUNNING"], "what is about no job is asked where it was"


def test_two_that_name_each_other_are_asked_once_each(
    client: RestClient, coordinator: FakeCoordinator, served: Served, leader: tuple[FakeCoordinator, Served]
) -> None:
    coordinator.error, leader[0].error = led_by(leader[1].url), led_by(served.url)
    with pytest.raises(NotLeaderError):
        client.job_state(JOB)
    asked = [call[0] for call in (*coordinator.calls, *leader[0].calls)]
    assert asked == ["job", "job"]


def test_a_leader_that_is_gone_is_told_to_who_named_it_before_the_call_fails(
    client: RestClient, coordinator: FakeCoordinator, served: Served
) -> None:
    """A command line asks once: the job would be led by nobody however often somebody ran it."""
    coordinator.error = led_by("http://127.0.0.1:9")
    with pytest.raises(ConnectionLostError, match=rf"at http://127\.0\.0\.1:9, which leads job {JOB} with epoch 4: "):
        client.job_state(JOB)
    assert coordinator.calls == [("job", JOB), ("job", JOB), ("leader_unreachable", JOB, 4)]
    coordinator.error = None
    assert client.job_state(JOB) == "RUNNING"


def test_a_leader_that_is_gone_may_have_a_successor_by_then(
    client: RestClient, coordinator: FakeCoordinator, leader: tuple[FakeCoordinator, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.error = led_by("http://127.0.0.1:9")
    tell = coordinator.leader_unreachable

    def learn(job_id: str, epoch: int) -> None:
        tell(job_id, epoch)
        coordinator.error = led_by(leader[1].url, 5)

    monkeypatch.setattr(coordinator, "leader_unreachable", learn)
    with pytest.raises(ConnectionLostError):
        client.job_state(JOB)
    assert client.job_state(JOB) == "RESTARTING"


def test_where_the_leader_and_the_address_are_gone_the_call_fails_once(
    client: RestClient, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def request(target: Target, method: str, path: str, body: bytes | None, timeout: object = None) -> bytes:
        asked.append(target.url)
        if len(asked) == 1:
            raise led_by("http://127.0.0.1:9")
        raise ConnectionLostError(f"can't reach {target.url}", url=target.url)

    monkeypatch.setattr(client, "_request", request)
    with pytest.raises(ConnectionLostError, match=f"can't reach {client.url}"):
        client.job_state(JOB)
    assert asked == [client.url, "http://127.0.0.1:9", client.url]


@pytest.mark.parametrize("header", ["", "-1", "four", "9" * 40, "\u0664"])
def test_an_epoch_that_is_none_is_not_passed_on(served: Served, coordinator: FakeCoordinator, header: str) -> None:
    coordinator.error = led_by("http://127.0.0.1:9")
    headers = {UNREACHABLE_HEADER: header.encode().decode("latin-1")}
    response = served.request("GET", f"/v1/jobs/{JOB}/status", headers=headers)
    assert response.status == 503
    assert coordinator.calls == [("job", JOB)]


def test_a_token_does_not_leave_encryption(coordinator: FakeCoordinator, leader: tuple[FakeCoordinator, Served]) -> None:
    client = RestClient("https://coordinator", TOKEN, reconnect_timeout_s=0)
    asked: list[str] = []

    def request(target: Target, method: str, path: str, body: bytes | None, timeout: object = None) -> bytes:
        asked.append(target.url)
        raise led_by(leader[1].url)

    client._request = request  # type: ignore[method-assign]
    with pytest.raises(NotLeaderError):
        client.job_state(JOB)
    assert asked == ["https://coordinator"]


@pytest.mark.parametrize("nonce", ["nonce", "another"])
def test_a_driver_finds_the_coordinator_that_began_elsewhere_if_it_sees_the_state_directory(tmp_path: Path, nonce: str) -> None:
    """A directory of the same name may be another deployment's: its coordinator must not get our token."""
    state = tmp_path / "state"
    state.mkdir()
    (state / DIRECTORY_FILE).write_text(nonce)
    with serving(FakeCoordinator(directory=str(state)), tmp_path) as first:
        client = RestClient(first.url, TOKEN, reconnect_timeout_s=0)
        client.submit(Submission(make_graph()))
    second = FakeCoordinator(state="RECONCILING")
    with serving(second, tmp_path) as moved:
        write_run_record(state, RunRecord(moved.url, 1, "here", 1))
        with pytest.raises(ConnectionLostError):
            client.job_state(JOB)
        if nonce == "nonce":
            assert client.job_state(JOB) == "RECONCILING"
        else:
            with pytest.raises(ConnectionLostError):
                client.job_state(JOB)
            assert second.calls == []
    client.close()
