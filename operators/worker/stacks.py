"""SHELL: the stacks of this process's threads, sampled for one question: names of functions, files and lines, and nothing else.

No variable and no argument is read, so that nothing of a record can leave the process. It runs on the control thread, and so also
while the loop hangs in a user's function. Time and frequency are bounded by `sampling.py`, sizes by the bounds of an answer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import NamedTuple

from holdfast.barriers.messages import (
    CODE_LINES_MAX,
    FRAME_CHARACTERS_MAX,
    STACK_FRAMES_MAX,
    STACKS_MAX,
    CodeLine,
    SampledStack,
    SubtaskKey,
    clip,
    clip_front,
    printable,
)

THREADS_MAX = 1_000
"""Threads in one look, at most."""

_WAITS = frozenset(
    {
        "CallRunner._run_loop",
        "CallRunner._serve",
        "Gateway._send_large",
        "OwnThread._serve",
        "ThreadPool._serve",
        "Watch._run",
        "ZmqTransport.poll",
        "lines",
    }
)
"""Functions of ours in which a thread waits for something to do."""


class _Key(NamedTuple):
    thread: int
    vertex: str
    subtask: int
    frames: tuple[int, ...]


@dataclass(slots=True)
class _Seen:
    name: str
    is_idle: bool
    samples: int = 0
    on_cpu: int = 0
    off_cpu: int = 0


class StackSampler:
    """Collects looks at all threads but the one that looks. One thread uses it."""

    def __init__(self, loop: int, working_for: Callable[[], SubtaskKey | None], *, loop_native_id: int | None = None) -> None:
        """`loop`: identity of the thread that runs the subtasks; `working_for`: whose step it takes. `loop_native_id`: the system's
        id of the loop, which `threading` does not know of the first thread of a forked process."""
        self._loop = loop
        self._loop_native_id = loop_native_id
        self._working_for = working_for
        self.begin("")

    def begin(self, question: str) -> None:
        """Start over, for another question."""
        self.question = question
        self.samples = 0
        self.left_out = 0
        self._code: dict[tuple[CodeType, int], int] = {}
        self._lines: list[CodeLine] = []
        self._seen: dict[_Key, _Seen] = {}
        self._cpu_ns: dict[int, int] = {}
        self._looked_ns = self._first_ns = time.monotonic_ns()

    @property
    def sampled_ms(self) -> int:
        return (self._looked_ns - self._first_ns) // 1_000_000

    def look(self) -> None:
        """Note where each thread is."""
        now_ns = time.monotonic_ns()
        since_ns = now_ns - self._looked_ns if self.samples else 0
        self._looked_ns = now_ns
        if not self.samples:
            self._first_ns = now_ns
        self.samples += 1
        working_for = self._working_for()
        threads = {thread.ident: thread for thread in threading.enumerate()}
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        for ident in sorted(frames)[:THREADS_MAX]:
            thread = threads.get(ident)
            native_id = thread.native_id if thread is not None else None
            if ident == self._loop:
                native_id = self._loop_native_id or native_id
            on_cpu = self._had_cpu(ident, native_id, since_ns)
            name = clip(printable(thread.name if thread is not None else f"thread-{ident}"), FRAME_CHARACTERS_MAX)
            self._note(ident, name, frames[ident], working_for if ident == self._loop else None, on_cpu)
        del frames  # they hold what their functions hold

    def _note(self, ident: int, name: str, innermost: FrameType, working_for: SubtaskKey | None, on_cpu: bool | None) -> None:
        found = self._frames(innermost)
        if found is None:
            self.left_out += 1
            return
        frames, is_idle = found
        vertex, subtask = (working_for.vertex, working_for.subtask) if working_for is not None else ("", -1)
        key = _Key(ident, vertex, subtask, frames)
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= STACKS_MAX:
                self.left_out += 1
                return
            seen = self._seen[key] = _Seen(name, is_idle)
        seen.samples += 1
        seen.on_cpu += on_cpu is True
        seen.off_cpu += on_cpu is False

    def _frames(self, innermost: FrameType) -> tuple[tuple[int, ...], bool] | None:
        """Indices of the lines, outermost first, and whether it waits for work; None without room."""
        found: list[int] = []
        is_idle: bool | None = None
        frame: FrameType | None = innermost
        while frame is not None and len(found) < STACK_FRAMES_MAX:
            index = self._line(frame)
            if index is None:
                return None
            found.append(index)
            if is_idle is None and self._lines[index].own:
                is_idle = self._lines[index].function in _WAITS
            frame = frame.f_back
        return tuple(reversed(found)), bool(is_idle)

    def _line(self, frame: FrameType) -> int | None:
        code, line = frame.f_code, frame.f_lineno or 0
        index = self._code.get((code, line))
        if index is not None:
            return index
        if len(self._lines) >= CODE_LINES_MAX:
            return None
        module = frame.f_globals.get("__name__")
        own = isinstance(module, str) and module.split(".", 1)[0] == "holdfast"
        function = clip(printable(code.co_qualname), FRAME_CHARACTERS_MAX)
        file = clip_front(printable(code.co_filename), FRAME_CHARACTERS_MAX)
        self._lines.append(CodeLine(function, file, line, own))
        index = self._code[code, line] = len(self._lines) - 1
        return index

    def _had_cpu(self, ident: int, native_id: int | None, since_ns: int) -> bool | None:
        """Whether the thread had a processor for half of the time since the last look; None where nothing tells."""
        spent_ns = _cpu_ns(native_id) if native_id is not None else None
        if spent_ns is None:
            return None
        before_ns = self._cpu_ns.get(ident)
        self._cpu_ns[ident] = spent_ns
        if before_ns is None or since_ns <= 0:
            return None
        return 2 * (spent_ns - before_ns) >= since_ns

    def found(self) -> tuple[tuple[CodeLine, ...], tuple[SampledStack, ...]]:
        """Lines of code, and the stacks of them, most frequent first."""
        stacks = [
            SampledStack(seen.name, key.frames, seen.samples, seen.on_cpu, seen.off_cpu, key.vertex, key.subtask, seen.is_idle)
            for key, seen in self._seen.items()
        ]
        return tuple(self._lines), tuple(sorted(stacks, key=lambda each: -each.samples))


def _cpu_ns(native_id: int) -> int | None:
    """Time that a thread has had a processor, as Linux counts it; None where nothing does."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
            return int(file.read(64).split()[0])
    except (OSError, IndexError, ValueError):
        return None
