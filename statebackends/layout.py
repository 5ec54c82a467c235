"""Layout of a state directory and of a snapshot: the only module that spells their paths.

    <state-dir>/_holdfast  _coordinator.json  _token  _lock       the directory's own files
    <state-dir>/_service/worker-key  tokens/<id>.json             what its coordinators share: who may ask them,
    <state-dir>/_service/audit/<chain>-<n>.jsonl                  and who did; <chain>0f-<n>.jsonl: more than a share of the log
    <state-dir>/_service/webhooks/<name>/<n>.json                 which events a webhook has had
    <state-dir>/_service/tls/authority.pem  _ca.pem               the authority of their certificates; what clients need of it
    <state-dir>/_service/leader/<epoch>  members/<member>-<beat>.json    which of several members is the active one, and who lives
    <state-dir>/<job>/leader/<epoch>                              who leads the job
    <state-dir>/<job>/submissions/<n>.json  attempts/<a>.json  results/<n>.json  config/<n>.json
    <state-dir>/<job>/history/<epoch>-<n>.jsonl                   what happened to the job
    <state-dir>/<job>/drills/<time>-<drill>.json                  what a drill of one of its snapshots found
    <state-dir>/<job>/labels/<id>                                 a checkpoint that may have labels
    <state-dir>/<job>/forgotten/<epoch>.json                      where a forgetting of the ended job has put its result
    <state-dir>/<job>/chk-<id>/_claim  _metadata                  the register of one checkpoint id
    <state-dir>/<job>/chk-<id>/_label-<n>                         what its users call it, or that it is being deleted
    <state-dir>/<job>/chk-<id>/<uid>-<subtask>-<attempt>-<nonce>-<file>
    <state-dir>/<job>/shared/<id>-<attempt>-<uid>-<subtask>-<nonce>-<file>
    <state-dir>/<job>/sources/<uid>/<submission>/manifest.json    a materialised input
    <state-dir>/<job>/sources/<uid>/<submission>/stream.json  batches/<id>/manifest.json  ...    a streaming input
    <savepoint-dir>/savepoint-<job>-<nonce>/_metadata  _owner  _label-<n>     a savepoint: one folder, relative paths

A name says who wrote the file, never what it holds. In the `_metadata` of `chk-<id>` a shared file is the path `../shared/<name>`,
the only path that leads out of a snapshot's folder. Pure: names, and the tags of registers. Which checkpoint refers to which file,
and the rest of a record, are for the coordinator."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import lru_cache
from urllib.parse import quote

import msgspec
import xxhash

from holdfast.statebackends.decoding import decode_json
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError

# ------------------------------------------------------------------------------------------------------- columns of a table

KEY_GROUP, NAMESPACE, MAP_KEY, POSITION, VALUE = "key_group", "namespace", "map_key", "position", "value"
ORDER, TIME = "order", "time"
"""Row tables: the number of a row's arrival, and its event time or null. Timers: their time."""
OWN_COLUMN = "row."
"""Before the name of a user's column that has one of ours."""
TTL_STAMP = "ttl_stamp_ms"
"""State with TTL: when the value was last written (or read), ms since the epoch; see `state.Ttl`."""
STATE_METADATA = b"holdfast.state"
"""Key in the schema's metadata: the StateMeta as JSON."""

TABLE_SUFFIX = ".sst"
"""Suffix of RocksDB's table files. They never change and a database uses each name once, so a hard link is as good as a copy.
RocksDB's other files are small, and written again for every copy."""
# ------------------------------------------------------------------------------------------------------ the state directory

