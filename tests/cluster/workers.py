"""Workers as plain processes on the hosts of the cluster, kept alive as on Spark: the supervisor is the same (operators/spark), and
starts processes instead of tasks. Slot i is on host i mod the number of hosts."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

from holdfast.api.client import RestClient
from holdfast.api.settings import client_settings
from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.launches import draw_secret, launch_token
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.launcher import JobHandle, LaunchOptions
from holdfast.operators.spark.handle import SparkJobHandle
from holdfast.operators.spark.packaging import modules_by_value, user_modules
from holdfast.operators.spark.slots import SlotRunner
from holdfast.operators.spark.supervisor import SlotSupervisor, WorkerEnd
from holdfast.operators.worker.main import WorkerSpec, pickle_plan

WORKERS_START_S = 60.0


class ProcessBackend:
    """Implements WorkerBackend: starts a process for each worker."""

    def __init__(self, spec: WorkerSpec, hosts: Sequence[Sequence[str]], folder: Path, launch_key: str) -> None:
        self._spec = spec
        self._hosts = hosts
        self._folder = folder
        self._launch_key = launch_key
        self._running: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def start(self, slot: int, spawn: int, ended: Callable[[WorkerEnd, str], None]) -> None:
        job_id, submission = self._spec.job_id, self._spec.submission
        token = launch_token(self._launch_key, job_id=job_id, submission=submission, slot=slot, spawn=spawn)
        host = slot % len(self._hosts)
        local = self._folder / f"disk-{host}"
        local.mkdir(exist_ok=True)
        fields = {**vars(self._spec), "slot": slot, "task_attempt": spawn, "spawn": spawn, "launch_token": token}
        path = self._folder / f"worker-{slot}-{spawn}"
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)  # it holds the token
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump(WorkerSpec(**{**fields, "local_directory": str(local)}), file)
        command = [*self._hosts[host], sys.executable, "-m", "holdfast.operators.worker.main", str(path)]
        with open(f"{path}.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._running[slot, spawn] = process
        threading.Thread(target=self._wait, args=(process, ended), name=f"worker-{slot}-{spawn}", daemon=True).start()

    def _wait(self, process: subprocess.Popen[bytes], ended: Callable[[WorkerEnd, str], None]) -> None:
        code = process.wait()
        if code == 0:
            ended(WorkerEnd.LEFT, "")
        else:
            ended(WorkerEnd.DIED, f"exit code {code}")

    def cancel(self, slot: int, spawn: int) -> None:
        self._running[slot, spawn].kill()


class PlainLauncher:
    """Implements Launcher."""

    def __init__(self, hosts: Sequence[Sequence[str]], folder: str) -> None:
        self._hosts = hosts
        self._folder = Path(folder)

    def launch(self, plan: JobPlan, options: LaunchOptions) -> JobHandle:
        assert options.coordinator_url is not None
        found = client_settings(os.environ, url=options.coordinator_url, token=options.token)
        client = RestClient(found.url, found.token, authorities=found.authorities)
        key = draw_secret()
        accepted = client.submit(Submission(plan.graph, driver_nonce=uuid4().hex, launch_key=key))
        with modules_by_value(user_modules()):
            pickled = pickle_plan(plan)
        spec = WorkerSpec(
            job_id=accepted.job_id,
            slot=0,
            submission=accepted.submission,
            task_attempt=0,
            coordinator_url=client.url,
            token=client.token,
            state_directory=accepted.directory,
            plan=pickled,
            local_directory="",
            directory_nonce=accepted.directory_nonce,
            authorities=client.authorities,
        )
        backend = ProcessBackend(spec, self._hosts, self._folder, key)
        handle = SparkJobHandle(
            accepted.job_id,
            client,
            plan.graph,
            accepted.slots,
            submission=accepted.submission,
            progress=False,
            release=client.close,
        )
        handle.start(SlotRunner(SlotSupervisor.of(accepted.slots, plan.graph.config), backend, handle.give_up))
        handle.wait_for_workers(WORKERS_START_S)
        return handle
