"""How a job gets to a PostgreSQL server: the address, in which no password stands, and what a connection asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.operators.connectors.extras import import_extra
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.secrets import Secret, hide, resolve

CONNECT_TIMEOUT_S = 10
_SECRET_OPTIONS = ("password", "sslpassword", "passfile")
_REFUSED = re.compile(
    r"authentication failed|no password supplied|no pg_hba.conf entry|role .* does not exist|database .* does not exist|"
    r"permission denied for database|must be (superuser|replication role)|could not translate host name|invalid (connection|URI)"
)
"""Of messages of libpq and of the server: what does not pass by itself. A failed connection has no SQLSTATE."""


def client() -> Any:
    """psycopg2. Raises InvalidConfigError that names the extra."""
    import_extra("psycopg2.extras", "postgres", "PostgreSQL")
    return import_extra("psycopg2", "postgres", "PostgreSQL")


def ingest_client() -> Any:
    """ADBC's PostgreSQL driver. Raises InvalidConfigError that names the extra."""
    return import_extra("adbc_driver_postgresql.dbapi", "postgres", "PostgreSQL")


@dataclass(frozen=True, slots=True)
class Login:
    """Address and password as a user gives them, checked; pickled into the job."""

    dsn: str | Secret
    """libpq's: a URI, or `host=... dbname=...`."""
    password: Secret | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dsn, Secret):
            return
        if not isinstance(self.dsn, str):
            raise InvalidConfigError(f"dsn is a text or hf.Secret, not a {type(self.dsn).__name__}", setting="dsn")
        if any(self._options(self.dsn).get(each) for each in _SECRET_OPTIONS[:2]):
            raise InvalidConfigError(
                "dsn has a password, which would be kept in the job's graph: give the whole dsn as hf.Secret('VARIABLE'), or the "
                "password as password=hf.Secret('VARIABLE')",
                setting="dsn",
            )

    def __repr__(self) -> str:
        return f"Login({self.place!r})"

    @property
    def place(self) -> str:
        """Server and database for messages: of a dsn that is a secret, its variable."""
        if isinstance(self.dsn, Secret):
            return f"postgresql ${self.dsn.variable}"
        options = self._options(self.dsn)
        host, port = options.get("host", "localhost"), options.get("port", "")
        return f"postgresql://{host}{':' if port else ''}{port}/{options.get('dbname', '')}"

    def conninfo(self, **options: Any) -> str:
        """What libpq connects by, with the password: for a client alone. `options`: beside the user's, which count where one of
        ours is None."""
        dsn = resolve(self.dsn)
        own = self._options(dsn)
        wanted = {name: value for name, value in options.items() if value is not None}
        wanted.setdefault("client_encoding", "UTF8")
        if "connect_timeout" not in own:
            wanted.setdefault("connect_timeout", CONNECT_TIMEOUT_S)
        if self.password is not None:
            wanted["password"] = self.password.resolve()
        text: str = client().extensions.make_dsn(dsn, **wanted)
        return text

    def connect(self, **options: Any) -> Any:
        """A psycopg2 connection that commits each statement. Raises what `refused` gives."""
        factory = options.pop("connection_factory", None)
        conninfo = self.conninfo(**options)
        try:
            connection = client().connect(conninfo, connection_factory=factory)
        except client().Error as error:
            raise self.failed(error) from None
        if factory is None:  # one for replication has no transactions
            connection.autocommit = True
        return connection

    def failed(self, error: Exception) -> HoldfastError:
        """A failed connection: InvalidConfigError where another try would fail, too, else StorageUnavailableError. Without what is
        secret."""
        text = self.hidden(str(error)).strip()
        if _REFUSED.search(text):
            return InvalidConfigError(f"{self.place} refuses the connection: {text}", setting="dsn")
        return StorageUnavailableError(f"{self.place} can't be reached: {text}", path=self.place)

    def hidden(self, text: str) -> str:
        """A client's message, without what is secret of it."""
        secrets = [] if self.password is None else [self.password.resolve()]
        if isinstance(self.dsn, Secret):
            dsn = self.dsn.resolve()
            options = self._options(dsn)
            secrets += [dsn, *(options[each] for each in _SECRET_OPTIONS if each in options)]
        return hide(text, secrets)

    @staticmethod
    def _options(dsn: str) -> Mapping[str, str]:
        """Raises InvalidConfigError for what is no dsn, and does not show it."""
        psycopg2 = client()
        try:
            found: Mapping[str, str] = psycopg2.extensions.parse_dsn(dsn)
        except psycopg2.ProgrammingError:
            raise InvalidConfigError(
                "dsn is none that PostgreSQL's clients take: postgresql://user@host:port/database, or host=... dbname=...",
                setting="dsn",
            ) from None
        return found
