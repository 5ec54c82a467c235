"""Which requests the server answers, in which versions, and by what.

Versions end where a newer one means something else: transactions of KIP-890's client side (`AddPartitionsToTxn` 4, `EndTxn` 4,
`Produce` 11), topics by their ids where names are as good (`OffsetCommit` 10, `OffsetFetch` 10), shared groups, and replicas'
fields of `Fetch`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from kafka.protocol import admin, consumer, metadata, producer, sasl

from tests.servers.kafka import admin_api, group_api, log_api, transaction_api
from tests.servers.kafka.broker import Broker
from tests.servers.kafka.errors import Code
from tests.servers.kafka.messages import Caller, make

Handler = Callable[[Broker, Any, Caller], Any]
"""Returns the answer, one that is awaited, or None for none."""


class Api(NamedTuple):
    request: Any
    version_min: int
    version_max: int
    handler: Handler

    @property
    def name(self) -> str:
        return str(self.request.__name__.removesuffix("Request"))


def api_versions(broker: Broker, request: Any, caller: Caller) -> Any:
    keys = [{"api_key": key, "min_version": api.version_min, "max_version": api.version_max} for key, api in APIS.items()]
    return make(metadata.ApiVersionsResponse, error_code=0, api_keys=keys)


def unsupported_version() -> bytes:
    """Body of an answer to ApiVersions in a version that is not known: in version 0, so that all clients read it."""
    key = metadata.ApiVersionsRequest.API_KEY
    return struct.pack(">hihhh", Code.UNSUPPORTED_VERSION, 1, key, APIS[key].version_min, APIS[key].version_max)


_LISTED = [
    Api(producer.ProduceRequest, 3, 10, log_api.produce),
    Api(consumer.FetchRequest, 4, 16, log_api.fetch),
    Api(consumer.ListOffsetsRequest, 1, 7, log_api.list_offsets),
    Api(consumer.OffsetForLeaderEpochRequest, 2, 4, log_api.offset_for_leader_epoch),
    Api(admin.DeleteRecordsRequest, 0, 2, log_api.delete_records),
    Api(producer.InitProducerIdRequest, 0, 4, transaction_api.init_producer_id),
    Api(producer.AddPartitionsToTxnRequest, 0, 3, transaction_api.add_partitions),
    Api(producer.AddOffsetsToTxnRequest, 0, 3, transaction_api.add_offsets),
    Api(producer.TxnOffsetCommitRequest, 0, 3, transaction_api.commit_offsets),
    Api(producer.EndTxnRequest, 0, 3, transaction_api.end),
    Api(admin.ListTransactionsRequest, 0, 2, transaction_api.list_all),
    Api(admin.DescribeTransactionsRequest, 0, 0, transaction_api.describe),
    Api(consumer.OffsetCommitRequest, 2, 9, group_api.commit_offsets),
    Api(consumer.OffsetFetchRequest, 1, 9, group_api.fetch_offsets),
    Api(consumer.JoinGroupRequest, 4, 9, group_api.join),
    Api(consumer.SyncGroupRequest, 0, 5, group_api.sync),
    Api(consumer.HeartbeatRequest, 0, 4, group_api.heartbeat),
    Api(consumer.LeaveGroupRequest, 0, 5, group_api.leave),
    Api(admin.ListGroupsRequest, 0, 5, group_api.list_all),
    Api(admin.DescribeGroupsRequest, 0, 5, group_api.describe),
    Api(admin.DeleteGroupsRequest, 0, 2, group_api.delete),
    Api(metadata.ApiVersionsRequest, 0, 3, api_versions),
    Api(metadata.MetadataRequest, 0, 12, admin_api.metadata),
    Api(metadata.FindCoordinatorRequest, 0, 5, admin_api.find_coordinator),
    Api(admin.DescribeClusterRequest, 0, 0, admin_api.describe_cluster),
    Api(sasl.SaslHandshakeRequest, 1, 1, admin_api.handshake),
    Api(sasl.SaslAuthenticateRequest, 0, 2, admin_api.authenticate),
    Api(admin.CreateTopicsRequest, 2, 7, admin_api.create_topics),
    Api(admin.DeleteTopicsRequest, 1, 6, admin_api.delete_topics),
    Api(admin.CreatePartitionsRequest, 0, 3, admin_api.create_partitions),
    Api(admin.DescribeConfigsRequest, 1, 4, admin_api.describe_configs),
    Api(admin.IncrementalAlterConfigsRequest, 0, 1, admin_api.alter_configs),
]
APIS = {int(api.request.API_KEY): api for api in _LISTED}
BEFORE_LOGIN = {"ApiVersions", "SaslHandshake", "SaslAuthenticate"}
