"""A real Flink 2.3 on this machine: a small job that runs, one that ended and one that failed; and what it answers.

`python -m tests.compat.real_flink` records the answers' shapes anew."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compat.flink import FLINK, flink_classes
from tests.golden.flink_answers import FILE, shape_of

DEADLINE_S = 240.0
NONE = "0" * 32

REQUESTS = (
    "config",
    "overview",
    "jobs",
    "jobs/overview",
    "jobs/metrics",
    "jobs/metrics?get=numRestarts",
    "jobs/metrics?get=numRestarts&agg=max",
    "jobs/{job}",
    "jobs/{job}/status",
    "jobs/{job}/config",
    "jobs/{job}/plan",
    "jobs/{job}/accumulators",
    "jobs/{job}/metrics",
    "jobs/{job}/metrics?get=numRestarts",
    "jobs/{job}/exceptions",
    "jobs/{job}/execution-result",
    "jobs/{job}/rescales/config",
    "jobs/{job}/rescales/overview",
    "jobs/{job}/rescales/history",
    "jobs/{job}/rescales/summary",
    f"jobs/{{job}}/rescales/details/{NONE}",
    "jobs/{job}/jobmanager/config",
    "jobs/{job}/jobmanager/environment",
    "jobs/{job}/jobmanager/log-url",
    "jobs/{job}/checkpoints",
    "jobs/{job}/checkpoints/config",
    "jobs/{job}/checkpoints/details/{checkpoint}",
    "jobs/{job}/checkpoints/details/{checkpoint}/subtasks/{vertex}",
    "jobs/{job}/vertices/{vertex}",
    "jobs/{job}/vertices/{vertex}/metrics",
    "jobs/{job}/vertices/{vertex}/metrics?get=0.numRecordsIn",
    "jobs/{job}/vertices/{vertex}/watermarks",
    "jobs/{job}/vertices/{vertex}/backpressure",
    "jobs/{job}/vertices/{vertex}/jm-operator-metrics",
    "jobs/{job}/vertices/{vertex}/subtasktimes",
    "jobs/{job}/vertices/{vertex}/taskmanagers",
    "jobs/{job}/vertices/{vertex}/accumulators",
    "jobs/{job}/vertices/{vertex}/subtasks/accumulators",
    "jobs/{job}/vertices/{vertex}/subtasks/metrics",
    "jobs/{job}/vertices/{vertex}/subtasks/metrics?get=numRecordsIn",
    "jobs/{job}/vertices/{vertex}/subtasks/0",
    "jobs/{job}/vertices/{vertex}/subtasks/0/metrics",
    "jobs/{job}/vertices/{vertex}/subtasks/0/metrics?get=numRecordsIn",
    "jobs/{job}/vertices/{vertex}/subtasks/0/attempts/{attempt}",
    "jobs/{job}/vertices/{vertex}/subtasks/0/attempts/{attempt}/accumulators",
    "jobs/{job}/vertices/{vertex}/subtasks/0/attempts/99",
    "jobs/{job}/vertices/{vertex}/subtasks/99",
    f"jobs/{NONE}",
    "taskmanagers",
    "taskmanagers/metrics",
    "taskmanagers/{worker}",
    "taskmanagers/{worker}/metrics",
    "taskmanagers/{worker}/logs",
    "jobmanager/config",
    "jobmanager/environment",
    "jobmanager/metrics",
    "jobmanager/metrics?get=numRegisteredTaskManagers",
    "jobmanager/logs",
    "jobmanager/thread-dump",
    "applications/overview",
    "applications/{job}",
    "applications/{job}/exceptions",
    "applications/{job}/jobmanager/config",
)
OF_ENDED = ("jobs/{finished}/execution-result",)
OF_FAILED = (
    "jobs/{failed}/execution-result",
    "jobs/{failed}/exceptions",
    "applications/{failed}",
    "applications/{failed}/exceptions",
)
"""Answers with a failure in them."""

_SQL = (
    "CREATE TABLE endless (k INT, ts AS LOCALTIMESTAMP, WATERMARK FOR ts AS ts) WITH ('connector'='datagen',"
    " 'rows-per-second'='100', 'fields.k.min'='1', 'fields.k.max'='9')",
    "CREATE TABLE few (k INT) WITH ('connector'='datagen', 'number-of-rows'='10', 'fields.k.min'='1', 'fields.k.max'='9')",
    "CREATE TABLE nowhere (k INT, n BIGINT) WITH ('connector'='blackhole')",
)
_JOBS = {
    "job": "INSERT INTO nowhere SELECT k, count(*) FROM endless GROUP BY k",
    "finished": "INSERT INTO nowhere SELECT k, count(*) FROM few GROUP BY k",
    "failed": "INSERT INTO nowhere SELECT 1 / (k - k), count(*) FROM few GROUP BY 1 / (k - k)",
}
_OPTIONS = " ".join(
    f"--add-opens=java.base/{package}=ALL-UNNAMED"
    for package in (
        "java.lang",
        "java.lang.reflect",
        "java.net",
        "java.nio",
        "java.time",
        "java.util",
        "java.util.concurrent",
        "java.util.concurrent.atomic",
    )
)


@dataclass(frozen=True)
class RealFlink:
    """A cluster that answers at `port`."""

    port: int

    def ask(self, path: str) -> tuple[int, Any]:
        """Status and body."""
        try:
            with urllib.request.urlopen(f"http://localhost:{self.port}/v1/{path}", timeout=DEADLINE_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def until(self, path: str, holds: Any) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                status, body = self.ask(path)
            except OSError:
                status, body = 0, None
            if status == 200 and holds(body):
                return body
            assert time.monotonic() < deadline, f"Flink's {path} did not become as it should: {str(body)[:2_000]}"
            time.sleep(0.3)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@contextmanager
def real_flink(folder: Path) -> Iterator[RealFlink]:
    """A job manager and a task manager of their own, stopped at the end of the block."""
    conf, port = folder / "conf", _free_port()
    conf.mkdir()
    settings = {
        "jobmanager": {"rpc": {"address": "localhost", "port": _free_port()}, "memory": {"process": {"size": "900m"}}},
        "taskmanager": {"host": "localhost", "numberOfTaskSlots": 4, "memory": {"process": {"size": "1200m"}}},
        "rest": {"address": "localhost", "bind-address": "localhost", "port": port},
        "io": {"tmp": {"dirs": str(folder)}},
        "env": {"java": {"opts": {"all": _OPTIONS}}},
    }
    (conf / "config.yaml").write_text(json.dumps(settings, indent=1))  # which is YAML
    (conf / "log4j-console.properties").write_text((FLINK / "conf" / "log4j-console.properties").read_text())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLINK_")}
    environment |= {"FLINK_CONF_DIR": str(conf), "FLINK_LOG_DIR": str(folder)}
    with (folder / "output").open("wb") as output:
        processes = [
            subprocess.Popen(
                ["bash", str(FLINK / "bin" / script), "start-foreground"], env=environment, stdout=output, stderr=output
            )
            for script in ("jobmanager.sh", "taskmanager.sh")
        ]
        try:
            flink = RealFlink(port)
            flink.until("overview", lambda body: body["taskmanagers"] == 1)
            yield flink
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(DEADLINE_S)


def submit(flink: RealFlink) -> dict[str, str]:
    """Ids of the three jobs, once the first has completed a checkpoint and the others have ended."""
    with flink_classes() as gateway:
        config = gateway.jvm.org.apache.flink.configuration.Configuration()
        options = {
            "execution.target": "remote",
            "rest.address": "localhost",
            "rest.port": str(flink.port),
            "parallelism.default": "2",
            "execution.checkpointing.interval": "1 s",
            "restart-strategy.type": "disable",
        }
        for name, value in options.items():
            config.setString(name, value)
        api = gateway.jvm.org.apache.flink.table.api
        mode = api.EnvironmentSettings.newInstance().inStreamingMode().withConfiguration(config).build()
        tables = api.TableEnvironment.create(mode)
        for statement in _SQL:
            tables.executeSql(statement)
        jobs = {}
        for name, statement in _JOBS.items():  # one by one: there are four slots
            jobs[name] = tables.executeSql(statement).getJobClient().get().getJobID().toString()
            if name != "job":
                flink.until(f"jobs/{jobs[name]}/status", lambda body, name=name: body["status"] == name.upper())
    flink.until(f"jobs/{jobs['job']}/checkpoints", lambda body: body["latest"]["completed"] is not None)
    flink.until(f"jobs/{jobs['job']}", lambda body: all(each["metrics"]["read-records-complete"] for each in body["vertices"]))
    return jobs


def record(flink: RealFlink) -> dict[str, dict[str, Any]]:
    """Status and shape of each answer, by request."""
    jobs = submit(flink)
    job = jobs["job"]
    names = {
        **jobs,
        "vertex": flink.ask(f"jobs/{job}")[1]["vertices"][-1]["id"],
        "worker": flink.ask("taskmanagers")[1]["taskmanagers"][0]["id"],
        "checkpoint": str(flink.ask(f"jobs/{job}/checkpoints")[1]["latest"]["completed"]["id"]),
        "attempt": "0",
    }
    vertex = f"jobs/{job}/vertices/{names['vertex']}"
    flink.until(f"{vertex}/backpressure", lambda body: body["status"] == "ok")
    flink.until(f"{vertex}/watermarks", len)
    for path in (f"{vertex}/metrics?get=0.numRecordsIn", f"jobs/{job}/metrics?get=numRestarts", "taskmanagers/metrics"):
        flink.until(path, len)
    found: dict[str, dict[str, Any]] = {}
    for request in (*REQUESTS, *OF_ENDED, *OF_FAILED):
        path = re.sub(r"\{(\w+)\}", lambda match: names[match[1]], request)
        status, body = flink.ask(path)
        if request.endswith("/checkpoints"):  # one that is under way has fewer fields
            body = flink.until(path, lambda each: not each["counts"]["in_progress"])
        found[request] = {"status": status, "body": shape_of(body)}
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, real_flink(Path(folder)) as flink:
        FILE.write_text(json.dumps(record(flink), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
