"""SHELL: one command as a confined process: a request to its standard input, which is closed behind it, an answer from its standard
output. Bounded in time and in the size of the answer, and killed with all that it started in its session.

What the process says is bytes here. It bounds its own memory and processor time, before it reads anything large:
`bound_process`."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from holdfast.barriers.children import KILLED_SECONDS_MAX, die_with_parent, end_group, has_exited, kill_group

logger = logging.getLogger(__name__)

NICENESS, NICENESS_MAX = 15, 19
MEMORY_BYTES_MIN = 192 << 20
"""Private memory with which a process has its libraries, and little besides."""
MEMORY_SHARE = 2
"""A process may use this part (1/2) of what its control group has left as it begins: two may run at a time, and the rest stays for
what started them, which the kernel might end with them."""
CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMIT_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use of a control group, version 2 and version 1."""
_LOOK_S, _POLL_S = 0.25, 0.02
"""Between two looks whether a process has ended whose output is still open, or closed."""
_CHUNK_BYTES = 1 << 16
_STARTED_BY = "HOLDFAST_STARTED_BY"
"""Variable of the environment of a confined process: the process that started it."""


class ProcessEnd(StrEnum):
    """How a confined process ended."""

    EXITED = "exited"
    NOT_STARTED = "not started"
    TIMED_OUT = "timed out"
    TOO_LONG = "too long an answer"
    KILLED = "killed"
    """By `ConfinedProcess.kill`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A confined process that has ended."""

    end: ProcessEnd
    output: bytes = b""
    """Of one that exited, by itself or by a signal; never more than its bound."""
    code: int = 0
    """Its exit code; negative: the signal."""
    detail: str = ""
    """What was wrong, of any but EXITED: a clause whose subject is the process."""

    @property
    def how(self) -> str:
        """Of one that exited: by which signal or exit code."""
        return f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"


class ConfinedProcess:
    """The process of one command at a time. Thread-safe: `run` is for one thread, `kill` for any."""

    def __init__(self, *, seconds_max: float, output_bytes_max: int) -> None:
        """`seconds_max`: of time that passes. `output_bytes_max`: a process that says more is killed."""
        self._seconds_max = seconds_max
        self._output_bytes_max = output_bytes_max
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None: there is none."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def kill(self) -> None:
        """End the process, and those that `run` would start. Idempotent."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                kill_group(self._process)

    def run(self, command: Sequence[str], request: bytes) -> Ended:
        """Start the command in a session of its own, with the import path of this process, and wait for its end. Its standard
        error is dropped. Nothing of it is left: whatever of its session is alive then is killed."""
        environment = {**os.environ, "PYTHONPATH": import_path(), _STARTED_BY: str(os.getpid())}
        with self._lock:
            if self._is_killed:
                return Ended(ProcessEnd.KILLED, detail="it was ended before it began")
            try:
                process = self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                return Ended(ProcessEnd.NOT_STARTED, detail=f"its process could not be started: {error}")
        try:
            return self._talk(process, request)
        finally:
            self._end(process)

    def _talk(self, process: subprocess.Popen[bytes], request: bytes) -> Ended:
        deadline_s = time.monotonic() + self._seconds_max
        output, end = self._exchange(process, request, deadline_s)
        if end is ProcessEnd.EXITED:
            while not (has_ended := has_exited(process)) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            end = end if has_ended else ProcessEnd.TIMED_OUT
        with self._lock:
            is_killed = self._is_killed
        if is_killed:
            return Ended(ProcessEnd.KILLED, detail="it was ended")
        if end is ProcessEnd.TIMED_OUT:
            return Ended(end, detail=f"it took longer than {self._seconds_max:g} s")
        if end is ProcessEnd.TOO_LONG:
            return Ended(end, detail=f"it said more than {self._output_bytes_max} bytes")
        has_yielded = _has_yielded(process)
        self._end(process)  # its code is known from here on
        if process.returncode == 0 and not has_yielded:
            warn_of_priority()
        return Ended(end, output, process.returncode)

    def _exchange(self, process: subprocess.Popen[bytes], request: bytes, deadline_s: float) -> tuple[bytes, ProcessEnd]:
        """Write and read until its output is closed, or it has ended; a process that does not read what it is told is no failure,
        since what it says counts."""
        assert process.stdin is not None
        assert process.stdout is not None
        output, rest = bytearray(), memoryview(request)
        with selectors.DefaultSelector() as selector:
            for pipe, event in ((process.stdin, selectors.EVENT_WRITE), (process.stdout, selectors.EVENT_READ)):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, event)
            while True:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return bytes(output), ProcessEnd.TIMED_OUT
                had_ended = has_exited(process)  # then all that it said is in the pipe
                ready = {key.fileobj for key, _ in selector.select(0 if had_ended else min(left_s, _LOOK_S))}
                if process.stdin in ready:
                    rest = _written(process.stdin.fileno(), rest)
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                if process.stdout in ready:
                    found = os.read(process.stdout.fileno(), _CHUNK_BYTES)
                    output += found
                    if len(output) > self._output_bytes_max:
                        return b"", ProcessEnd.TOO_LONG
                    if not found:
                        return bytes(output), ProcessEnd.EXITED
                elif had_ended:  # what it started may hold the pipe open
                    return bytes(output), ProcessEnd.EXITED

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill what is left of its session, and take its code. Idempotent."""
        with self._lock:
            if self._process is not process:
                return
            self._process = None  # no other thread signals its group behind this: its number may be another's
        if not end_group(process):
            logger.warning("a confined process, pid %d, was killed and runs on after %g s", process.pid, KILLED_SECONDS_MAX)


