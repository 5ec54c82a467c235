"""Members as real processes: `holdfast serve --ha` on one state directory, killed, stopped, woken and asked to leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import urllib3

from holdfast.api.client import RestClient
from holdfast.barriers.jobgraph import Submission
from holdfast.operators.worker.main import WorkerSpec, pickle_plan
from tests.harness.slots import LocalProcessSlots

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
POLL_S = 0.01
WITHOUT_LOCKS = """
import errno, fcntl, sys
def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = refuse
from holdfast import main
sys.exit(main())
"""
"""The program of a member on a file system that takes no locks; so are those of two hosts to each other."""


class MemberProcess:
    """One member. Its log is `<folder>/member-<name>.log`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        takeover_after_ms: int | None = None,
        has_locks: bool = True,
        options: tuple[str, ...] = ("--ha",),
        state_dir: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`state_dir`: None is `<folder>/state`. `environment`: beside this process's."""
        self.log = folder / f"member-{name}.log"
        self._announced = folder / f"member-{name}.json"
        program = ["-m", "holdfast"] if has_locks else ["-c", WITHOUT_LOCKS]
        state = state_dir or str(folder / "state")
        command = [sys.executable, *program, "serve", *options, "--json", "--port", "0", "--state-dir", state]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        if takeover_after_ms is not None:
            environment["HOLDFAST_TAKEOVER_AFTER_MS"] = str(takeover_after_ms)
        with self.log.open("ab") as log, self._announced.open("wb") as announced:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=announced, stderr=log, env=environment)
        self._http = urllib3.PoolManager(retries=False)
        self._url = ""

    @property
    def url(self) -> str:
        """Waits until it listens."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._url:
            if self.process.poll() is not None:
                raise AssertionError(f"the member ended with {self.process.returncode}: {self.log.read_text()[-3000:]}")
            assert time.monotonic() < deadline_s, f"the member does not listen: {self.log.read_text()[-3000:]}"
            text = self._announced.read_text()
            self._url = str(json.loads(text)["url"]) if text.endswith("\n") else ""
            time.sleep(0 if self._url else POLL_S)
        return self._url

    def status(self, path: str, timeout_s: float = 1.0) -> int:
        """Status of a GET without a token; 0: no answer."""
        try:
            return int(self._http.request("GET", self.url + path, timeout=timeout_s).status)
        except urllib3.exceptions.HTTPError:
            return 0

    @property
    def is_active(self) -> bool:
        return self.status("/leader") == 200

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, by its pid."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        self._http.clear()


def wait_for_active(members: list[MemberProcess], timeout_s: float = START_TIMEOUT_S) -> MemberProcess:
    """The member that says it is the active one."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        for member in members:
            if member.is_active:
                return member
        assert time.monotonic() < deadline_s, f"no member is active: {[each.log.read_text()[-1500:] for each in members]}"
        time.sleep(POLL_S)


def start_job(client: RestClient, plan: Any, folder: Path) -> tuple[str, LocalProcessSlots]:
    """Submit a plan to members, and start its workers, whose files and logs are in `<folder>/local` and `<folder>/logs`. The id of
    the job, and the slots, to be closed."""
    accepted = client.submit(Submission(plan.graph, driver_nonce=os.urandom(8).hex()))
    spec = WorkerSpec(
        job_id=accepted.job_id,
        slot=0,
        submission=accepted.submission,
        task_attempt=0,
        coordinator_url=client.url,
        token=accepted.worker_token,
        state_directory=accepted.directory,
        plan=pickle_plan(plan),
        local_directory=str(folder / "local"),
    )
    slots = LocalProcessSlots(replace(spec, unix_sockets=True), accepted.slots, log_directory=str(folder / "logs"))
    slots.start()
    return accepted.job_id, slots
