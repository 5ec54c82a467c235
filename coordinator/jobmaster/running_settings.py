"""CORE, part of the job master: the settings that hold, and users' changes to them, one write at a time.

A change holds once its record is stored, and is answered then. A write whose outcome is unknown is repeated until it is known: what
no user was told of must not come into force with the next leader. It knows nothing of what a setting does."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.tunable import TUNABLE, SettingValue, apply_settings
from holdfast.coordinator.jobmaster.actions import Action, Answer, Refuse, WriteConfig
from holdfast.coordinator.jobmaster.events import ConfigFailed, ConfigTaken, ConfigWritten
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, InvariantError, StorageUnavailableError

WAITING_MAX = 100
"""Changes of one job that wait for the one before them; a further one is refused."""

CONFIG_RETRY_MS = 500
"""Delay before a write whose outcome is unknown is repeated."""


@dataclass(slots=True)
class _Change:
    """A change that is being written."""

    ticket: int
    config: JobConfig
    """What holds once it is stored."""
    action: WriteConfig
    retry_ms: int | None = None
    is_unsure: bool = False
    """A write of it may have taken effect, or may yet."""


class RunningSettings:
    """Settings of one submission."""

    def __init__(self, submitted: JobConfig, in_force: JobConfig, last_number: int) -> None:
        """`last_number`: highest number of a record of the job."""
        self._submitted = submitted
        self.config = in_force
        """What holds."""
        self._number = last_number
        self._waiting: deque[tuple[int, Mapping[str, SettingValue]]] = deque()
        self._change: _Change | None = None
        self._closed = False

    def next_deadline_ms(self) -> int | None:
        """When `advance` repeats a write."""
        return self._change.retry_ms if self._change is not None else None

    def request(self, ticket: int, settings: Mapping[str, SettingValue]) -> None:
        """Queue a change. Raises StorageUnavailableError when too many wait."""
        if len(self._waiting) >= WAITING_MAX:
            raise StorageUnavailableError(f"{WAITING_MAX} changes of the job's settings wait for storage: try again")
        self._waiting.append((ticket, settings))

    def advance(self, now_ms: int) -> list[Action]:
        """Begin the next write unless one is under way, or repeat one whose outcome is unknown."""
        out: list[Action] = []
        if self._change is not None and self._change.retry_ms is not None and self._change.retry_ms <= now_ms:
            self._change.retry_ms = None
            out.append(self._change.action)
        while self._change is None and self._waiting:
            ticket, settings = self._waiting.popleft()
            try:
                config = apply_settings(self.config, settings)
            except InvalidConfigError as error:
                out.append(Refuse(ticket, error))
                continue
            if config == self.config:
                out.append(Answer(ticket, config))
                continue
            self._change = _Change(ticket, config, self._write(config))
            out.append(self._change.action)
        return out

    def _write(self, config: JobConfig) -> WriteConfig:
        self._number += 1
        changed = {name: getattr(config, name) for name in TUNABLE if getattr(config, name) != getattr(self._submitted, name)}
        return WriteConfig(self._number, changed)

    def ended(self, event: ConfigWritten | ConfigTaken | ConfigFailed, now_ms: int) -> list[Action]:
        """The outcome of a write. Raises InvariantError for one that was not under way."""
        change = self._change
        if self._closed:
            return []
        if change is None or change.action.number != event.number or change.retry_ms is not None:
            raise InvariantError(f"settings {event.number} were not being written")
        match event:
            case ConfigWritten():
                self.config, self._change = change.config, None
                return [Answer(change.ticket, change.config)]
            case ConfigTaken():  # by an older leader that came too late: its record does not count
                change.action = self._write(change.config)
                return [change.action]
            case ConfigFailed():
                change.is_unsure = change.is_unsure or event.ambiguous
                if change.is_unsure:
                    change.retry_ms = now_ms + CONFIG_RETRY_MS
                    return []
                self._change = None
                text = f"the settings could not be stored, and are as they were: {event.message}"
                return [Refuse(change.ticket, StorageUnavailableError(text))]
            case _:
                assert_never(event)

    def close(self, error: HoldfastError) -> list[Action]:
        """The job has ended, or another process leads it: no further change holds. Idempotent."""
        tickets = [ticket for ticket, _ in self._waiting]
        if self._change is not None:
            tickets.insert(0, self._change.ticket)
        self._waiting.clear()
        self._change, self._closed = None, True
        return [Refuse(ticket, error) for ticket in tickets]