DIRECTORY_FILE = "_holdfast"
"""Holds the state directory's nonce alone: a worker that reads the same text sees the same directory."""
RUN_FILE = "_coordinator.json"
"""Address of the directory's coordinator, or of its last one: a hint for people, programs and workers."""
TOKEN_FILE = "_token"
CA_FILE = "_ca.pem"
"""Certificate of the authority that clients of the directory's coordinators trust."""
GUARD_FILE = "_lock"
"""Lock file that the running coordinator holds, on a local directory."""
SERVICE_FOLDER = "_service"
WORKER_KEY_FILE = f"{SERVICE_FOLDER}/worker-key"
"""Key of the tokens of workers."""
TOKENS_FOLDER = f"{SERVICE_FOLDER}/tokens"
"""Records of issued tokens."""
AUDIT_FOLDER = f"{SERVICE_FOLDER}/audit"
"""Chains of the audit log."""
AUDIT_CHAIN_CHARACTERS = 16
"""Of the name of a coordinator's chain."""
WEBHOOKS_FOLDER = f"{SERVICE_FOLDER}/webhooks"
"""Where each webhook has got to."""
DOCTOR_FOLDER = f"{SERVICE_FOLDER}/doctor"
"""Folder of files by which `holdfast doctor` tries a storage; it deletes them."""
AUTHORITY_FILE = f"{SERVICE_FOLDER}/tls/authority.pem"
"""Key and certificate of the authority of the coordinators' certificates."""
SERVICE_LEADERS_FOLDER = f"{SERVICE_FOLDER}/leader"
"""Which member has been the active one, by epoch."""
MEMBERS_FOLDER = f"{SERVICE_FOLDER}/members"
"""Signs of life of members."""
FSCK_FOLDER = "_fsck"
"""Folder of temporary files by which a repair reads the clock of the storage."""

_DIRECTORY_FILES = re.compile(
    rf"{DIRECTORY_FILE}|{re.escape(RUN_FILE)}(\.\w+)?|{re.escape(CA_FILE)}(\.\w+)?|{TOKEN_FILE}|{GUARD_FILE}(\.\w+)?"
    rf"|{re.escape(AUTHORITY_FILE)}(\.\w+)?|{WORKER_KEY_FILE}|{TOKENS_FOLDER}/[0-9a-f]+\.json|{AUDIT_FOLDER}/[0-9a-f]+-[0-9]+\.jsonl"
    rf"|{SERVICE_LEADERS_FOLDER}/[0-9]+|{MEMBERS_FOLDER}/[0-9a-f]+-[0-9]+\.json"
    rf"|{WEBHOOKS_FOLDER}/[a-z0-9-]+/[0-9]+\.json|{DOCTOR_FOLDER}/[0-9a-f]+/[a-z0-9-]+"
)
_SIGN_NAME = re.compile(r"([0-9a-f]{1,64})-([1-9][0-9]{0,17})\.json")
_AUDIT_FILE = re.compile(rf"{AUDIT_FOLDER}/([0-9a-f]{{1,64}})-([0-9]{{1,12}})\.jsonl")


def token_path(token_id: str) -> str:
    """Record of an issued token."""
    return f"{TOKENS_FOLDER}/{token_id}.json"


def audit_path(chain: str, number: int) -> str:
    """The n-th file, from 0, of a chain of the audit log."""
    return f"{AUDIT_FOLDER}/{chain}-{number}.jsonl"


_FURTHER = "0f"


def further_chain(chain: str) -> str:
    """Beside a coordinator's chain of the audit log: what senders changed beyond their share of a day."""
    return f"{chain}{_FURTHER}"


def is_further_chain(chain: str) -> bool:
    """Whether it is one of `further_chain`: no other name of a coordinator's chain is as long."""
    return len(chain) == AUDIT_CHAIN_CHARACTERS + len(_FURTHER) and chain.endswith(_FURTHER)


def parse_audit_path(path: str) -> tuple[str, int]:
    """Chain and number of a file of the audit log; ("", -1) for any other path."""
    found = _AUDIT_FILE.fullmatch(path)
    return (found[1], int(found[2])) if found is not None else ("", -1)


def doctor_folder(nonce: str) -> str:
    """Folder of one run of `holdfast doctor`."""
    return f"{DOCTOR_FOLDER}/{nonce}"


def webhook_folder(name: str) -> str:
    """Folder of the places of one webhook."""
    return f"{WEBHOOKS_FOLDER}/{name}"


