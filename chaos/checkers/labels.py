"""Labels (I45, docs/invariants.md): a checkpoint that got one, as its user was told, is whole until it is taken back.

What a label keeps is seen in the store alone: its claim, its decision, and that its folder was not deleted."""

from __future__ import annotations

from typing import Any, ClassVar

from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.observations import Labelled, Lifecycle, Observation
from holdfast.statebackends.layout import JobPaths


class LabelsChecker(Checker):
    """Looks at what is labelled now and then, and at the end."""

    invariants: ClassVar[tuple[str, ...]] = ("I45",)
    hears: ClassVar[tuple[type, ...]] = (Labelled, Lifecycle)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._kept: dict[int, int] = {}
        """Id -> when its label was given, ms."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Labelled(keeps=True):
                self._kept.setdefault(observation.checkpoint_id, observation.at_ms)
            case Labelled():
                self._kept.pop(observation.checkpoint_id, None)
            case _:
                pass

    def look(self) -> None:
        paths = JobPaths(self.world.job_id)
        for number, at_ms in sorted(self._kept.items()):
            gone = [path for path in (paths.claim(number), paths.decision(number)) if self.world.state.size(path) is None]
            if gone:
                del self._kept[number]
                self.report("I45", f"checkpoint {number} has had a label since {at_ms} ms, and {gone[0]} was deleted")

    def at_end(self) -> None:
        self.look()
