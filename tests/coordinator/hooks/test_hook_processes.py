"""Master hooks in processes of their own: whatever a hook does, its caller has an answer in time, and nothing of it stays."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.children import end_group
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.hooks import process as process_module
from holdfast.coordinator.hooks import registry as registry_module
from holdfast.coordinator.hooks.calls import HookCall, HookCallKind, HookReply, HookVerdict
from holdfast.coordinator.hooks.frames import HookAnswer, HookRequest, encode
from holdfast.coordinator.hooks.process import HookError, HookProcess, _checked
from holdfast.coordinator.hooks.registry import HookRegistry
from holdfast.coordinator.service import CoordinatorService
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.snapshot.metadata import HOOK_STATE_BYTES_MAX, HookState
from tests.coordinator.doubles import submission, wait_until, word_count
from tests.scenarios.hooks import INSTALLED, ask, hooks_of

FIRST_MS = 60_000
"""For calls that start a process, on a machine that may be busy."""


def trigger(number: int = 1, timeout_ms: int = FIRST_MS) -> HookCall:
    return HookCall(HookCallKind.TRIGGER, "hook", number, 1_000, timeout_ms=timeout_ms)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log"
    monkeypatch.setenv("HOOK_LOG", str(path))
    return path


def lines(log: Path) -> list[str]:
    """What the hooks were called for, without their processes."""
    return [line.partition(" ")[2] for line in log.read_text().splitlines()]


def test_its_state_and_what_it_gets_back(log: Path) -> None:
    with hooks_of(hook="Stateful") as port:
        reply = ask(port, trigger(5))
        assert reply == HookReply(state=HookState("hook", 2, b"state of 5"))
        assert ask(port, HookCall(HookCallKind.RESTORE, "hook", 5, 1_000, reply.state, FIRST_MS)) == HookReply()
        assert ask(port, HookCall(HookCallKind.RESTORE, "hook", 4, timeout_ms=FIRST_MS)) == HookReply()
        port.close()
        assert port.join(30)
    assert lines(log) == ["trigger 5 4", "restore 5 of 1000: 2 b'state of 5'", "restore 4 of 0: 0 None", "close"]
    assert len({line.split()[0] for line in log.read_text().splitlines()}) == 1, "one process"


def test_one_without_state_has_none() -> None:
    with hooks_of(hook="Stateless") as port:
        assert ask(port, trigger()) == HookReply()


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("Raising", "ValueError: the ledger is closed"),
        ("Dying", "its process ended with exit code 7"),
        ("Huge", rf"its state has 1048576 bytes; at most {HOOK_STATE_BYTES_MAX} are stored"),
        ("NotBytes", "its state is bytes or None, not str"),
        ("NoHook", "which is no holdfast.MasterHook"),
        ("Missing", "AttributeError"),
        ("Babbling", r"can't be read|at most .* are taken"),
    ],
)
def test_one_that_fails_is_answered_for(hook: str, message: str) -> None:
    with hooks_of(hook=hook) as port:
        reply = ask(port, trigger())
    assert reply.verdict is HookVerdict.FAILED
    assert re.search(message, reply.message), reply.message


def test_one_that_hangs_is_killed_with_what_it_started_and_the_next_call_starts_anew(log: Path) -> None:
    with hooks_of(hook="Hanging") as port:
        assert ask(port, HookCall(HookCallKind.RESET, "hook", 0, timeout_ms=FIRST_MS)) == HookReply()
        reply = ask(port, trigger(1, timeout_ms=2_000))
        assert (reply.verdict, reply.message) == (HookVerdict.FAILED, "no answer in time; its process was killed")
        assert reply.timed_out
        pids = {int(line.split()[0]) for line in log.read_text().splitlines()}
        pids |= {int(line.split()[2]) for line in log.read_text().splitlines() if " child " in line}
        wait_until(lambda: not any(map(runs, pids)), lambda: time.sleep(0.01), what="the end of its processes")
        assert ask(port, HookCall(HookCallKind.RESET, "hook", 0, timeout_ms=FIRST_MS)) == HookReply()


def test_one_that_does_not_die_is_left_and_its_call_is_answered(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one in the midst of a read of a network disk that is gone."""
    left: list[subprocess.Popen[bytes]] = []

    def leave(process: subprocess.Popen[bytes]) -> bool:
        left.append(process)
        return False

    monkeypatch.setattr(process_module, "end_group", leave)
    with hooks_of(hook="Raising") as port, caplog.at_level(logging.WARNING):
        assert ask(port, HookCall(HookCallKind.RESET, "hook", 0, timeout_ms=FIRST_MS)) == HookReply()
        assert ask(port, trigger(1, timeout_ms=0)).timed_out
        assert [process.pid for process in left] == [int(log.read_text().split()[0])]
        assert f"pid {left[0].pid}, was killed and runs on" in caplog.text
        monkeypatch.undo()
        assert ask(port, HookCall(HookCallKind.RESET, "hook", 0, timeout_ms=FIRST_MS)) == HookReply(), "of another process"
    assert end_group(left[0])


