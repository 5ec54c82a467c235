"""SHELL: forgettings that were asked for over REST: one at a time, each in a process of its own, and remembered for a while.

A forgetting is crash-only: nothing of it is recorded, and the same request finishes what one began that was ended with the service.
The key is in the request to the process, and is kept nowhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.api.snapshots.forget_process import ForgetAnswer, ForgetRequest
from holdfast.api.snapshots.live_erasure import LiveErasure
from holdfast.coordinator.confined import ConfinedProcess, Ended, ProcessEnd
from holdfast.statebackends.decoding import UNDECODABLE, decode_json
from holdfast.statebackends.errors import HoldfastError, StorageUnavailableError

SECONDS_MAX = 24 * 3_600
"""A forgetting that takes longer is ended."""
REMEMBERED_MAX = 20
OUTPUT_BYTES_MAX = 16 << 20

log = logging.getLogger("holdfast.forgettings")


@dataclass(frozen=True, slots=True)
class Forgetting:
    """One request and its outcome."""

    forget_id: str
    job_id: str
    started_ms: int
    state: str = "running"
    """running, complete, incomplete (something was kept), or error (there is no certificate)."""
    certificate: dict[str, Any] | None = None
    error: str = ""
    error_kind: str = ""


def _command() -> list[str]:
    return [sys.executable, "-m", "holdfast.api.snapshots.forget_process"]


class Forgettings:
    """Forgettings of one service. Thread-safe."""

    def __init__(self, *, seconds_max: float = SECONDS_MAX, command: Callable[[], list[str]] = _command) -> None:
        """`command`: of the process."""
        self._seconds_max = seconds_max
        self._command = command
        self._lock = threading.Lock()
        self._known: deque[Forgetting] = deque(maxlen=REMEMBERED_MAX)
        self._process: ConfinedProcess | None = None
        self._is_running = self._is_closed = False

    def begin(
        self, request: ForgetRequest, forget_id: str, now_ms: int, erasure: LiveErasure | None = None
    ) -> Forgetting:
        """Begin it; `now_ms`: wall clock. `erasure`: of a running job, which comes first. Raises StorageUnavailableError while
        another one runs."""
        begun = Forgetting(forget_id, request.job_id, now_ms)
        wanted = msgspec.structs.replace(request, seconds_max=max(1, int(self._seconds_max)))
        with self._lock:
            if self._is_running or self._is_closed:
                raise StorageUnavailableError("a key is being forgotten: one at a time; ask again later", job=request.job_id)
            self._is_running = True
            self._known.appendleft(begun)
        try:
            threading.Thread(target=self._run, args=(begun, wanted, erasure), name=f"forget-{forget_id[:8]}", daemon=True).start()
        except RuntimeError as error:  # the system has no more threads
            self._end(begun, ForgetAnswer(error=str(error), error_kind="RuntimeError"))
            raise StorageUnavailableError(f"nothing can be forgotten now: {error}", job=request.job_id) from error
        return begun

    def of(self, job_id: str) -> list[Forgetting]:
        """Those of a job, newest first."""
        with self._lock:
            return [each for each in self._known if each.job_id == job_id]

    def close(self) -> None:
        """End the one under way. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _run(self, begun: Forgetting, wanted: ForgetRequest, erasure: LiveErasure | None) -> None:
        try:
            answer = self._answer(wanted) if erasure is None else self._erased(wanted, erasure)
        except Exception as error:
            log.error("job %s: the forgetting of a key failed: %s", begun.job_id, type(error).__name__)
            answer = ForgetAnswer(error="an internal error", error_kind=type(error).__name__)
        self._end(begun, answer)

    def _erased(self, wanted: ForgetRequest, erasure: LiveErasure) -> ForgetAnswer:
        """The key leaves the running job, then what it left behind is looked at. A mistake is found before that."""
        judged = self._answer(msgspec.structs.replace(wanted, judges=True))
        if judged.error_kind:
            return judged
        try:
            checkpoint_id = erasure.run()
        except HoldfastError as error:
            return ForgetAnswer(error=error.message, error_kind=type(error).__name__)
        try:
            return self._answer(msgspec.structs.replace(wanted, checkpoint_id=checkpoint_id))
        finally:
            erasure.release()

    def _answer(self, wanted: ForgetRequest) -> ForgetAnswer:
        process = ConfinedProcess(seconds_max=self._seconds_max, output_bytes_max=OUTPUT_BYTES_MAX)
        with self._lock:
            self._process = process
            if self._is_closed:
                process.kill()
        try:
            return _answered(process.run(self._command(), msgspec.json.encode(wanted)))
        finally:
            with self._lock:
                self._process = None

    def _end(self, begun: Forgetting, answer: ForgetAnswer) -> None:
        certificate: dict[str, Any] | None = msgspec.json.decode(answer.certificate)
        state = "error" if certificate is None else "complete" if certificate["is_complete"] else "incomplete"
        ended = replace(begun, state=state, certificate=certificate, error=answer.error, error_kind=answer.error_kind)
        with self._lock:
            kept = [ended if each.forget_id == begun.forget_id else each for each in self._known]
            self._known = deque(kept, REMEMBERED_MAX)
            self._is_running = False


_KINDS = {ProcessEnd.TIMED_OUT: "TimeoutError", ProcessEnd.NOT_STARTED: "OSError"}
"""`error_kind` of a process without an answer; of any other end ProcessDied."""


def _answered(ended: Ended) -> ForgetAnswer:
    if ended.end is not ProcessEnd.EXITED:
        goes_on = "" if ended.end is ProcessEnd.NOT_STARTED else ": ask again, it goes on"
        return ForgetAnswer(error=f"{ended.detail}{goes_on}", error_kind=_KINDS.get(ended.end, "ProcessDied"))
    try:
        return decode_json(ended.output.strip(), ForgetAnswer)
    except UNDECODABLE:
        how = f"its process died ({ended.how}) without a word: ask again, it goes on"
        return ForgetAnswer(error=how, error_kind="ProcessDied")
