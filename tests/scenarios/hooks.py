"""Plays the rows of group I against the real cores, and where a row is about processes, against real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.barriers.messages import FailureReason, TaskState
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.hooks.calls import HookCall, HookCallKind, HookReply, HookVerdict
from holdfast.coordinator.hooks.process import ProcessHooks
from holdfast.coordinator.hooks.registry import HookRegistry
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.restore.compatibility import check_compatibility
from holdfast.statebackends.errors import InvalidConfigError, MasterHookError
from holdfast.statebackends.layout import JobPaths, metadata_path
from holdfast.statebackends.snapshot.metadata import HOOKS_VERSION, HookState, SnapshotMetadata, decode_metadata
from tests.coordinator.bench import Bench, of
from tests.coordinator.doubles import wait_until, word_count
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB
from tests.scenarios.outcome import Outcome, Passed
from tests.scenarios.tables import Row, UnparsedError

INSTALLED = "tests.coordinator.hooks.installed"
ONE, TWO = HookState("one", 3, b"\x00 of one"), HookState("two", 1, b"of two")


def check_hook_row(row: Row) -> Outcome:
    """Play a row by its id; an assertion that fails is the row's failure. The row must say what is played."""
    if row.id not in SCENARIOS:
        raise UnparsedError(f"{row.id} is not a scenario that is known")
    words, play = SCENARIOS[row.id]
    text = " ".join(row.cells).lower()
    missing = [word for word in words if word not in text]
    if missing:
        raise UnparsedError(f"{row.id} does not say {', '.join(missing)}")
    play()
    return Passed()


def running_rig(**settings: Any) -> Rig:
    """A job that runs and names hooks `one`, `two` (with state) and `three` (without)."""
    names = settings.pop("master_hooks", ("one", "two", "three"))
    settings.setdefault("checkpoint_interval_ms", None)
    rig = Rig(master_hooks=names, **settings)
    rig.hooks = reply_of
    rig.run()
    return rig


def fail_over(rig: Rig) -> None:
    rig.report(0, 1, TaskState.FAILED, "ValueError: of a task")
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.CANCELED)
    rig.pass_time(5_000)


def reply_of(call: HookCall) -> list[HookReply]:
    if call.kind is not HookCallKind.TRIGGER:
        return [HookReply()]
    return [HookReply(state={"one": ONE, "two": TWO}.get(call.name))]


def metadata_of(rig: Rig, number: int) -> SnapshotMetadata:
    path = metadata_path(JobPaths(JOB).checkpoint(number))
    return decode_metadata(rig.storage.files[path], path)


def bench_with(*names: str, **settings: Any) -> Bench:
    return Bench(master_hooks=names, **settings)


def registered_twice() -> None:
    registry = HookRegistry()
    assert registry.register("x", "first:Hook")
    assert not registry.register("x", "second:Hook")
    assert registry._specs == {"x": "first:Hook"}


def registered_without_a_name() -> None:
    for name in (None, "", "   ", "a\nb", "x" * 101):
        with pytest.raises(InvalidConfigError):
            HookRegistry().register(name, "a:Hook")  # type: ignore[arg-type]


def states_are_stored() -> None:
    bench = bench_with("one", "three", "two")
    out = bench.trigger()
    assert [type(action) for action in out] == [actions.WriteClaim, *[actions.TriggerHook] * 3], "pending, and then called"
    assert [action.name for action in of(out, actions.TriggerHook)] == ["one", "three", "two"]
    assert bench.pending == [1]
    rig = running_rig()
    rig.checkpoint()
    stored = metadata_of(rig, 1)
    assert (stored.hooks, stored.version) == ((ONE, TWO), HOOKS_VERSION)


def a_hook_fails() -> None:
    bench = bench_with("one", "two", tolerable_failed_checkpoints=0)
    bench.trigger()
    out = bench.handle(events.HookFailed(1, "one", "ValueError: closed"))
    assert bench.reasons == {1: FailureReason.TRIGGER_FAILURE.value}
    assert not bench.all(actions.SendTriggers)
    assert not of(out, actions.FailJob)


def a_hook_never_returns() -> None:
    bench = bench_with("one", checkpoint_timeout_ms=100, master_hook_timeout_ms=5_000, tolerable_failed_checkpoints=0)
    bench.trigger()
    out = bench.advance(100)
    assert bench.reasons == {1: FailureReason.EXPIRED.value}
    assert not bench.all(actions.SendTriggers)
    assert not of(out, actions.FailJob), "a hook harms no job"
    assert bench.machine.failures.count == 0
    assert bench.handle(events.HookAnswered(1, "one", ONE)) == [], "too late"


