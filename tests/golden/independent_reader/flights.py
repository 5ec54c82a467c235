"""Records in flight: the pieces of the channels of one edge."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from .errors import UnreadableError, require
from .keys import key_json

END = b"\xff\xff\xff\xff\0\0\0\0"
"""Mark of the end of a stream."""
EVENTS = ("watermark", "status")
END_FIELDS = ("source", "tag", "target", "input", "ordinal", "side", "subtask")
"""What an end of an edge is known by."""
PARTITIONINGS = ("hash", "rebalance", "shuffle", "global")


def check_edge(channels: dict[str, Any], graph: dict[str, Any] | None) -> None:
    """That the graph has such an edge, with such channels."""
    require(channels["partitioning"] in PARTITIONINGS, "an edge that is never overtaken")
    require(channels["side"] in ("input", "output"), "a side")
    require(min(channels[name] for name in ("subtask", "input", "ordinal")) >= 0, "a negative number of an edge")
    require(graph is not None, "no graph")
    assert graph is not None
    vertices = {vertex["vertex_id"]: vertex for vertex in graph["vertices"]}
    wanted = tuple(channels[name] for name in ("source", "tag", "target", "input"))
    alike = []
    for edge in graph["edges"]:
        target = vertices[edge["target"]]["operators"][0]["uid"]
        if (edge["source_operator"], edge.get("side_output"), target, edge.get("input_index", 0)) == wanted:
            alike.append(edge)
    require(channels["ordinal"] < len(alike), "an edge that the graph does not have")
    edge = alike[channels["ordinal"]]
    ends = [vertices[edge["target"]]["parallelism"], vertices[edge["source"]]["parallelism"]]
    own, others = ends if channels["side"] == "input" else ends[::-1]
    require(edge["partitioning"] == channels["partitioning"] and channels["subtask"] < own, "channels that the edge did not have")
    require(all(0 <= piece["peer"] < others for piece in channels["pieces"]), "a channel that the edge did not have")


def read_pieces(channels: dict[str, Any], data: bytes) -> list[dict[str, Any]]:
    """Each piece of a part, with its elements."""
    at, found = 0, []
    for piece in channels["pieces"]:
        require(piece["length"] > 0 and piece["offset"] == at, "pieces of a part")
        at += piece["length"]
        require(at <= len(data), "a piece beyond its part")
        found.append({"peer": piece["peer"], "elements": read_stream(data[piece["offset"] : at], piece["rows"])})
    require(found and at == len(data), "bytes of a part that are in no piece")
    require(sum(piece["rows"] for piece in channels["pieces"]) == channels["rows"], "rows of all pieces")
    return found


def read_stream(data: bytes, rows: int) -> list[dict[str, Any]]:
    require(data[-len(END) :] == END, "a stream without its end")
    try:
        elements = list(elements_of(pa.BufferReader(data), len(data)))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise UnreadableError(f"a stream: {error}") from error
    require(sum(len(each.get("rows", ())) for each in elements) == rows, "rows of a piece")
    return elements


def elements_of(source: pa.BufferReader, length: int) -> Any:
    with pa.ipc.open_stream(source) as reader:
        names = reader.schema.names
        require(len(set(names)) == len(names), "columns of one name")
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                break
            if metadata is not None and b"holdfast.event" in metadata:
                event = json.loads(metadata[b"holdfast.event"])
                require(batch.num_rows == 0 and event["type"] in EVENTS, "an event")
                require(-(2**63) <= event.get("timestamp_ms", 0) < 2**63, "an event at no time")
                yield {"event": event}
                continue
            batch.validate(full=True)
            columns = batch.to_pydict()
            stamps = columns.pop("_timestamp_ms") if names and names[-1] == "_timestamp_ms" else None
            require(stamps is None or (None not in stamps and batch.schema.field(len(names) - 1).type == pa.int64()), "timestamps")
            shown = [[key_json(value) for value in row] for row in zip(*columns.values(), strict=True)]
            yield {"rows": shown, "timestamps": stamps}
    require(source.tell() == length, "bytes behind a stream")

