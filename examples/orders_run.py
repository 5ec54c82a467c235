"""Where the job of `orders.py` runs: on Spark with executors of their own, or in plain processes; and the servers that it needs, of
the user, or of the repository's tests."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import flights_chaos as chaos

import holdfast as hf

ROOT = Path(__file__).resolve().parents[1]
DSN_VARIABLE = "ORDERS_DSN"
LEAVE_S = 180.0
"""Time in which a job that is stopped commits what is left."""


@dataclass(frozen=True)
class Servers:
    """`dsn`: with its password; the job has it as a secret."""

    bootstrap: str
    dsn: str


@contextlib.contextmanager
def servers(kafka: str | None, postgres: str | None) -> Iterator[Servers]:
    """Those of the user, and in place of one that is not given that of the tests. Raises DemoError outside of the repository."""
    with contextlib.ExitStack() as stack:
        if kafka is None or postgres is None:
            _need_tests("give --kafka host:port and --postgres dsn")
        if kafka is None:
            from tests.servers.kafka import KafkaServer

            kafka = stack.enter_context(KafkaServer()).bootstrap
        if postgres is None:
            from tests.servers.postgres import PostgresServer

            postgres = stack.enter_context(PostgresServer()).dsn
        yield Servers(kafka, postgres)


def _need_tests(instead: str) -> None:
    if not (ROOT / "tests" / "servers").is_dir():
        raise chaos.DemoError(f"servers and processes of the tests are in the repository alone: {instead}")
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))


class RunningJob(Protocol):
    """What the drill needs of a job's handle."""

    job_id: str
    client: Any

    def stop(self, target: str | None = None, *, drain: bool = False) -> str: ...

    def close(self) -> None: ...


class Executor(NamedTuple):
    """kill: processes whose death is that of an executor; lost: those that die of it, its workers among them."""

    kill: list[int]
    lost: list[int]


class Place(Protocol):
    """Where jobs run."""

    name: str

    def launch(self, env: hf.Environment) -> RunningJob: ...

    def executor_of(self, pid: int, workers: list[int]) -> Executor:
        """That of the worker `pid`."""

    def close(self) -> None: ...


class OnSpark:
    """Two executors, each a JVM of its own with room for two workers. Java must be there."""

    name = "Spark, two executors"

    def __init__(self, folder: Path) -> None:
        from pyspark.sql import SparkSession

        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        short_lived = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        settings = {
            f"spark.executorEnv.{DSN_VARIABLE}": os.environ[DSN_VARIABLE],
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": short_lived,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": short_lived,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        }
        builder = SparkSession.builder.master("local-cluster[2,2,1024]").appName("orders")
        for setting, value in settings.items():
            builder = builder.config(setting, value)
        self._spark = builder.getOrCreate()
        self._spark.sparkContext.setLogLevel("OFF")

    def launch(self, env: hf.Environment) -> RunningJob:
        return env.execute(progress=False)

    def executor_of(self, pid: int, workers: list[int]) -> Executor:
        found = self._jvm_above(pid)
        return Executor([found], [found, *(each for each in workers if self._jvm_above(each) == found)])

    @staticmethod
    def _jvm_above(pid: int) -> int:
        """Of a Python worker: worker, daemon, executor."""
        above = pid
        while above > 1:
            above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
            if Path(f"/proc/{above}/comm").read_text().strip() == "java":
                return above
        raise chaos.DemoError(f"worker {pid} has no executor")

    def close(self) -> None:
        self._spark.stop()


class InProcesses:
    """Workers as processes of this machine, without Spark; all of them are one executor."""

    name = "processes, without Spark"

    def __init__(self, folder: Path) -> None:
        _need_tests("leave --without-spark out")
        self._folder = folder

    def launch(self, env: hf.Environment) -> RunningJob:
        from holdfast.api.client import RestClient
        from holdfast.barriers.jobgraph import Submission
        from holdfast.operators.worker.main import WorkerSpec, pickle_plan
        from tests.harness.slots import LocalProcessSlots

        plan = env.build()
        assert env.coordinator is not None
        client = RestClient(env.coordinator, env.token)
        accepted = client.submit(Submission(plan.graph, driver_nonce=os.urandom(8).hex()))
        local, logs = self._folder / "local", self._folder / "workers"
        for path in (local, logs):
            path.mkdir(exist_ok=True)
        spec = WorkerSpec(
            job_id=accepted.job_id,
            slot=0,
            submission=accepted.submission,
            task_attempt=0,
            coordinator_url=env.coordinator,
            token=env.token,
            state_directory=accepted.directory,
            plan=pickle_plan(plan),
            local_directory=str(local),
            directory_nonce=accepted.directory_nonce,
        )
        slots = LocalProcessSlots(spec, accepted.slots, log_directory=str(logs))
        slots.start()
        return _ProcessJob(accepted.job_id, client, slots)

    def executor_of(self, pid: int, workers: list[int]) -> Executor:
        return Executor(workers, workers)

    def close(self) -> None:
        return


@dataclass
class _ProcessJob:
    job_id: str
    client: Any
    slots: Any

    def stop(self, target: str | None = None, *, drain: bool = False) -> str:
        location: str = self.client.stop(self.job_id, target, drain=drain)
        if not self.slots.wait(LEAVE_S):
            raise chaos.DemoError(f"the job is {self.client.job_state(self.job_id)}, and its workers have not left")
        return location

    def close(self) -> None:
        self.slots.close()
