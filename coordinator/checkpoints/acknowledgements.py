"""CORE: checks whether a task can have sent an acknowledgement, and which of the files in it the task wrote. Pure.

Handles are checked when they are acknowledged, since a completed checkpoint subsumes older ones: a handle that no restore accepts
must not get that far. Files are not opened; their content is covered by checksums."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription
from holdfast.barriers.messages import AcknowledgeCheckpoint, CheckpointKind, SubtaskKey, has_control_characters
from holdfast.coordinator.checkpoints.acknowledged_channels import AcknowledgedChannels
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.checkpoints.pending import PendingCheckpoint
from holdfast.coordinator.ha.shared_state import SharedStateRegistry
from holdfast.statebackends.handles import (
    DELTA_FORMATS,
    NATIVE_FORMAT,
    TABLE_FORMATS,
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


@dataclass(frozen=True, slots=True)
class _Writer:
    """One subtask of one operator in one attempt."""

    operator: _Operator
    subtask: int
    attempt: int
    exclusive: str
    """Prefix of its files' names in the folder of a checkpoint."""

    def wrote(self, path: str, checkpoint_id: int, *, alone: bool = False) -> bool:
        """Whether a path, exclusive or shared, is that of a file of this writer for a checkpoint. Names identify their writer
        within an attempt: see statebackends/layout.py. `alone`: true only if no writer of another attempt can have given the name
        either."""
        shared = path.startswith(_SHARED)
        name, prefix = path, self.exclusive
        if shared:
            name = path[len(_SHARED) :]
            prefix = shared_prefix(checkpoint_id, self.operator.uid, self.subtask, self.attempt)
        if not name.startswith(prefix) or len(name) > NAME_CHARS_MAX or _REST.fullmatch(name, len(prefix)) is None:
            return False
        for rival in self.operator.rivals:
            numbers = r"[0-9]{1,5}-" if shared else rf"[0-9]{{1,5}}-{'[0-9]+' if alone else self.attempt}-"
            lead = f"{checkpoint_id}-{self.attempt}-" if shared else ""
            if re.match(re.escape(f"{lead}{rival}-") + numbers, name):
                return False
        return True


