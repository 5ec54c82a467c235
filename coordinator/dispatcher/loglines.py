"""CORE: texts of others, made fit for a line of the log: whatever is not printable is escaped, and what is long is clipped.

A coordinator inside a driver speaks to the handlers of somebody else, which write a text as they get it: so it is made fit where a
line is worded, and not by a formatter."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.barriers import messages

MESSAGE_CHARACTERS_MAX = 4_096
"""Of a line's message, and of each of its facts; of a traceback ten times as many."""

TEXT_CHARACTERS_MAX = 3_072
"""Of one text of somebody else's in a message: what we say around it has room, so that the message is clipped once."""

_CLIPPED = "... (clipped)"


def printable(text: str, characters_max: int = MESSAGE_CHARACTERS_MAX) -> str:
    """The text on one line of at most so many characters: what is not printable as Python escapes it, clipped.

    A line that went through here once stays as it is. `characters_max` is at least 16."""
    found = messages.printable(text[: characters_max + 1])
    return found if len(found) <= characters_max else found[: characters_max - len(_CLIPPED)] + _CLIPPED


def printable_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Facts of a line by name, each text of them fit for one."""
    return {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}
