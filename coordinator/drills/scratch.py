"""SHELL: the process of one drill, `python -m holdfast.coordinator.drills.scratch`: one request from stdin, one report to stdout.

It bounds itself before it reads anything: lower priority than any job's, memory, processor time; it dies with the process that
started it. Locations come by stdin, where no list of processes shows them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

import msgspec

from holdfast.coordinator.drills.records import DrillReport
from holdfast.statebackends.decoding import decode_json

NICENESS = 15
MEMORY_BYTES_MAX = 2 << 30
"""Private memory of a drill, at most, in bytes."""
_PR_SET_PDEATHSIG = 1


class DrillRequest(msgspec.Struct, frozen=True):
    location: str
    seconds_max: int
    """Of processor time; the parent bounds the time that passes."""
    memory_bytes_max: int = MEMORY_BYTES_MAX


def main() -> None:
    request = decode_json(sys.stdin.buffer.read(), DrillRequest)
    bound_process(request.memory_bytes_max, request.seconds_max)
    from holdfast.coordinator.drills.reading import describe_error, drill_snapshot  # within the bounds

    try:
        report = drill_snapshot(request.location)
    except MemoryError:
        report = DrillReport(error=f"it needs more than {request.memory_bytes_max} bytes of memory")
    except Exception as error:
        report = DrillReport(error=describe_error(error))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # no thread of a library holds it up


def bound_process(memory_bytes_max: int, seconds_max: int) -> None:
    """Yield to other processes, use no more memory and processor time than this, and die with the thread that started this one."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    for kind, most in ((resource.RLIMIT_DATA, memory_bytes_max), (resource.RLIMIT_CPU, seconds_max)):
        hard = resource.getrlimit(kind)[1]
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    main()