def test_what_a_dead_hook_had_started_ends_too(log: Path) -> None:
    with hooks_of(hook="Leaving") as port:
        assert "exit code 7" in ask(port, trigger()).message
    (child,) = (int(line.split()[2]) for line in log.read_text().splitlines() if " child " in line)
    wait_until(lambda: not runs(child), lambda: time.sleep(0.01), what="the end of its child")


def test_an_error_that_nobody_foresaw_is_an_answer_and_the_next_call_starts_anew(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooks_of(hook="Stateful") as port:
        with monkeypatch.context() as patched:
            patched.setattr(HookProcess, "_receive", _break)
            reply = ask(port, trigger())
        assert (reply.verdict, reply.message) == (HookVerdict.FAILED, "OSError: [Errno 5] not now")
        pid = int(log.read_text().split()[0]) if log.exists() else 0
        assert not pid or not runs(pid)
        assert ask(port, trigger(2)).verdict is HookVerdict.DONE


def _break(*_: object) -> bytes:
    raise OSError(5, "not now")


def test_an_answer_that_can_t_be_told_keeps_no_other_call_from_its_own() -> None:
    told: list[HookReply] = []

    def fail(reply: HookReply) -> None:
        told.append(reply)
        raise ValueError("of whoever asked")

    with hooks_of(hook="Stateful") as port:
        port.call(trigger(1), fail)
        assert ask(port, trigger(2)).verdict is HookVerdict.DONE
    assert len(told) == 1


class _NoThreads(threading.Thread):
    """A system that has no more threads for hooks until `failures` were refused."""

    failures = 0

    def start(self) -> None:
        if self.name.startswith("hook-") and _NoThreads.failures:
            _NoThreads.failures -= 1
            raise RuntimeError("can't start new thread")
        super().start()


def refuse_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(_NoThreads, "failures", count)
    monkeypatch.setattr(threading, "Thread", _NoThreads)


def test_without_a_thread_a_call_fails_and_a_later_one_is_performed(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, 1)
    with hooks_of(hook="Stateful") as port:
        message = "no thread can be started for it: can't start new thread"
        assert ask(port, trigger()) == HookReply(HookVerdict.FAILED, message=message)
        assert ask(port, trigger(2)).verdict is HookVerdict.DONE


def runs(pid: int) -> bool:
    """Whether a process runs; one that is dead and not collected by whoever inherited it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_calls_beyond_the_limit_fail_at_once() -> None:
    with hooks_of(hook="Hanging") as port:
        replies: list[HookReply] = []
        for number in range(1, 40):
            port.call(trigger(number), replies.append)
        assert len(replies) >= 20
        assert {reply.message for reply in replies} == {"16 calls of it wait already"}


def test_one_that_is_not_installed() -> None:
    with hooks_of(other="Stateful") as port:
        assert "not installed" in ask(port, trigger()).message
    registry = HookRegistry()
    registry.register("other", f"{INSTALLED}:Stateful")
    with pytest.raises(InvalidConfigError, match=r"'hook' is not installed .* there are: other"):
        registry.check(["hook", "other"])


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ("nosuch:Thing", "nosuch"),
        ("nosuch.hooks:Thing", "nosuch"),
        ("tests.coordinator.nosuch.hooks:Thing", "tests.coordinator.nosuch"),
        (f"{INSTALLED}:Stateful", None),
        (f"{INSTALLED}:NoSuch", None),
        ("json.decoder.JSONDecoder:x", None),  # of a module, which may make others when it is imported
        ("os.path:join", None),
    ],
)
def test_one_whose_module_is_not_there_is_refused_and_nothing_is_imported(spec: str, missing: str | None) -> None:
    registry = HookRegistry()
    registry.register("hook", spec)
    before = set(sys.modules)
    if missing is None:
        registry.check(["hook"])
    else:
        with pytest.raises(InvalidConfigError, match=rf"'hook' is installed as {spec}, .* no module '{missing}'"):
            registry.check(["hook"])
    assert set(sys.modules) == before


class Broken:
    """A finder of another package's."""

    def find_spec(self, *_: object) -> None:
        raise RuntimeError("not now")


def test_a_finder_that_fails_refuses_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Broken()])
    registry = HookRegistry()
    registry.register("hook", "nosuch:Thing")
    registry.check(["hook"])