@dataclass(frozen=True, slots=True)
class _Task:
    """One subtask of the job in one attempt: what all its acknowledgements are held against."""

    vertex: JobVertex
    key_groups: KeyGroupRange
    writers: Mapping[str, _Writer]
    """By the uid of each of its operators."""


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
        self._attempt = -1
        self._tasks: dict[tuple[str, int], _Task] = {}
        """Tasks of that attempt which were judged; each acknowledges in every checkpoint."""
        self._operators = {
            vertex_id: {operator.uid: _operator(operator, names) for operator in vertex.operators}
            for vertex_id, vertex in self._vertices.items()
        }

    def may_share(self, request: CheckpointRequest) -> bool:
        """Whether files of what a request makes may be shared with other checkpoints: if not, `problem` names each that is."""
        return self._form_of(request).shares

    def _form_of(self, request: CheckpointRequest) -> _Form:
        if request.kind is CheckpointKind.CHECKPOINT or not request.is_savepoint:
            return self._checkpoint
        return self._native if request.native else self._savepoint

    def problem(self, ack: AcknowledgeCheckpoint, pending: PendingCheckpoint) -> str | None:
        """Why the task can't have stored this for the checkpoint; None if it can."""
        task = self._task(ack)
        if task is None:
            return f"the job has no subtask {ack.subtask} of {_shown(ack.vertex)}"
        writers = task.writers
        if ack.states.keys() != writers.keys():
            return f"state of the operators {_shown(', '.join(sorted(ack.states)))}; the task has {', '.join(sorted(writers))}"
        request, form = pending.request, self._form_of(pending.request)
        uid = ""
        try:
            for uid, state in ack.states.items():
                is_erased = request.erasure is not None and uid in request.erasure.uids
                self._check_operator(task, writers[uid], state, self._savepoint if is_erased else form, pending)
            if ack.in_flight:
                uid = task.vertex.operators[0].uid
                self._check_channels(writers[uid], ack, pending)
        except _Refused as refused:
            return f"operator {uid!r}: {refused}"
        return None

    def _task(self, ack: AcknowledgeCheckpoint) -> _Task | None:
        """The task that an acknowledgement is of; None if the job has none such. Known ones are of one attempt: the newest, as
        only its tasks are judged."""
        if ack.attempt != self._attempt:
            self._attempt, self._tasks = ack.attempt, {}
        key = ack.vertex, ack.subtask
        known = self._tasks.get(key)
        if known is not None:
            return known
        found = self._make_task(ack)
        if found is not None:
            self._tasks[key] = found
        return found

    def _make_task(self, ack: AcknowledgeCheckpoint) -> _Task | None:
        vertex, subtask, attempt = self._vertices.get(ack.vertex), ack.subtask, ack.attempt
        if vertex is None or not 0 <= subtask < vertex.parallelism:
            return None
        writers = {
            uid: _Writer(operator, subtask, attempt, exclusive_prefix(uid, subtask, attempt))
            for uid, operator in self._operators[ack.vertex].items()
        }
        return _Task(vertex, assign_key_groups(vertex.max_parallelism, vertex.parallelism, subtask), writers)

    def files_of_writer(self, ack: AcknowledgeCheckpoint) -> Iterator[str]:
        """Paths in an acknowledgement that its task alone can have written, valid or not; never a record (`_*`).

        The attempt is the one that the sender gives. Paths that another operator may have written in any attempt are left out."""
        task = self._make_task(ack)  # of any attempt: not among the known ones
        if task is None:
            return
        for uid, state in ack.states.items():
            writer = task.writers.get(uid)
            if writer is None:
                continue
            parts: list[StateHandle] = [part for keyed in state.keyed for part in keyed.parts]
            parts += [listed.part for listed in state.operator]
            parts += [channel.part for channel in ack.in_flight]
            for part in parts:
                if not isinstance(part, FileHandle) or part.path.startswith("_"):
                    continue
                if writer.wrote(part.path, ack.checkpoint_id, alone=True):
                    yield part.path

    # --------------------------------------------------------------------------------------------------------- operators

    def _check_operator(
        self, task: _Task, writer: _Writer, state: OperatorSubtaskState, form: _Form, pending: PendingCheckpoint
    ) -> None:
        operator = writer.operator
        if state.keyed or operator.keyed:
            if not operator.is_keyed:
                raise _Refused("keyed state, which it does not have")
            self._check_keyed(writer, state.keyed, task.key_groups, form, pending)
        if state.operator or operator.lists:
            self._check_lists(writer, state.operator, pending.checkpoint_id)
        if state.external:
            if not operator.has_external:
                raise _Refused("files outside the snapshot, which only sources and sinks have")
            for entry in state.external:
                _check_external(entry)

    def _check_keyed(
        self,
        writer: _Writer,
        handles: tuple[KeyedStateHandle, ...],
        groups: KeyGroupRange,
        form: _Form,
        pending: PendingCheckpoint,
    ) -> None:
        if len(handles) == 1 and handles[0].format in TABLE_FORMATS and handles[0].states == writer.operator.tables:
            self._check_tables(writer, handles[0], groups, form, pending)
            return
        declared = writer.operator.keyed
        found: set[str] = set()
        deltas: dict[str, int] = {}
        files: dict[str, FileHandle] = {}
        natives = inline = 0
        for handle in handles:
            _check_frame(writer, handle, groups, form)
            _check_shape(handle)
            is_delta = handle.format in DELTA_FORMATS
            if not found and not is_delta and handle.states == writer.operator.tables:
                found.update(declared)
            else:
                _check_states(handle, declared, found, deltas, is_delta=is_delta)
            natives += handle.format == NATIVE_FORMAT
            for part in handle.parts:
                inline += self._check_part(writer, part, form, pending.checkpoint_id, pending.base, handle.format)
                if isinstance(part, FileHandle):
                    _check_same_file(files, part)
        if len(found) != len(declared):
            raise _Refused(f"nothing of the keyed state {', '.join(sorted(declared.keys() - found))}")
        if natives > 1:
            raise _Refused(f"{natives} databases")
        _check_inline(inline, form)

    def _check_tables(
        self, writer: _Writer, handle: KeyedStateHandle, groups: KeyGroupRange, form: _Form, pending: PendingCheckpoint
    ) -> None:
        """What `_check_keyed` comes to for one table of each declared state: the form of nearly all acknowledgements."""
        _check_frame(writer, handle, groups, form)
        _check_shape(handle)
        files: dict[str, FileHandle] = {}
        inline = 0
        for part in handle.parts:
            inline += self._check_part(writer, part, form, pending.checkpoint_id, pending.base, handle.format)
            if isinstance(part, FileHandle):
                _check_same_file(files, part)
        _check_inline(inline, form)

    def _check_lists(self, writer: _Writer, handles: tuple[OperatorListHandle, ...], checkpoint_id: int) -> None:
        declared = writer.operator.lists
        found: set[str] = set()
        for handle in handles:
            name = handle.state.name
            if declared.get(name) != handle.state or name in found:
                raise _Refused(f"the operator state {_shown(name)}, which is not declared so, or twice")
            found.add(name)
            part = handle.part
            self._check_part(writer, part, self._lists, checkpoint_id, None, "")
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
            self._check_part(writer, channel.part, self._lists, pending.checkpoint_id, None, "")
            if isinstance(channel.part, FileHandle):
                _check_same_file(files, channel.part)

    # ------------------------------------------------------------------------------------------------------------- parts

    def _check_part(
        self, writer: _Writer, part: StateHandle, form: _Form, checkpoint_id: int, base: int | None, table_format: str
    ) -> int:
        """Bytes of an inline part, else 0. Raises _Refused."""
        if isinstance(part, FileHandle):
            _check_place(part, form)
            _check_file(writer, part, checkpoint_id)
            return 0
        if isinstance(part, InlineHandle):
            size = len(part.data)
            if size >= form.inline_below:
                raise _Refused(f"a part of {size} bytes in the acknowledgement; such parts have fewer than {form.inline_below}")
            if table_format and (detail := _wrong_table(part.data, table_format)):
                raise _Refused(f"a part in the acknowledgement is {detail}")
            return size
        _check_place(part, form)
        self._check_base(writer.operator, part, base)
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


