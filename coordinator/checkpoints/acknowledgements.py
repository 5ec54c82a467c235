"""CORE: checks whether a task can have sent an acknowledgement, and which of the files in it the task wrote. Pure.

Handles are checked when they are acknowledged, since a completed checkpoint subsumes older ones: a handle that no restore accepts
must not get that far. Files are not opened; their content is covered by checksums."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import AcknowledgeCheckpoint, SubtaskKey, has_control_characters
from holdfast.coordinator.checkpoints.acknowledged_channels import AcknowledgedChannels
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint
from holdfast.coordinator.ha.shared_state import SharedStateRegistry
from holdfast.statebackends.handles import (
    DELTA_FORMATS,
    NATIVE_FORMAT,
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorSubtaskState,
    PlaceholderHandle,
    SegmentHandle,
    StateHandle,
    StateMeta,
    external_places,
)
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import exclusive_prefix, shared_name, shared_path, shared_prefix, uid_in_names
from holdfast.statebackends.snapshot.deltas import DELTAS_MAX
from holdfast.statebackends.snapshot.parts import FileEnds, outside_detail, wrong_format
from holdfast.statebackends.state import OPERATOR_KINDS

FILE_BYTES_MAX = 1 << 53
"""Bytes of one file, and entries of one state: the largest integer that every JSON reader represents exactly."""
NAME_CHARS_MAX = 255
"""Characters of a file's name: the limit of common file systems."""
EXTERNAL_CHARS_MAX = 4_096
"""Characters of one entry of external files: two places, with room for their root."""
SHOWN_CHARS_MAX = 200
"""Characters that a message repeats of a text in the acknowledgement."""

_CURRENT = "CURRENT"
"""File of a RocksDB database: one line, the name of its manifest."""
_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}")
_REST = re.compile(r"[0-9A-Za-z]+-[A-Za-z0-9._%~-]+")
"""Rest of a file's name after its writer's prefix: the nonce, and the escaped name of a part."""
_LOCAL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_EXTERNAL_KINDS = frozenset({"source", "sink_writer", "sink_committer"})
_ENTRIES = msgspec.msgpack.Decoder(list[bytes])


class _Refused(Exception):
    """The task can't have sent the acknowledgement; the message says why."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How one kind of snapshot stores the keyed state of an operator."""

    formats: frozenset[str]
    inline_below: int
    """An inline part has fewer bytes than this."""
    inline_bytes_max: int
    """Bytes of all inline parts of one operator."""
    shares: bool
    """Whether files may be shared with other checkpoints."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """One operator, as the graph describes it."""

    uid: str
    is_keyed: bool
    has_external: bool
    keyed: Mapping[str, StateMeta]
    lists: Mapping[str, StateMeta]
    tables: tuple[StateMeta, ...]
    """The keyed states as a task lists them when each has one table: those are found declared all at once."""
    older: re.Pattern[str]
    """Matches names of shared files that a subtask of it wrote for some checkpoint."""
    rivals: tuple[str, ...]
    """Escaped uids of other operators whose file names may look like this one's: `a-1` for the operator `a`."""


@dataclass(slots=True)
class _Writer:
    """One subtask of one operator, writing for one checkpoint in one attempt."""

    operator: _Operator
    checkpoint_id: int
    subtask: int
    attempt: int

    @property
    def exclusive(self) -> str:
        return exclusive_prefix(self.operator.uid, self.subtask, self.attempt)

    @property
    def shared(self) -> str:
        return shared_prefix(self.checkpoint_id, self.operator.uid, self.subtask, self.attempt)

    def wrote(self, path: str, *, alone: bool = False) -> bool:
        """Whether a path, exclusive or shared, is that of a file of this writer. Names identify their writer within an attempt: see
        statebackends/layout.py. `alone`: true only if no writer of another attempt can have given the name either."""
        shared = path.startswith(_SHARED)
        name = path[len(_SHARED) :] if shared else path
        prefix = self.shared if shared else self.exclusive
        if not name.startswith(prefix) or len(name) > NAME_CHARS_MAX or _REST.fullmatch(name, len(prefix)) is None:
            return False
        for rival in self.operator.rivals:
            numbers = r"[0-9]{1,5}-" if shared else rf"[0-9]{{1,5}}-{'[0-9]+' if alone else self.attempt}-"
            lead = f"{self.checkpoint_id}-{self.attempt}-" if shared else ""
            if re.match(re.escape(f"{lead}{rival}-") + numbers, name):
                return False
        return True


_SHARED = shared_path("")


