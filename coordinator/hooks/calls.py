"""What a job's runner asks of its master hooks: records, and the port that runs them. The simulator has a port of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Protocol

import msgspec

from holdfast.statebackends.snapshot.metadata import HookState

MESSAGE_CHARS_MAX = 1_000


class HookCallKind(StrEnum):
    TRIGGER = "trigger"
    RESTORE = "restore"
    RESET = "reset"
    CLOSE = "close"


class HookVerdict(StrEnum):
    DONE = "done"
    FAILED = "failed"
    """It raised, died, or gave no answer in time: another try may succeed."""
    UNKNOWN_VERSION = "unknown_version"
    """It does not know the version of its state: no try can succeed."""


class HookCall(msgspec.Struct, frozen=True):
    """One call of one hook."""

    kind: HookCallKind
    name: str
    checkpoint_id: int
    timestamp_ms: int = 0
    state: HookState | None = None
    """Of a RESTORE; None: the hook has none."""
    timeout_ms: int = 0
    """From the call on."""


class HookReply(msgspec.Struct, frozen=True):
    """The end of a call."""

    verdict: HookVerdict = HookVerdict.DONE
    state: HookState | None = None
    """Of a TRIGGER."""
    message: str = ""
    known: tuple[int, ...] = ()
    """Of UNKNOWN_VERSION: what the hook knows."""
    timed_out: bool = False
    """Of FAILED: it gave no answer in time."""


class HookPort(Protocol):
    """The hooks of one job under one leader."""

    def call(self, call: HookCall, ended: Callable[[HookReply], None]) -> None:
        """Begin a call; never blocks. `ended` follows once, from any thread, about `timeout_ms` later at the latest, unless the
        port is closed. Calls of one hook run one after the other."""

    def close(self) -> None:
        """Let the hooks end; returns at once. Idempotent."""


class HookHost(Protocol):
    """The hooks that a coordinator has."""

    def check(self, names: Collection[str]) -> None:
        """Raise InvalidConfigError for a name that no installed hook has."""

    def of_job(self, job_id: str, epoch: int) -> HookPort:
        """Starts nothing before the first call."""
