"""Flink's own client, as `make compat` has fetched it: its command line in processes, and its classes in a JVM."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

FLINK = Path(__file__).resolve().parents[2] / "build" / "flink" / "pyflink"
DEADLINE_S = 45.0
"""Of one command. A client that can't read an answer repeats its request for a minute, and is killed here: that is the failure."""


@dataclass(frozen=True)
class Outcome:
    code: int
    text: str

    def __contains__(self, words: str) -> bool:
        return words in self.text


@dataclass(frozen=True)
class FlinkCommand:
    """`bin/flink`, with nothing changed but where its logs go, and the header that brings the token."""

    url: str
    token: str
    logs: Path

    def __call__(self, command: str, *arguments: object, token: str | None = None) -> Outcome:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLINK_")}
        environment |= {
            "FLINK_REST_CLIENT_HEADERS": f"Authorization:Bearer {token or self.token}",
            "FLINK_LOG_DIR": str(self.logs),
            "JVM_ARGS": "-XX:TieredStopAtLevel=1",  # a process of a few seconds
        }
        words = ["bash", str(FLINK / "bin" / "flink"), command, "-m", self.url.removeprefix("http://"), *map(str, arguments)]
        ended = subprocess.run(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False
        )
        return Outcome(ended.returncode, ended.stdout)

    def done(self, command: str, *arguments: object) -> Outcome:
        outcome = self(command, *arguments)
        assert outcome.code == 0, outcome.text
        return outcome

    def fails(self, command: str, *arguments: object, token: str | None = None) -> Outcome:
        """Promptly, and not because it could not read what it was answered."""
        outcome = self(command, *arguments, token=token)
        assert outcome.code == 1, outcome.text
        for words in ("was neither of the expected type", "MismatchedInput", "NullPointer", "TimeoutException", "Could not parse"):
            assert words not in outcome, outcome.text
        return outcome


@contextmanager
def flink_classes() -> Iterator[Any]:
    """A JVM with Flink's classes, as a py4j gateway: `gateway.jvm.org.apache.flink...`."""
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar")
    classpath = os.pathsep.join(map(str, sorted((FLINK / "lib").glob("*.jar"))))
    port, token, process = launch_gateway(
        jarpath=str(jar), classpath=classpath, java_path=None, die_on_exit=True, enable_auth=True, return_proc=True
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port, auth_token=token))
    try:
        yield gateway
    finally:
        gateway.shutdown()
        process.stdin.close()
        process.wait(DEADLINE_S)
