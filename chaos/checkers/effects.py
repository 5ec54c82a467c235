"""What sinks make visible, and when: I18 to I22, and of I15 that older attempts commit nothing (docs/invariants.md).

An entry of the sink's log is the commit point of one checkpoint's files; links beside it serve plain readers. An entry may appear
once a checkpoint with its id or a higher one is durable, in the order of ids, once. No visible file is ever withdrawn."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.descent import Descent
from holdfast.chaos.checkers.ledger import AttemptRecorded, JobLedger, join
from holdfast.chaos.checkers.observations import Lifecycle, Observation, Report, Stored, WorldView
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.statebackends.storage.port import PutIfAbsent

_ATTEMPT = re.compile(r"-a(\d+)-s\d+-c\d+-")
"""Attempt that wrote a staged file, in the file's name."""


@dataclass(slots=True)
class _Sink:
    """One sink, by its log."""

    sink_id: str
    root: str
    folder: str
    """Location of the sink's own records."""
    entries: int = 0
    commits: list[tuple[int, str]] = field(default_factory=list)
    """Each committed id, with one of its files."""
    newest: int = 0
    """Highest committed id, ids behind a snapshot that the user went back to excepted."""
    attempt: int = 0
    """Attempt that owns the sink."""
    names: set[str] = field(default_factory=set)
    """Names of committed files, and of those that replaced some."""
    replaced: set[str] = field(default_factory=set)
    """Names of those that a merge has replaced: they may go."""