def webhook_places(name: str, number: int) -> str:
    """The n-th file of the places of a webhook; the highest counts."""
    return f"{webhook_folder(name)}/{number}.json"


def parse_webhook_places(name: str) -> int:
    """Number of a file in a webhook's folder; -1 for any other name."""
    number = name.removesuffix(".json")
    is_number = number != name and number.isdecimal() and number.isascii() and len(number) <= CHECKPOINT_DIGITS_MAX
    return int(number) if is_number else -1


def service_leader_path(epoch: int) -> str:
    """Record of the member that is the active one in this epoch."""
    return f"{SERVICE_LEADERS_FOLDER}/{epoch}"


def sign_path(member: str, beat: int) -> str:
    """The n-th sign of life, from 1, of a member."""
    return f"{MEMBERS_FOLDER}/{member}-{beat}.json"


def parse_sign_name(name: str) -> tuple[str, int]:
    """Member and beat of a file's name in MEMBERS_FOLDER; ("", 0) for any other name."""
    found = _SIGN_NAME.fullmatch(name)
    return (found[1], int(found[2])) if found is not None else ("", 0)


def is_directory_file(path: str) -> bool:
    """Whether a path of the state directory is one of the directory's own files, or a half-written one."""
    return _DIRECTORY_FILES.fullmatch(path) is not None


# ------------------------------------------------------------------------------------------------------ a job's directory

SHARED_FOLDER = "shared"
TASK_OWNED_FOLDER = "taskowned"
"""Folder in a job's directory for files that tasks own; the coordinator deletes none of them. Source: Flink's layout."""
CONFIG_FOLDER = "config"
"""Settings of running submissions that were changed."""
HISTORY_FOLDER = "history"
DRILLS_FOLDER = "drills"
LABELS_FOLDER = "labels"
"""Names of files: the ids of the job that were ever given a label. They tell where to look, and are no proof."""
FORGOTTEN_FOLDER = "forgotten"
SOURCES_FOLDER = "sources"
SINKS_FOLDER = "sinks"
INPUT_MANIFEST = "manifest.json"

CHECKPOINT_PREFIX, SAVEPOINT_PREFIX = "chk-", "savepoint-"
SNAPSHOT_PREFIXES = (SAVEPOINT_PREFIX, CHECKPOINT_PREFIX)
"""Prefixes of the names of folders that hold a snapshot."""
CHECKPOINT_DIGITS_MAX = 18
"""Digits of a checkpoint id."""

CLAIM_NAME = "_claim"
METADATA_NAME = "_metadata"
"""In a checkpoint's folder the decision on its id: the snapshot, or a record with a tag. In a savepoint's folder the snapshot."""
OWNER_NAME = "_owner"
"""In a savepoint's folder: record of the job that claimed it."""
UNFINISHED_NAME = "_unfinished"
"""In a folder that a tool is writing a snapshot into: its claim, deleted right before `_metadata` is created."""

_CHECKPOINT_NAME = re.compile(rf"{CHECKPOINT_PREFIX}([1-9][0-9]{{0,{CHECKPOINT_DIGITS_MAX - 1}}})/?")
_CHECKPOINT_FOLDER = re.compile(rf"(?:.*/)?{CHECKPOINT_PREFIX}[0-9]+")
_LABEL_NAME = re.compile(r"_label-([1-9][0-9]{0,5})")
_OWNER_NAME = re.compile(rf"{OWNER_NAME}(?:-([1-9][0-9]{{0,5}}))?")
_DRILL_NAME = re.compile(r"[0-9]{15}-[0-9a-f]{32}\.json")
_HISTORY_NAME = re.compile(r"([1-9][0-9]{0,17})-([1-9][0-9]{0,17})\.jsonl")
_JOB_RECORD = re.compile(
    r"leader/\d+|labels/[1-9]\d{0,17}|(submissions|attempts|results|config|forgotten)/\d+\.json|job\.json|result\.json"
)
STREAM_RECORD = "stream.json"
"""In the folder of a streaming input: what makes it one."""
_BATCHES = "batches"
_STREAM_NAMES = (STREAM_RECORD, f"{_BATCHES}/", "owners/", "starts/", "ends/", "dropped/", "query/")
_INPUT_PATH = re.compile(rf"[^/]+/{SOURCES_FOLDER}/[^/]+/[^/]+/({_BATCHES}/[0-9]+/)?{re.escape(INPUT_MANIFEST)}")


