"""Faults as records, and the catalogue of their kinds. A plan is a tuple of faults: composable, scriptable, minimisable.

A fault says what goes wrong (`kind`), with what (`target`), and when: at a time, at the n-th pass of a named point, or with a
probability inside a window. How it is carried out is injector.py's."""

from __future__ import annotations

import msgspec

from holdfast.statebackends.errors import InvalidConfigError


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault. Times in ms of virtual time since the run began."""

    kind: str
    """Name of a `FaultKind`."""
    target: str = ""
    """`worker-1`, `coordinator`, `driver`, a message kind, a store operation, an operator's uid; the kind says which."""
    at_ms: int | None = None
    """It begins at this time ..."""
    on: str = ""
    """... or when this point is passed (a prefix of the point's name will do) ..."""
    nth: int = 1
    """... for the n-th time, n >= 1."""
    duration_ms: int = 0
    """How long it lasts; 0 for a fault that happens once."""
    probability: float = 1.0
    """Probability that it hits a single message or call while it lasts, 0..1."""
    amount: int = 0
    """In the unit of the kind: ms of delay, ms of a clock's jump, bytes of a disk, the new parallelism."""
    name: str = ""
    """Name in reports; made from the rest when empty."""

    @property
    def label(self) -> str:
        """One line: what happens and when."""
        when = f"at {self.at_ms} ms" if self.at_ms is not None else f"on {self.on} #{self.nth}"
        parts = [self.name or self.kind, self.target, when]
        if self.duration_ms:
            parts.append(f"for {self.duration_ms} ms")
        if self.probability < 1:
            parts.append(f"p={self.probability:g}")
        if self.amount:
            parts.append(f"amount={self.amount}")
        return " ".join(part for part in parts if part)


class FaultKind(msgspec.Struct, frozen=True):
    """One kind of fault, with the meaning of its target and amount."""

    name: str
    meaning: str
    target: str
    amount: str = ""
    lasts: bool = False
    """Whether it needs a duration."""


MESSAGES = (
    "register",
    "acks",
    "states",
    "heartbeat",
    "stream",
    "deploy",
    "trigger",
    "complete",
    "abort",
    "cancel",
    "finish",
    "shutdown",
)
"""Kinds of control messages: requests of workers, then commands to them. `answer:<request>` is the answer to a request."""

REQUESTS = ("register", "acks", "states", "heartbeat", "submit", "look", "wish")
"""Requests with an answer: of workers, then of drivers and users."""

_ROLES = ("coordinator.", "worker.")
"""Prefixes of the names of points."""

STORE_OPERATIONS = (
    "PutIfAbsent",
    "WriteFile",
    "UploadFile",
    "DownloadFile",
    "ReadFile",
    "StatFile",
    "SyncFile",
    "ListFiles",
    "ListFolder",
    "LinkFile",
    "DeleteFile",
    "DeleteFolder",
)

_WORKER = "worker-<slot>, or workers"
_MESSAGE = f"a kind of message ({', '.join(MESSAGES)}), answer:<request>, or all"
_STORE = "a store operation such as PutIfAbsent, optionally /part-of-path, or all; coordinator: or worker: in front limits who"

