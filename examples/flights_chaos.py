"""What the flights demo does to itself, and the proof that it really did: kills, restarts, and a trace of every gap.

The trace is written by the job's own user function, outside Holdfast, so that recovery times and gaps are measured by
someone who has no reason to flatter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3

TRACE_EVERY_S = 0.02
GAP_MAX_S = 1.0
WAIT_S = 120.0
"""Until what has to come: patience with a machine that is busy with other things, and no promise of how long anything takes."""


class DemoError(Exception):
    """The demo did not do, or did not show, what it promises."""


# ------------------------------------------------------------------------------------------------- inside the workers


class Trace:
    """Appends `time count longest-gap` lines to one file per process: the first record at once, then every 20 ms."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._file: int | None = None
        self._count = 0
        self._last = self._written = self._gap = 0.0

    def record(self) -> None:
        """One record was processed, now."""
        now = time.time()
        if self._file is None:
            os.makedirs(self.folder, exist_ok=True)
            self._file = os.open(f"{self.folder}/{os.getpid()}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            self._last = now
        self._gap = max(self._gap, now - self._last)
        self._last = now
        self._count += 1
        if now - self._written >= TRACE_EVERY_S:
            os.write(self._file, f"{now:.6f} {self._count} {self._gap:.6f}\n".encode())
            self._written, self._gap = now, 0.0

    def __getstate__(self) -> str:
        return self.folder

    def __setstate__(self, folder: str) -> None:
        self.__init__(folder)  # type: ignore[misc]


@dataclass(frozen=True)
class Beat:
    """One trace line: a record at `time`; `gap` is the longest silence since the line before. Seconds."""

    time: float
    count: int
    gap: float


def beats(folder: Path, pid: int) -> list[Beat]:
    """What one process traced; whole lines only."""
    path = folder / str(pid)
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [Beat(float(at), int(count), float(gap)) for at, count, gap in (line.split() for line in lines)]


# --------------------------------------------------------------------------------------------------------- the driver


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float, every_s: float = 0.01) -> Any:
    """Poll until the condition is true; DemoError after the deadline. Errors of a dead coordinator count as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            value = condition()
        except (urllib3.exceptions.HTTPError, OSError):
            value = None
        except Exception as error:
            if type(error).__name__ not in ("StorageUnavailableError", "CoordinatorUnavailableError"):
                raise
            value = None
        if value:
            return value
        if time.monotonic() > deadline:
            raise DemoError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(every_s)


def pause(seconds: float) -> None:
    """Let the job run on: the demo's moments are drawn from its seed."""
    time.sleep(seconds)


def clock() -> str:
    """Local time, for the log."""
    return time.strftime("%H:%M:%S")


def is_alive(pid: int) -> bool:
    """A process of that id runs, or stands still."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Coordinator:
    """A real `holdfast serve` process on a state directory; the same URL and token after a restart."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        """Start it and wait until it is ready."""
        command = [sys.executable, "-m", "holdfast", "serve", "--state-dir", str(self.state)]
        with open(self.state.parent / "coordinator.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        http = urllib3.PoolManager()
        self.url = wait_for("coordinator started", lambda: self._ready(http), WAIT_S)

    def _ready(self, http: urllib3.PoolManager) -> str | None:
        assert self.process is not None
        if self.process.poll() is not None:
            raise DemoError(f"the coordinator ended: see {self.state.parent / 'coordinator.log'}")
        record = self.state / "_coordinator.json"
        if not record.exists():
            return None
        described = json.loads(record.read_text())
        if described["pid"] != self.process.pid:
            return None
        url: str = described["url"]
        return url if http.request("GET", f"{url}/readyz", retries=False, timeout=2).status == 200 else None

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Terminate; idempotent."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Members:
    """Two real `holdfast serve --ha` processes on a state directory, of which one is active."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._urls: dict[subprocess.Popen[bytes], str] = {}
        self._http = urllib3.PoolManager(retries=False, timeout=2)
        self._started = 0

    @property
    def url(self) -> str:
        """Both URLs, as `coordinator=` takes them."""
        return ",".join(self._urls.values())

    def start(self) -> None:
        """Start both and wait until one is active and the other stands by."""
        for _ in range(2):
            self.start_one()
        wait_for("an active member", self.active, WAIT_S)
        wait_for("one that stands by", lambda: any(self._says("standby", url) for url in self._urls.values()), WAIT_S)

    def start_one(self) -> str:
        """Start a member; its URL."""
        self._started += 1
        announced = self.state.parent / f"member-{self._started}.json"
        command = [sys.executable, "-m", "holdfast", "serve", "--ha", "--json", "--port", "0", "--state-dir", str(self.state)]
        with open(announced, "wb") as out, open(self.state.parent / "coordinator.log", "ab") as log:
            process = subprocess.Popen(command, stdout=out, stderr=log)
        wait_for("a member listens", lambda: announced.read_text().endswith("\n") or process.poll() is not None, WAIT_S)
        if process.poll() is not None:
            raise DemoError(f"a member ended: see {self.state.parent / 'coordinator.log'}")
        self._urls[process] = json.loads(announced.read_text())["url"]
        return self._urls[process]

    def _says(self, what: str, url: str) -> bool:
        try:
            return self._http.request("GET", f"{url}/{what}").status == 200
        except urllib3.exceptions.HTTPError:
            return False

    def active(self) -> subprocess.Popen[bytes] | None:
        """The member that says it is the active one."""
        return next((process for process, url in self._urls.items() if self._says("leader", url)), None)

    def kill_active(self) -> int:
        """kill -9; its pid."""
        process = self.active()
        if process is None:
            raise DemoError("no member is active")
        process.kill()
        process.wait()
        del self._urls[process]
        return process.pid

    def stop(self) -> None:
        """Terminate all; idempotent."""
        for process in self._urls:
            process.terminate()
        for process in self._urls:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass
