"""A gate written from section 0 of the scenarios alone: one list of waiting events, scanned from its start after every step."""

from __future__ import annotations

from tests.scenarios.notation import Event, channel_letter


class ReferenceGate:
    """Slow and plain. `trace` is what the real gate must give, in the same order."""

    def __init__(self, channel_count: int, *, after_finish: bool) -> None:
        self.after_finish = after_finish
        self.open = set(range(channel_count))
        self.arrived: set[int] = set()
        self.awaited: set[int] = set()
        self.current = 0
        self.newest = 0
        self.waiting: list[Event] = []
        self.trace: list[str] = []

    def offer(self, event: Event) -> None:
        self.waiting.append(event)
        while (ready := next((e for e in self.waiting if e.channel not in self.arrived), None)) is not None:
            # The first equal event is the one that was found, whether or not it is the same object.
            self.waiting.remove(ready)
            self._take(ready)

    def _take(self, event: Event) -> None:
        letter = channel_letter(event.channel)
        if event.kind == "record":
            self.trace.append(f"{letter}{event.number}")
        elif event.kind == "barrier":
            self._barrier(event)
        elif event.kind == "cancel":
            self._cancel(event)
        else:
            self.trace.append(f"E.{letter}")
            self.open.discard(event.channel)
            if self.current and not self.after_finish:
                self._abort("end of input")
            elif self.current:
                self._complete_if_all()

    def _barrier(self, event: Event) -> None:
        if event.number < self.newest or (event.number == self.newest and not self.current):
            return
        if event.number > self.newest:
            if self.current:
                self._abort("subsumed")
            self.current = self.newest = event.number
            self.awaited = set(self.open)
        self.arrived.add(event.channel)
        self._complete_if_all()

    def _cancel(self, event: Event) -> None:
        if event.number == self.current:
            self._abort("cancelled")
        elif event.number > self.newest:
            if self.current:
                self._abort("subsumed")
            self.newest = event.number
            self.trace.append(f"[A{event.number} cancelled]")

    def _abort(self, why: str) -> None:
        self.trace.append(f"[A{self.current} {why}]")
        self.current = 0
        self.arrived.clear()

    def _complete_if_all(self) -> None:
        if self.awaited & self.open <= self.arrived:
            self.trace.append(f"[T{self.current}]")
            self.current = 0
            self.arrived.clear()
