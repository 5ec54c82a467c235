"""How long after COMPLETED a reader sees the rows of a checkpoint: about 10,000 rows into each sink.

A reader of each outside asks all the time, every millisecond or two. Checkpoints are triggered one at a time, the next one when the
rows of the last one were seen, so that what a reader sees next is of that checkpoint. COMPLETED counts from the last
acknowledgement, so the write of the checkpoint's metadata is in the figures."""

from __future__ import annotations

import base64
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast as hf
from benchmarks.connectors import kafka, nats, postgres
from benchmarks.connectors.measuring import VALUE, Row, all_values, percentile, seconds_line, spread_of, values
from benchmarks.harness import Bench, wait_until
from benchmarks.jobs import environment
from holdfast.barriers.sinks.staged import ALL_ROWS, CommitPosition

CHECKPOINT_ROWS = 10_000
PERIOD_S = 0.25
"""Between two checkpoints: rows come at such a pace that each has about `CHECKPOINT_ROWS`."""
NATS_PERIOD_S = 1.0
"""A stream takes no more than some 20,000 messages a second: rows must not wait for those before them."""
CHECKPOINTS = 30
SEEN_S = 30.0
POLL_S = 0.001
SECONDS_MAX = 0.3
DELTA_SECONDS_MAX = 0.5

Probe = Callable[[], object]
"""What a reader sees: another value when it sees more rows."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A server's sink, and its reader."""

    sink: Any
    probe: Probe
    raw: Callable[[], object] | None = None
    """The raw client writes the rows of a checkpoint; None: that is not measured."""
    beside: str = ""
    """What it is."""


Outside = Callable[[Bench, Path], AbstractContextManager[Seen]]


def measure(bench: Bench, scale: float) -> list[Row]:
    """A line for each sink."""
    count = max(5, int(CHECKPOINTS * scale))
    return [_line(bench, name, outside, count) for name, outside in _OUTSIDES.items()]


def _line(bench: Bench, name: str, outside: Outside, count: int) -> Row:
    folder = bench.folder / f"visible-{name}"
    folder.mkdir()
    with outside(bench, folder) as seen:
        found = _seconds(bench, seen.sink, seen.probe, count, NATS_PERIOD_S if name == "NATS" else PERIOD_S)
        raw = _raw_seconds(seen.raw, seen.probe, count) if seen.raw is not None else []
    most = DELTA_SECONDS_MAX if name == "Delta" else SECONDS_MAX
    judged = percentile(found, 0.99)
    row = seconds_line(f"visible after COMPLETED, {name}", found, judged, most, "p99; about 10,000 rows of 100 B a checkpoint")
    return {**row, "beside": seen.beside, "beside_per_s": f"{spread_of(raw, 3)} s"} if raw else row


def _raw_seconds(raw: Callable[[], object], probe: Probe, count: int) -> list[float]:
    """Of the raw client, beside the same reader."""
    found = []
    with Watch(probe):
        for _ in range(count):
            began = time.perf_counter()
            raw()
            found.append(time.perf_counter() - began)
    return found


def _seconds(bench: Bench, sink: Any, probe: Probe, count: int, period_s: float) -> list[float]:
    env = environment("visible", 1, "memory", None)
    rate = CHECKPOINT_ROWS / period_s
    rows = int(rate * 600)  # more than the run takes
    if isinstance(sink, hf.PostgresSink):
        source: Any = hf.GeneratorSource(postgres.Orders(), rows, postgres.SCHEMA, rows_per_second=rate)
    else:
        source = hf.GeneratorSource(values, rows, VALUE, rows_per_second=rate)
    env.from_source(source).uid("values").sink_to(sink).uid("out")
    with bench.launched(env) as handle:
        wait_until("rows", lambda: handle.progress().records_in > 0, SEEN_S, every_s=0.05)
        with Watch(probe) as watch:
            next_s = time.monotonic()
            found = []
            for _ in range(count + 1):  # the sink may be open only behind the first one
                next_s = max(next_s + period_s, time.monotonic())
                time.sleep(max(0.0, next_s - time.monotonic()))
                found.append(_one(handle, watch))
            return found[1:]


def _one(handle: Any, watch: Watch) -> float:
    before = watch.changes
    number = handle.client.trigger_checkpoint(handle.job_id, timeout_s=SEEN_S)
    seen: float = wait_until("the rows of a checkpoint", lambda: watch.seen_behind(before), SEEN_S, every_s=POLL_S)
    latest = handle.client.checkpoints(handle.job_id)["latest"]["completed"]
    assert latest["id"] == number
    decided_ms: int = latest["trigger_timestamp"] + latest["end_to_end_duration"]
    return seen - decided_ms / 1000


