"""SHELL: one run: the hosts with their servers, the job, the cuts of the plan, and the comparison at the end."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.api.settings import local_folder
from holdfast.statebackends.layout import CA_FILE
from tests.cluster.job import Options
from tests.cluster.network import Network
from tests.cluster.plan import DRIVER, STORAGE, WORKERS, Cut, Kind
from tests.cluster.processes import Driver, Processes, RunError
from tests.cluster.storage import BUCKET, PORT
from tests.s3_server import CREDENTIALS

STATE = f"s3://{BUCKET}/state"
COORDINATOR_PORT = 8080
MASTER_PORT = 7077
CONNECT_PORT = 15002
CORES = 2
"""Of each worker's host: two hold three workers of the job, and one is free for a successor."""
PARALLELISM = 3
ROWS_PER_SECOND = 600
START_S = 120.0
RECOVER_S = 150.0
"""After a cut was healed a checkpoint completes within this time."""
BETWEEN_CUTS_S = 10
"""Time that the job's rows last for, beside the cuts themselves, for each of them."""
END_S = 240.0
QUIET: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
"""Of a short command: Ctrl-C is the runner's alone."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Observed:
    """What a cut did."""

    cut: Cut
    restarts: int
    recovered_s: float
    """From the healing to the next completed checkpoint."""


class Runner:
    """Runs on a network that stands."""

    def __init__(
        self, network: Network, cuts: tuple[Cut, ...], say: Say, *, with_spark: bool = True, connect: bool = False
    ) -> None:
        self._network = network
        self._cuts = cuts
        self._say = say
        self._with_spark = with_spark
        self._connect = connect
        self._token = secrets.token_hex(16)
        self._credentials = {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": f"http://{network.address(STORAGE)}:{PORT}"}
        self.processes = Processes(network, self._credentials)
        self._output = f"s3://{BUCKET}/out"
        # of a long cut the job repeats most, from its last checkpoint before it
        lasts_s = sum(cut.duration_ms / (2_000 if cut.is_long else 1_000) + BETWEEN_CUTS_S for cut in cuts)
        self._rows = int(ROWS_PER_SECOND * lasts_s)

    def run(self) -> tuple[list[Observed], dict[str, Any]]:
        """What the cuts did, and what the comparison found. Raises RunError."""
        self._start_servers()
        trusted = {"HOLDFAST_CA": str(local_folder(STATE, {"HOLDFAST_LOCAL_DIR": str(self.processes.local)}) / CA_FILE)}
        driver = Driver(
            self.processes.python(DRIVER, "tests.cluster.job", self._job_options(), reads=True, variables=trusted)
        )
        driver.wait_for(lambda told: told.get("checkpoint", 0) > 0, "the first checkpoint", START_S)
        self._say(f"the job runs: {PARALLELISM} workers, {self._rows:,} rows")
        observed = [self._cut(driver, number, cut) for number, cut in enumerate(self._cuts, 1)]
        driver.wait_for(lambda told: "records_in" in told, "the end of the job", END_S)
        if driver.told["state"] != "FINISHED":
            raise RunError(f"the job is {driver.told['state']}: {driver.told.get('failure')}")
        return observed, self._check()

    # --------------------------------------------------------------------------------------------------------- servers

    def _start_servers(self) -> None:
        address = self._network.address
        self.processes.python(STORAGE, "tests.cluster.storage", address(STORAGE), str(PORT))
        self._await_port(STORAGE, PORT)
        serve = ("serve", "--json", "--host", address(DRIVER), "--port", str(COORDINATOR_PORT))
        command = (sys.executable, "-m", "holdfast", *serve, "--state-dir", STATE)
        self.processes.start(DRIVER, "coordinator", *command, variables={"HOLDFAST_TOKEN": self._token})
        if self._with_spark:
            self._start_spark()
        if self._connect:
            self._start_connect()
        self._await_port(DRIVER, COORDINATOR_PORT)

    def _start_spark(self) -> None:
        address, master = self._network.address, f"spark://{self._network.address(DRIVER)}:{MASTER_PORT}"
        spark_class, disk = spark_home() / "bin" / "spark-class", self._network.disk
        common = {"SPARK_DAEMON_MEMORY": "192m", "SPARK_HOME": str(spark_home()), "SPARK_NO_DAEMONIZE": "1"}
        place = ("--host", address(DRIVER), "--port", str(MASTER_PORT), "--webui-port", "0")
        self.processes.start(DRIVER, "master", str(spark_class), "org.apache.spark.deploy.master.Master", *place, variables=common)
        self._await_port(DRIVER, MASTER_PORT)
        for host in WORKERS:
            size = ("--cores", str(CORES), "--memory", "1g", "--work-dir", str(disk / "work"))
            self.processes.start(
                host,
                host,
                str(spark_class),
                "org.apache.spark.deploy.worker.Worker",
                *("--host", address(host), "--webui-port", "0"),
                *size,
                master,
                variables={**common, "SPARK_LOCAL_DIRS": str(disk / "spark")},
            )

    def _start_connect(self) -> None:
        """The server of Spark Connect, which is the application's driver; on our driver's host."""
        settings = {**self._settings(), "spark.connect.grpc.binding.port": str(CONNECT_PORT)}
        words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        command = (str(spark_home() / "bin" / "spark-class"), "org.apache.spark.deploy.SparkSubmit", *words, "--class")
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        self.processes.start(DRIVER, "connect", *command, server, "spark-internal", variables={"SPARK_HOME": str(spark_home())})
        self._await_port(DRIVER, CONNECT_PORT)

    def _job_options(self) -> str:
        network = self._network
        specs = network.folder / "workers"
        specs.mkdir()
        options = Options(
            rows=self._rows,
            rows_per_second=ROWS_PER_SECOND,
            parallelism=PARALLELISM,
            coordinator=f"https://{network.address(DRIVER)}:{COORDINATOR_PORT}",
            token=self._token,
            output=self._output,
            spark={} if self._connect else self._settings() if self._with_spark else None,
            remote=f"sc://{network.address(DRIVER)}:{CONNECT_PORT}" if self._connect else None,
            workers=tuple(tuple(network.inside(host)) for host in WORKERS),
            folder=str(specs),
        )
        return msgspec.json.encode(options).decode()

    def _settings(self) -> dict[str, str]:
        address = self._network.address(DRIVER)
        variables = {**self._credentials, "TMPDIR": str(self._network.disk / "tmp")}
        return {
            "spark.master": f"spark://{address}:{MASTER_PORT}",
            "spark.driver.host": address,
            "spark.driver.bindAddress": address,
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": str(CORES),
            "spark.cores.max": str(CORES * len(WORKERS)),
            "spark.ui.enabled": "false",
            "spark.local.dir": str(self._network.disk / "spark"),
            **{f"spark.executorEnv.{name}": value for name, value in variables.items()},
        }

    # ------------------------------------------------------------------------------------------------------------ cuts

    def _cut(self, driver: Driver, number: int, cut: Cut) -> Observed:
        """Cut, wait, heal, and wait for the next checkpoint. Raises RunError, too, when the cut did not cut."""
        begun = driver.checkpoint
        driver.wait_for(lambda told: told["checkpoint"] >= begun + cut.checkpoints, f"checkpoints before cut {number}", RECOVER_S)
        time.sleep(cut.delay_ms / 1000)
        self._expect_running(driver, f"cut {number}")
        restarts = driver.restarts
        self._say(f"cut {number}/{len(self._cuts)}: {cut}")
        ends = time.monotonic() + cut.duration_ms / 1000
        with self._cut_off(cut):
            self._prove_cut(cut)
            time.sleep(max(0.0, ends - time.monotonic()))
        healed, checkpoint = time.monotonic(), driver.checkpoint
        self._await_healed(cut)
        driver.wait_for(
            lambda told: told["state"] == "FINISHED" or (told["state"] == "RUNNING" and told["checkpoint"] > checkpoint + 1),
            f"checkpoints behind cut {number}",
            RECOVER_S,
        )
        self._expect_running(driver, f"the end of cut {number}")
        observed = Observed(cut, driver.restarts - restarts, time.monotonic() - healed)
        self._say(f"  healed: {observed.restarts} restarts, checkpoints again behind {observed.recovered_s:.1f} s")
        if cut.kind is Kind.COORDINATOR and cut.is_long and not observed.restarts:
            raise RunError(f"cut {number} was longer than the heartbeat timeout, and the job was not restarted")
        return observed

    def _expect_running(self, driver: Driver, what: str) -> None:
        if driver.told["state"] in ("FINISHED", "FAILED", "CANCELED"):
            raise RunError(f"the job is {driver.told['state']} before {what}: {driver.told.get('failure')}")

    @contextmanager
    def _cut_off(self, cut: Cut) -> Any:
        self._network.cut(cut.first, cut.second, cut.lost)
        try:
            yield
        finally:
            self._network.heal(cut.first, cut.second, cut.lost)

    def _prove_cut(self, cut: Cut) -> None:
        if self._reaches(cut):
            raise RunError(f"{cut.first} reaches {cut.second} although their link is cut")

    def _await_healed(self, cut: Cut) -> None:
        deadline = time.monotonic() + 10
        while not self._reaches(cut):
            if time.monotonic() > deadline:
                raise RunError(f"{cut.first} does not reach {cut.second} although their link is healed")

    def _reaches(self, cut: Cut) -> bool:
        """Whether a connection from one to the other is answered, be it by a refusal."""
        code = (
            "import socket,sys\ntry: socket.create_connection((sys.argv[1], 9), 0.6)\n"
            "except ConnectionRefusedError: pass\nexcept OSError: sys.exit(1)"
        )
        command = self._network.inside(cut.first, sys.executable, "-S", "-c", code, self._network.address(cut.second))
        return subprocess.run(command, check=False, **QUIET).returncode == 0

    # ------------------------------------------------------------------------------------------------------------- end

    def _check(self) -> dict[str, Any]:
        process = self.processes.python(DRIVER, "tests.cluster.check", str(self._rows), self._output, reads=True)
        output, _ = process.communicate(timeout=END_S)
        if process.returncode:
            raise RunError("the comparison failed, see check.log")
        return dict(json.loads(output))

    def _await_port(self, host: str, port: int) -> None:
        """Until somebody listens there. Asked from the host itself."""
        code = (
            "import socket,sys,time\nfor _ in range(1200):\n"
            " try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 1); break\n"
            " except OSError: time.sleep(0.05)\nelse: sys.exit(1)"
        )
        command = self._network.inside(host, sys.executable, "-S", "-c", code, self._network.address(host), str(port))
        if subprocess.run(command, check=False, **QUIET).returncode:
            raise RunError(f"nobody listens on {host}, port {port}")


def spark_home() -> Path:
    """Where PySpark's own Spark is."""
    import pyspark

    return Path(pyspark.__file__).parent