KINDS: dict[str, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind("kill_worker", "a worker process dies; its slot gets a successor", _WORKER),
        FaultKind("kill_coordinator", "the coordinator process dies and is started again", "", "ms until it is back"),
        FaultKind("kill_driver", "the driver and its workers die; a new driver submits the job again", "", "ms until it is back"),
        FaultKind("kill_all", "every process dies at once", "", "ms until they are back"),
        FaultKind("power_loss", "every process dies, and storage loses what was not durable", "", "ms until they are back"),
        FaultKind("kill_recovering", "a process dies while it recovers", "worker or coordinator"),
        FaultKind("damage_copies", "a worker dies, and the copies of state on its host's disk are damaged or gone", _WORKER),
        FaultKind(
            "local_disk_full", "a worker dies, and the disk of its host takes nothing for a while", _WORKER, lasts=True
        ),
        FaultKind(
            "pause_worker", "a worker is paused and resumes", _WORKER, "1: its driver replaces it meanwhile", lasts=True
        ),
        FaultKind(
            "hang_worker",
            "a worker hangs until its driver cancels its task, and dies of that",
            _WORKER,
            "1: the process is out of the driver's reach, and wakes afterwards",
        ),
        FaultKind("pause_coordinator", "the coordinator is paused for a while", "", lasts=True),
        FaultKind("second_coordinator", "another coordinator takes over while the first one lives on", "", lasts=True),
        FaultKind("old_leader_wakes", "the coordinator is paused, another takes over, then the first one wakes", "", lasts=True),
        FaultKind("drop", "control messages are lost", _MESSAGE, lasts=True),
        FaultKind("delay", "control messages are late", _MESSAGE, "ms", lasts=True),
        FaultKind("duplicate", "control messages arrive twice", _MESSAGE, lasts=True),
        FaultKind("reorder", "control messages overtake each other", _MESSAGE, "ms", lasts=True),
        FaultKind("partition", "a worker and the coordinator can't reach each other", _WORKER, lasts=True),
        FaultKind("partition_members", "members can't reach each other, and all reach storage", "", lasts=True),
        FaultKind("forged_ack", "acknowledgements of a worker name what no task can have stored", _WORKER, lasts=True),
        FaultKind("forged_registration", "processes that no launcher started register for a worker's slot and others", _WORKER),
        FaultKind("break_stream", "a worker's command stream breaks; the coordinator notices late", _WORKER, "ms until it does"),
        FaultKind("cut_link", "a data connection between two workers breaks, and can be made again", "<slot>-<slot>"),
        FaultKind("forged_frames", "frames that no process of its attempt sent come to a worker's data port", _WORKER),
        FaultKind("slow_link", "a data connection is slow", "<slot>-<slot>, or all", "ms", lasts=True),
        FaultKind("store_fails", "calls of the store fail without effect", _STORE, lasts=True),
        FaultKind("store_slow", "calls of the store are slow", _STORE, "ms", lasts=True),
        FaultKind("store_partial", "a write leaves a part of its bytes behind and fails", _STORE, lasts=True),
        FaultKind("store_lies", "calls of the store take effect and report failure", _STORE, lasts=True),
        FaultKind("store_unsynced", "a new name is there before it is durable, and its call fails in between", _STORE, lasts=True),
        FaultKind("store_late", "calls of the store report failure and take effect later", _STORE, "ms", lasts=True),
        FaultKind("disk_full", "nothing can be written", "all, coordinator:, or worker:", lasts=True),
        FaultKind("clock_jump", "the wall clock of a process jumps", f"coordinator, driver, {_WORKER}", "ms, may be negative"),
        FaultKind("slow_operator", "calls of an operator, or slices of its firing, take longer", "uid", "ms", lasts=True),
        FaultKind("blocked_operator", "one call of an operator blocks its worker's loop", "uid", "ms"),
        FaultKind("user_error", "the user's function raises", "uid"),
        FaultKind("checkpoint", "a user asks for a checkpoint", ""),
        FaultKind("savepoint", "a user takes a savepoint", ""),
        FaultKind("restore", "the job is stopped with a savepoint, and started again from it", ""),
        FaultKind("drain", "the job is drained and stopped with a savepoint, and started again from it", ""),
        FaultKind("rewind", "the job is started again from an older snapshot than its newest one", ""),
        FaultKind("retune", "a user changes settings of the running job", ""),
        FaultKind("rescale", "the driver is replaced by one with another parallelism", "", "new parallelism"),
    )
}

FAMILIES: dict[str, tuple[str, ...]] = {
    "crashes": (
        "kill_worker",
        "kill_coordinator",
        "kill_driver",
        "kill_all",
        "kill_recovering",
        "damage_copies",
        "local_disk_full",
    ),
    "zombies": ("pause_worker", "hang_worker", "pause_coordinator", "second_coordinator", "old_leader_wakes"),
    "messages": (
        "drop",
        "delay",
        "duplicate",
        "reorder",
        "partition",
        "partition_members",
        "break_stream",
        "forged_ack",
        "forged_registration",
    ),
    "data": ("cut_link", "slow_link", "forged_frames"),
    "storage": (
        "store_fails",
        "store_slow",
        "store_partial",
        "store_lies",
        "store_late",
        "store_unsynced",
        "disk_full",
        "power_loss",
    ),
    "clocks": ("clock_jump",),
    "operators": ("slow_operator", "blocked_operator", "user_error"),
    "users": ("checkpoint", "savepoint", "restore", "drain", "rewind", "retune", "rescale"),
}
"""Names of families, which `--faults` takes beside single kinds."""