class EffectsChecker(Checker):
    """Checks every change in a sink's folder."""

    invariants: ClassVar[tuple[str, ...]] = ("I15", "I18", "I19", "I20", "I21", "I22", "I43")
    hears: ClassVar[tuple[type, ...]] = (Stored, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._sinks = [
            _Sink(sink.sink_id, sink.path.rstrip("/"), join(sink.path, "_holdfast", quote(sink.sink_id, safe="")))
            for sink in scenario.sinks
        ]
        self._descent = Descent(ledger)
        self._roots = tuple(f"{sink.root}/" for sink in self._sinks)

    def observe(self, observation: Observation) -> None:
        if isinstance(observation, Lifecycle):
            if observation.change == "power_loss":
                self._look_again()
            return
        if not isinstance(observation, Stored) or not (observation.added or observation.removed):
            return
        changes = self.ledger.changes(observation)
        if self._descent.follow():
            self._find_newest()
        for change in changes:
            if isinstance(change, AttemptRecorded):
                self._restored(change)
        if not f"{observation.root}/".startswith(self._roots):
            return
        for path in observation.added:
            self._added(join(observation.root, path), observation)
        for path in observation.removed:
            self._removed(join(observation.root, path), observation)

    # ---------------------------------------------------------------------------------------------------------- commits

    def _added(self, location: str, fact: Stored) -> None:
        for sink in self._sinks:
            if location.startswith(f"{sink.folder}/log/"):
                self._entry(sink, location, fact)
                return
        folder, _, name = location.rpartition("/")
        beside = [sink for sink in self._sinks if sink.root == folder]
        if beside and not any(name in sink.names for sink in beside):
            self.report("I18", f"{location} is visible to plain readers and not committed")

    def _entry(self, sink: _Sink, location: str, fact: Stored) -> None:
        operation, path = fact.operation, location.removeprefix(f"{sink.root}/")
        content = operation.data if isinstance(operation, PutIfAbsent) else self.world.store(sink.root).peek(path)
        number = location.rpartition("/")[2].removesuffix(".json")
        if not number.isdecimal() or int(number) != sink.entries:
            self.report("I19", f"sink {sink.sink_id}: entry {number} of its log follows {sink.entries} others")
        sink.entries += 1
        entry: dict[str, Any] = msgspec.json.decode(content or b"{}")
        if entry.get("type") == "commit":
            self._commit(sink, entry)
        elif entry.get("type") == "merge":
            self._merge(sink, entry)
        elif entry.get("type") == "owner":
            sink.attempt = max(sink.attempt, entry["attempt"])

    def _merge(self, sink: _Sink, entry: dict[str, Any]) -> None:
        merged, replaced = entry["file"]["name"], [file["name"] for file in entry["replaced"]]
        where = f"sink {sink.sink_id}: {merged}, merged by attempt {entry['attempt']},"
        old = [name for name in replaced if name not in sink.names or name in sink.replaced]
        if old:
            self.report("I43", f"{where} replaces {old[0]}, which is not current")
        if merged in sink.names:
            self.report("I43", f"{where} is there already")
        if not self.ledger.exists(f"{sink.folder}/data/{merged}"):
            self.report("I43", f"{where} is not in its place")
        sink.names.add(merged)
        sink.replaced.update(replaced)

    def _commit(self, sink: _Sink, entry: dict[str, Any]) -> None:
        checkpoint, where = entry["checkpoint_id"], f"sink {sink.sink_id}: checkpoint {entry['checkpoint_id']}"
        if max(self.ledger.released, self._begun_with()) < checkpoint:
            plain = [number for number in self.ledger.completed if number >= checkpoint]
            invariant = "I21" if plain else "I18"
            why = f"only savepoint {plain[0]} is" if plain else f"only {self.ledger.released} is"
            self.report(invariant, f"{where} is committed, and {why} complete")
        if entry["attempt"] < sink.attempt:
            self.report("I15", f"{where} is committed by attempt {entry['attempt']}, and attempt {sink.attempt} has the sink")
        name = _first_name(entry)
        if self._descent.holds_file(checkpoint, name):
            if checkpoint <= sink.newest:
                self.report("I19", f"{where} is committed after {sink.newest}")
            sink.newest = max(sink.newest, checkpoint)
        sink.commits.append((checkpoint, name))
        for file in entry["files"]:
            name = file["name"]
            if name in sink.names:
                self.report("I19", f"{where}: {name} is committed twice")
            if not self.ledger.exists(f"{sink.folder}/data/{name}"):
                self.report("I19", f"{where}: {name} is committed and is not in its place")
            sink.names.add(name)

    def _begun_with(self) -> int:
        """Highest id that a submission started from: one restored from a plain savepoint commits what the savepoint held back."""
        bases = [record.base for record in self.ledger.submissions.values()]
        return max((base.checkpoint_id for base in bases if base is not None), default=0)

    # ------------------------------------------------------------------------------------------------------ taking back

    def _removed(self, location: str, fact: Stored) -> None:
        folder, _, name = location.rpartition("/")
        for sink in self._sinks:
            if folder == f"{sink.folder}/log":
                self.report("I19", f"{fact.actor} deleted an entry of the log of sink {sink.sink_id}: {location}")
            elif folder == f"{sink.folder}/staged" and name not in sink.names:
                self._swept(name, fact)
            elif name in sink.replaced:
                continue
            elif name in sink.names and folder in (f"{sink.folder}/data", sink.root):
                self.report("I19", f"{fact.actor} deleted {location}, which is committed")

    def _swept(self, name: str, fact: Stored) -> None:
        """A staged, uncommitted file may be deleted only once a later attempt runs."""
        found = _ATTEMPT.search(name)
        if found is not None and int(found[1]) >= self.ledger.newest_attempt:
            self.report("I20", f"{fact.actor} deleted {name}, which the attempt that runs has staged")

    def _look_again(self) -> None:
        """Read the log again after a power loss: entries that were not durable may be gone, and their ids are committed again."""
        for sink in self._sinks:
            view = self.world.store(sink.root)
            prefix = sink.folder.removeprefix(f"{sink.root}/")
            contents: list[dict[str, Any]] = []
            while (content := view.peek(f"{prefix}/log/{len(contents):012d}.json")) is not None:
                try:
                    contents.append(msgspec.json.decode(content))
                except msgspec.DecodeError as error:
                    self.report("I19", f"entry {len(contents)} of the log of sink {sink.sink_id} can't be read: {error}")
                    return
            commits = [entry for entry in contents if entry["type"] == "commit"]
            sink.entries = len(contents)
            sink.commits = [(entry["checkpoint_id"], _first_name(entry)) for entry in commits]
            sink.attempt = max((entry["attempt"] for entry in contents if entry["type"] == "owner"), default=0)
            merges = [entry for entry in contents if entry["type"] == "merge"]
            sink.replaced = {file["name"] for entry in merges for file in entry["replaced"]}
            sink.names = {file["name"] for entry in commits for file in entry["files"]} | {each["file"]["name"] for each in merges}
        self._find_newest()

    def _find_newest(self) -> None:
        for sink in self._sinks:
            sink.newest = max((number for number, name in sink.commits if self._descent.holds_file(number, name)), default=0)

    def _restored(self, change: AttemptRecorded) -> None:
        """A submission starts behind visible output only with its user's permission to repeat output."""
        record = change.record
        if record.epoch < self.ledger.newest_epoch:
            return
        restored = record.restored.checkpoint_id if record.restored is not None else 0
        for sink in self._sinks:
            if restored < sink.newest:
                self.report(
                    "I22", f"attempt {record.attempt} begins at checkpoint {restored}; sink {sink.sink_id} shows {sink.newest}"
                )


def _first_name(entry: dict[str, Any]) -> str:
    """One of the files that an entry commits; empty if it commits none."""
    return str(entry["files"][0]["name"]) if entry["files"] else ""
