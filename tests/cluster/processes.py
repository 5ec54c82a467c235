"""SHELL: the processes of a run, each on its host, with a log of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.cluster.network import Network

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 25
FOREIGN = ("AWS_", "SPARK_", "HOLDFAST_", "PYSPARK_", "JAVA_TOOL")
"""Variables of other clusters, which the processes don't get."""


class RunError(Exception):
    """The run failed; the text says in what."""


class Processes:
    """Starts them; the network's end kills them."""

    def __init__(self, network: Network, environment: dict[str, str]) -> None:
        self._network = network
        self._environment = environment
        self.logs = network.folder / "logs"
        self.logs.mkdir()
        self.local = network.disk / "holdfast"
        """Where, on each host, a coordinator keeps what clients of that host need."""

    def start(
        self, host: str, name: str, *command: str, reads: bool = False, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[str]:
        """`reads`: its standard output is read by the caller, else it is in the log, with its errors."""
        disk = self._network.disk
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        environment = {
            **inherited,
            "TMPDIR": str(disk / "tmp"),
            "JDK_JAVA_OPTIONS": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={disk / 'tmp'}",
            "HOLDFAST_LOCAL_DIR": str(self.local),
            "SPARK_LOCAL_IP": self._network.address(host),
            "PYSPARK_PYTHON": sys.executable,  # `spark.pyspark.python` is read by spark-submit alone
            "PYTHONPATH": str(ROOT),
            **self._environment,
            **variables,
        }
        with open(self.logs / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                self._network.inside(host, *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if reads else log,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
                start_new_session=True,  # Ctrl-C is the runner's alone
            )

    def python(self, host: str, module: str, *arguments: str, **settings: Any) -> subprocess.Popen[str]:
        return self.start(host, module.rpartition(".")[2], sys.executable, "-m", module, *arguments, **settings)

    def tail(self) -> str:
        """The last lines of each log."""
        parts = []
        for log in sorted(self.logs.iterdir()):
            lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            parts += [f"--- {log.name}", *lines] if lines else []
        return "\n".join(parts)


class Driver:
    """The driver's process, and how it told that the job stands."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.told: dict[str, Any] = {}
        """The newest line that has a state."""
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="driver", daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            with self._changed:
                if "state" in told:
                    self.told = told
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self._changed.notify_all()

    @property
    def checkpoint(self) -> int:
        return int(self.told.get("checkpoint", 0))

    @property
    def restarts(self) -> int:
        return int(self.told.get("restarts", 0))

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], what: str, timeout_s: float) -> None:
        """Raises RunError when the process ends before, or the time has passed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition(self.told):
                if self.process.poll() is not None and not self._changed.wait(1.0):
                    raise RunError(f"{what}: the driver ended before, with code {self.process.returncode}; the job: {self.told}")
                if time.monotonic() >= deadline:
                    raise RunError(f"{what}: not within {timeout_s:g} s; the job: {self.told}")
                self._changed.wait(min(1.0, deadline - time.monotonic()))