def states_are_restored() -> None:
    rig = running_rig()
    rig.checkpoint()
    told = {action.timestamp_ms for action in of(rig.actions, actions.TriggerHook)}
    assert len(told) == 1
    assert 0 not in told
    rig.actions.clear()
    fail_over(rig)
    restores = {action.name: action for action in of(rig.actions, job_actions.RestoreHook)}
    assert {action.timestamp_ms for action in restores.values()} == told, "of its trigger"
    assert {name: (action.checkpoint_id, action.state) for name, action in restores.items()} == {
        "one": (1, ONE),
        "two": (1, TWO),
        "three": (1, None),
    }


def a_state_has_no_hook() -> None:
    rig = running_rig()
    rig.checkpoint()
    stored, graph = metadata_of(rig, 1), word_count(master_hooks=("two",))
    (refusal,) = check_compatibility(stored, graph).refusals
    error = refusal.error()
    assert isinstance(error, MasterHookError)
    assert error.hooks == ["one"]
    allowed = check_compatibility(stored, graph, allow_non_restored_state=True)
    assert not allowed.refusals
    assert "master hook 'one' is not among the job's: its state is dropped" in allowed.notes


def a_version_is_not_known() -> None:
    with hooks_of(hook="Stateful") as port:
        reply = ask(port, HookCall(HookCallKind.RESTORE, "hook", 7, state=HookState("hook", 9, b""), timeout_ms=30_000))
    assert (reply.verdict, reply.known) == (HookVerdict.UNKNOWN_VERSION, (1, 2))
    rig = running_rig(master_hooks=("one",))
    rig.checkpoint()
    unknown = HookReply(HookVerdict.UNKNOWN_VERSION, known=(1, 2))
    rig.hooks = lambda call: [unknown] if call.kind is HookCallKind.RESTORE else reply_of(call)
    fail_over(rig)
    assert rig.master.state in (JobState.FAILING, JobState.FAILED)
    assert all(part in (rig.master.lifecycle.failure or "") for part in ("'one'", "version 3", "knows 1, 2"))


def empty_start_and_end() -> None:
    rig = running_rig()
    resets = [(action.name, action.checkpoint_id, action.timestamp_ms) for action in of(rig.actions, job_actions.RestoreHook)]
    assert resets == [("one", 0, 0), ("three", 0, 0), ("two", 0, 0)]
    with hooks_of(hook="Stateful") as port:
        assert ask(port, HookCall(HookCallKind.RESET, "hook", 0, timeout_ms=30_000)).verdict is HookVerdict.DONE
        port.close()
        port.close()
        assert port.join(30)
        assert ask_nothing(port)


def blocking_calls() -> None:
    with hooks_of(hook="Stateful", other="Hanging") as port:
        assert ask(port, HookCall(HookCallKind.RESET, "hook", 0, timeout_ms=30_000)).verdict is HookVerdict.DONE
        began = time.monotonic()
        replies: list[HookReply] = []
        port.call(HookCall(HookCallKind.TRIGGER, "other", 1, timeout_ms=20_000), replies.append)
        assert time.monotonic() - began < 5, "it does not wait for the hook"
        assert ask(port, HookCall(HookCallKind.TRIGGER, "hook", 1, timeout_ms=10_000)).state is not None
        assert replies == [], "the other one hangs still"


@contextmanager
def hooks_of(**classes: str) -> Iterator[ProcessHooks]:
    """Hooks of the tests, by name, in real processes."""
    registry = HookRegistry()
    for name, each in classes.items():
        registry.register(name, f"{INSTALLED}:{each}")
    port = registry.of_job(JOB, 4)
    try:
        yield port
    finally:
        port.close()
        kill(port)


def kill(port: ProcessHooks) -> None:
    """What hangs would else live on until its call's time is up."""
    for thread in port._threads.values():
        process = thread._process._process
        if process is not None:
            process.kill()
    assert port.join(30)


def ask(port: ProcessHooks, call: HookCall) -> HookReply:
    replies: list[HookReply] = []
    port.call(call, replies.append)
    wait_until(lambda: bool(replies), lambda: time.sleep(0.005), timeout_s=60, what="the hook's answer")
    return replies[0]


def ask_nothing(port: ProcessHooks) -> bool:
    """Whether a call behind the end has no effect."""
    replies: list[HookReply] = []
    port.call(HookCall(HookCallKind.TRIGGER, "hook", 1, timeout_ms=1), replies.append)
    return not replies


SCENARIOS: Mapping[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    "I01": (("twice", "refused"), registered_twice),
    "I02": (("blank", "error"), registered_without_a_name),
    "I03": (("stateless", "before"), states_are_stored),
    "I04": (("trigger failure",), a_hook_fails),
    "I05": (("never returns", "expiry"), a_hook_never_returns),
    "I06": (("restore", "null"), states_are_restored),
    "I07": (("non-restored", "dropped"), a_state_has_no_hook),
    "I08": (("version", "fails"), a_version_is_not_known),
    "I09": (("reset", "close"), empty_start_and_end),
    "I10": (("blocking", "does not block"), blocking_calls),
}
"""Row -> words that it must have, and what is played."""