class JobPaths(msgspec.Struct, frozen=True):
    """Storage-relative paths of one job."""

    job_id: str

    @property
    def leaders(self) -> str:
        return f"{self.job_id}/leader"

    def leader(self, epoch: int) -> str:
        return f"{self.job_id}/leader/{epoch}"

    @property
    def submissions(self) -> str:
        return f"{self.job_id}/submissions"

    def submission(self, number: int) -> str:
        return f"{self.job_id}/submissions/{number}.json"

    @property
    def attempts(self) -> str:
        return f"{self.job_id}/attempts"

    def attempt(self, attempt: int) -> str:
        return f"{self.job_id}/attempts/{attempt}.json"

    @property
    def results(self) -> str:
        return f"{self.job_id}/results"

    def result(self, number: int) -> str:
        return f"{self.job_id}/results/{number}.json"

    @property
    def configs(self) -> str:
        return f"{self.job_id}/{CONFIG_FOLDER}"

    def config(self, number: int) -> str:
        return f"{self.job_id}/{CONFIG_FOLDER}/{number}.json"

    @property
    def histories(self) -> str:
        return f"{self.job_id}/{HISTORY_FOLDER}"

    def history(self, epoch: int, first: int) -> str:
        """File of the records that one leader made, from number `first` on."""
        return f"{self.job_id}/{HISTORY_FOLDER}/{epoch}-{first}.jsonl"

    @property
    def drills(self) -> str:
        return f"{self.job_id}/{DRILLS_FOLDER}"

    def drill(self, started_ms: int, drill_id: str) -> str:
        """What the drill found that began then, ms since the epoch; names sort by that time."""
        return f"{self.job_id}/{DRILLS_FOLDER}/{started_ms:015d}-{drill_id}.json"

    @property
    def labels(self) -> str:
        return f"{self.job_id}/{LABELS_FOLDER}"

    def labelled(self, checkpoint_id: int) -> str:
        """Says that an id may have labels."""
        return f"{self.job_id}/{LABELS_FOLDER}/{checkpoint_id}"

    @property
    def forgettings(self) -> str:
        return f"{self.job_id}/{FORGOTTEN_FOLDER}"

    def forgetting(self, epoch: int) -> str:
        """What the forgetting that fenced the ended job with this epoch was about to write, and where."""
        return f"{self.job_id}/{FORGOTTEN_FOLDER}/{epoch}.json"

    @property
    def shared(self) -> str:
        """Files that checkpoints share."""
        return f"{self.job_id}/{SHARED_FOLDER}"

    def checkpoint(self, checkpoint_id: int) -> str:
        return f"{self.job_id}/{checkpoint_name(checkpoint_id)}"

    def claim(self, checkpoint_id: int) -> str:
        return claim_path(self.checkpoint(checkpoint_id))

    def decision(self, checkpoint_id: int) -> str:
        return metadata_path(self.checkpoint(checkpoint_id))

    def inputs(self, uid: str) -> str:
        """Folder of all inputs that one source materialised."""
        return f"{self.job_id}/{SOURCES_FOLDER}/{folder_name(uid)}"

    def input_folder(self, uid: str, submission: int) -> str:
        """Folder of the input that one submission made."""
        return f"{self.inputs(uid)}/{submission:06d}"

    def input_manifest(self, uid: str, submission: int) -> str:
        return f"{self.input_folder(uid, submission)}/{INPUT_MANIFEST}"


