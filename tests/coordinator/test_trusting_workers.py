"""What a worker says is taken for itself alone: its slot, its process, its texts; and jobs have names that can be shown."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.barriers import codec
from holdfast.barriers.jobgraph import JOB_NAME_CHARS_MAX, Submission, check_job_name
from holdfast.barriers.launches import draw_secret, is_launched, launch_token
from holdfast.barriers.messages import (
    INT_MAX,
    TEXT_BYTES_MAX,
    TRACEBACK_BYTES_MAX,
    AckBatch,
    AcknowledgeCheckpoint,
    CheckpointMetrics,
    DeclineCheckpoint,
    FailureReason,
    Heartbeat,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    clip,
    clip_front,
)
from holdfast.coordinator.dispatcher.submit import Starter, identify_job, resume_submission, start_submission
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.slots import Slot
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.spark.slots import RddBackend, WorkerTemplate
from holdfast.operators.spark.supervisor import Launch, SlotSupervisor, SpawnWorker, WorkerEnded, derive_end
from holdfast.operators.worker.session import Session
from holdfast.operators.worker.session_events import DeadlineReached, SendRegister, WorkerIdentity
from holdfast.statebackends.errors import AuthenticationError, FencedError, InvalidConfigError, ProtocolError
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB, DictStorage

KEY = "k" * 64

# --------------------------------------------------------------------------------------------------------------- slots


def test_a_worker_reports_of_its_own_slot_alone() -> None:
    rig = Rig().run()
    vertex = rig.graph.vertices[0].vertex_id
    own = SubtaskStatus(1, vertex, 0, TaskState.FAILED, error="ValueError: mine")
    foreign = msgspec.structs.replace(own, subtask=1)
    batch = StatusBatch(rig.setup.epoch, 0, rig.sessions[0], (own, foreign))
    with pytest.raises(ProtocolError, match=r"the worker in slot 0 reports on subtask 1 of \w+, which runs in another slot"):
        rig.call(lambda ticket: job_events.StatesReceived(ticket, batch))
    assert rig.state == "RUNNING", "nothing of the message was taken"
    beat = Heartbeat(0, rig.sessions[0], 1, (SubtaskMetrics(vertex, 1, records_in=10**9),))
    with pytest.raises(ProtocolError, match="in another slot"):
        rig.call(lambda ticket: job_events.HeartbeatReceived(ticket, beat))
    with pytest.raises(ProtocolError, match="in another slot"):
        rig.register(0, attempt=1, nonce="0-0", subtasks=(foreign,))
    assert rig.state == "RUNNING"


def test_counters_of_a_status_are_those_of_its_subtask() -> None:
    rig = Rig().run()
    vertex = rig.graph.vertices[0].vertex_id
    counters = SubtaskMetrics("x" * 5_000, 0, records_in=7)
    batch = StatusBatch(
        rig.setup.epoch, 0, rig.sessions[0], (SubtaskStatus(1, vertex, 0, TaskState.RUNNING, drained=True, metrics=counters),)
    )
    rig.call(lambda ticket: job_events.StatesReceived(ticket, batch))
    assert rig.master.lifecycle.execution is not None
    assert {entry.records_in for entry in rig.master.lifecycle.execution.metrics()} == {0}


def test_an_acknowledgement_for_another_slot_declines_the_checkpoint() -> None:
    rig = Rig(tolerable_failed_checkpoints=3).run()
    rig.feed_request()
    for item in rig.acks(1, 1, 1):
        batch = AckBatch(rig.setup.epoch, 0, rig.sessions[0], (item,))
        rig.call(lambda ticket, batch=batch: job_events.AckBatchReceived(ticket, batch))
    assert rig.master.coordinator.retained == ()
    (view,) = rig.master.coordinator.stats.view().history
    assert (view.status, view.failure_reason) == ("FAILED", "declined")
    assert "the worker in slot 0 answered for subtask 1 of" in (view.failure_message or "")


# --------------------------------------------------------------------------------------------------------------- texts


def test_texts_are_clipped_where_they_are_taken() -> None:
    rig = Rig(tolerable_failed_checkpoints=3).run()
    rig.feed_request()
    vertex = rig.graph.vertices[0].vertex_id
    decline = DeclineCheckpoint(1, 1, vertex, 0, FailureReason.DECLINED, "d" * 100_000)
    batch = AckBatch(rig.setup.epoch, 0, rig.sessions[0], (decline,))
    rig.call(lambda ticket: job_events.AckBatchReceived(ticket, batch))
    (view,) = rig.master.coordinator.stats.view().history
    assert len(view.failure_message or "") < TEXT_BYTES_MAX + 100
    failed = SubtaskStatus(1, vertex, 0, TaskState.FAILED, error="E: " + "e" * 100_000, traceback="t" * 100_000 + "last line")
    rig.call(lambda ticket: job_events.StatesReceived(ticket, StatusBatch(rig.setup.epoch, 0, rig.sessions[0], (failed,))))
    failure = rig.master.lifecycle.exceptions.newest
    assert failure is not None
    assert (len(failure.error), len(failure.traceback)) == (TEXT_BYTES_MAX, TRACEBACK_BYTES_MAX)
    assert failure.traceback.endswith("last line")


def test_a_clipped_text_has_whole_characters_and_a_sign_that_it_goes_on() -> None:
    assert clip("x" * TEXT_BYTES_MAX) == "x" * TEXT_BYTES_MAX
    assert clip("ä" * 600) == "ä" * 510 + "..."
    assert len(clip("\U0001f600" * 600).encode()) <= TEXT_BYTES_MAX
    assert clip_front("a" * 9_000 + "ä") == "..." + "a" * (TRACEBACK_BYTES_MAX - 5) + "ä"
    assert clip("\ud800" * 2_000).startswith("???")


@pytest.mark.parametrize("clipped", [clip, clip_front])
def test_a_text_that_names_an_undecodable_file_can_be_sent(clipped: Callable[[str], str]) -> None:
    """Python keeps such a byte as a lone surrogate, which is in no UTF-8: however short the text, it is replaced."""
    assert clipped("ValueError: bad record caf\udce9") == "ValueError: bad record caf?"
    assert clipped("käse") == "käse"


def test_what_a_registration_reports_is_not_kept() -> None:
    rig = Rig().run()
    items = (AcknowledgeCheckpoint(1, 1, rig.graph.vertices[0].vertex_id, 0),)
    rig.register(0, attempt=1, nonce="0-0", unanswered=items)
    holder = rig.master.slot_pool.slots[0].holder
    assert holder is not None
    assert (holder.unanswered, holder.subtasks) == ((), ())


@pytest.mark.parametrize("name", ["nonce", "data_key"])
@pytest.mark.parametrize("text", ["x" * 5_000, "a\0b", "ä"])
def test_names_of_a_process_are_names(name: str, text: str) -> None:
    rig = Rig()
    given: dict[str, Any] = {name: text}
    with pytest.raises(ProtocolError, match=f"the {name} of a worker"):
        rig.register(0, **given)


@pytest.mark.parametrize("path", ["", "/data/größe/hf-1/d", "/データ/日本　語/d", "/" + "x" * 106])
def test_a_data_socket_is_a_path_in_any_script(path: str) -> None:
    rig = Rig()
    rig.register(0, data_socket=path)
    assert rig.master.slot_pool.data_ports().sockets == ({0: path} if path else {})


@pytest.mark.parametrize("path", ["d", "../d", "/a\0b", "/a\nb", "/a\x85b", "/" + "x" * 107, "/" + "ß" * 54, "/\ud800"])
def test_a_data_socket_that_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(ProtocolError, match="the data_socket of a worker"):
        Rig().register(0, data_socket=path)


@pytest.mark.parametrize("pid", [-1, 2**31, 2**62])
def test_a_pid_is_that_of_a_process(pid: int) -> None:
    with pytest.raises(ProtocolError, match="the pid of a worker"):
        Rig().register(0, pid=pid)


@pytest.mark.parametrize(
    ("name", "number"), [("attempt", b"1" + b"0" * 30), ("frames_refused", b"1" + b"0" * 400), ("frames_refused", b"-1")]
)
def test_a_number_that_no_reader_holds_is_refused(name: str, number: bytes) -> None:
    written = codec.encode(Heartbeat(0, "s", 1, frames_refused=1))
    body = written.replace(f'"{name}":1'.encode(), f'"{name}":'.encode() + number)
    assert body != written
    with pytest.raises(ProtocolError, match=name):
        codec.decode(body, Heartbeat)


@pytest.mark.parametrize("number", [b"-1", b"1.7e308"])
@pytest.mark.parametrize("name", ["sync_duration_ms", "checkpointed_size"])
def test_what_an_acknowledgement_measures_has_bounds(name: str, number: bytes) -> None:
    """Else a duration of 309 digits is shown, and a counter falls."""
    metrics = msgspec.json.encode({name: 1}).replace(b":1", b":" + number)
    with pytest.raises(msgspec.ValidationError, match=name):
        msgspec.json.decode(metrics, type=CheckpointMetrics)
    with pytest.raises(msgspec.ValidationError, match="records_in"):
        msgspec.json.decode(b'{"vertex":"v","subtask":0,"records_in":-1}', type=SubtaskMetrics)


def test_a_sum_of_what_workers_count_has_an_end() -> None:
    slot = Slot(0)
    for nonce in ("a", "b"):
        slot.take(RegisterWorker(JOB, 0, 1, 1, nonce, 1, "host", "", ""), "session", 1)
        slot.count_refused(INT_MAX)
    assert slot.frames_refused == INT_MAX


# -------------------------------------------------------------------------------------------------------------- launcher


def launched(slot: int, spawn: int, **fields: object) -> dict[str, object]:
    token = launch_token(KEY, job_id=JOB, submission=1, slot=slot, spawn=spawn)
    return {"task_attempt": 1, "spawn": spawn, "launch_token": token, **fields}


def guarded() -> Rig:
    """A job whose launcher vouches for its workers."""
    rig = Rig()
    storage = DictStorage()
    asked = submission(rig.graph, job_id=JOB, launch_key=KEY)
    rig.storage = storage
    rig.open(run_flow(start_submission(JOB, asked, Starter("starter", "", "directory", 0)), storage))
    return rig


def test_only_who_was_launched_may_register() -> None:
    rig = guarded()
    for fields in (
        {"task_attempt": 10**18},
        {"task_attempt": 10**18, "spawn": 10**18},
        {**launched(0, 1), "spawn": 2},
        launched(1, 1),
        {**launched(0, 1), "launch_token": "x" * 64},
    ):
        with pytest.raises(AuthenticationError, match="slot 0: the process is not the worker"):
            rig.register(0, **fields)
    rig.register(0, **launched(0, 1))  # type: ignore[arg-type]


def test_nobody_locks_out_the_next_worker_of_a_slot() -> None:
    rig = guarded()
    rig.register(0, **launched(0, 1, task_attempt=10**18))  # type: ignore[arg-type]
    with pytest.raises(FencedError):
        rig.register(0, **launched(0, 1, task_attempt=5))  # type: ignore[arg-type]
    rig.register(0, **launched(0, 2, task_attempt=6))  # type: ignore[arg-type]
    with pytest.raises(FencedError):
        rig.register(0, **launched(0, 1, task_attempt=10**18 + 1, nonce="again"))  # type: ignore[arg-type]


def test_spark_may_run_the_task_of_a_spawn_again() -> None:
    rig = guarded()
    rig.register(0, **launched(0, 1, task_attempt=5))  # type: ignore[arg-type]
    rig.register(0, **launched(0, 1, task_attempt=6))  # type: ignore[arg-type]
    assert rig.master.slot_pool.slots[0].holder is not None
    assert rig.master.slot_pool.slots[0].holder.task_attempt == 6


def test_who_takes_a_slot_with_a_task_attempt_of_its_own_ends_no_job() -> None:
    """A true worker that was told that another driver runs the job made its driver stop all slots for ever."""
    rig = guarded()
    rig.register(0, **launched(0, 1, task_attempt=5))  # type: ignore[arg-type]
    rig.register(0, **launched(0, 1, task_attempt=2**62))  # type: ignore[arg-type]
    delivered = [line.command for each in rig.actions if isinstance(each, job_actions.Deliver) for line in each.commands]
    (told,) = [command for command in delivered if isinstance(command, ShutdownWorker)]
    assert (told.respawn, told.superseded) == (True, False)
    end = derive_end(respawn=told.respawn, superseded=told.superseded)
    supervisor = SlotSupervisor(2)
    supervisor.handle(Launch(), now_ms=0)
    assert supervisor.handle(WorkerEnded(0, 1, end, told.reason), now_ms=1) == [SpawnWorker(0, 2)]
    rig.register(0, **launched(0, 2, task_attempt=0, nonce="next"))  # type: ignore[arg-type]


def test_workers_of_an_older_submission_are_told_that_a_newer_one_runs() -> None:
    rig = Rig().run()
    rig.call(lambda ticket: job_events.SuspendRequested(ticket, "a newer submission"))
    assert [command.superseded for command in rig.commands(0, ShutdownWorker)] == [True]


def test_the_next_coordinator_knows_who_was_launched() -> None:
    rig = guarded()
    rig.open(run_flow(resume_submission(JOB, Starter("second", "", "directory", 0)), rig.storage))
    with pytest.raises(AuthenticationError):
        rig.register(0, task_attempt=10**18)
    rig.register(0, **launched(0, 1))  # type: ignore[arg-type]


def test_proofs_are_of_one_worker_and_of_one_submission() -> None:
    who = {"job_id": JOB, "submission": 1, "slot": 0, "spawn": 1}
    token = launch_token(KEY, **who)  # type: ignore[arg-type]
    assert is_launched(KEY, token, **who)  # type: ignore[arg-type]
    for name, other in (("job_id", "b" * 32), ("submission", 2), ("slot", 1), ("spawn", 2)):
        assert not is_launched(KEY, token, **{**who, name: other})  # type: ignore[arg-type]
    assert not is_launched(KEY, "\ud800", **who)  # type: ignore[arg-type]
    assert len(draw_secret()) == 64
    assert is_launched("", "", **who), "a launcher that gives no key vouches for nobody"  # type: ignore[arg-type]


def test_older_workers_and_drivers_say_nothing_of_it() -> None:
    register = codec.decode(
        b'{"type":"register","job_id":"j","slot":0,"submission":1,"task_attempt":2,"nonce":"n","pid":1,"host":"h",'
        b'"data_address":"tcp://h:1","directory_nonce":"d"}',
        RegisterWorker,
    )
    assert (register.spawn, register.launch_token) == (0, "")
    older = msgspec.json.decode(codec.encode(Submission(word_count())))
    del older["launch_key"]
    assert codec.decode(msgspec.json.encode(older), Submission).launch_key == ""


# ------------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["", "  ", "x" * 256, "a\0b", "line\nbreak", "\x1b[31mred", "bell\a", "\u202ereversed"])
def test_a_job_has_a_name_that_can_be_shown(name: str) -> None:
    with pytest.raises(InvalidConfigError, match="name") as caught:
        check_job_name(name)
    assert caught.value.fields["setting"] == "name"
    with pytest.raises(InvalidConfigError):
        identify_job(Submission(word_count(name=name)))


def test_other_names_are_taken() -> None:
    for name in ("a", "x" * JOB_NAME_CHARS_MAX, "Umsätze je Stunde", "日本語 №1"):
        check_job_name(name)


def test_a_launch_key_has_a_limit() -> None:
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(Submission(word_count(), launch_key="k" * 300)), Submission)


def test_the_key_never_leaves_the_driver() -> None:
    template = WorkerTemplate(JOB, 1, "http://x", None, "/s", b"", 1_000)
    started = RddBackend(None, template, "words", launch_key=KEY)._launched(1, 3)
    assert is_launched(KEY, started.launch_token, job_id=JOB, submission=1, slot=1, spawn=3)
    assert (started.spawn, KEY.encode() in pickle.dumps(started)) == (3, False)


def test_a_session_shows_its_proof() -> None:
    identity = WorkerIdentity(JOB, 1, 1, 9, "n", 1, "h", "tcp://h:1", "d", spawn=3, launch_token="t")
    (send,) = Session(identity, random.Random(1)).handle(DeadlineReached(), now_ms=0)
    assert isinstance(send, SendRegister)
    assert (send.body.spawn, send.body.launch_token) == (3, "t")


@pytest.mark.parametrize("name", ["x" * 256, "a\nb", " "])
def test_python_refuses_a_name_before_anything_starts(name: str) -> None:
    with pytest.raises(InvalidConfigError, match="name"):
        Environment(name)


@pytest.mark.parametrize(
    "address", ["inproc://a", "ipc:///tmp/a", "tcp://host", "tcp://host:0", "tcp://host:65536", "tcp://a b:1", "x"]
)
def test_a_data_address_is_a_port_of_a_host(address: str) -> None:
    with pytest.raises(ProtocolError, match="slot 0: the data_address of a worker"):
        Rig().register(0, data_address=address)


@pytest.mark.parametrize("key", ["k", "0" * 39, "0" * 41, "0" * 39 + "~", "#" * 40])
def test_a_data_key_is_one_that_peers_can_connect_with(key: str) -> None:
    with pytest.raises(ProtocolError, match="slot 0: the data_key of a worker"):
        Rig().register(0, data_key=key)


def test_two_slots_have_two_keys() -> None:
    """Peers know each other by them alone."""
    rig = Rig()
    rig.register(0, data_key="0" * 40)
    with pytest.raises(ProtocolError, match="that of slot 0"):
        rig.register(1, data_key="0" * 40)
    rig.register(1, data_key="1" * 40)
    assert rig.master.slot_pool.data_ports().keys == {0: "0" * 40, 1: "1" * 40}
