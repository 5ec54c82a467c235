"""Many seeds over several processes, each of which runs one seed after another: both ends of such a process, and the pool of them.

Results come in the order of the requests, so that they do not depend on the number of processes. A run that raises, hangs or ends
its process is a failed seed, never a lost one. Of the simulated world this module knows only the name of the function that runs a
request."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from holdfast.chaos.cluster.results import RunResult, ViolationRecord

if TYPE_CHECKING:
    from holdfast.chaos.cluster.world import Run, RunRequest

RUN_SEED = "holdfast.chaos.campaign.user_runs:run_seed"
"""The function that runs one request: module:name."""

SIMULATOR = "simulator"
"""Named like an invariant: a run raised, or ended its process, through a defect of the simulator or of a user's workload."""
HANG = "hang"
"""Named like an invariant: a run did not end within its limit of real time."""

_BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from holdfast.chaos.campaign.runner import call
call(*sys.argv[2:])"""
GC_THRESHOLD = 1_000_000
"""Allocations between two collections of the youngest generation: a usual run makes fewer, a long one stays bounded."""
_FRAMES = 4
"""Innermost frames in the line that says where a run raised or hung."""

_frozen = False
"""Whether `tidy_up` has frozen the objects that this process keeps."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run to be made, and how much of its trace to return."""

    request: RunRequest
    events: int | None = 0
    """Last events of the trace; None: the whole trace."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run, and the requested events."""

    result: RunResult
    events: tuple[str, ...] = ()


def perform(run: Callable[[RunRequest], Run], task: Task) -> Outcome:
    """Run a task in this process; an error becomes a violation of `simulator`."""
    try:
        done = run(task.request)
        lines = done.trace.lines(task.events) if task.events != 0 else []
        return Outcome(done.result, tuple(lines))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = " ".join(str(error).split())
        return failed(task, SIMULATOR, f"{type(error).__name__}: {text} ({place(frames)})")


def failed(task: Task, invariant: str, message: str) -> Outcome:
    """A run without a result of its own. Its plan is unknown unless the request gave one."""
    request = task.request
    return Outcome(RunResult(request.seed, request.workload, request.plan or (), violations=(ViolationRecord(invariant, message),)))


def place(frames: list[traceback.FrameSummary]) -> str:
    """The innermost frames as one line, without the paths of this machine: `step kernel.py:80 < run world.py:12`."""
    theirs = [frame for frame in frames[::-1] if frame.filename != __file__]
    inner = [f"{frame.name} {os.path.basename(frame.filename)}:{frame.lineno}" for frame in theirs[:_FRAMES]]
    return " < ".join(inner) or "outside of Python"


def resolve(name: str) -> Callable[..., Any]:
    """The function named module:name. Raises ImportError, AttributeError."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def interpreter(function: str, *arguments: str) -> list[str]:
    """A command that calls a function (module:name) with these texts in a new interpreter, with this one's import path."""
    import json

    return [sys.executable, "-c", _BOOT, json.dumps(sys.path), function, *arguments]


def call(function: str, *arguments: str) -> None:
    """Entry point of a new interpreter."""
    prepare_process()
    resolve(function)(*arguments)


def prepare_process() -> None:
    """Set up a process that runs seeds one after another, or one alone."""
    quieten_logs()
    # a run makes many small objects and few cycles, and ends before they matter: `tidy_up` collects them all at once
    gc.set_threshold(GC_THRESHOLD, 20, 100)


def tidy_up() -> None:
    """Free the cycles of the last run.

    Objects left by the first run are mostly the imported product, which stays: they are frozen."""
    global _frozen
    gc.collect()
    if not _frozen:  # gc.get_freeze_count() would count all that stays, one by one
        gc.freeze()
        collapse_memory()
        _frozen = True


def quieten_logs() -> None:
    """Keep the product's warnings about faults off stderr; a run attaches handlers of its own."""
    logging.getLogger().addHandler(logging.NullHandler())


# ------------------------------------------------------------------------------------------------- the end that runs


def serve(descriptor: str, entry: str, limit_s: str) -> None:
    """Run tasks from a pipe until its other end is closed."""
    connection = Connection(int(descriptor))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task: Task = pickle.loads(connection.recv_bytes())
            with _time_limit(connection, task, float(limit_s)):
                outcome = perform(lambda request: resolve(entry)(request), task)
            connection.send((outcome, False))
            tidy_up()


@contextlib.contextmanager
def _time_limit(connection: Connection, task: Task, limit_s: float) -> Any:
    """Answer for a run that takes longer, and end the process: no exception ends a loop that swallows exceptions."""

    def give_up(_signal: int, frame: FrameType | None) -> None:
        message = f"no end within {limit_s:g} s of real time; it was in {place(traceback.extract_stack(frame))}"
        connection.send((failed(task, HANG, message), True))
        os._exit(0)

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


# ------------------------------------------------------------------------------------------------ the end that asks


def start_server(descriptor: int, entry: str, limit_s: float, hash_seed: str | None) -> subprocess.Popen[bytes]:
    """A new interpreter that serves the other end of a pipe, and inherits it."""
    environment = dict(os.environ)
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    return subprocess.Popen(
        interpreter("holdfast.chaos.campaign.runner:serve", str(descriptor), entry, str(limit_s)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # output of a workload must not mix with a report in JSON
        pass_fds=(descriptor,),
        process_group=0,  # Ctrl-C is for the process that gives the tasks: it ends the others
        env=environment,
    )


class SeedProcess:
    """A seed process, from the side that gives it tasks."""

    def __init__(self, entry: str, limit_s: float, hash_seed: str | None) -> None:
        self.connection, theirs = Pipe()
        self.tasks = 0
        """Tasks given so far."""
        with theirs:
            self._process = start_server(theirs.fileno(), entry, limit_s, hash_seed)

    def give(self, task: Task) -> None:
        """Send it a task. If it is dead, its connection is at its end."""
        self.tasks += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(task))

    def take(self, task: Task) -> tuple[Outcome, bool]:
        """Its answer, and whether it takes further tasks. Blocks until the answer is whole, so call it only when there is one."""
        try:
            outcome, last = self.connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._process.wait()
            return failed(task, SIMULATOR, f"its process ended with code {code}"), True
        return outcome, last

    def end(self) -> None:
        """Kill it and wait for its end. Idempotent."""
        self.connection.close()
        self._process.kill()
        self._process.wait()