class StreamPaths(msgspec.Struct, frozen=True):
    """Storage-relative paths of one streaming input."""

    folder: str

    @property
    def record(self) -> str:
        return f"{self.folder}/{STREAM_RECORD}"

    @property
    def batches(self) -> str:
        return f"{self.folder}/{_BATCHES}"

    def batch(self, batch_id: int) -> str:
        """Folder of one batch: its manifest, and its rows in a folder of their writer."""
        return f"{self.batches}/{batch_id:012d}"

    def manifest(self, batch_id: int) -> str:
        return f"{self.batch(batch_id)}/{INPUT_MANIFEST}"

    @property
    def owners(self) -> str:
        return f"{self.folder}/owners"

    def owner(self, number: int) -> str:
        return f"{self.owners}/{number:06d}.json"

    def end(self, job_id: str, submission: int) -> str:
        return f"{self.folder}/ends/{folder_name(job_id)}-{submission:06d}.json"

    @property
    def dropped(self) -> str:
        return f"{self.folder}/dropped"

    def dropped_before(self, batch_id: int) -> str:
        """Says that batches with lower ids were dropped."""
        return f"{self.dropped}/{batch_id:012d}.json"

    @property
    def query(self) -> str:
        """Checkpoint of the query, unless it is elsewhere."""
        return f"{self.folder}/query"


def stream_start(folder: str, submission: int, subtask: int) -> str:
    """Path of what one reader of a streaming input says as it begins; `folder`: the input that its submission would begin with."""
    return f"{folder}/starts/{submission:06d}-{subtask:05d}.json"


def batch_of_manifest(path: str) -> tuple[str, int] | None:
    """The folder of a streaming input, and the id of the batch whose manifest the path is; None for any other path."""
    folder, _, name = path.rpartition(f"/{_BATCHES}/")
    number, slash, file = name.partition("/")
    return (folder, int(number)) if folder and slash and file == INPUT_MANIFEST and number.isdecimal() else None


def batch_folder(path: str) -> str | None:
    """Folder of the batch of a streaming input that a path within the input is in; None: in none."""
    folder, found, rest = path.partition(f"/{_BATCHES}/")
    return f"{folder}/{_BATCHES}/{rest.partition('/')[0]}" if found and "/" in rest else None


def is_in_stream(name: str) -> bool:
    """Whether a path within the folder of an input is part of a streaming input."""
    return name.startswith(_STREAM_NAMES)


def is_job_record(name: str) -> bool:
    """Whether a path within a job's directory is one of the job's records."""
    return _JOB_RECORD.fullmatch(name) is not None


def parse_history_name(name: str) -> tuple[int, int] | None:
    """Epoch and number of the first record of a file in a job's history; None for any other name."""
    found = _HISTORY_NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found is not None else None


def is_drill_name(name: str) -> bool:
    """Whether a name is that of a drill's file."""
    return _DRILL_NAME.fullmatch(name) is not None


def is_input_manifest(path: str) -> bool:
    """Whether a path of the state directory is the manifest of a materialised input, or of a batch of one, of any job."""
    return _INPUT_PATH.fullmatch(path) is not None


# ------------------------------------------------------------------------------------------------- a checkpoint's register


def checkpoint_name(checkpoint_id: int) -> str:
    """A checkpoint's folder within its job's directory: `chk-42`."""
    return f"{CHECKPOINT_PREFIX}{checkpoint_id}"


def parse_checkpoint_name(name: str) -> int | None:
    """The id in `chk-42` or `chk-42/`; None for any other name, and for another spelling of an id (`chk-042`)."""
    found = _CHECKPOINT_NAME.fullmatch(name)
    return int(found[1]) if found is not None else None


def is_checkpoint_folder(folder: str) -> bool:
    """Whether a folder is a checkpoint's within its job's directory: `<job>/chk-42`."""
    return _CHECKPOINT_FOLDER.fullmatch(folder) is not None


def claim_path(folder: str) -> str:
    return f"{folder}/{CLAIM_NAME}"


class DecisionTag(StrEnum):
    """Field `decision` of a `_metadata` that is not a snapshot."""

    ABORTED = "aborted"
    SAVEPOINT = "savepoint"


