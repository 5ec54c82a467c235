"""A key that leaves keyed state at the barrier of one checkpoint: in its trigger, then in its barriers.

Every subtask of the named operators erases it at its cut and stores canonical tables, so that it is one moment of the stream for
all of them. It travels and is never stored: a checkpoint's claim says that there is one, and no more; no text shows the key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from holdfast.statebackends.errors import InvalidConfigError

EVERY_STATE = "*"
"""In place of a state's name: all keyed states and timers of its operator."""
KEY_CHARS_MAX = 4_096
NAME_CHARS_MAX = 256
STATES_MAX = 8
"""An event in a channel is small; what is more is erased by several checkpoints."""


_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]


class Erasure(msgspec.Struct, frozen=True):
    key: Annotated[str, msgspec.Meta(max_length=KEY_CHARS_MAX)]
    """As a text: see statebackends/serialization/key_texts.py. Where it can't be one of an operator's keys, nothing is erased."""
    states: Annotated[tuple[tuple[_Name, _Name], ...], msgspec.Meta(max_length=STATES_MAX)]
    """(uid, state)."""

    def __repr__(self) -> str:
        return f"Erasure({', '.join(f'{uid}/{state}' for uid, state in self.states)})"  # logs and traces may show it

    @staticmethod
    def of(states: Sequence[tuple[str, str]], key: str) -> Erasure:
        """Raises InvalidConfigError for more than an event can carry; it does not repeat the key."""
        names = [name for state in states for name in state]
        if not 1 <= len(states) <= STATES_MAX or max(map(len, names)) > NAME_CHARS_MAX:
            message = f"of a running job 1..{STATES_MAX} states are named at a time, each with at most {NAME_CHARS_MAX} characters"
            raise InvalidConfigError(message, setting="state")
        if len(key) > KEY_CHARS_MAX or any("\ud800" <= each <= "\udfff" for each in key):
            message = f"a running job forgets keys of at most {KEY_CHARS_MAX} characters, none of them half of a pair"
            raise InvalidConfigError(message, setting="key")
        return Erasure(key, tuple(states))

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(uid for uid, _ in self.states)

    def states_of(self, uid: str) -> frozenset[str] | None:
        """States of an operator that is named; None: all of them, and its timers."""
        names = frozenset(name for owner, name in self.states if owner == uid)
        return None if EVERY_STATE in names else names