class AcknowledgementValidator:
    """Checks acknowledgements of one job. `graph` has each task's state and key groups, `shared` the files of base checkpoints."""

    def __init__(self, graph: JobGraph, shared: SharedStateRegistry) -> None:
        self._shared = shared
        self._channels = AcknowledgedChannels(graph)
        self._lists = _Form(frozenset(), graph.config.inline_threshold, FILE_BYTES_MAX, shares=False)
        self._checkpoint = _form(graph.config, savepoint=False, native=False)
        self._savepoint = _form(graph.config, savepoint=True, native=False)
        self._native = _form(graph.config, savepoint=True, native=True)
        names = {uid_in_names(operator.uid) for vertex in graph.vertices for operator in vertex.operators}
        self._vertices = {vertex.vertex_id: vertex for vertex in graph.vertices}
        self._operators = {
            vertex_id: {operator.uid: _operator(operator, names) for operator in vertex.operators}
            for vertex_id, vertex in self._vertices.items()
        }

    def may_share(self, request: CheckpointRequest) -> bool:
        """Whether files of what a request makes may be shared with other checkpoints: if not, `problem` names each that is."""
        return self._form_of(request).shares

    def _form_of(self, request: CheckpointRequest) -> _Form:
        if not request.is_savepoint:
            return self._checkpoint
        return self._native if request.native else self._savepoint

    def problem(self, ack: AcknowledgeCheckpoint, pending: PendingCheckpoint) -> str | None:
        """Why the task can't have stored this for the checkpoint; None if it can."""
        vertex = self._vertices.get(ack.vertex)
        if vertex is None or not 0 <= ack.subtask < vertex.parallelism:
            return f"the job has no subtask {ack.subtask} of {_shown(ack.vertex)}"
        operators = self._operators[ack.vertex]
        if ack.states.keys() != operators.keys():
            return f"state of the operators {_shown(', '.join(sorted(ack.states)))}; the task has {', '.join(sorted(operators))}"
        request, form = pending.request, self._form_of(pending.request)
        uid = ""
        try:
            for uid, state in ack.states.items():
                writer = _Writer(operators[uid], ack.checkpoint_id, ack.subtask, ack.attempt)
                is_erased = request.erasure is not None and uid in request.erasure.uids
                self._check_operator(writer, state, vertex, self._savepoint if is_erased else form, pending.base)
            if ack.in_flight:
                uid = vertex.operators[0].uid
                self._check_channels(_Writer(operators[uid], ack.checkpoint_id, ack.subtask, ack.attempt), ack, pending)
        except _Refused as refused:
            return f"operator {uid!r}: {refused}"
        return None

    def files_of_writer(self, ack: AcknowledgeCheckpoint) -> Iterator[str]:
        """Paths in an acknowledgement that its task alone can have written, valid or not; never a record (`_*`).

        The attempt is the one that the sender gives. Paths that another operator may have written in any attempt are left out."""
        vertex = self._vertices.get(ack.vertex)
        if vertex is None or not 0 <= ack.subtask < vertex.parallelism:
            return
        operators = self._operators[ack.vertex]
        for uid, state in ack.states.items():
            if uid not in operators:
                continue
            writer = _Writer(operators[uid], ack.checkpoint_id, ack.subtask, ack.attempt)
            parts: list[StateHandle] = [part for keyed in state.keyed for part in keyed.parts]
            parts += [listed.part for listed in state.operator]
            parts += [channel.part for channel in ack.in_flight]
            for part in parts:
                if isinstance(part, FileHandle) and not part.path.startswith("_") and writer.wrote(part.path, alone=True):
                    yield part.path

    # --------------------------------------------------------------------------------------------------------- operators

    def _check_operator(
        self, writer: _Writer, state: OperatorSubtaskState, vertex: JobVertex, form: _Form, base: int | None
    ) -> None:
        operator = writer.operator
        if state.keyed or operator.keyed:
            if not operator.is_keyed:
                raise _Refused("keyed state, which it does not have")
            groups = _key_groups(vertex.max_parallelism, vertex.parallelism, writer.subtask)
            self._check_keyed(writer, state.keyed, groups, form, base)
        if state.operator or operator.lists:
            self._check_lists(writer, state.operator)
        if state.external:
            if not operator.has_external:
                raise _Refused("files outside the snapshot, which only sources and sinks have")
            for entry in state.external:
                _check_external(entry)

    def _check_keyed(
        self, writer: _Writer, handles: tuple[KeyedStateHandle, ...], groups: KeyGroupRange, form: _Form, base: int | None
    ) -> None:
        declared = writer.operator.keyed
        found: set[str] = set()
        deltas: dict[str, int] = {}
        files: dict[str, FileHandle] = {}
        natives = inline = 0
        for handle in handles:
            if handle.key_groups != groups:
                have = f"{handle.key_groups.start}..{handle.key_groups.stop}"
                raise _Refused(f"key groups {have}; those of subtask {writer.subtask} are {groups.start}..{groups.stop}")
            if handle.format not in form.formats:
                raise _Refused(f"keyed state in the format {_shown(handle.format)}; here it is {' or '.join(sorted(form.formats))}")
            _check_shape(handle)
            is_delta = handle.format in DELTA_FORMATS
            if not found and not is_delta and handle.states == writer.operator.tables:
                found.update(declared)
            else:
                _check_states(handle, declared, found, deltas, is_delta=is_delta)
            natives += handle.format == NATIVE_FORMAT
            for part in handle.parts:
                inline += self._check_part(writer, part, form, base, handle.format)
                if isinstance(part, FileHandle):
                    _check_same_file(files, part)
        if len(found) != len(declared):
            raise _Refused(f"nothing of the keyed state {', '.join(sorted(declared.keys() - found))}")
        if natives > 1:
            raise _Refused(f"{natives} databases")
        if inline > form.inline_bytes_max:
            raise _Refused(f"{inline} bytes of keyed state in the acknowledgement; the limit is {form.inline_bytes_max}")

    def _check_lists(self, writer: _Writer, handles: tuple[OperatorListHandle, ...]) -> None:
        declared = writer.operator.lists
        found: set[str] = set()
        for handle in handles:
            name = handle.state.name
            if declared.get(name) != handle.state or name in found:
                raise _Refused(f"the operator state {_shown(name)}, which is not declared so, or twice")
            found.add(name)
            part = handle.part
            self._check_part(writer, part, self._lists, None, "")
            if not 0 <= handle.count <= FILE_BYTES_MAX:
                raise _Refused(f"operator state {name!r} with {handle.count} entries")
            if isinstance(part, InlineHandle) and _count(part.data) != handle.count:
                raise _Refused(f"operator state {name!r} whose bytes are not its {handle.count} entries")
        if len(found) != len(declared):
            raise _Refused(f"nothing of the operator state {', '.join(sorted(declared.keys() - found))}")

    def _check_channels(self, writer: _Writer, ack: AcknowledgeCheckpoint, pending: PendingCheckpoint) -> None:
        """Files of in-flight data are written by the head of the chain."""
        if not pending.unaligned:
            raise _Refused("in-flight data of a checkpoint whose barriers overtake nothing")
        problem = self._channels.problem(SubtaskKey(ack.vertex, ack.subtask), ack.in_flight)
        if problem is not None:
            raise _Refused(problem)
        files: dict[str, FileHandle] = {}
        for channel in ack.in_flight:
            self._check_part(writer, channel.part, self._lists, None, "")
            if isinstance(channel.part, FileHandle):
                _check_same_file(files, channel.part)

    # ------------------------------------------------------------------------------------------------------------- parts

    def _check_part(self, writer: _Writer, part: StateHandle, form: _Form, base: int | None, table_format: str) -> int:
        """Bytes of an inline part, else 0. Raises _Refused."""
        if isinstance(part, InlineHandle):
            size = len(part.data)
            if size >= form.inline_below:
                raise _Refused(f"a part of {size} bytes in the acknowledgement; such parts have fewer than {form.inline_below}")
            if table_format and (detail := _wrong_table(part.data, table_format)):
                raise _Refused(f"a part in the acknowledgement is {detail}")
            return size
        if not 0 <= part.length <= FILE_BYTES_MAX:
            raise _Refused(f"{_shown(part.path)} with {part.length} bytes")
        if part.path.startswith(_SHARED) and not form.shares:
            raise _Refused(f"{_shown(part.path)}, a file that checkpoints share, which is not done here")
        if isinstance(part, PlaceholderHandle):
            self._check_base(writer.operator, part, base)
            return 0
        if not writer.wrote(part.path):
            raise _Refused(f"{_shown(part.path)}, which is not the name of a file that this task writes for this checkpoint")
        if _CHECKSUM.fullmatch(part.checksum) is None:
            raise _Refused(f"{part.path} with the checksum {_shown(part.checksum)}")
        if isinstance(part, SegmentHandle) and not (part.is_inside and part.file_length <= FILE_BYTES_MAX):
            raise _Refused(f"{part.path}: {outside_detail(part)}")
        return 0

    def _check_base(self, operator: _Operator, part: PlaceholderHandle, base: int | None) -> None:
        """Raise _Refused unless the base has the file; any subtask of the operator may have written it, since state is rescaled."""
        name = shared_name(part.path)
        known = None if name is None or base is None else self._shared.find(base, name, part.offset)
        if known is None or name is None or operator.older.match(name) is None:
            raise _Refused(f"{_shown(part.path)}, which its base {base} does not have of it")
        if known.length != part.length:
            raise _Refused(f"{part.path} with {part.length} bytes; the base has it with {known.length}")


