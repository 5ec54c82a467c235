"""The writer of a sink that writes at least once: rows are sent as they come, and a checkpoint waits until brokers have them."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa

from holdfast.operators.connectors.kafka.connection import Client, Connection
from holdfast.operators.connectors.kafka.records import RecordFormat
from holdfast.operators.connectors.kafka.target import PRODUCER, offer, records_of
from holdfast.operators.functions.context import FunctionContext
from holdfast.operators.sinks.connector import SinkWriter, WriterOperator
from holdfast.statebackends.errors import StorageUnavailableError

FLUSH_STEP_S = 1.0


class KafkaWriter(SinkWriter):
    """Encodes and sends rows. What a broker has refused, or not taken for `message.timeout.ms`, fails the next call."""

    def __init__(self, connection: Connection, record_format: RecordFormat, sink_id: str) -> None:
        self._connection = connection
        self._format = record_format
        self._sink_id = sink_id
        self._client: Client | None = None
        self._failed: list[tuple[Any, str]] = []
        self._has_ended = False

    def open(self, ctx: FunctionContext) -> None:
        if self._format.topic:  # before rows wait for it
            self._connection.open("AdminClient", {}).check_topic(self._format.topic)
        own = {**PRODUCER, "client.id": f"holdfast-{self._sink_id}-{ctx.subtask}", "on_delivery": self._note_failure}
        self._client = self._connection.open("Producer", own)

    def _note_failure(self, error: Any, message: Any) -> None:
        if error is not None and len(self._failed) < 10:
            self._failed.append((error, message.topic()))

    def write(self, batch: pa.RecordBatch) -> None:
        client = self._client
        assert client is not None
        try:
            offer(client.made, records_of(self._format.encode(batch), self._format))
        except client.package.KafkaException as raised:
            raise client.error(raised, "sending rows") from None
        client.made.poll(0)
        self._check(client)

    def flush(self, *, end_of_input: bool) -> None:
        """Until brokers have all rows, or one of them was refused or has waited for `message.timeout.ms`."""
        client = self._client
        assert client is not None
        while client.made.flush(FLUSH_STEP_S):
            self._check(client)
        self._check(client)

    def _check(self, client: Client) -> None:
        if self._failed:
            error, topic = self._failed[0]
            raise client.error(error, f"sending rows to topic {topic}")
        if client.news.refusal is not None:
            raise client.error(client.news.refusal, "sending rows")
        if self._has_ended:
            raise StorageUnavailableError("the sink was closed while rows were sent", path=self._connection.bootstrap)

    def end(self) -> None:
        """A call under way is to end, and what brokers have not got is dropped: rows behind the last checkpoint, which are sent
        again. Any thread; does not wait."""
        self._has_ended = True
        client = self._client
        if client is not None:
            with contextlib.suppress(client.package.KafkaException):
                client.made.purge(blocking=False)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(client.package.KafkaException):
                client.made.purge()


class KafkaWriterOperator(WriterOperator):
    """Ends the call under way when its attempt ends: with brokers away it would wait, and hold rows in memory, for minutes."""

    def __init__(self, writer: KafkaWriter) -> None:
        super().__init__(writer)
        self._kafka = writer

    def close(self) -> None:
        self._kafka.end()
        super().close()
