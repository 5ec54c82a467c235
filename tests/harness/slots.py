"""Worker slots as processes on this machine, without Spark.

One thread starts the processes, and a dead one's successor after a short, growing delay; a process that left by command is not
replaced. The coordinator decides which process gets a slot, by the task attempt number."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading
import time
from dataclasses import dataclass, replace

from holdfast.barriers.launches import launch_token
from holdfast.operators.worker.main import WorkerSpec
from holdfast.statebackends.errors import InvalidConfigError
from tests.harness.nursery import Child, start_worker

RESPAWN_DELAY_MS_MIN = 20
RESPAWN_DELAY_MS_MAX = 2_000
HEALTHY_AFTER_S = 5.0
"""Age from which the next respawn has the smallest delay again."""

POLL_S = 0.02


@dataclass(slots=True)
class _Slot:
    """One slot: the process that holds it, and when its successor is due."""

    index: int
    process: Child | None = None
    started_s: float = 0.0
    respawn_at_s: float = 0.0
    delay_ms: int = RESPAWN_DELAY_MS_MIN
    task_attempt: int = 0
    has_left: bool = False
    """It ended with exit code 0: the job is over for it."""


class LocalProcessSlots:
    """`count` worker processes of one job on this machine, respawned until `close` or until they leave by themselves."""

    def __init__(
        self,
        spec: WorkerSpec,
        count: int,
        *,
        standbys: int = 0,
        log_directory: str | None = None,
        launch_key: str = "",
    ) -> None:
        """`spec` is a template: slot and task attempt are set for each process. Output goes to `log_directory`, or nowhere.
        `launch_key`: of the submission. `standbys`: processes beyond the slots, which stand by."""
        self._count, self._standbys = count, standbys
        self._launch_key = launch_key
        if count < 1:
            raise InvalidConfigError(f"a job needs at least one slot, got {count}", setting="count")
        self._spec = spec
        self._slots = [_Slot(index) for index in range(count + standbys)]
        self._log_directory = log_directory
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-slots-")
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="holdfast-slots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pid(self, slot: int) -> int | None:
        """Process id of the slot's process; None while there is none."""
        process = self._slots[slot].process
        return None if process is None or process.poll() is not None else process.pid

    def starts(self, slot: int) -> int:
        """How many processes the slot has had."""
        return self._slots[slot].task_attempt

    def wait(self, timeout_s: float) -> bool:
        """Whether every slot's process has left by itself within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: all(slot.has_left for slot in self._slots), timeout_s)

    def close(self) -> None:
        """Kill running processes. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()
        self._folder.cleanup()

    # ---------------------------------------------------------------------------------------------------------- thread

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            for slot in self._slots:
                self._look_after(slot, time.monotonic())

    def _look_after(self, slot: _Slot, now_s: float) -> None:
        if slot.has_left:
            return
        if slot.process is None:
            if now_s >= slot.respawn_at_s:
                self._spawn(slot, now_s)
            return
        code = slot.process.poll()
        if code is None:
            return
        slot.process = None
        if code == 0:
            with self._changed:
                slot.has_left = True
                self._changed.notify_all()
            return
        if now_s - slot.started_s > HEALTHY_AFTER_S:
            slot.delay_ms = RESPAWN_DELAY_MS_MIN
        slot.respawn_at_s = now_s + slot.delay_ms / 1000
        slot.delay_ms = min(RESPAWN_DELAY_MS_MAX, slot.delay_ms * 2)

    def _spawn(self, slot: _Slot, now_s: float) -> None:
        slot.task_attempt += 1
        job_id, submission, spawn = self._spec.job_id, self._spec.submission, slot.task_attempt
        token = launch_token(self._launch_key, job_id=job_id, submission=submission, slot=slot.index, spawn=spawn)
        stands_by = self._standbys > 0 and (slot.index >= self._count or spawn > 1)
        spec = replace(
            self._spec,
            slot=slot.index,
            task_attempt=spawn,
            spawn=spawn,
            launch_token=token,
            stands_by=stands_by,
            has_slot=slot.index < self._count,
        )
        path = os.path.join(self._folder.name, f"{slot.index}-{slot.task_attempt}")
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)  # it holds the token
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump(spec, file)
        log = os.devnull
        if self._log_directory is not None:
            log = os.path.join(self._log_directory, f"worker-{slot.index}-{slot.task_attempt}.log")
        slot.process = start_worker(path, log)
        slot.started_s = now_s
