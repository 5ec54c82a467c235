"""The only door into a subtask: mails put by any thread, taken by the loop thread between two slices.

It decides nothing about a mail. A mail put after `close` is dropped, and its sender is told so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from holdfast.barriers.messages import FinishTasks, NotifyCheckpointAborted, NotifyCheckpointComplete, TriggerCheckpoint


class PoolOutcome(msgspec.Struct, frozen=True):
    """Blocking work ended on the pool; `done(result, error)` runs on the loop thread."""

    done: Callable[[Any, BaseException | None], None]
    result: Any = None
    error: BaseException | None = None


class CancelSubtask(msgspec.Struct, frozen=True):
    """Stop at the next step; nothing more is emitted."""


class FailSubtask(msgspec.Struct, frozen=True):
    """Something outside the operators broke the attempt (a lost peer, a gap in a channel)."""

    error: BaseException


Mail: TypeAlias = (
    TriggerCheckpoint | NotifyCheckpointComplete | NotifyCheckpointAborted | FinishTasks | CancelSubtask | FailSubtask | PoolOutcome
)


class Mailbox:
    """A queue with many writers and one reader. Order is that of `put`; a mail is taken once.

    `deque.append` and `popleft` are atomic, so no lock is needed: a mail that races with `close` is dropped by the reader."""

    __slots__ = ("_closed", "_mails", "_wake")

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._mails: deque[Mail] = deque()
        self._wake = wake
        self._closed = False

    def put(self, mail: Mail) -> bool:
        """Add a mail and wake the loop; False if the mailbox is closed. Any thread."""
        if self._closed:
            return False
        self._mails.append(mail)
        if self._wake is not None:
            self._wake()
        return True

    def take(self) -> Mail | None:
        """The oldest mail, or None. Loop thread only."""
        return self._mails.popleft() if self._mails else None

    def close(self) -> None:
        """Refuse further mails and forget those not taken."""
        self._closed = True
        self._mails.clear()

    @property
    def closed(self) -> bool:
        return self._closed

    def __len__(self) -> int:
        return len(self._mails)