LIMIT_S = 60.0
"""Real time that one run may take, seconds."""
GRACE_S = 5.0
"""Beyond the limit, until a process that does not report its own timeout is killed; it may hang outside of Python."""
START_S = 60.0
"""Beside the limit, for an interpreter that has to start and import the product."""
AHEAD_PER_PROCESS = 64
"""Most finished runs kept for each process while a slower one before them continues."""


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class _Running:
    process: SeedProcess
    index: int
    task: Task
    deadline_s: float


class SeedRunner:
    """Up to `jobs` processes that run tasks. One that hangs or dies is replaced, and its seed reported as failed."""

    def __init__(
        self,
        jobs: int,
        *,
        entry: str = RUN_SEED,
        limit_s: float = LIMIT_S,
        hash_seed: str | None = None,
        runs_per_process: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """hash_seed: PYTHONHASHSEED of the processes; None: this one's. runs_per_process: runs after which one is replaced."""
        self.jobs = max(1, jobs)
        self._entry = entry
        self._limit_s = limit_s
        self._hash_seed = hash_seed
        self._runs_per_process = runs_per_process
        self._clock = clock
        self._idle: list[SeedProcess] = []
        self._running: dict[Connection, _Running] = {}

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome, None, None]:
        """Outcomes in the order of the tasks. Leaving the loop early kills running tasks; one such loop at a time."""
        waiting = enumerate(tasks)
        done: dict[int, Outcome] = {}
        following = given = 0
        try:
            while True:
                given += self._fill(waiting, following + AHEAD_PER_PROCESS * self.jobs - given)
                if not self._running:
                    return
                for running, outcome in self._collect():
                    done[running.index] = outcome
                while following in done:
                    yield done.pop(following)
                    following += 1
        finally:
            self._kill_running()

    def run_one(self, task: Task) -> Outcome:
        """Run one task."""
        with contextlib.closing(self.run([task])) as outcomes:
            return next(outcomes)

    def _fill(self, waiting: Iterator[tuple[int, Task]], room: int) -> int:
        """Give tasks to idle processes, `room` at most. Returns how many it gave."""
        for given in range(room):
            found = next(waiting, None) if len(self._running) < self.jobs else None
            if found is None:
                return given
            process = self._idle.pop() if self._idle else SeedProcess(self._entry, self._limit_s, self._hash_seed)
            deadline_s = self._clock() + self._limit_s + GRACE_S + (0 if process.tasks else START_S)
            self._running[process.connection] = _Running(process, *found, deadline_s)
            process.give(found[1])
        return room

    def _collect(self) -> list[tuple[_Running, Outcome]]:
        """Wait until a process answers, dies or exceeds its limit."""
        first_s = min(running.deadline_s for running in self._running.values())
        ready = wait(list(self._running), timeout=max(0.0, first_s - self._clock()))
        collected = [self._take(self._running.pop(connection)) for connection in ready if isinstance(connection, Connection)]
        late = [running for running in self._running.values() if running.deadline_s <= self._clock()]
        for running in late:
            del self._running[running.process.connection]
            running.process.end()
            collected.append(
                (running, failed(running.task, HANG, f"no end within {self._limit_s:g} s of real time; it was killed"))
            )
        return collected

    def _take(self, running: _Running) -> tuple[_Running, Outcome]:
        outcome, last = running.process.take(running.task)
        if last or running.process.tasks == self._runs_per_process:
            running.process.end()
        else:
            self._idle.append(running.process)
        return running, outcome

    def _kill_running(self) -> None:
        for running in self._running.values():
            running.process.end()
        self._running.clear()

    def close(self) -> None:
        """End every process. Idempotent."""
        self._kill_running()
        while self._idle:
            self._idle.pop().end()

    def __enter__(self) -> SeedRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------------- huge pages
#
# A run goes through all of the product's code and data every few milliseconds. On a virtual machine each miss of the address
# cache costs two walks of page tables, 5 to 10 % of a run's time in all.

_HUGE_BYTES = 1 << 21
_MADV_COLLAPSE = 25
"""Since Linux 6.1; older kernels refuse it."""


def collapse_memory() -> int:
    """Ask the kernel to move this process's private memory, as it is now, to huge pages. Only advice: a kernel that refuses changes
    nothing. Returns the bytes of the ranges that it took whole."""
    if sys.platform != "linux":
        return 0
    with suppress(ImportError, AttributeError, OSError):
        import ctypes

        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return sum(end - start for start, end in _ranges() if madvise(start, end - start, _MADV_COLLAPSE) == 0)
    return 0


def _ranges() -> list[tuple[int, int]]:
    """Whole huge pages within anonymous, writable memory."""
    found = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
            if inode != "0" or not rights.startswith("rw") or not rights.endswith("p") or (name and name[0].strip() != "[heap]"):
                continue
            first, last = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-first // _HUGE_BYTES) * _HUGE_BYTES, last // _HUGE_BYTES * _HUGE_BYTES
            if start < end:
                found.append((start, end))
    return found
