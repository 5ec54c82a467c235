"""Orders for the job of `orders.py`: JSON records in a topic of Kafka, written while the job runs. Some are out of order, some come
far too late, and some can't be read at all."""

from __future__ import annotations

import datetime as dt
import json
import random
import threading
import time
from typing import Any

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

PARTITIONS = 4
RECORDS_PER_S, RECORDS_PER_S_LATER = 600, 250
QUICK_S = 20.0
"""Behind it orders come slower: a run that takes longer, on a busy machine, has not as much more to do."""
TICK_S = 0.05
ANSWER_S = 60.0
"""Within it a broker answers, on a busy machine too."""
SHOPS = 60
DISORDER_MS = 5_000
"""How far orders of one partition are out of order, at most, but for those that are late."""
LATE_MS = (600_000, 1_200_000)
LATE_SHARE, POISON_SHARE = 0.01, 0.005
BEGIN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
POISON = (
    b'{"id": 1, "shop": "shop-0',
    b'{"id": 1, "shop": "shop-0", "cents": "ten", "ordered_at": "2026-01-01T00:00:00.000Z"}',
    b'{"id": 1, "shop": null, "cents": 10, "ordered_at": "2026-01-01T00:00:00.000Z"}',
    b"\xff\x00",
    None,
)


class Orders:
    """The records of one seed, a partition at a time: the n-th of a partition is always the same."""

    def __init__(self, seed: int) -> None:
        self._random = [random.Random(f"{seed}/{partition}") for partition in range(PARTITIONS)]
        self._passed_ms = [0] * PARTITIONS
        self._id = [0] * PARTITIONS

    def next(self, partition: int) -> bytes | None:
        """An order a second of its own time; None is a tombstone."""
        chance = self._random[partition]
        if chance.random() < POISON_SHARE:
            return chance.choice(POISON)
        self._passed_ms[partition] += 1_000
        self._id[partition] += 1
        behind = chance.randrange(DISORDER_MS)
        if self._passed_ms[partition] > LATE_MS[1] and chance.random() < LATE_SHARE:
            behind = chance.randrange(*LATE_MS)
        at = BEGIN + dt.timedelta(milliseconds=self._passed_ms[partition] - min(behind, self._passed_ms[partition]))
        order = {
            "id": self._id[partition] * PARTITIONS + partition,
            "shop": f"shop-{chance.randrange(SHOPS):02}",
            "cents": chance.randrange(1, 100_000),
            "ordered_at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        }
        return json.dumps(order).encode()


class Feeder:
    """Writes orders at a steady pace, on a thread of its own. A context manager, which ends it."""

    def __init__(self, bootstrap: str, topic: str, seed: int) -> None:
        settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, "log_level": 2}
        self._producer = confluent_kafka.Producer(settings)
        self._bootstrap = bootstrap
        self._topic = topic
        self._orders = Orders(seed)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="orders-feeder", daemon=True)
        self._failure: BaseException | None = None
        self.records = 0

    def create_topic(self) -> None:
        """Raises KafkaException."""
        admin = AdminClient({"bootstrap.servers": self._bootstrap})
        admin.create_topics([NewTopic(self._topic, PARTITIONS, 1)])[self._topic].result(30)

    def delete_topic(self) -> None:
        """Raises KafkaException."""
        admin = AdminClient({"bootstrap.servers": self._bootstrap})
        admin.delete_topics([self._topic])[self._topic].result(30)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ending.set()
        self._thread.join()

    def end(self) -> int:
        """Write no more; the number of records, once the broker has them all. Raises what has stopped the feeder."""
        self.__exit__()
        if self._failure is not None:
            raise self._failure
        left = self._producer.flush(30)
        if left:
            raise TimeoutError(f"the broker has not taken {left} records")
        return self.records

    def _run(self) -> None:
        try:
            began = time.monotonic()
            while not self._ending.wait(TICK_S):
                pace = RECORDS_PER_S if time.monotonic() - began < QUICK_S else RECORDS_PER_S_LATER
                for number in range(round(pace * TICK_S)):
                    partition = number % PARTITIONS
                    self._producer.produce(self._topic, self._orders.next(partition), partition=partition, on_delivery=self._told)
                    self.records += 1
                self._producer.poll(0)
        except BaseException as error:
            self._failure = error

    def _told(self, error: Any, message: Any) -> None:
        if error is not None and self._failure is None:
            self._failure = confluent_kafka.KafkaException(error)


def unread(bootstrap: str, topic: str, group: str) -> int:
    """Records of the topic behind the offsets that the group has committed."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    try:
        places = [confluent_kafka.TopicPartition(topic, partition) for partition in range(PARTITIONS)]
        committed = {place.partition: max(place.offset, 0) for place in consumer.committed(places, timeout=ANSWER_S)}
        ends = {place.partition: consumer.get_watermark_offsets(place, timeout=ANSWER_S)[1] for place in places}
        return sum(ends[partition] - committed[partition] for partition in ends)
    finally:
        consumer.close()
