"""How a connector reaches Kafka: the user's settings, judged before a job starts, and what a client's errors mean.

It decides which settings of librdkafka a user may give, and which class of error follows from an error code. Nothing is connected
here; secrets are resolved where a client is made, and hidden in whatever it says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.operators.connectors.extras import import_extra
from holdfast.statebackends.errors import FencedError, HoldfastError, InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.secrets import Secret, hide, resolve

log = logging.getLogger("holdfast.connectors.kafka")

Setting: TypeAlias = str | int | float | bool | Secret

CALL_S = 10.0
"""Time of one request to the cluster."""
LOG_LEVEL = 2
"""Critical: a client whose brokers are away says so ten times a second. What a call met is in its error."""
METADATA_STEP_S = 2.0
STEP_S = 0.5
"""A call that waits is asked again so often, so that news of the connection are seen meanwhile."""

OWNED = {
    "bootstrap.servers": "bootstrap= says it",
    "metadata.broker.list": "bootstrap= says it",
    "plugin.library.paths": "a plugin may change what is written",
}
SINK_OWNED = {
    **OWNED,
    "transactional.id": "it follows from the sink_id, and fences older owners",
    "enable.idempotence": "rows would be lost or written twice",
    "acks": "rows would be lost with a broker",
    "request.required.acks": "rows would be lost with a broker",
    "delivery.report.only.error": "the sink reads those reports",
}
SOURCE_OWNED = {
    **OWNED,
    "group.id": "group= says it",
    "group.instance.id": "partitions are assigned by the job, not by the group",
    "partition.assignment.strategy": "partitions are assigned by the job, not by the group",
    "isolation.level": "rows of aborted transactions would be read",
    "auto.offset.reset": "start= says it, and on_data_loss=",
    "enable.auto.commit": "offsets are committed when a checkpoint is complete",
    "enable.auto.offset.store": "offsets are committed when a checkpoint is complete",
    "auto.commit.interval.ms": "offsets are committed when a checkpoint is complete",
    "enable.partition.eof": "the source reads those events",
}
SECRETS = frozenset({
    "sasl.password",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.config",
})  # fmt: skip
"""Settings that must not lie in a job graph."""

_FENCED = ("_FENCED", "INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED")
_WRONG = (
    "_AUTHENTICATION",
    "_INVALID_ARG",
    "_UNKNOWN_TOPIC",
    "_UNKNOWN_PARTITION",
    "_UNSUPPORTED_FEATURE",
    "CLUSTER_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "ILLEGAL_SASL_STATE",
    "INVALID_CONFIG",
    "INVALID_GROUP_ID",
    "INVALID_PARTITIONS",
    "INVALID_RECORD",
    "INVALID_REPLICATION_FACTOR",
    "INVALID_TRANSACTION_TIMEOUT",
    "MSG_SIZE_TOO_LARGE",
    "POLICY_VIOLATION",
    "SASL_AUTHENTICATION_FAILED",
    "SECURITY_DISABLED",
    "TOPIC_AUTHORIZATION_FAILED",
    "TOPIC_EXCEPTION",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    "UNKNOWN_TOPIC_OR_PART",
    "UNSUPPORTED_SASL_MECHANISM",
    "UNSUPPORTED_VERSION",
)
"""A call that ended so has changed nothing, and would end so again: somebody has to mend the job or the cluster."""


def import_client(connector: str) -> Any:
    """The package confluent_kafka. Raises InvalidConfigError, naming the extra, without it."""
    import_extra("confluent_kafka.admin", "kafka", connector)  # which the package does not import itself
    return import_extra("confluent_kafka", "kafka", connector)


@dataclass(frozen=True, slots=True)
class Connection:
    """Where Kafka is, and how its clients are set up: part of a job, without a secret's content."""

    connector: str
    """Names it in errors: `KafkaSink`."""
    bootstrap: str
    settings: Mapping[str, Setting]
    owned: Mapping[str, str]
    """Settings that a user must not give, each with why."""

    def __post_init__(self) -> None:
        if not isinstance(self.bootstrap, str) or not self.bootstrap.strip():
            raise InvalidConfigError(f"{self.connector}: bootstrap is host:port, or several with commas", setting="bootstrap")
        for name, value in self.settings.items():
            reason = self.owned.get(name)
            if reason is not None:
                raise InvalidConfigError(f"{self.connector}: {name} can't be set: {reason}", setting=name)
            if name in SECRETS and not isinstance(value, Secret):
                raise InvalidConfigError(
                    f'{self.connector}: give {name} as hf.Secret("VARIABLE"): it must be in no job graph and no log', setting=name
                )
            if not isinstance(value, str | int | float | bool | Secret):
                raise InvalidConfigError(f"{self.connector}: {name} is a text, a number or a bool, not {value!r}", setting=name)

    def check(self, make: str, own: Mapping[str, Any]) -> None:
        """Make a client that connects to nobody, without secrets. Raises InvalidConfigError for a setting that it does not have, or
        whose value it does not take. `make`: Producer or Consumer."""
        client = import_client(self.connector)
        plain = {name: value for name, value in self.settings.items() if not isinstance(value, Secret)}
        needs_login = {name for name in plain if name.startswith(("sasl.", "security."))}  # incomplete without the password
        for name in needs_login:
            del plain[name]
        try:
            getattr(client, make)({**own, **plain, "logger": log})
        except client.KafkaException as raised:
            said = raised.args[0].str()
            named = next((name for name in self.settings if f'"{name}"' in said or f"`{name}`" in said or name in said), None)
            raise InvalidConfigError(f"{self.connector}: {said}", setting=named) from None

    def open(self, make: str, own: Mapping[str, Any]) -> Client:
        """A client. Raises InvalidConfigError for a setting that it does not take, or a secret that is not set."""
        package = import_client(self.connector)
        secrets = [resolve(value) for value in self.settings.values() if isinstance(value, Secret)]
        settings = {name: resolve(value) if isinstance(value, Secret) else value for name, value in self.settings.items()}
        news = News(package.KafkaError)
        config = {
            "client.id": "holdfast",
            "log_level": LOG_LEVEL,
            **own,
            **settings,
            "bootstrap.servers": self.bootstrap,
            "error_cb": news.hear,
            "logger": log,
        }
        kind = package.admin.AdminClient if make == "AdminClient" else getattr(package, make)
        try:
            made = kind(config)
        except package.KafkaException as raised:
            raise InvalidConfigError(f"{self.connector}: {hide(raised.args[0].str(), secrets)}", setting="settings") from None
        return Client(made, package, self, news, secrets)


