"""SHELL: keeps Python's cyclic collector from stopping the process for long.

A full collection looks at every object that may be part of a cycle, while no other thread runs. Of a coordinator that serves
nothing yet these are some hundred thousand, of its modules, routes and types: 150 ms, in which no acknowledgement is answered, and
a flood of requests causes one every few seconds. None of them ever becomes garbage: they are set aside, and the collector looks at
what came since. What a collection has just left over has no garbage in it, and most of what first requests build stays, too."""

from __future__ import annotations

import gc
import threading

THRESHOLD = (50_000, 10, 10)
"""As of gc.set_threshold. By Python's default of 700 objects a checkpoint of 10,000 subtasks is looked at a hundred times while its
acknowledgements come, and none of it is garbage. Cycles, such as those of exceptions, may take some 20 MiB before
they are found."""

FREEZES_MAX = 3
"""Full collections behind the start whose rest is set aside as well: what jobs leave behind later must be found for ever."""


class HeapSettler:
    """Sets aside what a process that serves has at its start. For a process of its own alone: never for one that embeds a
    coordinator in a user's program."""

    def __init__(self) -> None:
        self._left = FREEZES_MAX
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Collect once, now, before anybody waits."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLD)
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, facts: dict[str, int]) -> None:
        if phase != "stop" or facts["generation"] != 2:
            return
        gc.freeze()
        with self._lock:
            self._left -= 1
            if self._left == 0:
                gc.callbacks.remove(self._collected)
