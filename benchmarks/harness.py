"""Runs benchmark jobs on a local Spark and measures them from outside: wall clock, CPU of the workers, checkpoints."""

from __future__ import annotations

import os
import selectors
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

import holdfast as hf

SAMPLE_S = 0.1
RUN_TIMEOUT_S = 1_200.0
"""A machine on a slow day takes ten times as long as on a good one: a run that goes on is measured, not given up."""


@dataclass
class Measured:
    """One run. `records_per_second` counts from job RUNNING to FINISHED, the final checkpoint included."""

    records: int
    seconds: float
    cpu_seconds: float
    checkpoints: int
    checkpoints_expected: int
    checkpoint_ms: list[int] = field(default_factory=list)
    checkpoint_bytes: list[int] = field(default_factory=list)

    @property
    def records_per_second(self) -> float:
        return self.records / self.seconds

    @property
    def cpu_per_million(self) -> float:
        """CPU seconds of all workers per million records."""
        return self.cpu_seconds / (self.records / 1e6)

    @property
    def counts(self) -> bool:
        """A row counts only if checkpoints completed."""
        return not self.checkpoints_expected or self.checkpoints / self.checkpoints_expected >= 0.9


class Cpu:
    """CPU seconds of a set of processes, sampled, so that a process's last figures survive it."""

    def __init__(self, pids: list[int]) -> None:
        self._seconds: dict[int, float] = {}
        self._pids = pids
        self._stop = threading.Event()
        self._sample()
        self._first = dict(self._seconds)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        for pid in self._pids:
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue
            self._seconds[pid] = times.user + times.system

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._sample()

    def stop(self) -> float:
        """CPU seconds since the start, over all processes."""
        self._stop.set()
        self._thread.join()
        return sum(seconds - self._first.get(pid, 0.0) for pid, seconds in self._seconds.items())


class Bench:
    """A Spark session, for suites that ask for one, and a scratch directory, on the file system of the working directory. scale: of
    the suites that have one."""

    def __init__(self, slots: int = 3, *, scale: float = 1.0) -> None:
        self.scale = scale
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        self._slots = slots
        self._runs = 0

    @cached_property
    def spark(self) -> Any:
        from pyspark.sql import SparkSession

        session = (
            SparkSession.builder.master(f"local[{self._slots}]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.memory", "1g")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        return session

    @contextmanager
    def launched(self, env: hf.Environment) -> Iterator[Any]:
        """The job's handle, in a state directory of its own."""
        assert self.spark is not None  # the job finds the active session
        self._runs += 1
        env.state_dir = str(self.folder / f"state-{self._runs}")
        os.makedirs(env.state_dir, exist_ok=True)
        handle = env.execute(progress=False)
        try:
            yield handle
        finally:
            if handle.state() not in ("FINISHED", "CANCELED", "FAILED"):
                handle.cancel()
            handle.close()
            shutil.rmtree(env.state_dir, ignore_errors=True)

    def run(self, env: hf.Environment, records: int) -> Measured:
        """Run a bounded job to its end."""
        interval_ms = env.config.checkpoint_interval_ms
        with self.launched(env) as handle:
            pids = [worker["pid"] for worker in handle.client.workers(handle.job_id)["workers"]]
            cpu = Cpu(pids)
            last: dict[str, Any] = {}
            deadline = time.monotonic() + RUN_TIMEOUT_S
            while handle.client.job_state(handle.job_id) not in ("FINISHED", "FAILED", "CANCELED"):
                last = handle.client.checkpoints(handle.job_id)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{env.name} ran longer than {RUN_TIMEOUT_S} s")
                time.sleep(SAMPLE_S)
            seconds_cpu = cpu.stop()
            state = handle.wait(10)
            if state != "FINISHED":
                raise RuntimeError(f"{env.name} ended {state}")
            job = handle.client.job(handle.job_id)
        seconds = (job["timestamps"]["FINISHED"] - job["timestamps"]["RUNNING"]) / 1000
        completed = [entry for entry in last.get("history", []) if entry["status"] == "COMPLETED"]
        return Measured(
            records,
            seconds,
            seconds_cpu,
            int(last.get("counts", {}).get("completed", 0)),
            int(seconds * 1000 / interval_ms) if interval_ms else 0,
            [int(entry["end_to_end_duration"]) for entry in completed],
            [int(entry["checkpointed_size"]) for entry in completed],
        )

    def close(self) -> None:
        if "spark" in self.__dict__:
            self.spark.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def raw_write_ms(folder: Path, size: int) -> float:
    """write + fsync of `size` bytes into the directory, the raw cost of the same bytes."""
    payload = os.urandom(min(size, 1 << 20))
    path = folder / "raw"
    began = time.perf_counter()
    with open(path, "wb") as file:
        for offset in range(0, size, len(payload) or 1):
            file.write(payload[: min(len(payload), size - offset)])
        file.flush()
        os.fsync(file.fileno())
    elapsed = (time.perf_counter() - began) * 1000
    path.unlink()
    return elapsed


def spread(values: list[float]) -> str:
    """`median (min-max, n=...)`."""
    if not values:
        return "-"
    return f"{statistics.median(values):,.2f} ({min(values):,.2f}-{max(values):,.2f}, n={len(values)})"


def wait_until(what: str, condition: Any, timeout_s: float, every_s: float = 0.005) -> Any:
    """The condition's first true value. TimeoutError after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(every_s)
    return value


class ProcessFailedError(RuntimeError):
    """A process of a benchmark said nothing in time, or died."""


def first_line(process: subprocess.Popen[bytes], what: str, timeout_s: float, errors: Path) -> bytes:
    """The first line that a process prints to a pipe; `errors`: the file of its standard error.

    Raises ProcessFailedError, which names `what` it is, when it has ended or the time is up without one."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise ProcessFailedError(f"{what}: said nothing within {timeout_s:g} s{_tail(errors)}")
            byte = os.read(process.stdout.fileno(), 1)  # what follows is the next reader's
            if not byte:
                raise died(process, what, errors)
            line += byte
    return line


def last_words(process: subprocess.Popen[bytes], what: str, timeout_s: float, errors: Path) -> bytes:
    """What a process prints until its end, which the end of its standard input asks for. Raises ProcessFailedError."""
    try:
        told, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ProcessFailedError(f"{what}: not ended within {timeout_s:g} s{_tail(errors)}") from error
    if process.returncode:
        raise died(process, what, errors)
    return told


def died(process: subprocess.Popen[bytes], what: str, errors: Path) -> ProcessFailedError:
    """The error for a process that has closed its output, or ended."""
    try:
        how = f"died (exit code {process.wait(5)})"
    except subprocess.TimeoutExpired:
        how = "closed its output"
    return ProcessFailedError(f"{what}: {how}{_tail(errors)}")


def _tail(errors: Path) -> str:
    lines = errors.read_text(errors="replace").strip().splitlines() if errors.exists() else []
    return f": {lines[-1][-500:]}" if lines else ""


def end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """SIGTERM, and SIGKILL when the time is up."""
    process.terminate()
    try:
        process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