def test_tokens_do_not_reach_a_hook(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TOKEN", "a secret")
    with hooks_of(hook="Stateful") as port:
        ask(port, trigger())
        pid = log.read_text().split()[0]
        assert b"HOLDFAST_TOKEN" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"HOOK_LOG" in Path(f"/proc/{pid}/environ").read_bytes()


REQUEST = HookRequest(3, HookCallKind.TRIGGER, "job", 4, 5, 6)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (HookAnswer(2, 4, 5), "not asked"),
        (HookAnswer(3, 3, 5), "not asked"),
        (HookAnswer(3, 4, 6), "not asked"),
        (HookAnswer(3, 4, 5, state=b"x", version=-1), "can't be its state"),
        (HookAnswer(3, 4, 5, state=bytes(HOOK_STATE_BYTES_MAX + 1)), "can't be its state"),
    ],
)
def test_an_answer_to_something_else_is_none(answer: HookAnswer, message: str) -> None:
    with pytest.raises(HookError, match=message):
        _checked(encode(answer), REQUEST, "hook")
    with pytest.raises(HookError, match="can't be read"):
        _checked(b"\xc1", REQUEST, "hook")
    good = _checked(encode(HookAnswer(3, 4, 5, state=b"x", version=1)), REQUEST, "hook")
    assert good.state == HookState("hook", 1, b"x")


def test_entry_points_are_found_and_the_first_of_two_of_a_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, value, "g") for name, value in (("b", "z:H"), ("a", "m:H [extra]"), ("b", "y:H"), (" ", "q:H"))]
    monkeypatch.setattr(registry_module, "entry_points", lambda group: points if group == "holdfast.master_hooks" else [])
    registry = HookRegistry(discover=True)
    assert registry.names() == ("a", "b")
    assert registry._specs == {"a": "m:H", "b": "y:H"}


# ------------------------------------------------------------------------------------------------- a real coordinator


@contextmanager
def coordinator(directory: Path, *names: str) -> Iterator[CoordinatorService]:
    registry = HookRegistry()
    for name in names:
        registry.register(name.lower(), f"{INSTALLED}:{name}")
    service = CoordinatorService(ServiceConfig(str(directory), view_interval_ms=0), hooks=registry)
    service.lead()
    try:
        wait_until(lambda: service.ready, lambda: time.sleep(0.005), timeout_s=30, what="the coordinator")
        yield service
    finally:
        service.close()


def settings(*hooks: str, **more: Any) -> dict[str, Any]:
    return {"master_hooks": hooks, "master_hook_timeout_ms": FIRST_MS, "checkpoint_interval_ms": None, **more}


def test_a_job_resets_its_hooks_and_closes_them_at_its_end(tmp_path: Path, log: Path) -> None:
    with coordinator(tmp_path / "state", "Stateful") as service:
        accepted = service.submit(submission(word_count(1, **settings("stateful"))))
        wait_until(lambda: log.exists() and "reset 0" in lines(log), lambda: time.sleep(0.005), timeout_s=60, what="the reset")
        service.cancel(accepted.job_id)
        wait_until(lambda: "close" in lines(log), lambda: time.sleep(0.005), timeout_s=60, what="the close")
    assert lines(log) == ["reset 0", "close"]
    pids = {int(line.split()[0]) for line in log.read_text().splitlines()}
    wait_until(lambda: not any(map(runs, pids)), lambda: time.sleep(0.01), what="the end of its process")


def test_a_job_is_led_on_where_a_thread_for_its_hook_is_refused_and_the_next_try_has_one(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, 1)
    with coordinator(tmp_path / "state", "Stateful") as service:
        service.submit(submission(word_count(1, **settings("stateful"))))
        wait_until(lambda: log.exists() and "reset 0" in lines(log), lambda: time.sleep(0.005), timeout_s=60, what="the reset")
    assert _NoThreads.failures == 0


def test_a_job_that_names_a_hook_that_is_not_installed_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with coordinator(tmp_path / "state") as service:
        for ask_for in (service.submit, service.preflight):
            with pytest.raises(InvalidConfigError, match="'billing' is not installed"):
                ask_for(submission(word_count(1, **settings("billing"))))
        assert not service.jobs()
    assert not list((tmp_path / "state").glob("*/leader")), "no job has a leader"


def test_settings_of_hooks_are_judged() -> None:
    for wrong in ({"master_hooks": ("a", "a")}, {"master_hooks": ("",)}, {"master_hooks": tuple(map(str, range(17)))}):
        with pytest.raises(InvalidConfigError, match=r"master_hooks|master hook"):
            word_count(**wrong).config.check()
    with pytest.raises(InvalidConfigError, match="master_hook_timeout_ms"):
        word_count(master_hook_timeout_ms=0).config.check()
    assert msgspec.json.decode(msgspec.json.encode(word_count(master_hooks=("a",)).config))["master_hooks"] == ["a"]