def _has_yielded(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process that has ended, and whose code was not taken, had a lower priority than this one; True if none can tell."""
    try:
        niceness = os.getpriority(os.PRIO_PROCESS, process.pid)
    except OSError:
        return True
    return niceness >= min(NICENESS_MAX, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)


@functools.cache
def warn_of_priority() -> None:
    """Once: the process itself has nobody to tell."""
    logger.warning(
        "drills and forgettings run at this process's own priority, beside acknowledgements: the system forbids them to lower it "
        "(seccomp without setpriority; for a unit of systemd SystemCallFilter=setpriority)"
    )


def _written(descriptor: int, rest: memoryview) -> memoryview:
    """What is still to be written; nothing to one that reads no more."""
    try:
        return rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
    except BlockingIOError:
        return rest
    except OSError:
        return rest[:0]


def import_path() -> str:
    """PYTHONPATH by which a process imports what this one does."""
    return os.pathsep.join(entry for entry in sys.path if entry)


def memory_left(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Bytes that the control groups of this process have left, as those of a container or of a unit with MemoryMax=; None: they
    have no limit. What the kernel keeps of files counts as left: it gives that up before it ends anything."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    left: list[int] = []
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        group = groups / "memory" if controllers else groups
        left += _left_in(group)
        for name in path.split("/"):
            if name not in ("", ".."):  # a group outside of a container's own view
                group = group / name
                left += _left_in(group)
    return min(left, default=None)


def _left_in(group: Path) -> list[int]:
    """At most one number; none where the group has no limit."""
    for limit_file, use_file in _LIMIT_FILES:
        try:
            limit, use = (group / limit_file).read_text().strip(), int((group / use_file).read_text())
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit.isdecimal():
            kinds = ("inactive_file", "active_file")  # version 1 tells those of the groups below apart
            files = sum(int(facts.get(f"total_{kind}", facts.get(kind, 0))) for kind in kinds)
            return [max(0, int(limit) - max(0, use - files))]
    return []


def bound_process(memory_bytes_max: int, seconds_max: int) -> int:
    """Within the confined process: yield to other processes, use no more private memory and processor time than this, be the first
    that a kernel without memory ends, and die with the thread that started this one. Returns the bytes of memory that it may use:
    fewer than `memory_bytes_max` in a small container."""
    started_by = os.environ.get(_STARTED_BY)
    if not die_with_parent(int(started_by) if started_by else None):
        os._exit(1)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)  # refused, the process that waits for this one tells
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    left = memory_left()
    memory_bytes = memory_bytes_max if left is None else min(memory_bytes_max, left // MEMORY_SHARE)
    for kind, most in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CPU, seconds_max)):
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return memory_bytes


def check_memory(memory_bytes: int) -> None:
    """Raise MemoryError if a process can't even load its libraries within this; they would end it without a word."""
    if memory_bytes < MEMORY_BYTES_MIN:
        raise MemoryError


def memory_text(memory_bytes: int, memory_bytes_max: int) -> str:
    """Of a process that had too little: what it might use, and why not more."""
    text = f"it needs more than {memory_bytes} bytes of memory"
    if memory_bytes == memory_bytes_max:
        return text
    return f"{text}, half of what its container or unit had left: docs/deployment.md says how much it needs"
