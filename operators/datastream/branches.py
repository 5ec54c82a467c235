"""Output of a branch: its file sinks write below a folder of the branch, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.operators.datastream.graph import StreamGraph
from holdfast.operators.sinks.connector import Sink
from holdfast.operators.sinks.parquet import FileSink
from holdfast.operators.sinks.simple import Blackhole, CollectSink, PrintSink
from holdfast.statebackends.errors import InvalidConfigError

LOCAL = (Blackhole, CollectSink, PrintSink)
"""Sinks whose output nobody else sees."""


@contextmanager
def redirected(graph: StreamGraph, branch: str, output: str | os.PathLike[str] | None) -> Iterator[None]:
    """The graph with each file sink below `output`, in a folder of its sink id, while the context lasts. Ids must be known.

    Raises InvalidConfigError naming the first sink that can't be redirected."""
    nodes = [node for node in graph.nodes if node.sink is not None]
    before = [node.sink for node in nodes]
    try:
        for node in nodes:
            assert node.sink is not None
            node.sink = _elsewhere(node.sink, branch, output)
        yield
    finally:
        for node, sink in zip(nodes, before, strict=True):
            node.sink = sink


def _elsewhere(sink: Sink, branch: str, output: str | os.PathLike[str] | None) -> Sink:
    if isinstance(sink, LOCAL):
        return sink
    if not isinstance(sink, FileSink):
        raise InvalidConfigError(
            f"branch {branch!r}: sink {sink.sink_id!r} ({type(sink).__name__}) can't be redirected: give the branch's program a "
            "sink of its own there, such as hf.Blackhole()",
            setting="branch",
            operator=sink.sink_id,
        )
    if output is None:
        message = f"branch {branch!r}: sink {sink.sink_id!r} writes files: say where the branch's go with branch_output="
        raise InvalidConfigError(message, setting="branch_output", operator=sink.sink_id)
    return sink.redirected(f"{os.fspath(output).rstrip('/')}/{sink.sink_id}")
