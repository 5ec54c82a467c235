"""SHELL: the coordinator's own process in Flink's dialect: its threads, interpreter and numbers, read where it runs.

No local variable, no argument of the command and no environment variable is ever shown."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from types import FrameType

from holdfast.api.flink import worker_schemas as shapes
from holdfast.coordinator.dispatcher.job_log import printable

THREADS_MAX = 1_000
"""Threads in one dump, at most."""
FRAMES_MAX = 200
"""Frames of one thread, innermost first, at most."""
NAME_CHARACTERS_MAX = 200


def thread_dump() -> shapes.ThreadDump:
    """What each thread does at the moment."""
    names = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sorted(sys._current_frames().items())[:THREADS_MAX]:
        thread = names.get(ident)
        name = printable(thread.name if thread is not None else f"thread-{ident}", NAME_CHARACTERS_MAX)
        daemon = " daemon" if thread is not None and thread.daemon else ""
        found.append(shapes.ThreadInfo(threadName=name, stringifiedThreadInfo=f'"{name}"{daemon} Id={ident}\n{_stack(frame)}\n'))
    return shapes.ThreadDump(threadInfos=found)


def _stack(innermost: FrameType) -> str:
    lines: list[str] = []
    frame: FrameType | None = innermost
    while frame is not None and len(lines) < FRAMES_MAX:
        code = frame.f_code
        lines.append(f"\tat {code.co_qualname}({code.co_filename}:{frame.f_lineno})\n")
        frame = frame.f_back
    return "".join(lines) + ("\t...\n" if frame is not None else "")


def environment() -> shapes.Environment:
    """The interpreter, its options and where it finds modules."""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    options = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sorted(sys._xoptions.items())]
    options += [f"-W{option}" for option in sys.warnoptions]
    interpreter = shapes.Interpreter(version=version, arch=platform.machine(), options=options)
    return shapes.Environment(jvm=interpreter, classpath=list(sys.path))


def process_metrics() -> dict[str, str]:
    """Numbers of this process under Flink's names for the same ones of a JVM; what the system does not tell is left out."""
    found = {
        "Status.JVM.CPU.Time": time.process_time_ns(),
        "Status.JVM.Threads.Count": threading.active_count(),
    }
    try:
        import resource  # not on every system

        found["Status.JVM.FileDescriptor.Max"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        found["Status.JVM.FileDescriptor.Open"] = len(os.listdir("/proc/self/fd")) - 1
    except (ImportError, OSError):
        pass
    return {name: str(value) for name, value in found.items()}
