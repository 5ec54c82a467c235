"""A confined process: bounded in time and answer, its request behind a closed pipe, and nothing of it left."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from holdfast.coordinator.confined import (
    MEMORY_BYTES_MIN,
    NICENESS,
    ConfinedProcess,
    Ended,
    ProcessEnd,
    check_memory,
    memory_left,
    memory_text,
    warn_of_priority,
)
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


# --------------------------------------------------------------------------------------------------------------- priority


FORBIDDEN = "import os; os.nice = lambda _: (_ for _ in ()).throw(OSError)"


@pytest.mark.parametrize(("forbidden", "priority", "warnings"), [("", NICENESS, 0), (FORBIDDEN, 0, 1)])
def test_a_priority_that_can_t_be_lowered_is_told_once(
    caplog: pytest.LogCaptureFixture, forbidden: str, priority: int, warnings: int
) -> None:
    warn_of_priority.cache_clear()
    program = f"""
{forbidden}
import os
from holdfast.coordinator import confined
confined.bound_process(1 << 30, 60)
print(os.getpriority(os.PRIO_PROCESS, 0))
"""
    for _ in range(2):
        ended = run(program)
        assert (ended.code, int(ended.output)) == (0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + priority))
    assert [record.levelname for record in caplog.records if "SystemCallFilter" in record.message] == ["WARNING"] * warnings


# ----------------------------------------------------------------------------------------------------------------- memory


def group(folder: Path, limit: str, used: int, files: int = 0, *, version: int = 2) -> None:
    """Files of a control group."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, content in zip(names, (limit, str(used)), strict=True):
        (folder / name).write_text(f"{content}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {files - files // 3}\ninactive_file {files // 3}\n")


def left(folder: Path, text: str) -> int | None:
    (folder / "own").write_text(text)
    return memory_left(folder / "groups", folder / "own")


def test_memory_that_is_left_is_that_of_the_container_without_what_the_kernel_keeps_of_files(tmp_path: Path) -> None:
    group(tmp_path / "groups", "1000", 900, 600)
    assert left(tmp_path, "0::/\n") == 700


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    for path, limit, used in (("system.slice", "5000", 4_800), ("system.slice/holdfast.service", "1000", 100), ("another", "9", 0)):
        group(tmp_path / "groups" / path, limit, used)
    assert left(tmp_path, "0::/system.slice/holdfast.service\n") == 200
    group(tmp_path / "groups" / "system.slice", "max", 4_800)
    assert left(tmp_path, "0::/system.slice/holdfast.service\n") == 900
    group(tmp_path / "groups" / "system.slice/holdfast.service", "1000", 1_100)
    assert left(tmp_path, "0::/system.slice/holdfast.service\n") == 0


def test_groups_of_version_1_are_found_by_their_path_or_at_the_container_s_own_root(tmp_path: Path) -> None:
    text = "9:name=systemd:/x\n4:memory,hugetlb:/docker/abc\n3:cpu:/\n0::/\n"
    group(tmp_path / "groups" / "memory", "4000", 1_000, version=1)
    assert left(tmp_path, text) == 3_000
    group(tmp_path / "groups" / "memory/docker/abc", "2000", 500, version=1)
    assert left(tmp_path, text) == 1_500


@pytest.mark.parametrize("text", ["", "0::/\n", "0::/../../other\n", "4:memory:/\n"])
def test_where_no_limit_is_known_there_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "groups").mkdir()
    assert left(tmp_path, text) is None
    assert memory_left(tmp_path, tmp_path / "missing") is None


def bounded(tmp_path: Path, limit: str, used: int) -> list[int]:
    """What a process of 1 GiB at most returns, and its limit, in such a container."""
    group(tmp_path, limit, used)
    (tmp_path / "own").write_text("0::/\n")
    program = f"""
import pathlib, resource
from holdfast.coordinator import confined
left = confined.memory_left(pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(tmp_path / "own")!r}))
confined.memory_left = lambda: left
print(confined.bound_process(1 << 30, 60), resource.getrlimit(resource.RLIMIT_DATA)[0], open("/proc/self/oom_score_adj").read())
"""
    ended = run(program)
    assert ended.code == 0
    return [int(word) for word in ended.output.split()]


def test_a_process_has_half_of_what_its_container_has_left_and_is_ended_before_the_coordinator(tmp_path: Path) -> None:
    assert bounded(tmp_path, str(1 << 30), 200 << 20) == [412 << 20, 412 << 20, 1_000]
    assert bounded(tmp_path, str(8 << 30), 200 << 20) == [1 << 30, 1 << 30, 1_000]
    assert bounded(tmp_path, "max", 200 << 20) == [1 << 30, 1 << 30, 1_000]


def test_too_little_memory_for_libraries_is_told_before_they_die_of_it() -> None:
    check_memory(MEMORY_BYTES_MIN)
    with pytest.raises(MemoryError):
        check_memory(MEMORY_BYTES_MIN - 1)
    assert memory_text(7, 7) == "it needs more than 7 bytes of memory"
    assert "its container or unit" in memory_text(7, 8)
