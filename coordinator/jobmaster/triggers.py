"""Trigger ids of user requests and what became of them. Bounded; a repeated id is the same request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.checkpoints.events import CompleteRequest
from holdfast.coordinator.views import TriggerView

TRIGGERS_MAX = 1_000


class TriggerRegister:
    """The oldest finished trigger is forgotten when the bound is passed."""

    def __init__(self, known: Iterable[TriggerView] = ()) -> None:
        self._triggers: OrderedDict[str, TriggerView] = OrderedDict((view.trigger_id, view) for view in known)
        self._cancel_after: set[str] = set()

    def get(self, trigger_id: str) -> TriggerView | None:
        return self._triggers.get(trigger_id)

    def begin(self, trigger_id: str, kind: CheckpointKind, *, cancel: bool = False) -> bool:
        """Note a request; False if the id is known: then nothing is to be done."""
        if trigger_id in self._triggers:
            return False
        self._triggers[trigger_id] = TriggerView(trigger_id, kind, in_progress=True)
        if cancel:
            self._cancel_after.add(trigger_id)
        self._forget()
        return True

    def reopen(self, trigger_id: str) -> None:
        """What it asks for is tried again: it has no outcome yet."""
        view = self._triggers.get(trigger_id)
        if view is not None:
            self._triggers[trigger_id] = TriggerView(trigger_id, view.kind, in_progress=True)

    def end(self, outcome: CompleteRequest) -> bool:
        """Note an outcome; True if the job is to be cancelled now."""
        view = self._triggers.get(outcome.request.trigger_id)
        if view is None:
            return False
        failed = outcome.failure is not None
        self._triggers[view.trigger_id] = replace(
            view,
            in_progress=False,
            checkpoint_id=outcome.checkpoint_id,
            location=outcome.completed.folder if outcome.completed is not None else None,
            failure=(outcome.message or outcome.failure.value) if outcome.failure is not None else None,
            failure_reason=outcome.failure.value if outcome.failure is not None else None,
            tries=outcome.tries,
        )
        wanted = view.trigger_id in self._cancel_after
        self._cancel_after.discard(view.trigger_id)
        return wanted and not failed

    def savepoints(self) -> frozenset[str]:
        """Folders of the savepoints that were taken."""
        return frozenset(view.location for view in self._triggers.values() if view.kind.is_savepoint and view.location is not None)

    def _forget(self) -> None:
        for trigger_id in list(self._triggers):
            if len(self._triggers) <= TRIGGERS_MAX:
                return
            if not self._triggers[trigger_id].in_progress:
                del self._triggers[trigger_id]
