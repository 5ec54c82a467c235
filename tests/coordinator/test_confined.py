"""A confined process: bounded in time and answer, its request behind a closed pipe, and nothing of it left."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from holdfast.coordinator.confined import ConfinedProcess, Ended, ProcessEnd
from tests.coordinator.doubles import wait_until

LONG_S = 60.0


def run(program: str, request: bytes = b"", *, seconds_max: float = LONG_S, output_bytes_max: int = 1_000) -> Ended:
    return ConfinedProcess(seconds_max=seconds_max, output_bytes_max=output_bytes_max).run([sys.executable, "-c", program], request)


def pause() -> None:
    threading.Event().wait(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_it_reads_its_request_to_the_end_and_answers() -> None:
    ended = run("import sys; print(len(sys.stdin.buffer.read()))", b"x" * 1_000_000)
    assert ended == Ended(ProcessEnd.EXITED, b"1000000\n", 0)


@pytest.mark.parametrize(
    ("program", "output", "code", "how"),
    [
        ("print('x')", b"x\n", 0, "exit code 0"),
        ("raise SystemExit(3)", b"", 3, "exit code 3"),
        ("import os; print('x', flush=True); os.kill(os.getpid(), 9)", b"x\n", -9, "signal 9"),
        ("import sys; sys.stderr.write('noise')", b"", 0, "exit code 0"),
        ("import os; os.write(1, b'x' * 1000)", b"x" * 1_000, 0, "exit code 0"),
    ],
)
def test_how_it_ended_is_told(program: str, output: bytes, code: int, how: str) -> None:
    ended = run(program, b"nobody reads it " * 100_000)
    assert (ended.end, ended.output, ended.code, ended.how) == (ProcessEnd.EXITED, output, code, how)


@pytest.mark.parametrize("program", ["import time; time.sleep(600)", "import os, time; os.close(1); time.sleep(600)"])
def test_one_that_takes_too_long_is_killed(program: str) -> None:
    began_s = time.monotonic()
    ended = run(program, seconds_max=0.5)
    assert ended == Ended(ProcessEnd.TIMED_OUT, detail="it took longer than 0.5 s")
    assert time.monotonic() - began_s < 20


def test_one_that_says_too_much_is_killed_before_it_has_said_it() -> None:
    ended = run("import os\nwhile True: os.write(1, b'x' * 1000)", output_bytes_max=10_000)
    assert ended == Ended(ProcessEnd.TOO_LONG, detail="it said more than 10000 bytes")


CHILD = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)"


@pytest.mark.parametrize("behind", ["", "; raise SystemExit(4)"])
def test_its_children_are_killed_with_it_though_they_hold_its_output_open(behind: str) -> None:
    ended = run(CHILD + behind)
    assert ended.end is ProcessEnd.EXITED
    assert ended.code == (4 if behind else 0)
    wait_until(lambda: is_gone(int(ended.output)), pause, what="the end of its child")


def test_it_is_killed_from_another_thread_with_its_children(tmp_path: Path) -> None:
    process = ConfinedProcess(seconds_max=LONG_S, output_bytes_max=1_000)
    told = tmp_path / "pid"
    ended: list[Ended] = []
    command = ["sh", "-c", f"sleep 600 & echo $! > {told}; sleep 600"]
    thread = threading.Thread(target=lambda: ended.append(process.run(command, b"")))
    thread.start()
    wait_until(lambda: told.exists() and bool(told.read_text().strip()), pause, what="its child")
    process.kill()
    thread.join(20)
    assert ended == [Ended(ProcessEnd.KILLED, detail="it was ended")]
    assert process.pid is None
    wait_until(lambda: is_gone(int(told.read_text())), pause, what="the end of its child")


def test_none_is_started_behind_the_end() -> None:
    process = ConfinedProcess(seconds_max=LONG_S, output_bytes_max=1_000)
    process.kill()
    assert process.run(["/nowhere"], b"").end is ProcessEnd.KILLED


def test_a_program_that_is_not_there_is_named() -> None:
    ended = ConfinedProcess(seconds_max=1, output_bytes_max=1).run(["/nowhere/python"], b"")
    assert ended.end is ProcessEnd.NOT_STARTED
    assert ended.detail.startswith("its process could not be started: ")


def test_no_descriptor_and_no_process_is_left() -> None:
    before, children = len(os.listdir("/proc/self/fd")), psutil.Process().children()
    for program in ("print('x')", "raise SystemExit(3)"):
        run(program, b"x" * 200_000)
    run("import time; time.sleep(600)", seconds_max=0.1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert set(psutil.Process().children()) <= set(children), "neither runs, nor waits to be taken note of"