def expand_kinds(names: tuple[str, ...]) -> tuple[str, ...]:
    """Single kinds named by kinds and families; empty: all. Raises InvalidConfigError naming the choices."""
    if not names:
        return tuple(KINDS)
    wanted: set[str] = set()
    for name in names:
        if name in FAMILIES:
            wanted.update(FAMILIES[name])
        elif name in KINDS:
            wanted.add(name)
        else:
            choices = ", ".join((*FAMILIES, *KINDS))
            raise InvalidConfigError(f"there is no fault {name!r}; choose from {choices}", setting="faults")
    return tuple(kind for kind in KINDS if kind in wanted)


def check_plan(plan: tuple[Fault, ...]) -> None:
    """Raise InvalidConfigError naming the first fault that can't be carried out, and its problem."""
    for index, fault in enumerate(plan):
        where = f"fault {index} ({fault.kind})"
        kind = KINDS.get(fault.kind)
        if kind is None:
            raise InvalidConfigError(
                f"fault {index}: there is no fault {fault.kind!r}; choose from {', '.join(KINDS)}", setting="plan"
            )
        if (fault.at_ms is None) == (not fault.on):
            raise InvalidConfigError(f"{where} needs at_ms or on, one of them", setting="plan")
        if fault.nth < 1 or fault.duration_ms < 0 or (fault.at_ms is not None and fault.at_ms < 0):
            raise InvalidConfigError(f"{where}: nth must be at least 1, at_ms and duration_ms not negative", setting="plan")
        if not 0 < fault.probability <= 1:
            raise InvalidConfigError(f"{where}: probability must be above 0 and at most 1, got {fault.probability}", setting="plan")
        if kind.lasts and fault.duration_ms == 0:
            raise InvalidConfigError(f"{where} needs a duration_ms", setting="plan")
        if fault.on and not any(role.startswith(fault.on) or fault.on.startswith(role) for role in _ROLES):
            raise InvalidConfigError(f"{where}: no point begins with {fault.on!r}, but with {' or '.join(_ROLES)}", setting="plan")
        if not _is_target(kind, fault.target):
            known = f"has the target {kind.target}" if kind.target else "has no target"
            raise InvalidConfigError(f"{where} {known}, not {fault.target!r}", setting="plan")
        least = 1 if fault.kind == "rescale" else 0
        if fault.amount < least and fault.kind != "clock_jump":
            meaning = f": {kind.amount}" if kind.amount else ""
            raise InvalidConfigError(f"{where} needs an amount of at least {least}{meaning}, not {fault.amount}", setting="plan")


def _is_target(kind: FaultKind, target: str) -> bool:
    """Whether a target is of the kind's sort; whether a run has it, such as a worker in slot 7, is not known here."""
    if not target:
        return kind.name not in ("cut_link", "clock_jump", "kill_recovering")
    is_worker = target == "workers" or (target.startswith("worker-") and target.removeprefix("worker-").isdigit())
    match kind.target:
        case "":
            return False
        case "uid":
            return True
        case _ if kind.target == _WORKER:
            return is_worker
        case _ if kind.target == _MESSAGE:
            return target in ("all", *REQUESTS, *MESSAGES, *(f"answer:{request}" for request in REQUESTS))
        case _ if kind.target == _STORE or kind.name == "disk_full":
            who, _, call = target.rpartition(":")
            return who in ("", "coordinator", "worker") and call.partition("/")[0] in ("", "all", *STORE_OPERATIONS)
        case _ if kind.name == "clock_jump":
            return is_worker or target in ("coordinator", "driver")
        case _ if kind.name == "kill_recovering":
            return target in ("worker", "coordinator")
        case _:
            one, _, other = target.partition("-")
            return (one.isdigit() and other.isdigit()) or (target == "all" and kind.name == "slow_link")


def encode_plan(plan: tuple[Fault, ...]) -> bytes:
    """A plan as JSON: a list of faults."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=1)


def decode_plan(content: bytes, where: str) -> tuple[Fault, ...]:
    """Read and check a plan. Raises InvalidConfigError naming `where` and the problem."""
    try:
        plan = msgspec.json.decode(content, type=tuple[Fault, ...])
    except msgspec.MsgspecError as error:
        raise InvalidConfigError(f"{where} is not a plan of faults: {error}", setting="plan") from error
    check_plan(plan)
    return plan