class _Decision(msgspec.Struct):
    decision: str | None = None


class _Claim(msgspec.Struct):
    attempt: int


class _SavepointFolder(msgspec.Struct):
    folder: str


def decode_decision_tag(content: bytes) -> str | None:
    """Tag of a `_metadata`: a DecisionTag, or one of a newer version; None for a snapshot. Raises one of UNDECODABLE."""
    return decode_json(content, _Decision).decision


def decode_savepoint_folder(content: bytes) -> str:
    """Folder of the savepoint that a `_metadata` with the tag SAVEPOINT points to. Raises one of UNDECODABLE."""
    return decode_json(content, _SavepointFolder).folder


def decode_claim_attempt(content: bytes) -> int:
    """Attempt that a `_claim` was made for. Raises one of UNDECODABLE."""
    return decode_json(content, _Claim).attempt


# --------------------------------------------------------------------------------------------------- a snapshot's folder

PATH_REASON = "path"
"""Reason of a CorruptStateError for a path that is not within the snapshot."""
_NAME_LENGTH_MAX = 100
_SEGMENT_BYTES_MAX = 255
_PATH_BYTES_MAX = 1024
"""S3's bound for a key."""


def metadata_path(folder: str) -> str:
    return f"{folder}/{METADATA_NAME}"


def describe_absence(folder: str, names: Sequence[str], shown: Callable[[str], str] = str) -> str:
    """Why a folder with these names in it (`name/` of a folder) holds no snapshot, and what there is instead. `shown`: the form in
    which the caller's user names a snapshot."""
    inside = [name.rstrip("/") for name in names if name.startswith(SNAPSHOT_PREFIXES)]
    if inside:
        newest = max(inside, key=lambda name: (parse_checkpoint_name(name) or 0, name))
        more = f", and {len(inside) - 1} more" if len(inside) > 1 else ""
        return f"it is a folder of snapshots: {shown(f'{folder}/{newest}')}{more}"
    if DIRECTORY_FILE in names:
        return "it is a state directory: the folders of its jobs have snapshots, which `holdfast checkpoints JOB` lists"
    if not names:
        return f"there is no {METADATA_NAME} file: there is no such folder, or it is empty"
    is_unfinished = folder.rpartition("/")[2].startswith(SNAPSHOT_PREFIXES) or {CLAIM_NAME, UNFINISHED_NAME} & {*names}
    like = ", as a snapshot that was never completed does" if is_unfinished else ""
    return f"there is no {METADATA_NAME} file; it holds {len(names)} other files{like}"


def folder_of_snapshot(location: str) -> str:
    """A snapshot's folder, from its own location or that of its `_metadata`."""
    return location.rstrip("/").removesuffix(f"/{METADATA_NAME}")


def savepoint_folder(target: str, job_id: str, nonce: str) -> str:
    """Folder of one savepoint of a job, below the location that the user gave."""
    return f"{target.rstrip('/')}/{SAVEPOINT_PREFIX}{job_id[:6]}-{nonce}"


def owner_name(number: int) -> str:
    """File name of the record of a snapshot's n-th owner; `number` counts from 1."""
    return OWNER_NAME if number == 1 else f"{OWNER_NAME}-{number}"


def parse_owner_name(name: str) -> int | None:
    """The number in `_owner` (1) or `_owner-2`; None for any other name."""
    found = _OWNER_NAME.fullmatch(name)
    return int(found[1] or 1) if found is not None else None


def label_path(folder: str, number: int) -> str:
    """The n-th record of a snapshot's labels, from 1."""
    return f"{folder}/_label-{number}"


def parse_label_name(name: str) -> int | None:
    """The number in `_label-2`; None for any other name."""
    found = _LABEL_NAME.fullmatch(name)
    return int(found[1]) if found is not None else None