class News:
    """What a client said of its connections: a call that ends without an answer may have ended for it."""

    def __init__(self, errors: Any) -> None:
        self._errors = errors
        self.last: Any = None
        self.refusal: Any = None
        """The login, which was refused: waiting does not help."""

    def hear(self, error: Any) -> None:
        self.last = error
        if error.code() == self._errors._AUTHENTICATION:
            self.refusal = error


@dataclass(slots=True)
class Client:
    """A client of confluent_kafka, and what its errors mean."""

    made: Any
    package: Any
    connection: Connection
    news: News
    _secrets: list[str] = field(repr=False)

    def error(self, raised: Any, what: str) -> HoldfastError:
        """What a user meets. `raised`: KafkaException or KafkaError; `what`: what was tried."""
        error = raised.args[0] if isinstance(raised, self.package.KafkaException) else raised
        heard = self.news.refusal or (self.news.last if error.code() in self._vague else None)
        said = error.str() if heard is None else f"{error.str()} ({heard.str()})"
        text = f"{self.connection.connector}: {what} at {self.connection.bootstrap}: {hide(said, self._secrets)}"
        if error.code() in self._codes(_FENCED):
            return FencedError(text)
        if error.code() in self._codes(_WRONG) or self.news.refusal is not None:
            return InvalidConfigError(text, setting="settings" if self.news.refusal is not None else None)
        return StorageUnavailableError(text, path=self.connection.bootstrap)

    def look_up(self, topic: str) -> Any:
        """A topic's metadata: with an error if it is not there. Of an AdminClient; others may make the topic by asking."""
        what = f"looking for topic {topic}"
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                return self.made.list_topics(topic, timeout=METADATA_STEP_S).topics[topic]
            except self.package.KafkaException as raised:
                self.made.poll(0)
                vague = raised.args[0].code() in self._vague
                if not vague or self.news.refusal is not None or time.monotonic() > deadline:
                    raise self.error(raised, what) from None

    def check_topic(self, topic: str) -> None:
        """Raises InvalidConfigError for one that is not there, or not to be seen."""
        found = self.look_up(topic).error
        if found is not None:
            raise self.error(found, f"topic {topic}")

    @property
    def _vague(self) -> frozenset[int]:
        return self._codes(("_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT_QUEUE", "_STATE"))

    def _codes(self, names: tuple[str, ...]) -> frozenset[int]:
        return frozenset(getattr(self.package.KafkaError, name) for name in names if hasattr(self.package.KafkaError, name))

    def repeat(self, call: Callable[[float], Any], timeout_s: float, listen: Callable[[], Any]) -> Any:
        """A call that librdkafka wants to be asked again after a time-out, until it has an answer. Raises KafkaException: that of a
        time-out when no answer comes in `timeout_s`, that of another failure at once. `listen`: lets the client tell its news."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return call(STEP_S)
            except self.package.KafkaException as raised:
                listen()
                error = raised.args[0]
                if not error.retriable() or error.fatal() or self.news.refusal is not None or time.monotonic() > deadline:
                    raise