def _check_frame(writer: _Writer, handle: KeyedStateHandle, groups: KeyGroupRange, form: _Form) -> None:
    """Raise _Refused for keyed state of other key groups than the task's, or in a format that is not written here."""
    if handle.key_groups != groups:
        have = f"{handle.key_groups.start}..{handle.key_groups.stop}"
        raise _Refused(f"key groups {have}; those of subtask {writer.subtask} are {groups.start}..{groups.stop}")
    if handle.format not in form.formats:
        raise _Refused(f"keyed state in the format {_shown(handle.format)}; here it is {' or '.join(sorted(form.formats))}")


def _check_place(part: FileHandle | PlaceholderHandle, form: _Form) -> None:
    """Raise _Refused for a length that no file has, and for a file that checkpoints share where none is."""
    if not 0 <= part.length <= FILE_BYTES_MAX:
        raise _Refused(f"{_shown(part.path)} with {part.length} bytes")
    if not form.shares and part.path.startswith(_SHARED):
        raise _Refused(f"{_shown(part.path)}, a file that checkpoints share, which is not done here")


def _check_file(writer: _Writer, part: FileHandle, checkpoint_id: int) -> None:
    """Raise _Refused unless the writer can have written the file, or the segment, for the checkpoint."""
    if not writer.wrote(part.path, checkpoint_id):
        raise _Refused(f"{_shown(part.path)}, which is not the name of a file that this task writes for this checkpoint")
    if _CHECKSUM.fullmatch(part.checksum) is None:
        raise _Refused(f"{part.path} with the checksum {_shown(part.checksum)}")
    if type(part) is FileHandle:
        return
    if isinstance(part, SegmentHandle) and not (part.is_inside and part.file_length <= FILE_BYTES_MAX):
        raise _Refused(f"{part.path}: {outside_detail(part)}")


def _check_inline(size: int, form: _Form) -> None:
    """Raise _Refused for more bytes of inline parts than an acknowledgement of one operator may have."""
    if size > form.inline_bytes_max:
        raise _Refused(f"{size} bytes of keyed state in the acknowledgement; the limit is {form.inline_bytes_max}")


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
