"""A task and its gate, written from the rules alone: barriers that overtake, that time out, that wait behind restored data.

One list of all that waits, in arrival order, scanned from its start for each thing that is done. Plain and slow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass
class Event:
    """Something that comes on a channel, or is done to a task."""

    kind: str
    """On a channel: record | watermark | marker | barrier | cancel | end | restored (a record, before all others). Else: notice |
    call | return | pass | jump."""
    channel: int = 0
    number: int = 0
    """Of a record, a watermark, a checkpoint; milliseconds that pass; milliseconds by which the wall clock is set."""
    timeout_ms: int | None = None
    """Of a barrier: the age at which it may overtake; None: it may not."""

    @property
    def token(self) -> str:
        letter = "abcd"[self.channel]
        signs = {"record": "", "restored": "^", "watermark": "W", "marker": "M", "end": "E"}
        return f"{signs[self.kind]}{letter}{self.number if self.kind != 'end' else ''}"


IN_FLIGHT = ("record", "restored", "watermark")


@dataclass
class ReferenceTask:
    """`created_ms`: of each id, by the wall clock. Inside a call nothing is looked at, and no timer fires."""

    channels: int
    created_ms: dict[int, int]
    after_finish: bool
    overtakable: bool
    now_ms: int = 0
    wall_ms: int = 0
    is_calling: bool = False
    trace: list[str] = field(default_factory=list)
    stored: dict[int, list[list[str]]] = field(default_factory=dict)
    """Checkpoint id -> in flight, channel by channel."""

    def __post_init__(self) -> None:
        self.waiting: list[Event] = []
        self.open = set(range(self.channels))
        self.newest = self.current = 0
        self.is_collecting = False
        """The barrier of the current id has overtaken."""
        self.awaited: set[int] = set()
        self.blocked: set[int] = set()
        self.collected: list[list[str]] = []
        self.uncollected: set[int] = set()
        """Channels behind whose barrier, or end, we are."""
        self.arrivals: list[Event] = []
        """Barriers and ends that are to be counted before anything is read."""
        self.ends_seen: set[int] = set()
        self.known: dict[int, int] = {}
        """Id -> age at which it overtakes, of barriers that may and have not."""
        self.due_ms: dict[int, int] = {}
        self.noticed: set[int] = set()

    # ------------------------------------------------------------------------------------------------ what is done to it

    def do(self, event: Event) -> None:
        match event.kind:
            case "call" | "return":
                self.is_calling = event.kind == "call"
            case "pass":
                self._pass(event.number)
            case "jump":
                self.wall_ms += event.number
            case "notice":
                self._notice(event.number)
            case _:
                self._come(event)
        if not self.is_calling and event.kind != "restored":
            self._run()

    def _pass(self, ms: int) -> None:
        """An idle task wakes up when a barrier becomes old enough."""
        end_ms = self.now_ms + ms
        while not self.is_calling:
            self._is_urgent()
            next_ms = min((self.due_ms[number] for number in self.known), default=end_ms + 1)
            if next_ms > end_ms:
                break
            self.wall_ms += next_ms - self.now_ms
            self.now_ms = next_ms
            self._run()
        self.wall_ms += end_ms - self.now_ms
        self.now_ms = end_ms

    def _notice(self, number: int) -> None:
        if number == self.current:
            self._give_up("notified")
        elif number > self.newest:
            self.noticed.add(number)

    def _come(self, event: Event) -> None:
        mine = [each for each in self.waiting if each.channel == event.channel]
        if self.is_collecting and event.channel in self.awaited - self.uncollected:
            if event.kind == "barrier" and event.number == self.current:
                self._is_behind(event)
                return
            if event.kind == "end" and mine:
                self._is_behind(event)
            elif event.kind in IN_FLIGHT:
                self.collected[event.channel].append(event.token)
        if event.kind == "barrier" and event.timeout_ms is not None and self.overtakable:
            said = self.known.setdefault(event.number, event.timeout_ms)
            if event.timeout_ms == 0 and said:  # it has overtaken upstream
                self.known[event.number] = 0
                self.due_ms.pop(event.number, None)
        if event.kind == "watermark" and mine and mine[-1].kind == "watermark":
            mine[-1].number = event.number
        else:
            self.waiting.append(replace(event))

    def _is_behind(self, event: Event) -> None:
        self.uncollected.add(event.channel)
        self.arrivals.append(event)

    # ---------------------------------------------------------------------------------------------------- what it does

    def _run(self) -> None:
        while True:
            while self._is_urgent():
                self._count_arrivals()
                if due := self._due():
                    del self.known[due[0]], self.due_ms[due[0]]  # a barrier of the same id that comes later has its own time
                    self._overtake(due[0])
                    self._count_arrivals()
            event = next((each for each in self.waiting if each.channel not in self.blocked), None)
            if event is None:
                return
            self.waiting = [each for each in self.waiting if each is not event]
            self._take(event)

    def _is_urgent(self) -> bool:
        if self.is_collecting:
            first = {each.channel: each.kind for each in reversed(self.waiting)}
            ends = {channel for channel in self.awaited - self.uncollected if first.get(channel) == "end"}
            for channel in sorted(ends & self.ends_seen):  # it could have been read meanwhile, and was not
                self._is_behind(Event("end", channel))
            self.ends_seen = ends
            if self.arrivals:
                return True
        return bool(self._due())

    def _due(self) -> list[int]:
        """Ids whose barrier is old enough; of one that is looked at for the first time the wall clock tells its age."""
        for number in self.known:
            age_ms = max(0, self.wall_ms - self.created_ms[number])
            self.due_ms.setdefault(number, self.now_ms + max(0, self.known[number] - age_ms))
        return sorted(number for number in self.known if self.due_ms[number] <= self.now_ms)

    def _count_arrivals(self) -> None:
        while self.is_collecting and self.arrivals:
            event = self.arrivals.pop(0)
            if event.kind == "barrier" or self.after_finish:
                self._arrived(event.channel)

    def _take(self, event: Event) -> None:
        match event.kind:
            case "barrier":
                if event.number == self.current:
                    self._arrived(event.channel)
                elif self._begin(event.number):
                    self.is_collecting, self.awaited = False, set(self.open)
                    self._arrived(event.channel)
            case "cancel":
                if event.number == self.current:
                    self._give_up("cancelled")
                elif event.number > self.newest:
                    self._begin(event.number, "cancelled")
            case "end":
                self.trace.append(event.token)
                self.open.discard(event.channel)
                if self.current and not self.after_finish:
                    self._give_up("end-of-input")
                elif self.current:
                    self.awaited.discard(event.channel)
                    self._complete_if_all()
            case _:
                self.trace.append(event.token)

    def _begin(self, number: int, dead: str = "") -> bool:
        """An id comes for the first time: whether it begins."""
        if number <= self.newest:
            return False
        if self.current:
            self._give_up("subsumed")
        self.newest = number
        why = "notified" if number in self.noticed else dead
        self.noticed = {each for each in self.noticed if each > number}
        if why:
            self.trace.append(f"[A{number} {why}]")
            self.known.pop(number, None)
            return False
        self.current = number
        return True

    def _overtake(self, number: int) -> None:
        if number != self.current:
            if not self._begin(number):
                return
            self.awaited = set(self.open)
        elif self.is_collecting:
            return
        self.trace.append(f"[U{number}]")
        self.known.pop(number, None)
        self.is_collecting = True
        self.blocked.clear()
        self.collected = [[] for _ in range(self.channels)]
        self.uncollected, self.arrivals, self.ends_seen = set(), [], set()
        for channel in sorted(self.awaited):
            for each in [each for each in self.waiting if each.channel == channel]:
                if each.kind == "barrier" and each.number == number:
                    self.waiting = [other for other in self.waiting if other is not each]
                    self._is_behind(each)
                    break
                if each.kind == "end":
                    self._is_behind(each)
                    break
                if each.kind in IN_FLIGHT:
                    self.collected[channel].append(each.token)

    def _arrived(self, channel: int) -> None:
        self.awaited.discard(channel)
        if not self.is_collecting:
            self.blocked.add(channel)
        self._complete_if_all()

    def _complete_if_all(self) -> None:
        if self.awaited:
            return
        if self.is_collecting:
            self.trace.append(f"[C{self.current}]")
            self.stored[self.current] = self.collected
        else:
            self.trace.append(f"[T{self.current}]")
        self._over()

    def _give_up(self, why: str) -> None:
        self.trace.append(f"[A{self.current} {why}]")
        self._over()

    def _over(self) -> None:
        self.known.pop(self.current, None)
        self.current, self.is_collecting = 0, False
        self.blocked.clear()
        self.arrivals, self.ends_seen, self.collected = [], set(), []