class Watch:
    """Asks a probe on a thread of its own, and notes when what it says has changed."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._stop = threading.Event()
        self._times: list[float] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last: object = None
        while not self._stop.is_set():
            try:
                seen = self._probe()
            except Exception as error:
                self._error = error
                return
            if seen != last:
                self._times.append(time.time())
                last = seen
            time.sleep(POLL_S)

    @property
    def changes(self) -> int:
        return len(self._times)

    def seen_behind(self, changes: int) -> float | None:
        """When the first change behind so many was seen."""
        if self._error is not None:
            raise self._error
        return self._times[changes] if len(self._times) > changes else None


@contextlib.contextmanager
def _kafka(bench: Bench, folder: Path) -> Iterator[Seen]:
    import confluent_kafka

    from holdfast.operators.connectors.kafka.source import CONSUMER
    from tests.servers.kafka import KafkaServer

    with KafkaServer() as server:
        kafka.make_topic(server, "out", partitions=1)
        settings = {**CONSUMER, "bootstrap.servers": server.bootstrap, "group.id": "sees", "enable.partition.eof": False}
        consumer = confluent_kafka.Consumer(settings)
        consumer.assign([confluent_kafka.TopicPartition("out", 0, 0)])
        seen, last = 0, -2

        def probe() -> object:
            """Transactions of which a row was read: between two of them the partition has a marker, at an offset of its own."""
            nonlocal seen, last
            for message in consumer.consume(1_000, 0.002):
                if message.error() is None:
                    seen += message.offset() != last + 1
                    last = message.offset()
            return seen

        try:
            yield Seen(hf.KafkaSink(server.bootstrap, "out", sink_id="out", value="value"), probe)
        finally:
            consumer.close()


@contextlib.contextmanager
def _postgres(bench: Bench, folder: Path) -> Iterator[Seen]:
    with postgres.started(bench) as server, postgres.cursor_of(server) as cursor:
        postgres.make_table(server, "visible_rows")
        yield Seen(postgres.sink_of(server, "visible_rows"), lambda: _mark(postgres.committed(cursor)))


def _mark(position: Any) -> object:
    """Rows and their position are one transaction: who sees one sees the other."""
    return position.checkpoint_id if position is not None and position.checkpoint_id else None


@contextlib.contextmanager
def _nats(bench: Bench, folder: Path) -> Iterator[Seen]:
    from holdfast.operators.connectors.nats.connection import JetStreamError, NatsConnection, NatsLogin
    from tests.servers.nats import NatsServer

    content = all_values(CHECKPOINT_ROWS)
    with NatsServer() as server:
        nats.create_stream(server, "OUT")
        connection = NatsConnection(NatsLogin((server.url,)), "benchmark")
        connection.open()
        seen: object = None

        def probe() -> object:
            """The position, which the server stores with the last rows; of a checkpoint that is there in part, the one before."""
            nonlocal seen
            with contextlib.suppress(JetStreamError):  # there is none yet
                message = connection.request("STREAM.MSG.GET.OUT", {"last_by_subj": "out.holdfast.out"})["message"]
                position = CommitPosition.decode(base64.b64decode(message["data"]))
                seen = _mark(position) if position.row == ALL_ROWS else seen
            return seen

        try:
            sink = hf.NatsSink(server.url, "OUT", "out", subject="out.rows", value="value")
            with nats.connected(server) as client:
                yield Seen(sink, probe, lambda: client(nats.batches, "OUT", content), "nats-py, the same atomic batches")
        finally:
            connection.close()


@contextlib.contextmanager
def _parquet(bench: Bench, folder: Path) -> Iterator[Seen]:
    out = folder / "rows"


    def probe() -> object:
        return sum(name.startswith("part-") for name in os.listdir(out)) if out.exists() else 0

    yield Seen(hf.ParquetSink(str(out)), probe)


@contextlib.contextmanager
def _delta(bench: Bench, folder: Path) -> Iterator[Seen]:
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    out = str(folder / "table")

    def probe() -> object:
        """Files of rows: a takeover adds none."""
        try:
            return DeltaTable(out).get_add_actions().num_rows or None
        except TableNotFoundError:
            return None

    yield Seen(hf.DeltaSink(out, "out"), probe)


@contextlib.contextmanager
def _iceberg(bench: Bench, folder: Path) -> Iterator[Seen]:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchTableError

    properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    load_catalog("default", **properties).create_namespace_if_not_exists("shop")
    catalog = load_catalog("default", **properties)

    def probe() -> object:
        """Rows, as the snapshot tells them: a takeover adds none."""
        try:
            snapshot = catalog.load_table("shop.rows").current_snapshot()
        except NoSuchTableError:
            return None
        rows = None if snapshot is None or snapshot.summary is None else snapshot.summary["total-records"]
        return None if rows == "0" else rows

    yield Seen(hf.IcebergSink("shop.rows", "out", properties=properties), probe)


_OUTSIDES = {"Kafka": _kafka, "PostgreSQL": _postgres, "NATS": _nats, "Parquet": _parquet, "Delta": _delta, "Iceberg": _iceberg}
