"""`PostgresSink`: rows into a table, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from holdfast.operators.connectors.postgres.catalog import split_name
from holdfast.operators.connectors.postgres.login import Login
from holdfast.operators.connectors.postgres.target import PostgresTarget
from holdfast.operators.functions.predicates import Where
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.secrets import Secret

Mode = Literal["append", "upsert"]


class PostgresSink(StagedSink):
    """Writes rows to a table of PostgreSQL (14 or newer), exactly once: those of a checkpoint, when it is complete, in one
    transaction with the sink's position, a row of the table `holdfast_positions` of the same schema.

    dsn: libpq's address, without a password: a URI or `host=... dbname=...`; or an `hf.Secret` that holds one, with a password or
    without. password: an `hf.Secret`, unless the dsn, a password file or the server's own means do.
    table: `table` or `schema.table`, each as it is, upper case included; it must exist. Its columns are found by name; those that
    the rows don't have get their default.
    mode: "append" inserts each row. "upsert" keeps one row for each `key`: of rows with the same key the last one counts.
    key: column or columns of a primary key or unique index, for upsert.
    delete_when: of an upsert, the rows that delete their key instead: a boolean column of the rows (written only if the table has
    it, too), a condition in SQL, or a function of a batch.
    silence_max_ms: time without an answer behind which the server is asked what it does; when it does nothing for us, twice, the
    call is given up and the output opened again.
    sink_id, rows_per_commit, commit_interval_ms: as of StagedSink.

    Connects on the driver, too, when the job is built, and raises InvalidConfigError for a table, a column, a type or a right that
    is not there. A row that the table can't take fails the job in front of the checkpoint that would have it (InvalidRowError,
    InvalidKeyError)."""

    def __init__(
        self,
        dsn: str | Secret,
        table: str,
        *,
        mode: Mode = "append",
        key: str | Sequence[str] = (),
        delete_when: Where | None = None,
        password: Secret | None = None,
        sink_id: str = "",
        rows_per_commit: int | None = None,
        commit_interval_ms: int = 0,
        silence_max_ms: int = 15_000,
        name: str = "postgres",
    ) -> None:
        split_name(table)
        if mode not in get_args(Mode):
            raise InvalidConfigError(f"mode is {mode!r}, must be one of {', '.join(get_args(Mode))}", setting="mode")
        keys = (key,) if isinstance(key, str) else tuple(key)
        if (mode == "upsert") != bool(keys) or len(set(keys)) != len(keys):
            raise InvalidConfigError(f"key names the columns of an upsert, each once, for that alone: {key!r}", setting="key")
        if mode != "upsert" and delete_when is not None:
            raise InvalidConfigError("delete_when is for mode='upsert'", setting="delete_when")
        if not isinstance(silence_max_ms, int) or silence_max_ms < 1:
            raise InvalidConfigError(f"silence_max_ms must be at least 1, not {silence_max_ms!r}", setting="silence_max_ms")
        target = PostgresTarget(
            Login(dsn, password), table, mode=mode, key=keys, delete_when=delete_when, silence_max_ms=silence_max_ms
        )
        super().__init__(target, sink_id, rows_per_commit=rows_per_commit, commit_interval_ms=commit_interval_ms, name=name)
