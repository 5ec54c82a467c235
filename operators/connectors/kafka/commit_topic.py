"""The topic that has sinks' commit positions: compacted, one record a sink, written in the transaction of its rows.

All sinks use partition 0, whatever others there are. A position is the newest committed record of the sink's id. A transaction that
is open on the partition, of any sink, hides what follows it: a reader waits until there is none in front of the end that it saw."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from holdfast.operators.connectors.kafka.connection import CALL_S, Client, log
from holdfast.operators.sinks.targets.positions import CommitPosition
from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError

STABLE_S = 30.0
"""Time in which open transactions must end that hide the position."""
STABLE_STEP_S = 0.02
READ_S = 30.0
"""Time that reading a window of records may take."""
PARTITION = 0
WINDOW = 64
"""Offsets looked through at first, from the end: the newest position is mostly the last record."""
WINDOW_GROWTH = 16

CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": str(16 << 20),
    "segment.ms": str(6 * 3_600_000),
    "min.cleanable.dirty.ratio": "0.1",
}
"""Small segments, as only closed ones are compacted. The copies and how many of them must be in sync are the cluster's defaults."""


@dataclass(frozen=True, slots=True)
class CommitTopic:
    """The topic, as one sink sees it."""

    admin: Client
    """An AdminClient."""
    name: str
    sink_id: str

    # ---------------------------------------------------------------------------------------------------------- there or not

    def ensure(self) -> None:
        """Create it, compacted, if it is not there. Raises InvalidConfigError when that is refused, and for one that drops records
        by age or size: the position would be lost in a pause."""
        client = self.admin
        try:
            error = client.look_up(self.name).error
            if error is None:
                self._check()
            elif error.code() in (client.package.KafkaError.UNKNOWN_TOPIC_OR_PART, client.package.KafkaError._UNKNOWN_TOPIC):
                self._create()
            else:
                raise client.error(error, f"commit_topic {self.name}")
        except client.package.KafkaException as raised:
            raise client.error(raised, f"commit_topic {self.name}") from None

    def _create(self) -> None:
        client = self.admin
        wanted = client.package.admin.NewTopic(self.name, num_partitions=1, replication_factor=-1, config=CONFIG)
        try:
            client.made.create_topics([wanted], operation_timeout=CALL_S, request_timeout=CALL_S)[self.name].result(CALL_S)
        except client.package.KafkaException as raised:
            if raised.args[0].code() != client.package.KafkaError.TOPIC_ALREADY_EXISTS:
                failed = client.error(raised, f"creating commit_topic {self.name}, with cleanup.policy=compact and one partition,")
                raise failed from None
        deadline = time.monotonic() + CALL_S
        while time.monotonic() < deadline:
            found = client.look_up(self.name)
            if found.error is None and any(partition.leader >= 0 for partition in found.partitions.values()):
                return
            time.sleep(STABLE_STEP_S)

    def _check(self) -> None:
        client = self.admin
        admin = client.package.admin
        resource = admin.ConfigResource(admin.ResourceType.TOPIC, self.name)
        try:
            found = client.made.describe_configs([resource], request_timeout=CALL_S)[resource].result(CALL_S)
        except client.package.KafkaException as raised:
            if raised.args[0].code() != client.package.KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise
            log.info("no right to read the settings of commit_topic %s: they are not checked", self.name)
            return
        policy = str(found["cleanup.policy"].value)
        if policy.strip() != "compact":
            raise InvalidConfigError(
                f"commit_topic {self.name} has cleanup.policy={policy}, which drops positions by age or size; it must be compact",
                setting="commit_topic",
                expected="compact",
            )

    # ---------------------------------------------------------------------------------------------------------------- position

    def peek(self) -> tuple[CommitPosition | None, bool]:
        """The newest position that is visible, and whether no open transaction hides a newer one."""
        first, stable, end = self._offsets()
        return self._find(first, stable), stable >= end

    def read(self) -> CommitPosition | None:
        """The newest position; None without one. Behind a fence: no older owner may commit any more. Raises StorageUnavailableError
        when transactions of other sinks stay open for too long."""
        deadline = time.monotonic() + STABLE_S
        first, stable, end = self._offsets()
        while stable < end:
            if time.monotonic() > deadline:
                raise StorageUnavailableError(
                    f"{self.admin.connection.connector}: a transaction is open in commit_topic {self.name} at offset {stable} for "
                    f"{STABLE_S:.0f} s: that of another sink, whose job is gone. Its time-out ends it; or give this sink a "
                    "commit_topic of its own",
                    path=self.name,
                )
            time.sleep(STABLE_STEP_S)
            first, stable, _ = self._offsets()
        return self._find(first, stable)

    def _offsets(self) -> tuple[int, int, int]:
        """The first offset, the last stable one, and the end."""
        client = self.admin
        package, admin = client.package, client.package.admin
        place = package.TopicPartition(self.name, PARTITION)

        def asked(spec: Any, isolation: Any) -> int:
            answers = client.made.list_offsets({place: spec}, isolation_level=isolation, request_timeout=CALL_S)
            return int(answers[place].result(CALL_S + 1).offset)

        try:
            levels = package.IsolationLevel
            first = asked(admin.OffsetSpec.earliest(), levels.READ_UNCOMMITTED)
            end = asked(admin.OffsetSpec.latest(), levels.READ_UNCOMMITTED)
            return first, asked(admin.OffsetSpec.latest(), levels.READ_COMMITTED), end
        except package.KafkaException as raised:
            raise client.error(raised, f"offsets of commit_topic {self.name}") from None

    def _find(self, first: int, stop: int) -> CommitPosition | None:
        """The newest record of the sink in [first, stop), looked for from the end."""
        if first >= stop:
            return None
        own = {
            "group.id": f"holdfast-{self.sink_id}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 10,
        }
        client = self.admin.connection.open("Consumer", own)
        window = WINDOW
        try:
            while stop > first:
                start = max(first, stop - window)
                found = self._last(client, start, stop)
                if found is not None:
                    return CommitPosition.decode(found, f"commit_topic {self.name}")
                stop, window = start, window * WINDOW_GROWTH
        finally:
            client.made.close()
        return None

    def _last(self, client: Client, start: int, stop: int) -> bytes | None:
        """The value of the last record of the sink in [start, stop)."""
        consumer, package, key = client.made, client.package, self.sink_id.encode()
        consumer.assign([package.TopicPartition(self.name, PARTITION, start)])
        found, deadline = None, time.monotonic() + READ_S
        while time.monotonic() < deadline:
            message = consumer.poll(0.1)
            if message is None:
                continue
            error = message.error()
            if error is None and message.offset() < stop:
                found = message.value() if message.key() == key else found
            elif error is None or error.code() == package.KafkaError._PARTITION_EOF:
                return found
            elif not error.retriable():
                raise client.error(error, f"reading commit_topic {self.name}")
        raise client.error(package.KafkaError(package.KafkaError._TIMED_OUT), f"reading commit_topic {self.name}")
