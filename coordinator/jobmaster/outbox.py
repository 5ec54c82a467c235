"""CORE: the numbered commands of one session, kept so that a broken stream can be resumed. Bounded.

Numbers are 1, 2, 3 ... per (epoch, session). What fell out of the bound can't be resumed: the worker registers again."""

from __future__ import annotations

from collections import deque

from holdfast.barriers.messages import NumberedCommand, WorkerCommand

OUTBOX_COMMANDS_MAX = 1_000


class Outbox:
    """Commands of one session; `session` is drawn at registration."""

    def __init__(self, epoch: int, session: str, *, commands_max: int = OUTBOX_COMMANDS_MAX) -> None:
        self.epoch = epoch
        self.session = session
        self._commands: deque[NumberedCommand] = deque(maxlen=commands_max)
        self._last_number = 0

    @property
    def last_number(self) -> int:
        return self._last_number

    def append(self, command: WorkerCommand) -> NumberedCommand:
        """Number a command and keep it."""
        self._last_number += 1
        numbered = NumberedCommand(self.epoch, self.session, self._last_number, command)
        self._commands.append(numbered)
        return numbered

    def resume(self, after: int) -> tuple[NumberedCommand, ...] | None:
        """Commands behind number `after`; None if some of them are gone or `after` was never sent."""
        if after > self._last_number or after < 0:
            return None
        kept = tuple(numbered for numbered in self._commands if numbered.number > after)
        return kept if len(kept) == self._last_number - after else None
