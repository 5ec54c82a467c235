"""Two checkpoints of one operator, the second an increment upon the first.

Never change what is here: the snapshots are kept for ever."""

from __future__ import annotations

from holdfast.statebackends.state import ListStateDescriptor, MapStateDescriptor, ValueStateDescriptor
from tests.golden.model import Contents, Held

COUNT = ValueStateDescriptor("count", int)
SEEN = ListStateDescriptor("seen", str)
TAGS = MapStateDescriptor("tags", str, int)


def _totals(count: dict[str, int], seen: dict[str, list[str]], tags: dict[str, dict[str, int]], timers: list[str]) -> Contents:
    return Contents(
        uid="totals",
        key_type="utf8",
        held=(
            Held(COUNT, [(key, b"", value) for key, value in count.items()], "int"),
            Held(SEEN, [(key, b"", value) for key, value in seen.items()], "str"),
            Held(TAGS, [(key, b"", value) for key, value in tags.items()], "map<str,int>"),
        ),
        timers={"_event_time_timers": [(key, b"", 1_000) for key in timers]},
    )


_KEYS = [f"user-{number}" for number in range(120)]

BEFORE = (
    _totals(
        count={key: number for number, key in enumerate(_KEYS)},
        seen={key: [key, "x"] for key in _KEYS[::4]},
        tags={key: {"t": 1, "u": number} for number, key in enumerate(_KEYS[::5])},
        timers=_KEYS[:6],
    ),
)
AFTER = (
    _totals(
        # every tenth is gone, every third has changed, and two are new
        count={key: -number if number % 3 == 0 else number for number, key in enumerate(_KEYS) if number % 10}
        | {"new-1": 1, "new-2": 2},
        seen={key: [key, "x", "y"] if number % 2 else [key, "x"] for number, key in enumerate(_KEYS[::4]) if number != 4},
        tags={
            key: {"t": 1, "v": 3} if number % 2 else {"t": 1, "u": number} for number, key in enumerate(_KEYS[::5]) if number != 3
        },
        timers=_KEYS[3:9],
    ),
)
