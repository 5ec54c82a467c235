"""SHELL: the process of one drill, `python -m holdfast.coordinator.drills.scratch`: one request from stdin, one report to stdout.

It bounds itself before it reads anything: lower priority than any job's, memory, processor time; it dies with the process that
started it. Locations come by stdin, where no list of processes shows them."""

from __future__ import annotations

import os
import sys

import msgspec

from holdfast.coordinator.confined import bound_process, check_memory, memory_text
from holdfast.coordinator.drills.records import DrillReport
from holdfast.statebackends.decoding import decode_json

MEMORY_BYTES_MAX = 2 << 30
"""Private memory of a drill, at most, in bytes; less in a small container."""


class DrillRequest(msgspec.Struct, frozen=True):
    location: str
    seconds_max: int
    """Of processor time; the parent bounds the time that passes."""
    memory_bytes_max: int = MEMORY_BYTES_MAX


def main() -> None:
    request = decode_json(sys.stdin.buffer.read(), DrillRequest)
    memory_bytes = bound_process(request.memory_bytes_max, request.seconds_max)
    try:
        check_memory(memory_bytes)
        report = _drill(request.location)
    except MemoryError:
        report = DrillReport(error=memory_text(memory_bytes, request.memory_bytes_max))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)  # no thread of a library holds it up


def _drill(location: str) -> DrillReport:
    """Raises MemoryError."""
    from holdfast.coordinator.drills.reading import describe_error, drill_snapshot  # within the bounds

    try:
        return drill_snapshot(location)
    except MemoryError:
        raise
    except Exception as error:
        return DrillReport(error=describe_error(error))


if __name__ == "__main__":
    main()
