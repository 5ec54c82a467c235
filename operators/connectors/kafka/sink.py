"""`hf.KafkaSink`: rows to topics of Kafka, exactly once or at least once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from holdfast.operators.base import Operator
from holdfast.operators.connectors.kafka.at_least_once import KafkaWriter, KafkaWriterOperator
from holdfast.operators.connectors.kafka.connection import SINK_OWNED, Connection, Setting
from holdfast.operators.connectors.kafka.records import RECORD_OVERHEAD, RecordFormat
from holdfast.operators.connectors.kafka.target import KafkaTarget
from holdfast.operators.sinks.files.parquet import FILE_SIZE_MAX
from holdfast.operators.sinks.targets.staged import StagedSink
from holdfast.statebackends.errors import GraphError, InvalidConfigError

COMMIT_TOPIC = "holdfast-positions"
MESSAGE_BYTES_MAX = 1_000_000
"""Of librdkafka, `message.max.bytes`."""


class KafkaSink(StagedSink):
    """Writes rows to Kafka. Readers with `isolation.level=read_committed` see each row once, when its checkpoint is complete.

    bootstrap: `host:port`, several with commas. topic: of all rows; or topic_column: the column that has it.
    key: the column with the record's key (text, bytes, or an integer as its digits), or several, as a JSON object. A null key is an
    InvalidRowError; null_keys=True: such a row goes without a key, to any partition.
    value: a column of text or bytes as it is, where null is a tombstone; a list of columns: a JSON object of them; None: of all but
    those of topic, timestamp and headers.
    headers: name -> its column. timestamp: the column with the record's time, a timestamp or ms since 1970; else that of sending.
    guarantee: "exactly_once", or "at_least_once": rows are sent as they come, a checkpoint waits until brokers have them, and a
    failure repeats those behind it; sink_id, commit_topic, rows_per_commit and commit_interval_ms are without effect.
    sink_id: identity of the output, and of its transactions (`holdfast-<sink id>`), in the whole cluster.
    commit_topic: compacted topic with the positions of sinks; created if it is not there.
    settings: of librdkafka, such as `security.protocol`, `compression.type`, `transaction.timeout.ms`; a secret as `hf.Secret`.
    rows_per_commit, commit_interval_ms, file_size_max: as of StagedSink.

    Raises InvalidConfigError for settings that would break the guarantee, or that are out of bounds."""

    def __init__(
        self,
        bootstrap: str,
        topic: str = "",
        sink_id: str = "",
        *,
        topic_column: str = "",
        key: str | Sequence[str] = (),
        null_keys: bool = False,
        value: str | Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        timestamp: str = "",
        guarantee: str = "exactly_once",
        commit_topic: str = COMMIT_TOPIC,
        settings: Mapping[str, Setting] | None = None,
        rows_per_commit: int | None = None,
        commit_interval_ms: int = 0,
        file_size_max: int = FILE_SIZE_MAX,
        name: str = "",
    ) -> None:
        if bool(topic) == bool(topic_column):
            raise InvalidConfigError("KafkaSink: give either topic or topic_column", setting="topic")
        if guarantee not in ("exactly_once", "at_least_once"):
            raise InvalidConfigError(
                f'KafkaSink: guarantee is "exactly_once" or "at_least_once", not {guarantee!r}', setting="guarantee"
            )
        if not commit_topic or commit_topic == topic:
            raise InvalidConfigError("KafkaSink: commit_topic is a topic for positions alone", setting="commit_topic")
        connection = Connection("KafkaSink", bootstrap, dict(settings or {}), SINK_OWNED)
        record_format = RecordFormat(
            sink=f"KafkaSink to {topic or 'topics of column ' + topic_column}",
            topic=topic,
            topic_column=topic_column,
            key=(key,) if isinstance(key, str) and key else tuple(key),
            null_keys=null_keys,
            value=value if isinstance(value, str) or value is None else tuple(value),
            headers=dict(headers or {}),
            timestamp=timestamp,
            bytes_max=_bytes_max(connection) - RECORD_OVERHEAD,
            reserved=commit_topic,
        )
        super().__init__(
            KafkaTarget(connection, record_format, commit_topic),
            sink_id,
            rows_per_commit=rows_per_commit,
            commit_interval_ms=commit_interval_ms,
            file_size_max=file_size_max,
            name=name or f"kafka {topic or topic_column}",
        )
        self._guarantee = guarantee
        self._kafka = connection, record_format

    def __repr__(self) -> str:
        return super().__repr__().replace("StagedSink(KafkaTarget", f"KafkaSink({self._guarantee}", 1)

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        if self._guarantee == "exactly_once":
            return super().create_writer(schema)
        if schema is None:
            raise GraphError(f"sink {self.name} needs columns: declare returns= on the function before it")
        self.target.check(schema.remove_metadata())
        return KafkaWriterOperator(KafkaWriter(*self._kafka, self.sink_id))

    def create_committer(self) -> Operator | None:  # type: ignore[override]
        return super().create_committer() if self._guarantee == "exactly_once" else None


def _bytes_max(connection: Connection) -> int:
    limit = connection.settings.get("message.max.bytes", MESSAGE_BYTES_MAX)
    try:
        return int(str(limit))
    except ValueError:
        raise InvalidConfigError(f"KafkaSink: message.max.bytes is a number, not {limit!r}", setting="message.max.bytes") from None