def _form(config: JobConfig, *, savepoint: bool, native: bool) -> _Form:
    """As the state backends write it: `statebackends/backend.py`, SnapshotTarget, and the writers of tables."""
    if savepoint and not native:
        return _Form(frozenset({"parquet"}), config.inline_threshold, FILE_BYTES_MAX, shares=False)
    if config.state_backend == "memory":
        limit = config.memory_snapshot_bytes_max
        return _Form(frozenset({"arrow"}), limit + 1, limit, shares=False)
    formats = {"arrow"}
    if config.state_backend == "rocksdb":
        formats.add(NATIVE_FORMAT)
    shares = config.is_incremental and not savepoint
    if shares:
        formats |= {*DELTA_FORMATS}
    return _Form(frozenset(formats), config.inline_threshold, FILE_BYTES_MAX, shares=shares)


def _operator(operator: OperatorDescription, names: set[str]) -> _Operator:
    name = uid_in_names(operator.uid)
    keyed = {meta.name: meta for meta in operator.states if meta.kind not in OPERATOR_KINDS}
    return _Operator(
        uid=operator.uid,
        is_keyed=operator.key_type is not None,
        has_external=operator.kind in _EXTERNAL_KINDS,
        keyed=keyed,
        tables=tuple(keyed.values()),
        lists={meta.name: meta for meta in operator.states if meta.kind in OPERATOR_KINDS},
        older=re.compile(rf"[1-9][0-9]{{0,17}}-[1-9][0-9]*-{re.escape(name)}-[0-9]+-"),
        rivals=tuple(sorted(other for other in names if other.startswith(f"{name}-"))),
    )


