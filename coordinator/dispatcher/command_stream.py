"""SHELL: one open command stream, between the thread of a job and the writer of the socket.

It is bounded: if the reader falls too far behind, the stream is closed, and the worker registers again for the full state."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from holdfast.barriers.messages import NumberedCommand
from holdfast.coordinator.jobmaster.slots import OUTBOX_COMMANDS_MAX


class Subscription:
    """Implements `interface.CommandSubscription`. One feeding thread, one consumer."""

    def __init__(
        self,
        epoch: int,
        slot: int,
        session: str,
        after: int,
        *,
        on_close: Callable[[Subscription], None],
        commands_max: int = OUTBOX_COMMANDS_MAX,
    ) -> None:
        self._epoch = epoch
        self.slot = slot
        self.session = session
        self.number = 0
        """Ticket that opened it: distinguishes the streams of one session."""
        self._on_close = on_close
        self._commands_max = commands_max
        self._condition = threading.Condition()
        self._commands: deque[NumberedCommand] = deque()
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        self._last_number = after

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def last_number(self) -> int:
        return self._last_number

    def push(self, commands: Iterable[NumberedCommand]) -> bool:
        """Add commands; False if there are too many: the stream is then closed."""
        with self._condition:
            if self._closed:
                return True
            self._commands.extend(commands)
            overflow = len(self._commands) > self._commands_max
            if overflow:
                self._commands.clear()
                self._closed = True
            self._condition.notify_all()
        self._notify()
        return not overflow

    def end(self) -> None:
        """Close from the feeding side; waiting commands can still be taken."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
        self._notify()

    def close(self) -> None:
        """Close from the reading side, and notify the job. Idempotent."""
        with self._condition:
            first = not self._closed
            self._closed = True
            self._commands.clear()
            self._condition.notify_all()
        if first:
            self._on_close(self)

    def take(self) -> list[NumberedCommand]:
        with self._condition:
            commands = list(self._commands)
            self._commands.clear()
            if commands:
                self._last_number = commands[-1].number
            return commands

    def get(self, timeout_s: float | None) -> NumberedCommand | None:
        with self._condition:
            self._condition.wait_for(lambda: bool(self._commands) or self._closed, timeout_s)
            if not self._commands:
                return None
            command = self._commands.popleft()
            self._last_number = command.number
            return command

    def add_listener(self, listener: Callable[[], None]) -> None:
        with self._condition:
            self._listeners.append(listener)
            waiting = bool(self._commands) or self._closed
        if waiting:
            listener()

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()