class Drill:
    """Breaks one running job on purpose and keeps the evidence."""

    handle: Any
    trace: Path
    say: Callable[[str], None]
    kills: int = 0
    recoveries: list[float] = field(default_factory=list)
    replacements: list[float] = field(default_factory=list)
    """Seconds from the loss of a worker that stood still to its successor's first record."""
    takeovers: list[float] = field(default_factory=list)
    """Seconds from the death of the active member until another one leads the job with all workers."""
    kills_with_checkpoint_pending: int = 0
    restored_ids: list[int] = field(default_factory=list)

    def workers(self) -> dict[str, Any]:
        described: dict[str, Any] = self.handle.client.workers(self.handle.job_id)
        return described

    def pids(self) -> dict[int, int]:
        return {worker["slot"]: worker["pid"] for worker in self.workers()["workers"]}

    def checkpoints(self) -> dict[str, Any]:
        described: dict[str, Any] = self.handle.client.checkpoints(self.handle.job_id)
        return described

    def pending(self) -> list[int]:
        return [entry["id"] for entry in self.checkpoints()["history"] if entry["status"] == "IN_PROGRESS"]

    def flowing(self, pids: list[int], since: float) -> bool:
        """Every process traced a record after `since`."""
        return all((lines := beats(self.trace, pid)) and lines[-1].time > since for pid in pids)

    def kill_worker(self, slot: int, *, checkpoint_pending: bool) -> None:
        """kill -9 one worker between two of its records, and measure until its successor processes the next one."""
        pid = self.pids()[slot]
        wait_for("records before the kill", lambda: self.flowing([pid], time.time() - 1), WAIT_S)
        pending: list[int] = []
        if checkpoint_pending:
            pending = wait_for("a pending checkpoint", self.pending, WAIT_S, every_s=0.002)
        os.kill(pid, signal.SIGKILL)
        at = time.time()
        self.kills += 1
        self.say(f"kill -9 worker in slot {slot} (pid {pid})" + (f", checkpoint {pending[0]} pending" if pending else ""))
        successor = wait_for("a successor", lambda: (new := self.pids().get(slot)) != pid and new, WAIT_S)
        first = wait_for("a record after the kill", lambda: beats(self.trace, successor), WAIT_S)[0]
        self.recoveries.append(first.time - at)
        self.note_restore()
        self.say(f"    first record again after {first.time - at:.2f} s, from checkpoint {self.restored_ids[-1]}")
        if pending:
            self._note_pending(pending[0])

    def stop_worker(self, slot: int) -> None:
        """SIGSTOP one worker, which nobody wakes: measure from when the coordinator gives it up to its successor's first record."""
        pid = self.pids()[slot]
        wait_for("records before the stop", lambda: self.flowing([pid], time.time() - 1), WAIT_S)
        os.kill(pid, signal.SIGSTOP)
        at = time.time()
        self.kills += 1
        self.say(f"SIGSTOP worker in slot {slot} (pid {pid})")
        successor = wait_for("a successor", lambda: (new := self.pids().get(slot)) != pid and new, WAIT_S)
        first = wait_for("a record after the stop", lambda: beats(self.trace, successor), WAIT_S)[0]
        lost = wait_for("the loss on record", lambda: self.lost_at() > at and self.lost_at(), WAIT_S)
        self.replacements.append(first.time - lost)
        self.note_restore()
        given_up, again = f"given up after {lost - at:.1f} s", f"first record again {first.time - lost:.2f} s later"
        self.say(f"    {given_up}, {again}, from checkpoint {self.restored_ids[-1]}")
        wait_for("the end of who stood still", lambda: not is_alive(pid), WAIT_S)

    def lost_at(self) -> float:
        """When the coordinator gave a worker up the last time, wall clock in seconds; 0 for never."""
        entries = self.handle.client.exceptions(self.handle.job_id)["exceptionHistory"]["entries"]
        return next((entry["timestamp"] / 1000 for entry in entries if "WorkerLost" in entry["stacktrace"]), 0.0)

    def note_restore(self) -> None:
        """Remember which checkpoint the job restored; it must be one."""
        restored = self.checkpoints()["latest"]["restored"]
        if restored is None or restored["id"] <= 0:
            raise DemoError(f"the job did not restore from a checkpoint: {restored}")
        self.restored_ids.append(restored["id"])

    def _note_pending(self, checkpoint_id: int) -> None:
        status = {entry["id"]: entry["status"] for entry in self.checkpoints()["history"]}.get(checkpoint_id)
        if status == "FAILED":
            self.kills_with_checkpoint_pending += 1
        self.say(f"    checkpoint {checkpoint_id}: {status}")

    def restart_coordinator(self, coordinator: Coordinator, dead_for_s: float) -> None:
        """kill -9 the coordinator; the workers must go on as if nothing had happened."""
        before, pids = self.workers(), self.pids()
        completed = self.checkpoints()["counts"]["completed"]
        wait_for("records before the kill", lambda: self.flowing(list(pids.values()), time.time() - 1), WAIT_S)
        coordinator.kill()
        at = time.time()
        self.kills += 1
        self.say(f"kill -9 coordinator, for {dead_for_s:.1f} s")
        pause(dead_for_s)
        coordinator.start()
        self._wait_for_workers(pids)
        gap = self._check_undisturbed(before, pids, at)
        self.say(
            f"    same workers, same attempt {before['attempt']}, {completed} checkpoints before;"
            f" longest gap between records {gap:.2f} s"
        )

    def lose_active(self, members: Members) -> None:
        """kill -9 the active member; another one takes over, and the workers go on as if nothing had happened."""
        before, pids = self.workers(), self.pids()
        wait_for("records before the kill", lambda: self.flowing(list(pids.values()), time.time() - 1), WAIT_S)
        pending = wait_for("a pending checkpoint", self.pending, WAIT_S, every_s=0.002)
        pid = members.kill_active()
        at = time.time()
        self.kills += 1
        self.say(f"kill -9 the active member (pid {pid}), checkpoint {pending[0]} pending")
        wait_for("another active member", members.active, WAIT_S)
        self._wait_for_workers(pids)
        self.takeovers.append(time.time() - at)
        self.kills_with_checkpoint_pending += 1
        gap = self._check_undisturbed(before, pids, at)
        self.say(
            f"    led again after {self.takeovers[-1]:.2f} s by another member; same workers, same attempt {before['attempt']};"
            f" longest gap between records {gap:.2f} s"
        )

    def _wait_for_workers(self, pids: dict[int, int]) -> None:
        wait_for("the workers to come back", lambda: self.pids().keys() == pids.keys() and self._running(), WAIT_S)

    def _check_undisturbed(self, before: dict[str, Any], pids: dict[int, int], at: float) -> float:
        """Checkpoints and records go on; the longest gap between two records since `at`, seconds. DemoError if a worker changed."""
        wait_for("a checkpoint after the restart", lambda: self.checkpoints()["counts"]["completed"] > 0, WAIT_S)
        back = time.time()
        wait_for("records after the restart", lambda: self.flowing(list(pids.values()), back), WAIT_S)
        if self.pids() != pids or self.workers()["attempt"] != before["attempt"]:
            raise DemoError(f"the coordinator's death disturbed the workers: {before} became {self.workers()}")
        gaps = [beat.gap for pid in pids.values() for beat in beats(self.trace, pid) if at <= beat.time <= back + 1]
        if max(gaps) > GAP_MAX_S:
            raise DemoError(f"a gap of {max(gaps):.2f} s between records while the coordinator was dead")
        return max(gaps)

    def check_nothing_late(self) -> None:
        """The bound of the watermark must be large enough; DemoError when it is not."""
        late = self.late_records()
        if late:
            raise DemoError(f"{late} records were late: the watermark bound is too small")

    def late_records(self) -> int:
        """Records dropped as late since the attempt began, over all operators."""
        return int(self.workers()["late_dropped"])

    def _running(self) -> bool:
        state: str = self.handle.state()
        return state == "RUNNING"
