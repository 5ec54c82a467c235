"""Folders of workers on the disk of their host (I17, docs/invariants.md): a dead worker's folder goes with the next worker, a
living one's never.

A worker deletes what it finds in its own thread pool, beside its other work; when the pool is idle, it has finished."""

from __future__ import annotations

import os
from typing import ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import JobLedger
from holdfast.chaos.checkers.observations import Report, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.operators.worker.working_folders import WORKER_FOLDER

START_MS = 100
"""Time after its start at which a worker has begun to look, ms."""


class WorkingFoldersChecker(Checker):
    """Checks the folders of one run."""

    invariants: ClassVar[tuple[str, ...]] = ("I17",)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._dead: dict[str, set[str]] = {}
        """Folder of a dead worker -> workers alive when it was first seen: these may have looked before."""
        self._first_ms: dict[str, int] = {}
        """Worker -> when it was first seen, ms."""

    def look(self) -> None:
        root = self.world.local_directory
        if not root:
            return
        hosts = {host.process.name: host for host in self.world.workers() if host.folder is not None}
        self._first_ms = {name: self._first_ms.get(name, self.world.now_ms) for name in hosts}
        found = {name for name in os.listdir(root) if WORKER_FOLDER.fullmatch(name)}
        owned = {os.path.basename(host.folder.path): name for name, host in hosts.items()}
        for folder in sorted(owned.keys() - found):
            if hosts[owned[folder]].worker.leaving is None:
                self.report("I17", f"{owned[folder]} lives, and its folder {folder} is gone")
        self._dead = {folder: self._dead.get(folder, set(hosts)) for folder in sorted(found - owned.keys())}
        for folder, earlier in self._dead.items():
            for name in sorted(hosts.keys() - earlier):
                ran_ms = self.world.now_ms - self._first_ms[name]
                if ran_ms > START_MS and hosts[name].pool.is_idle and not hosts[name].process.paused:
                    self.report("I17", f"{name} has looked for {ran_ms} ms, and a dead worker's folder {folder} is still there")
