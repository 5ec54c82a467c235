"""Requests on the cluster and its topics: ApiVersions, Metadata, FindCoordinator, SASL, topics, partitions, configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kafka.protocol.admin import (
    CreatePartitionsResponse,
    CreateTopicsResponse,
    DeleteTopicsResponse,
    DescribeClusterResponse,
    DescribeConfigsResponse,
    IncrementalAlterConfigsResponse,
)
from kafka.protocol.metadata import FindCoordinatorResponse, MetadataResponse
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from tests.servers.kafka.broker import CLUSTER_ID, NODE_ID, Broker, Topic
from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.log_api import NO_ID
from tests.servers.kafka.messages import Caller, make

_TOPIC_RESOURCE = 2
_DYNAMIC_TOPIC_CONFIG, _DEFAULT_CONFIG = 1, 5
_DEFAULTS = {
    "cleanup.policy": "delete",
    "max.message.bytes": "1048588",
    "min.insync.replicas": "1",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
}
_SET, _DELETE = 0, 1


def metadata(broker: Broker, request: Any, caller: Caller) -> Any:
    host, port = caller.advertised
    return make(
        MetadataResponse,
        brokers=[{"node_id": NODE_ID, "host": host, "port": port}],
        cluster_id=CLUSTER_ID,
        controller_id=NODE_ID,
        topics=_described(broker, request, caller),
    )


def _described(broker: Broker, request: Any, caller: Caller) -> list[dict[str, Any]]:
    if request.topics is None or (caller.version == 0 and not request.topics):
        return [_topic_metadata(topic) for name, topic in broker.topics.items() if name not in broker.denied]
    found = []
    creates = broker.settings.auto_create_topics and (caller.version < 4 or request.allow_auto_topic_creation)
    for each in request.topics:
        try:
            if each.name is None:
                found.append(_topic_metadata(broker.topic_of_id(each.topic_id)))
                continue
            if creates and each.name not in broker.topics:
                broker.create_topic(each.name, 1, {})
            found.append(_topic_metadata(broker.topic(each.name)))
        except RefusedError as error:
            topic_id = each.topic_id if each.name is None else NO_ID
            found.append({"error_code": error.code, "name": each.name, "topic_id": topic_id, "partitions": []})
    return found


def _topic_metadata(topic: Topic) -> dict[str, Any]:
    nodes = [NODE_ID]
    partitions = [
        {
            "error_code": 0,
            "partition_index": index,
            "leader_id": NODE_ID,
            "leader_epoch": 0,
            "replica_nodes": nodes,
            "isr_nodes": nodes,
            "offline_replicas": [],
        }
        for index in range(len(topic.partitions))
    ]
    return {"error_code": 0, "name": topic.name, "topic_id": topic.topic_id, "partitions": partitions}


def find_coordinator(broker: Broker, request: Any, caller: Caller) -> Any:
    """This broker is that of all groups and transactions."""
    host, port = caller.advertised
    place = {"node_id": NODE_ID, "host": host, "port": port, "error_code": 0, "error_message": ""}
    if caller.version < 4:
        return make(FindCoordinatorResponse, **place)
    return make(FindCoordinatorResponse, coordinators=[{"key": key, **place} for key in request.coordinator_keys])


def describe_cluster(broker: Broker, request: Any, caller: Caller) -> Any:
    host, port = caller.advertised
    brokers = [{"broker_id": NODE_ID, "host": host, "port": port, "rack": None}]
    return make(DescribeClusterResponse, error_code=0, cluster_id=CLUSTER_ID, controller_id=NODE_ID, brokers=brokers)


# -------------------------------------------------------------------------------------------------------------------------- SASL


def handshake(broker: Broker, request: Any, caller: Caller) -> Any:
    known = request.mechanism == "PLAIN"
    caller.mechanism = request.mechanism if known else ""
    return make(SaslHandshakeResponse, error_code=Code.NONE if known else Code.SASL_NOT_SUPPORTED, mechanisms=["PLAIN"])


def authenticate(broker: Broker, request: Any, caller: Caller) -> Any:
    user, _, password = bytes(request.auth_bytes).decode().partition("\0")[2].partition("\0")
    if caller.mechanism and broker.settings.users.get(user) == password:
        caller.user = user
        return make(SaslAuthenticateResponse, error_code=0, auth_bytes=b"")
    return make(
        SaslAuthenticateResponse,
        error_code=Code.SASL_AUTHENTICATION_FAILED,
        error_message="Authentication failed: Invalid username or password",
        auth_bytes=b"",
    )


# ------------------------------------------------------------------------------------------------------------------------ topics


def _attempt(act: Callable[[], object]) -> tuple[int, str | None]:
    """(code, why not) of an act that may be refused."""
    try:
        act()
    except RefusedError as error:
        return error.code, error.why or error.code.name
    return Code.NONE, None


def create_topics(broker: Broker, request: Any, caller: Caller) -> Any:
    results = []
    for each in request.topics:
        configs = {config.name: config.value for config in each.configs if config.value is not None}
        count = len(each.assignments) or (1 if each.num_partitions == -1 else each.num_partitions)

        def create(each: Any = each, count: int = count, configs: dict[str, str] = configs) -> None:
            if each.replication_factor not in (-1, 1) or any(list(one.broker_ids) != [NODE_ID] for one in each.assignments):
                raise RefusedError(Code.INVALID_REPLICATION_FACTOR, "there is one broker")
            if request.validate_only and each.name not in broker.topics:
                return
            broker.create_topic(each.name, count, configs)

        code, why = _attempt(create)
        topic_id = broker.topics[each.name].topic_id if not code and not request.validate_only else NO_ID
        results.append(
            {
                "name": each.name,
                "topic_id": topic_id,
                "error_code": code,
                "error_message": why,
                "num_partitions": count,
                "replication_factor": 1,
                "configs": [],
            }
        )
    return make(CreateTopicsResponse, topics=results)


def delete_topics(broker: Broker, request: Any, caller: Caller) -> Any:
    if caller.version < 6:
        asked = [(name, NO_ID) for name in request.topic_names]
    else:
        asked = [(each.name, each.topic_id) for each in request.topics]
    results = []
    for name, topic_id in asked:

        def delete(name: str | None = name, topic_id: Any = topic_id) -> None:
            broker.delete_topic(name if name is not None else broker.topic_of_id(topic_id).name)

        code, why = _attempt(delete)
        results.append({"name": name, "topic_id": topic_id, "error_code": code, "error_message": why})
    return make(DeleteTopicsResponse, responses=results)


def create_partitions(broker: Broker, request: Any, caller: Caller) -> Any:
    results = []
    for each in request.topics:

        def add(each: Any = each) -> None:
            if not request.validate_only:
                broker.add_partitions(each.name, each.count)

        code, why = _attempt(add)
        results.append({"name": each.name, "error_code": code, "error_message": why})
    return make(CreatePartitionsResponse, results=results)


# ---------------------------------------------------------------------------------------------------------------- configurations


def describe_configs(broker: Broker, request: Any, caller: Caller) -> Any:
    """Of topics those that are set and some defaults; of the broker none."""
    results = []
    for each in request.resources:
        configs: dict[str, str] = {}
        code, why = Code.NONE.value, None
        if each.resource_type == _TOPIC_RESOURCE:
            code, why = _attempt(lambda name=each.resource_name: broker.topic(name))  # type: ignore[misc]
            configs = {} if code else {**_DEFAULTS, **broker.topic(each.resource_name).configs}
        given = {} if code or not configs else broker.topic(each.resource_name).configs
        wanted = each.configuration_keys
        entries: list[dict[str, Any]] = [
            {
                "name": name,
                "value": value,
                "read_only": False,
                "config_source": _DYNAMIC_TOPIC_CONFIG if name in given else _DEFAULT_CONFIG,
                "is_sensitive": False,
                "synonyms": [],
                "config_type": 2,
                "documentation": None,
            }
            for name, value in configs.items()
            if wanted is None or name in wanted
        ]
        results.append(
            {
                "error_code": code,
                "error_message": why,
                "resource_type": each.resource_type,
                "resource_name": each.resource_name,
                "configs": entries,
            }
        )
    return make(DescribeConfigsResponse, results=results)


def alter_configs(broker: Broker, request: Any, caller: Caller) -> Any:
    responses = []
    for each in request.resources:

        def alter(each: Any = each) -> None:
            if each.resource_type != _TOPIC_RESOURCE:
                raise RefusedError(Code.INVALID_REQUEST, "only topics have configurations here")
            configs = dict(broker.topic(each.resource_name).configs)
            for config in each.configs:
                if config.config_operation == _SET:
                    configs[config.name] = config.value
                elif config.config_operation == _DELETE:
                    configs.pop(config.name, None)
                else:
                    raise RefusedError(Code.INVALID_CONFIG, config.name)
            if not request.validate_only:
                broker.configure(each.resource_name, configs)

        code, why = _attempt(alter)
        responses.append(
            {"error_code": code, "error_message": why, "resource_type": each.resource_type, "resource_name": each.resource_name}
        )
    return make(IncrementalAlterConfigsResponse, responses=responses)