def part_path(folder: str, path: str, *, operator: str | None = None) -> str:
    """Storage path of a part's path relative to the snapshot's folder.

    Parts lie in the folder; those of a checkpoint may also be `../shared/<name>`. Raises CorruptStateError for other paths, and for
    names longer than a file system allows, since its answer about such a name says nothing about the file."""
    owner = f"operator {operator!r}: " if operator else ""
    if any(len(name.encode()) > _SEGMENT_BYTES_MAX for name in path.split("/")) or len(path.encode()) > _PATH_BYTES_MAX:
        raise CorruptStateError(
            f"{owner}{path[:_NAME_LENGTH_MAX]!r}... is longer than the name of a file can be",
            path=path,
            operator=operator,
            reason=PATH_REASON,
        )
    relative = posixpath.normpath(path)
    leaves = path.startswith("/") or relative in (".", "..") or relative.startswith("../") or "\0" in path
    is_shared = shared_name(path) is not None and is_checkpoint_folder(folder) and "/" in folder
    if leaves and not is_shared:
        raise CorruptStateError(
            f"{owner}{path!r} leaves the folder {folder} of the snapshot", path=path, operator=operator, reason=PATH_REASON
        )
    return posixpath.normpath(posixpath.join(folder, path))


# ------------------------------------------------------------------------------------------------------- names of files

_SHARED_PREFIX = f"../{SHARED_FOLDER}/"
_WRITER = re.compile(r"([1-9][0-9]{0,17})-")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")

UID_CHARS_MAX = 80
"""Characters of a uid in a file name; the nonce makes the name unique."""


def folder_name(text: str) -> str:
    """The name of a folder for an id, of which `unquote` makes the id again. Raises InvalidConfigError for `.` and `..`, which
    would be other folders."""
    if text in (".", ".."):
        raise InvalidConfigError(f"{text!r} can't be an id: it is part of a path", setting="id")
    return quote(text, safe="")


def file_name(text: str) -> str:
    """A file name for any text, different for different texts. Characters outside of A-Z a-z 0-9 . _ - become %XX."""
    escaped = re.sub(r"^\.", "%2E", quote(text, safe="-_."))
    if len(escaped) <= _NAME_LENGTH_MAX:
        return escaped
    return f"{escaped[:_NAME_LENGTH_MAX]}~{xxhash.xxh3_64_hexdigest(text.encode('utf-8'))}"


def safe_text(text: str) -> str:
    """A text as part of a file name; different texts may give the same, so something else must make the name unique."""
    return _UNSAFE.sub("_", text)


@lru_cache(4_096)
def uid_in_names(uid: str) -> str:
    """An operator's uid as part of the names of its files."""
    return safe_text(uid)[:UID_CHARS_MAX]


def exclusive_prefix(uid: str, subtask: int, attempt: int) -> str:
    """Prefix of the names of files that one subtask of an operator writes into a snapshot's folder; a nonce follows."""
    return f"{uid_in_names(uid)}-{subtask}-{attempt}-"


def shared_prefix(checkpoint_id: int, uid: str, subtask: int, attempt: int) -> str:
    """As `exclusive_prefix`, for files that later checkpoints may share."""
    return f"{checkpoint_id}-{attempt}-{uid_in_names(uid)}-{subtask}-"


def shared_path(name: str) -> str:
    """Path of a shared file relative to a checkpoint's folder."""
    return _SHARED_PREFIX + name


def shared_name(path: str) -> str | None:
    """The name in `../shared/<name>`; None for any other path."""
    if not path.startswith(_SHARED_PREFIX):
        return None
    name = path[len(_SHARED_PREFIX) :]
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        return None
    return name


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file in a folder: it leads nowhere else, and no file system finds it too long."""
    is_plain = posixpath.basename(name) == name and name not in ("", ".", "..") and "\0" not in name
    return is_plain and len(name.encode()) <= _SEGMENT_BYTES_MAX


def writer_of(name: str) -> int | None:
    """Id of the checkpoint that a shared file was written for, from its name; None for a name of another form."""
    found = _WRITER.match(name)
    return int(found[1]) if found is not None else None
