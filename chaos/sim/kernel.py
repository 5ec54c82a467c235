"""The kernel of a run: virtual time, scheduled events and their processes, random numbers, and the trace.

Time jumps from event to event; events of one moment come in an order drawn from the seed. An event belongs to a process or to none
(the store, the network): events of a dead process never happen, those of a paused one wait.
Each stream of random numbers is derived from the root seed by its name. A fault less in a plan, or one more number of a stream,
changes no other stream, which makes a failing seed minimisable. The trace has one line an event, equal bytes for equal seeds."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from holdfast.chaos.pipelines.modules import UserModules, running


class Stream(random.Random):
    """One stream of random numbers."""

    def between(self, low: int, high: int) -> int:
        """Equal to randrange(low, high), low < high, number for number, in half the time: most events draw one."""
        width = high - low
        bits = width.bit_length()
        drawn = self.getrandbits(bits)
        while drawn >= width:
            drawn = self.getrandbits(bits)
        return low + drawn


class Streams:
    """Named random streams of one seed. The same (seed, name) gives the same numbers in every process."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, Stream] = {}

    def of(self, name: str) -> Stream:
        """The stream of a name; a further call returns it where it is."""
        stream = self._streams.get(name)
        if stream is None:
            digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=16).digest()
            stream = self._streams[name] = Stream(int.from_bytes(digest, "big"))
        return stream


Entry = tuple[int, str, str, str]
"""(time in us, actor, event, details)."""


class Trace:
    """Events of a run, kept as tuples and formatted on demand."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, actor: str, event: str, details: str = "") -> None:
        """`details` must not differ between two machines: no addresses, no real times or paths."""
        self._entries.append((self._now_us(), actor, event, details.replace("\n", " | ") if "\n" in details else details))

    def lines(self, last: int | None = None) -> list[str]:
        """The whole trace, or its last events, one aligned line each."""
        entries = self._entries if last is None else self._entries[-last:]
        return [
            ("%12.3f  %-16s %-22s %s" % (time_us / 1000, actor, event, details)).rstrip()  # noqa: UP031 - twice as fast
            for time_us, actor, event, details in entries
        ]

    def digest(self) -> str:
        """Digest of all lines."""
        return hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=16).hexdigest()


Act = Callable[[], None]


@dataclass(eq=False, slots=True)
class Process:
    """A simulated operating system process."""

    name: str
    """`worker-1.3` is the third process in slot 1; others are `coordinator-2`, `driver-1`."""
    role: str
    alive: bool = True
    paused: bool = False
    last_point: str = "start"
    """Last point that it passed, as a fault would name its death now."""
    phase: str = ""
    """Prefix of its points: a coordinator is `recovering` until it has tried to lead every job."""
    wall_offset_ms: int = 0
    """Offset of its wall clock from virtual time."""
    modules: UserModules | None = None
    """The user's code in this process; None: it runs none."""
    waiting: list[Act] = field(default_factory=list)
    """Events that came due while it was paused."""


class Kernel:
    """The schedule. `current` is the process of the running event; None for an event without one."""

    def __init__(self, streams: Streams, trace: Trace) -> None:
        self.streams = streams
        self.trace = trace
        self.now_us = 0
        self.steps = 0
        self.opaque = False
        """The trace omits the content of messages and files: RocksDB's files hold the time of day, as do their checksums."""
        self.power_cuts = 0
        """Losses of power so far: what was on its way at one never arrives."""
        self.current: Process | None = None
        self._order: Callable[[], float] = streams.of("order").random
        self._events: list[tuple[int, float, int, Process | None, Act]] = []
        self._numbers = 0

    @property
    def now_ms(self) -> int:
        return self.now_us // 1000

    def after(self, delay_us: int, act: Act, process: Process | None = None) -> None:
        """Schedule `act` after a delay, >= 0 us."""
        self._numbers += 1
        due_us = self.now_us + delay_us if delay_us > 0 else self.now_us
        heappush(self._events, (due_us, self._order(), self._numbers, process, act))

    def at_ms(self, at_ms: int, act: Act, process: Process | None = None) -> None:
        """Schedule `act` at a time, or now if that is over."""
        self.after(at_ms * 1000 - self.now_us, act, process)

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._events:
            return False
        self.now_us, _, _, process, act = heappop(self._events)
        self.steps += 1
        if process is None or (process.alive and not process.paused and process.modules is None):
            # as run_as: a thousand events a run come by here
            before, self.current = self.current, process
            try:
                act()
            finally:
                self.current = before
        else:
            self.run_as(process, act)
        return True

    def run_as(self, process: Process | None, act: Act) -> None:
        """Run an act as a process: never if it is dead, later if it is paused."""
        if process is not None:
            if not process.alive:
                return
            if process.paused:
                process.waiting.append(act)
                return
        before, self.current = self.current, process
        try:
            if process is None or process.modules is None:
                act()
            else:
                with running(process.modules):
                    act()
        finally:
            self.current = before

    def kill(self, process: Process) -> None:
        """End a process: none of its events runs any more."""
        process.alive = False
        process.waiting.clear()

    def pause(self, process: Process) -> None:
        process.paused = True

    def resume(self, process: Process) -> None:
        """Run the events that came due meanwhile, in their order."""
        if not process.paused:
            return
        process.paused = False
        waiting, process.waiting = process.waiting, []
        for delay_us, act in enumerate(waiting):  # one after the other: lines of a stream must not overtake each other
            self.after(delay_us, act, process)


class ProcessClock:
    """Both clocks and the stopwatch of one process (`holdfast.operators.task.context.Clock`, and the coordinator's)."""

    def __init__(self, kernel: Kernel, process: Process, epoch_ms: int = 1_700_000_000_000) -> None:
        self._kernel = kernel
        self._process = process
        self._epoch_ms = epoch_ms
        self.spent_us = 0
        """Time used up by the running event: slow user code moves the stopwatch, not the schedule."""

    def monotonic_ms(self) -> int:
        return (self._kernel.now_us + self.spent_us) // 1000

    def wall_ms(self) -> int:
        return self._epoch_ms + self.monotonic_ms() + self._process.wall_offset_ms

    def seconds(self) -> float:
        return (self._kernel.now_us + self.spent_us) / 1_000_000
