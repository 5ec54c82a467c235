"""The golden snapshot with records in flight: read by both readers, restored, and refused by both when it is damaged."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.barriers.alignment.inflight import decode, encode
from holdfast.coordinator.restore.in_flight import assign_in_flight
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import FileHandle, InlineHandle
from holdfast.statebackends.snapshot.metadata import encode_metadata
from tests.golden.in_flight_snapshot import FOLDER, GOLDEN, STORED, shown, two_edges
from tests.golden.independent_reader import UnreadableError, open_envelope, read_snapshot
from tests.golden.independent_reader.flights import read_stream
from tests.golden.test_format_refusals import seal

Document = dict[str, Any]
SOURCE = GOLDEN / FOLDER
EXPECTED: list[Any] = json.loads((GOLDEN / "expected.json").read_text("utf-8"))
EDGES = [("in", None, "out", 0), ("in", "late", "out", 1)]


def by_edge(found: list[Document]) -> list[Any]:
    """As in expected.json; a channel's pieces follow each other there as one."""
    ends: dict[tuple[str, int], list[Any]] = {}
    for channels in found:
        edge = EDGES.index((channels["source"], channels["tag"], channels["target"], channels["input"]))
        for piece in channels["pieces"]:
            logs = ends.setdefault((channels["side"], channels["subtask"]), [])
            if logs and logs[-1][:2] == [edge, piece["peer"]]:
                logs[-1][2] += piece["elements"]
            else:
                logs.append([edge, piece["peer"], list(piece["elements"])])
    return [["out" if side == "input" else "in", side, subtask, logs] for (side, subtask), logs in ends.items()]


def test_both_readers_read_what_was_stored() -> None:
    assert by_edge(read_snapshot(SOURCE)["in_flight"]) == EXPECTED
    snapshot = hf.Snapshot(SOURCE)
    assert snapshot.verify().is_sound
    assert encode_metadata(snapshot.metadata) == (SOURCE / "_metadata").read_bytes()
    parts = [channel.part for channel in snapshot.metadata.in_flight]
    assert any(isinstance(part, FileHandle) for part in parts)
    assert any(isinstance(part, InlineHandle) for part in parts)
    found = []
    for channel in snapshot.metadata.in_flight:
        part = channel.part
        if isinstance(part, InlineHandle):
            data = part.data
        else:
            assert isinstance(part, FileHandle)
            data = (SOURCE / part.path).read_bytes()[part.offset : part.offset + part.length]
        pieces = [
            {"peer": each.peer, "elements": shown(decode(data[each.offset : each.offset + each.length], rows=each.rows))}
            for each in channel.pieces
        ]
        names = ("source", "tag", "target", "input", "side", "subtask")
        found.append({name: getattr(channel, name) for name in names} | {"pieces": pieces})
    assert by_edge(found) == EXPECTED


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_it_is_restored_at_any_parallelism(consumers: int) -> None:
    """Of a piece whose rows are for several subtasks each one gets all of it."""
    metadata = hf.Snapshot(SOURCE).metadata
    restores = assign_in_flight(metadata.in_flight, metadata.graph, two_edges(2, consumers))
    given = Counter(piece.rows for restore in restores.values() for channel in restore.channels for piece in channel.pieces)
    stored = Counter(piece.rows for channel in metadata.in_flight for piece in channel.pieces)
    assert given == stored if consumers < 3 else set(given) == set(stored)


def test_a_stream_cut_off_anywhere_is_refused_by_the_other_reader_too() -> None:
    elements = [each for *_, logs in STORED for edge, _, log in logs if edge == 0 for each in log][:4]
    rows = sum(getattr(each, "num_rows", 0) for each in elements)
    data = encode(elements)
    assert read_stream(data, rows) == shown(elements)
    for length in range(len(data)):
        with pytest.raises(UnreadableError):
            read_stream(data[:length], rows)


def first(document: Document) -> Document:
    found: Document = document["channels"][0]
    return found


RECORDS: dict[str, Callable[[Document], Any]] = {
    "a broadcast edge": lambda d: first(d).update(partitioning="broadcast"),
    "an end of an edge twice": lambda d: d["channels"].append(first(d)),
    "no side": lambda d: first(d).update(side="both"),
    "no subtask": lambda d: first(d).update(subtask=-1),
    "no peer": lambda d: first(d)["pieces"][0].update(peer=-1),
    "no pieces": lambda d: first(d).update(pieces=[], rows=0),
    "a piece that is missing": lambda d: first(d)["pieces"].pop(),
    "a piece too long": lambda d: first(d)["pieces"][-1].update(length=1 << 20),
    "a gap between pieces": lambda d: first(d)["pieces"][-1].update(offset=1 << 10),
    "other rows": lambda d: first(d).update(rows=99),
    "another checksum": lambda d: first(d)["part"].update(checksum="xxh3_128:" + "0" * 32),
    "version 1": lambda d: d.update(version=1),
}


@pytest.mark.parametrize("what", list(RECORDS))
def test_records_that_can_not_be_are_refused_by_both(what: str, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    shutil.copytree(SOURCE, folder)
    document = open_envelope((folder / "_metadata").read_bytes())
    RECORDS[what](document)
    (folder / "_metadata").write_bytes(seal(json.dumps(document).encode(), document["version"]))
    with pytest.raises(UnreadableError):
        read_snapshot(folder)
    with pytest.raises(CorruptStateError):
        hf.Snapshot(folder).export(tmp_path / "out")


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_damaged_files_are_refused_by_both(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    shutil.copytree(SOURCE, folder)
    (path,) = [each for each in folder.iterdir() if each.name != "_metadata"]
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] if damage == "shorter" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UnreadableError):
        read_snapshot(folder)
    assert not hf.Snapshot(folder).verify().is_sound
    with pytest.raises(CorruptStateError):
        hf.Snapshot(folder).export(tmp_path / "out")
