"""Many seeds over several processes. Results come in the order of the requests, whoever is ready first, so that what is
made of them does not depend on how many processes ran."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType

from holdfast.chaos.campaign.seedprocess import HANG, RUN_SEED, Outcome, SeedProcess, Task, failed

LIMIT_S = 60.0
"""Real time that one run may take, seconds."""
GRACE_S = 5.0
"""Beyond the limit, until a process that does not even say so itself is killed; it may hang outside of Python."""
START_S = 60.0
"""Besides, for an interpreter that has to start and import the product."""
AHEAD_PER_PROCESS = 64
"""Finished runs kept at most, a process, while a slower one before them goes on."""


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(slots=True)
class _Running:
    process: SeedProcess
    index: int
    task: Task
    deadline_s: float


class SeedRunner:
    """Up to `jobs` processes that run tasks. One that hangs or dies is replaced, and its seed reported as failed."""

    def __init__(
        self,
        jobs: int,
        *,
        entry: str = RUN_SEED,
        limit_s: float = LIMIT_S,
        hash_seed: str | None = None,
        runs_per_process: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """hash_seed: PYTHONHASHSEED of the processes, by default this one's. runs_per_process: replaced after that many runs."""
        self.jobs = max(1, jobs)
        self._entry = entry
        self._limit_s = limit_s
        self._hash_seed = hash_seed
        self._runs_per_process = runs_per_process
        self._clock = clock
        self._idle: list[SeedProcess] = []
        self._running: dict[Connection, _Running] = {}

    def run(self, tasks: Iterable[Task]) -> Generator[Outcome, None, None]:
        """Outcomes in the order of the tasks. Leaving it early kills what still runs; one such loop at a time."""
        waiting = enumerate(tasks)
        done: dict[int, Outcome] = {}
        following = given = 0
        try:
            while True:
                given += self._fill(waiting, following + AHEAD_PER_PROCESS * self.jobs - given)
                if not self._running:
                    return
                for running, outcome in self._collect():
                    done[running.index] = outcome
                while following in done:
                    yield done.pop(following)
                    following += 1
        finally:
            self._kill_running()

    def run_one(self, task: Task) -> Outcome:
        """One task."""
        with contextlib.closing(self.run([task])) as outcomes:
            return next(outcomes)

    def _fill(self, waiting: Iterator[tuple[int, Task]], room: int) -> int:
        """Give tasks to processes as long as there are both, `room` at most. Returns how many it gave."""
        for given in range(room):
            found = next(waiting, None) if len(self._running) < self.jobs else None
            if found is None:
                return given
            process = self._idle.pop() if self._idle else SeedProcess(self._entry, self._limit_s, self._hash_seed)
            deadline_s = self._clock() + self._limit_s + GRACE_S + (0 if process.tasks else START_S)
            self._running[process.connection] = _Running(process, *found, deadline_s)
            process.give(found[1])
        return room

    def _collect(self) -> list[tuple[_Running, Outcome]]:
        """Wait until a process answers, dies or is too late."""
        first_s = min(running.deadline_s for running in self._running.values())
        ready = wait(list(self._running), timeout=max(0.0, first_s - self._clock()))
        collected = [self._take(self._running.pop(connection)) for connection in ready if isinstance(connection, Connection)]
        late = [running for running in self._running.values() if running.deadline_s <= self._clock()]
        for running in late:
            del self._running[running.process.connection]
            running.process.end()
            collected.append(
                (running, failed(running.task, HANG, f"no end within {self._limit_s:g} s of real time; it was killed"))
            )
        return collected

    def _take(self, running: _Running) -> tuple[_Running, Outcome]:
        outcome, last = running.process.take(running.task)
        if last or running.process.tasks == self._runs_per_process:
            running.process.end()
        else:
            self._idle.append(running.process)
        return running, outcome

    def _kill_running(self) -> None:
        for running in self._running.values():
            running.process.end()
        self._running.clear()

    def close(self) -> None:
        """End every process. Idempotent."""
        self._kill_running()
        while self._idle:
            self._idle.pop().end()

    def __enter__(self) -> SeedRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
