"""Output of a branch: its file sinks write below a folder of the branch, muted sinks write nothing, and others are refused."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from holdfast.operators.datastream.graph import StreamGraph, StreamNode, sinks_by_uid
from holdfast.operators.sinks.connector import Sink
from holdfast.operators.sinks.files.parquet import FileSink
from holdfast.operators.sinks.simple import Blackhole, CollectSink, MutedSink, PrintSink
from holdfast.statebackends.errors import InvalidConfigError

LOCAL = (Blackhole, CollectSink, MutedSink, PrintSink)
"""Sinks whose output nobody else sees."""

Output = str | os.PathLike[str] | None
"""Folder of a branch's output; None: none was given."""


@contextmanager
def muted(graph: StreamGraph, branch: str, mute: bool | str | Collection[str], output: Output) -> Iterator[None]:
    """The graph with these sinks muted while the context lasts. `mute`: uids; True: of all sinks, False: of none. Those sinks are
    asked for nothing, so that what they write to need not be reachable.

    Raises InvalidConfigError for what is no uid of a sink, and where `output` would redirect nothing but muted sinks."""
    sinks = sinks_by_uid(graph)
    wanted = _wanted_uids(branch, mute, sinks)
    files = {uid for uid, node in sinks.items() if isinstance(node.sink, FileSink)}
    if output is not None and files and files <= wanted:
        named = ", ".join(map(repr, sorted(files)))
        message = f"branch {branch!r}: {named} can't be muted and redirected: give mute= or branch_output="
        raise InvalidConfigError(message, setting="mute", operator=min(files))
    with _replaced([sinks[uid] for uid in sorted(wanted)]) as nodes:
        for node in nodes:
            assert node.sink is not None
            node.sink = MutedSink(node.sink.sink_id, node.sink.name)
        yield


def _wanted_uids(branch: str, mute: bool | str | Collection[str], known: Collection[str]) -> set[str]:
    if isinstance(mute, bool):
        return set(known) if mute else set()
    uids = [mute] if isinstance(mute, str) else list(mute) if isinstance(mute, Collection) else [mute]
    unknown = [uid for uid in uids if not isinstance(uid, str) or uid not in known]
    if unknown:
        there = ", ".join(map(repr, known))
        message = f"branch {branch!r}: mute= names {unknown[0]!r}, which is no sink's uid; its sinks are {there}"
        raise InvalidConfigError(message, setting="mute", operator=str(unknown[0]))
    return set(uids)


@contextmanager
def redirected(graph: StreamGraph, branch: str, output: Output) -> Iterator[None]:
    """The graph with each file sink below `output`, in a folder of its sink id, while the context lasts. Ids must be known.

    Raises InvalidConfigError naming the first sink that can't be redirected."""
    sinks = sinks_by_uid(graph)
    with _replaced(list(sinks.values())):
        for uid, node in sinks.items():
            assert node.sink is not None
            node.sink = _elsewhere(node.sink, uid, branch, output)
        yield


@contextmanager
def _replaced(nodes: list[StreamNode]) -> Iterator[list[StreamNode]]:
    """These nodes, to be given other sinks; behind the context they have their own."""
    before = [node.sink for node in nodes]
    try:
        yield nodes
    finally:
        for node, sink in zip(nodes, before, strict=True):
            node.sink = sink


def _elsewhere(sink: Sink, uid: str, branch: str, output: Output) -> Sink:
    if isinstance(sink, LOCAL):
        return sink
    if not isinstance(sink, FileSink):
        raise InvalidConfigError(
            f"branch {branch!r}: sink {sink.sink_id!r} ({type(sink).__name__}) can't be redirected: mute it (mute={uid!r}), or "
            "give the branch's program a sink of its own there",
            setting="branch",
            operator=sink.sink_id,
        )
    if output is None:
        message = (
            f"branch {branch!r}: sink {sink.sink_id!r} writes files: say where the branch's go with branch_output=, or mute it "
            f"(mute={uid!r})"
        )
        raise InvalidConfigError(message, setting="branch_output", operator=sink.sink_id)
    return sink.redirected(f"{os.fspath(output).rstrip('/')}/{sink.sink_id}")
