"""SHELL: the process of one drill, `python -m holdfast.coordinator.drills.scratch`: one request from stdin, one report to stdout.

It bounds itself before it reads anything: lower priority than any job's, memory, processor time; it dies with the process that
started it. Locations come by stdin, where no list of processes shows them."""

from __future__ import annotations

import os
import sys

import msgspec

from holdfast.coordinator.confined import bound_process
from holdfast.coordinator.drills.records import DrillReport
from holdfast.statebackends.decoding import decode_json

MEMORY_BYTES_MAX = 2 << 30
"""Private memory of a drill, at most, in bytes."""


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


if __name__ == "__main__":
    main()
