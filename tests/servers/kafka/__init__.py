"""A server that speaks Kafka's protocol, of one node: for tests of connectors, as no package has a broker with right transactions.

Built on the message definitions of kafka-python; librdkafka and kafka-python talk to it. Rows last: what it has answered is there
after kill -9 and a restart. Transactions, idempotence and fences are Kafka's, among them the moment between a commit's answer and
its markers. Not in it: replicas, quotas, TLS, log-append time, deletion by age (`DeleteRecords` does it), the `consumer` group
protocol, ACLs beyond `deny`. Batches of formats older than 2 are refused, and no checksum is looked at, as in Python that would
take longer than the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from tests.servers.kafka.errors import Code
from tests.servers.kafka.faults import Fault, Harm
from tests.servers.process import HOST, START_TIMEOUT_S, ReservedPort, ServerProcess

__all__ = ["Code", "Fault", "Harm", "KafkaServer"]

ROOT = Path(__file__).resolve().parents[3]


class KafkaServer(ServerProcess):
    """`users`: passwords by name, for SASL PLAIN; none: nobody needs one. Faults, the list of requests, held markers and denied
    topics are forgotten by a restart; its clock, which `advance` moves, is not."""

    name = "kafka"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        auto_create_topics: bool = False,
        users: dict[str, str] | None = None,
        transaction_timeout_ms_max: int = 900_000,
        segment_bytes_max: int = 64 << 20,
    ) -> None:
        super().__init__(folder)
        self._proxied = ReservedPort()
        self._advertised_port = 0
        self._answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._settings = {
            "auto_create_topics": auto_create_topics,
            "users": users or {},
            "transaction_timeout_ms_max": transaction_timeout_ms_max,
            "segment_bytes_max": segment_bytes_max,
        }

    # ------------------------------------------------------------------------------------------------------------ where it is

    @property
    def bootstrap(self) -> str:
        """`bootstrap.servers` of its clients."""
        return f"{HOST}:{self.port}"

    @property
    def proxied_port(self) -> int:
        """The target of a proxy, on a port that was given to `advertise`: its clients stay behind it, and others aren't led
        there."""
        return self._proxied.number

    def advertise(self, proxy_port: int) -> None:
        self._advertised_port = proxy_port
        if self.is_alive:
            self._do("advertise", port=proxy_port)

    # ---------------------------------------------------------------------------------------------------------------- commands

    def plan(self, *faults: Fault) -> None:
        self._do("plan", faults=[fault.to_json() for fault in faults])

    def heal(self) -> None:
        """No fault from now on; requests that are held stay so."""
        self._do("heal")

    def release(self) -> None:
        """Requests that are held are handled, in the order of their connections."""
        self._do("release")

    def requests(self, client: str = "") -> list[str]:
        """Names of all requests of clients whose id begins so, since the last call."""
        found: Iterable[tuple[str, str]] = self._do("requests")
        return [name for name, client_id in found if client_id.startswith(client)]

    def advance(self, ms: int) -> None:
        """Its clock, by which transactions and sessions time out."""
        self._do("advance", ms=ms)

    def hold_markers(self) -> None:
        """Decided transactions stay without their markers until `write_markers`."""
        self._do("hold_markers", held=True)

    def write_markers(self) -> None:
        self._do("hold_markers", held=False)

    def compact(self, topic: str) -> None:
        """At once, all but what is not stable."""
        self._do("compact", topic=topic)

    def deny(self, *topics: str) -> None:
        """The only topics that are refused to all from now on."""
        self._do("deny", topics=topics)

    def open_transactions(self) -> dict[str, str]:
        """Status of those that are begun and not complete, by transactional id."""
        found: dict[str, dict[str, Any]] = self._do("transactions")
        return {
            name: each["status"] for name, each in found.items() if each["status"] in ("Ongoing", "PrepareCommit", "PrepareAbort")
        }

    def _do(self, name: str, **fields: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **fields}).encode() + b"\n")
        self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=START_TIMEOUT_S)
        except Empty:
            raise AssertionError(f"{self.name} does not answer {name!r}") from None
        assert "error" not in answer, answer["error"]
        return answer["value"]

    # -------------------------------------------------------------------------------------------------------------- the process

    def _command(self) -> list[str]:
        launch = {
            "port": self.port,
            "proxied_port": self.proxied_port,
            "advertised_port": self._advertised_port,
            "settings": self._settings,
        }
        return [sys.executable, "-m", "tests.servers.kafka.server", str(self.folder), json.dumps(launch)]

    def _options(self) -> dict[str, object]:
        return {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}

    def _on_spawn(self, process: subprocess.Popen[bytes]) -> None:
        answers = self._answers = SimpleQueue()

        def read() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    answers.put(json.loads(line))

        Thread(target=read, daemon=True).start()

    def _is_ready(self) -> bool:
        try:
            return bool(self._answers.get(timeout=0.1)["value"] == "ready")
        except Empty:
            return False

    def close(self) -> None:
        super().close()
        self._proxied.close()
