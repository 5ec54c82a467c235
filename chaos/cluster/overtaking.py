"""Watches barriers that overtake: what a subtask does at one, what it restores in flight, and when it takes that.

It wraps the ports of one subtask's channels, and changes nothing in what they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.barriers.alignment.aligner import Aligner, CollectingInFlight
from holdfast.barriers.alignment.gate import Delivered, InputGate
from holdfast.barriers.elements import Batch, Element
from holdfast.barriers.exchange.channels import OutputGate
from holdfast.chaos.checkers.observations import CollectingAborted, InFlightRestored, Overtook, TakenOutOfTurn
from holdfast.operators.worker.deploy import DeployedSubtask

Tell = Callable[..., None]
"""Observes a fact of this type of the subtask, given its own fields; nothing once the process is dead."""


def watch_overtaking(deployed: DeployedSubtask, tell: Tell) -> None:
    """Watch all channels of a subtask."""
    gate = deployed.gate
    if gate is not None:
        _watch_handler(deployed, gate, tell)
        _Inherited(gate, tell)
    for output in deployed.outputs:
        _watch_output(output, tell)


def rows_of(batch: Batch) -> tuple[tuple[Any, ...], ...]:
    """Rows as values of the columns, and the timestamp if there is one."""
    columns: list[Sequence[Any]] = [column.to_pylist() for column in batch.columns().columns]
    if batch.timestamps is not None:
        columns.append(batch.timestamps.tolist())
    return tuple(zip(*columns, strict=True))


def _watch_handler(deployed: DeployedSubtask, gate: InputGate, tell: Tell) -> None:
    handler: Any = gate._handler
    if not isinstance(handler, Aligner):
        return
    overtake, abandon = handler._overtake, handler._abandon

    def overtakes(barrier: Any, now_ms: int, wall_ms: int) -> Any:
        actions = overtake(barrier, now_ms, wall_ms)
        if isinstance(handler._state, CollectingInFlight) and handler._state.barrier.checkpoint_id == barrier.checkpoint_id:
            in_hand = any(isinstance(element, Batch) and element.num_rows for _, element in deployed.subtask._input.in_hand())
            tell(Overtook, barrier.checkpoint_id, "input", bool(barrier.aligned_timeout_ms), in_hand, any(gate._queued_restored))
        return actions

    def abandons(why: Any) -> Any:
        if isinstance(handler._state, CollectingInFlight):
            tell(CollectingAborted, handler._state.barrier.checkpoint_id)
        return abandon(why)

    vars(handler).update(_overtake=overtakes, _abandon=abandons)


def _watch_output(output: OutputGate, tell: Tell) -> None:
    let_overtake, overtake_due = output.let_overtake, output.overtake_due
    at_once = [False]

    def lets(checkpoint_id: int, due_ms: int, *, now_ms: int) -> None:
        at_once[0] = True
        let_overtake(checkpoint_id, due_ms, now_ms=now_ms)
        at_once[0] = False

    def due(now_ms: int) -> None:
        aging = output._aging
        overtake_due(now_ms)
        if aging is not None and output._aging is None and output._overtaken is not None and output._overtaken[1]:
            tell(Overtook, aging[0], "output", not at_once[0], False, False)

    vars(output).update(let_overtake=lets, overtake_due=due)


class _Inherited:
    """What a gate restores, and in which order it hands that out."""

    def __init__(self, gate: InputGate, tell: Tell) -> None:
        self._tell = tell
        self._waiting: dict[int, deque[Batch]] = {}
        self._restore, self._poll = gate.restore, gate.poll
        vars(gate).update(restore=self.restore, poll=self.poll)

    def restore(self, channel: int, elements: Sequence[Element]) -> None:
        batches = [element for element in elements if isinstance(element, Batch) and element.num_rows]
        if batches:
            self._waiting.setdefault(channel, deque()).extend(batches)
        events = sum(not isinstance(element, Batch) for element in elements)
        self._tell(InFlightRestored, channel, tuple(row for batch in batches for row in rows_of(batch)), events)
        self._restore(channel, elements)

    def poll(self, **clocks: Any) -> Any:
        item = self._poll(**clocks)
        if self._waiting and isinstance(item, Delivered) and isinstance(item.element, Batch) and item.element.num_rows:
            waiting = self._waiting.get(item.channel)
            if waiting and waiting[0] is item.element:
                waiting.popleft()
                if not waiting:
                    del self._waiting[item.channel]
            else:
                self._tell(TakenOutOfTurn, item.channel, sum(map(len, self._waiting.values())))
                self._waiting.clear()
        return item
