"""One process that runs seeds, one after another: its two ends, and what goes between them.

It decides what becomes of a run that raises, hangs or takes its process along: a failed seed, never a lost one. It knows
nothing of the simulated world but the function that runs a request."""

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
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

from holdfast.chaos.campaign.hugepages import collapse_memory
from holdfast.chaos.cluster.results import RunResult, ViolationRecord

if TYPE_CHECKING:
    from holdfast.chaos.cluster.world import Run, RunRequest

RUN_SEED = "holdfast.chaos.campaign.user_runs:run_seed"
"""Where the function is that runs one request: module:name."""

SIMULATOR = "simulator"
"""Named like an invariant when a run raises, or ends its process: a defect of the simulator, or of a user's workload."""
HANG = "hang"
"""Named like an invariant when a run does not end within its limit of real time."""

_BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from holdfast.chaos.campaign.seedprocess import call
call(*sys.argv[2:])"""
GC_THRESHOLD = 1_000_000
"""Objects that are made between two collections of the youngest: a run of usual length makes fewer, a long one stays bounded."""
_FRAMES = 4
"""Innermost frames in the line that says where a run raised or hung."""

_frozen = False
"""Whether `tidy_up` has set aside what this process keeps."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run that is wanted, and how much of its trace."""

    request: RunRequest
    events: int | None = 0
    """Last events of the trace; None: the whole trace."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to, and the events that were wanted."""

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
    """The innermost frames as one line, without the paths of this machine: `step processes.py:80 < run world.py:12`."""
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
    """First thing in a new interpreter."""
    prepare_process()
    resolve(function)(*arguments)


def prepare_process() -> None:
    """Set up a process that runs seeds one after another, or one alone."""
    quieten_logs()
    # A run makes many small objects and few cycles, and ends before they matter: `tidy_up` takes them all at once behind it.
    gc.set_threshold(GC_THRESHOLD, 20, 100)


def tidy_up() -> None:
    """Between two runs: free what the last one left in cycles.

    What the first one left is mostly the imported product, which stays and is never looked at again."""
    global _frozen
    gc.collect()
    if not _frozen:  # gc.get_freeze_count() would count all that stays, one by one
        gc.freeze()
        collapse_memory()
        _frozen = True


def quieten_logs() -> None:
    """Keep from stderr that the product logs every fault that it survives; a run hears its loggers by itself."""
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
    """Answer for a run that takes longer, and end the process: nothing else ends a loop that swallows what it is sent."""

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


class SeedProcess:
    """A started process, as the one who gives it tasks sees it."""

    def __init__(self, entry: str, limit_s: float, hash_seed: str | None) -> None:
        self.connection, theirs = Pipe()
        self.tasks = 0
        """Given so far."""
        environment = dict(os.environ)
        if hash_seed is not None:
            environment["PYTHONHASHSEED"] = hash_seed
        with theirs:
            self._process = subprocess.Popen(
                interpreter("holdfast.chaos.campaign.seedprocess:serve", str(theirs.fileno()), entry, str(limit_s)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # whatever a workload prints: it must not mix with a report in JSON
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the process that gives the tasks: it ends the others
                env=environment,
            )

    def give(self, task: Task) -> None:
        """Let it run a task. If it is dead by now, its connection is at its end."""
        self.tasks += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(task))

    def take(self, task: Task) -> tuple[Outcome, bool]:
        """Its answer, and whether it takes no more tasks. Waits for a whole answer, so ask only when there is one."""
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