_key_groups = lru_cache(4_096)(assign_key_groups)


def _check_shape(handle: KeyedStateHandle) -> None:
    """Raise _Refused unless states, parts and names belong together."""
    parts = len(handle.parts)
    if handle.format == NATIVE_FORMAT:
        names = set(handle.names)
        if len(handle.names) != parts or len(names) != parts:
            raise _Refused(f"a database of {parts} files with {len(names)} names")
        for name in names:
            if _LOCAL_NAME.fullmatch(name) is None:
                raise _Refused(f"a database with a file {_shown(name)}")
        if _CURRENT not in names:
            raise _Refused(f"a database without the file {_CURRENT}")
        current = handle.parts[handle.names.index(_CURRENT)]
        if isinstance(current, InlineHandle) and current.data not in {f"{name}\n".encode() for name in names}:
            raise _Refused(f"a database whose file {_CURRENT} names none of its files")
        return
    if handle.names or len(handle.states) != parts:
        raise _Refused(f"{parts} tables of {len(handle.states)} states")


def _check_states(
    handle: KeyedStateHandle, declared: Mapping[str, StateMeta], found: set[str], deltas: dict[str, int], *, is_delta: bool
) -> None:
    """Raise _Refused unless the states of a handle are declared, and new, or deltas of what was found. Adds them to `found`, and
    to the counts of `deltas`."""
    for meta in handle.states:
        if declared.get(meta.name) != meta:
            raise _Refused(f"the keyed state {_shown(meta.name)}, which is not declared so")
        if (meta.name in found) is not is_delta:
            raise _Refused(f"the keyed state {_shown(meta.name)} twice, or a delta of it and no table before")
        if is_delta:
            deltas[meta.name] = deltas.get(meta.name, 0) + 1
        found.add(meta.name)
    if max(deltas.values(), default=0) > DELTAS_MAX:
        raise _Refused(f"more than {DELTAS_MAX} deltas of one state")


def _check_same_file(files: dict[str, FileHandle], part: FileHandle) -> None:
    """Raise _Refused for two parts of one file, unless they are segments that agree on its length."""
    other = files.setdefault(part.path, part)
    if other is part:
        return
    are_segments = isinstance(other, SegmentHandle) and isinstance(part, SegmentHandle)
    if not are_segments or other.file_length != part.file_length:
        raise _Refused(f"{part.path} twice")


def _check_external(entry: str) -> None:
    """Raise _Refused for what is no entry of external files. A user's path may have any printable character, and any space."""
    is_text = len(entry) <= EXTERNAL_CHARS_MAX and not has_control_characters(entry)
    if not is_text or not all(place and ".." not in place.split("/") for place in external_places(entry)):
        raise _Refused(f"{_shown(entry)}, which is not the place of a file outside the snapshot")


def _count(data: bytes) -> int:
    """Entries of encoded operator state; -1 if it can't be decoded."""
    try:
        return len(_ENTRIES.decode(data))
    except msgspec.MsgspecError:
        return -1


def _wrong_table(data: bytes, table_format: str) -> str:
    ends = FileEnds()
    ends.add(data)
    return wrong_format(table_format, ends)


def _shown(text: str) -> str:
    """A text of the sender, quoted and cut for a message."""
    return repr(text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}...")
