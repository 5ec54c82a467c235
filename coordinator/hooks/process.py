"""SHELL: one master hook in a process of its own, and the hooks of one job. Bounded in time and in the size of an answer.

A call that has no answer in time, or another one than was asked for, ends the process; the next call starts another. Nobody waits
for a hook but its own thread here."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.barriers.children import KILLED_SECONDS_MAX, end_group, has_exited
from holdfast.coordinator.confined import import_path
from holdfast.coordinator.hooks.calls import MESSAGE_CHARS_MAX, HookCall, HookCallKind, HookReply, HookVerdict
from holdfast.coordinator.hooks.frames import FRAME_BYTES_MAX, PREFIX, HookAnswer, HookRequest, decode_answer, frame
from holdfast.coordinator.views import NO_ANSWER
from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.snapshot.metadata import HOOK_STATE_BYTES_MAX, HookState

logger = logging.getLogger(__name__)

CALLS_WAITING_MAX = 16
"""Calls of one hook that wait; one more fails at once."""

CLOSE_TIMEOUT_MS = 2_000
"""How long a hook may take to close."""

_GONE_S, _LOOK_S = 1.0, 0.01
"""How long the end of a process is waited for that has closed its pipes, and between two looks."""


class HookError(HoldfastError):
    """A hook did not answer as it must; its process is gone. It does not leave this module."""

    timed_out: bool = False
    """It gave no answer in time."""


class HookProcess:
    """The process of one hook, started by the first call. Used by one thread."""

    def __init__(self, spec: str, job_id: str, epoch: int) -> None:
        """`spec`: `module:name` of the hook."""
        self._spec = spec
        self._job_id = job_id
        self._epoch = epoch
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def ask(self, call: HookCall, deadline_s: float) -> HookReply:
        """Call the hook; `deadline_s` is of time.monotonic. Raises HookError; behind any error none runs."""
        self._number += 1
        state = call.state
        version, content = (0, None) if state is None else (state.version, state.state)
        number, kind = self._number, call.kind
        request = HookRequest(number, kind, self._job_id, self._epoch, call.checkpoint_id, call.timestamp_ms, version, content)
        try:
            self._send(frame(request), deadline_s)
            return _checked(self._receive(deadline_s), request, call.name)
        except Exception:
            self.kill()
            raise

    def kill(self) -> None:
        """End it, and what it started in its process group. One that does not die is left: the next call starts another."""
        process, self._process = self._process, None
        if process is not None and not end_group(process):
            text = "the process of master hook %s, pid %d, was killed and runs on after %g s; it is left"
            logger.warning(text, self._spec, process.pid, KILLED_SECONDS_MAX)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
            environment["PYTHONPATH"] = import_path()
            command = [sys.executable, "-m", "holdfast.coordinator.hooks.child", self._spec, str(os.getpid())]
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0, bufsize=0
                )
            except OSError as error:
                raise HookError(f"its process can't be started: {error}") from error
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
        return self._process

    def _send(self, content: bytes, deadline_s: float) -> None:
        pipe = self._started().stdin
        assert pipe is not None
        rest = memoryview(content)
        while rest:
            self._wait(pipe.fileno(), select.POLLOUT, deadline_s)
            try:
                rest = rest[os.write(pipe.fileno(), rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise HookError(self._gone()) from error

    def _receive(self, deadline_s: float) -> bytes:
        (length,) = PREFIX.unpack(self._read(PREFIX.size, deadline_s))
        if length > FRAME_BYTES_MAX:
            raise HookError(f"its answer has {length} bytes; at most {FRAME_BYTES_MAX} are taken")
        return self._read(length, deadline_s)

    def _read(self, length: int, deadline_s: float) -> bytes:
        pipe = self._started().stdout
        assert pipe is not None
        content = b""
        while len(content) < length:
            self._wait(pipe.fileno(), select.POLLIN, deadline_s)
            try:
                found = os.read(pipe.fileno(), length - len(content))
            except BlockingIOError:
                continue
            if not found:
                raise HookError(self._gone())
            content += found
        return content

    @staticmethod
    def _wait(descriptor: int, events: int, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(descriptor, events)
        left_ms = (deadline_s - time.monotonic()) * 1000
        if left_ms <= 0 or not poller.poll(left_ms):
            raise HookError(f"{NO_ANSWER}; its process was killed", timed_out=True)

    def _gone(self) -> str:
        process = self._process
        assert process is not None
        until_s = time.monotonic() + _GONE_S
        while not (has_ended := has_exited(process)) and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self.kill()
        code = process.returncode if has_ended else None
        how = "" if code is None else f" by signal {-code}" if code < 0 else f" with exit code {code}"
        return f"its process ended{how}; standard error of the coordinator has what it said"


def _checked(content: bytes, request: HookRequest, name: str) -> HookReply:
    """The reply, if it can be one to this request."""
    try:
        answer: HookAnswer = decode_answer(content)
    except UNDECODABLE as error:
        raise HookError(f"its answer can't be read: {error}") from error
    if (answer.number, answer.epoch, answer.checkpoint_id) != (request.number, request.epoch, request.checkpoint_id):
        raise HookError("it answered what it was not asked")
    message, known = answer.message[:MESSAGE_CHARS_MAX], answer.known[:20]
    if answer.verdict is not HookVerdict.DONE or request.kind is not HookCallKind.TRIGGER or answer.state is None:
        return HookReply(answer.verdict, None, message, known)
    if len(answer.state) > HOOK_STATE_BYTES_MAX or not 0 <= answer.version < 2**31:
        raise HookError(f"{len(answer.state)} bytes of version {answer.version} can't be its state")
    return HookReply(answer.verdict, HookState(name, answer.version, answer.state))


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: HookCall
    deadline_s: float
    ended: Callable[[HookReply], None]


class _HookThread:
    """The calls of one hook, one after the other, on a thread of its own. Its process dies with this thread."""

    def __init__(self, name: str, process: HookProcess) -> None:
        """Raises RuntimeError if the system has no more threads."""
        self._name = name
        self._process = process
        self._calls: queue.Queue[_Waiting | None] = queue.Queue(CALLS_WAITING_MAX)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hook-{name[:20]}", daemon=True)
        self._thread.start()

    def put(self, waiting: _Waiting) -> None:
        try:
            self._calls.put_nowait(waiting)
        except queue.Full:
            waiting.ended(HookReply(HookVerdict.FAILED, message=f"{CALLS_WAITING_MAX} calls of it wait already"))

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then it sees that it is closing behind the call that runs
            self._calls.put_nowait(None)

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set():
            waiting = self._calls.get()
            if waiting is not None and not self._closing.is_set():
                self._answer(waiting)
        if self._process.is_running:
            call = HookCall(HookCallKind.CLOSE, self._name, 0)
            reply = self._ask(_Waiting(call, time.monotonic() + CLOSE_TIMEOUT_MS / 1000, lambda _reply: None))
            if reply.verdict is not HookVerdict.DONE:
                logger.warning("master hook %r could not be closed: %s", self._name, reply.message)
        self._process.kill()

    def _answer(self, waiting: _Waiting) -> None:
        reply = self._ask(waiting)
        try:
            waiting.ended(reply)
        except Exception:  # the calls behind it have answers, too
            logger.exception("the end of a call of master hook %r could not be told", self._name)

    def _ask(self, waiting: _Waiting) -> HookReply:
        try:
            return self._process.ask(waiting.call, waiting.deadline_s)
        except HookError as error:
            return HookReply(HookVerdict.FAILED, message=str(error), timed_out=error.timed_out)
        except Exception as error:  # a job waits for an answer, whatever is the matter
            logger.exception("a call of master hook %r failed unexpectedly", self._name)
            return HookReply(HookVerdict.FAILED, message=f"{type(error).__name__}: {error}"[:MESSAGE_CHARS_MAX])


class ProcessHooks:
    """Implements `HookPort`: hooks of one job, each started by its first call."""

    def __init__(self, specs: Mapping[str, str], job_id: str, epoch: int) -> None:
        """`specs`: name -> `module:name`, of all hooks that are installed."""
        self._specs = specs
        self._job_id = job_id
        self._epoch = epoch
        self._lock = threading.Lock()
        self._threads: dict[str, _HookThread] = {}
        self._closed = False

    def call(self, call: HookCall, ended: Callable[[HookReply], None]) -> None:
        deadline_s = time.monotonic() + call.timeout_ms / 1000
        try:
            with self._lock:
                if self._closed:
                    return
                thread = self._thread_of(call.name)
        except HookError as error:
            ended(HookReply(HookVerdict.FAILED, message=str(error)))
        else:
            thread.put(_Waiting(call, deadline_s, ended))

    def _thread_of(self, name: str) -> _HookThread:
        """Raises HookError if there is none."""
        known, spec = self._threads.get(name), self._specs.get(name)
        if known is not None:
            return known
        if spec is None:
            raise HookError("it is not installed where the coordinator runs")
        try:
            thread = self._threads[name] = _HookThread(name, HookProcess(spec, self._job_id, self._epoch))
        except RuntimeError as error:  # within a job's turn, which it would end
            raise HookError(f"no thread can be started for it: {error}") from error
        return thread

    def close(self) -> None:
        with self._lock:
            self._closed = True
            threads = list(self._threads.values())
        for thread in threads:
            thread.close()

    def join(self, timeout_s: float) -> bool:
        """Wait until the processes are gone, for at most so long each; whether they are."""
        gone = [thread.join(timeout_s) for thread in self._threads.values()]
        return all(gone)
