"""The simulated disk with a switch: the power fails after so many calls, or a kind of call always fails."""

from __future__ import annotations

import os
import random

from holdfast.chaos.sim.disk import SimDisk


class PowerCut(BaseException):
    """The machine is off; no later call does anything."""


class CrashFileSystem(SimDisk):
    """`calls_left`: calls until the power fails; `fail`: errors by call name, raised each time. Writes are short."""

    def __init__(self, calls_left: int | None = None, write_max: int = 5) -> None:
        super().__init__(before_call=self._call)
        self.calls_left = calls_left
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self._write_max = write_max

    def lose_power(self, seed: int) -> None:
        """Switch off and on again: what was not synced survives in part, by the seed."""
        self.calls_left = None
        self.power_loss(random.Random(seed))

    def _call(self, name: str, path: str, size: int) -> int:
        if self.calls_left is not None:
            if self.calls_left <= 0:
                raise PowerCut
            self.calls_left -= 1
        self.calls.append(name)
        if name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]), path)
        return min(size, self._write_max)
