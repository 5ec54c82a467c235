"""Values of one state by slot, in pages of a list each: the working state behind functions of rows.

A barrier freezes in O(pages): the snapshot takes the pages as they are, by reference, and the first write to one behind it makes a
copy, so that a pool thread reads what the barrier found. There are no layers: a read is two subscripts whatever snapshots are in
flight. Marks say which slots were written since the last barrier. A page without marks may be shared with a snapshot; a value whose
slot has none may be, too, and is copied before it is given out where it can be changed in place.

It does not know which key has which slot: that is for key_slots.py. For the loop thread only, but for `FrozenPages`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress, islice, pairwise, repeat
from operator import is_
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from holdfast.statebackends.columnar.key_index import Slots
from holdfast.statebackends.heap.state_table import MISSING, DirtyKeys, FrozenDirtyKeys

PAGE_BITS = 8
PAGE_SLOTS = 1 << PAGE_BITS
"""A copy of a page takes less than a microsecond. Of a million keys written in any order, each page is copied once a barrier."""
PLACE_MASK = PAGE_SLOTS - 1

WRITTEN_MAX = 4
"""Barriers whose written slots are remembered for columns that a snapshot has kept. More come between two snapshots that complete
only where many are aborted."""

Flags: TypeAlias = npt.NDArray[np.uint8]
"""flags[page, place] of some pages: 1 for what is meant."""
Marks = bytearray | None
_NO_MARKS = bytes(PAGE_SLOTS)


class DirtySlots(Collection[int]):
    """Slots that were written between two barriers."""

    __slots__ = ("_count", "_marks", "_slots")

    def __init__(self, marks: Sequence[Marks], slots: Slots | None = None) -> None:
        """`slots`, ascending, in place of the marks of pages."""
        self._marks = marks
        self._slots = slots
        self._count = sum([page.count(1) for page in marks if page is not None]) if slots is None else len(slots)

    def add_to(self, flags: Flags, first: int) -> None:
        """Set flags[page - first, place] of those that were written, in as many pages as there are flags for. Only of marks."""
        pages = self._marks[first : first + len(flags)]
        if any(page is not None for page in pages):
            found = np.frombuffer(b"".join([_NO_MARKS if page is None else page for page in pages]), np.uint8)
            flags[: len(pages)] |= found.reshape(-1, PAGE_SLOTS)

    def slots(self) -> Slots:
        """Ascending. Loop or pool thread."""
        if self._slots is None:
            self._slots = marked_slots(self._marks)
        return self._slots

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self.slots().tolist())

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and bool((self.slots() == slot).any())


def marked_slots(marks: Sequence[Marks]) -> Slots:
    """Slots with a mark, ascending."""
    pages = [page for page, some in enumerate(marks) if some is not None]
    if not pages:
        return np.empty(0, np.int64)
    flags = np.frombuffer(b"".join([some for some in marks if some is not None]), np.uint8).reshape(-1, PAGE_SLOTS)
    rows, places = np.nonzero(flags)
    slots: Slots = np.array(pages, np.int64)[rows] * PAGE_SLOTS + places
    return slots


class SlotPages:
    """The values of one state. `pages` and `marks` stay the same lists for good: state objects hold them."""

    __slots__ = (
        "_barriers", "_dirty", "_emptied", "_frozen", "_full", "_known", "_pins", "_written",
        "marks", "numbering", "pages", "pinned", "remembers_written",
    )

    def __init__(self) -> None:
        self.pages: list[list[Any]] = []
        """pages[slot >> PAGE_BITS][slot & PLACE_MASK]: a value, or MISSING."""
        self.marks: list[Marks] = []
        """Of each page its slots that were written since the last barrier; None: the page must be `own`ed before it is written."""
        self.pinned = False
        """Some snapshot reads frozen pages."""
        self._pins = 0
        self._dirty: DirtyKeys | None = None
        self._frozen: DirtySlots | None = None  # what the last barrier found written, until it is noted
        self._known = 0  # slots that there were at the last barrier
        self._barriers = 0
        self._full = bytearray()  # 1: a snapshot found that all slots of the page have a value, and none was removed since
        self._emptied: list[int] = []  # barriers that there were when the page was made, or a value of it was removed last
        self.numbering = 0
        """How often slots were numbered anew."""
        self.remembers_written = False
        """Whether a frozen view can tell what was written since one of the last barriers. It takes a byte a slot and barrier."""
        self._written: deque[tuple[int, DirtySlots]] = deque(maxlen=WRITTEN_MAX)  # what each barrier found written, oldest first

    def reserve(self, count: int) -> None:
        """Make pages for so many slots."""
        for _ in range(len(self.pages), (count + PLACE_MASK) >> PAGE_BITS):
            self.pages.append([MISSING] * PAGE_SLOTS)
            self.marks.append(None)
            self._full.append(0)
            self._emptied.append(self._barriers)  # what a snapshot in flight finds is told of an older page of this number

    def own(self, page: int) -> bytearray:
        """The marks of a page that is about to be written for the first time since a barrier."""
        if self.pinned:
            self.pages[page] = self.pages[page].copy()
        marks = self.marks[page] = bytearray(PAGE_SLOTS)
        return marks

    def get(self, slot: int) -> Any:
        return self.pages[slot >> PAGE_BITS][slot & PLACE_MASK]

    def put(self, slot: int, value: Any) -> None:
        """`value` may be MISSING."""
        page = slot >> PAGE_BITS
        marks = self.marks[page] or self.own(page)
        marks[slot & PLACE_MASK] = 1
        self.pages[page][slot & PLACE_MASK] = value
        if value is MISSING:
            self._full[page] = 0
            self._emptied[page] = self._barriers

    def is_marked(self, slot: int) -> bool:
        """Whether it was written since the last barrier."""
        marks = self.marks[slot >> PAGE_BITS]
        return marks is not None and bool(marks[slot & PLACE_MASK])

    def load(self, slots: Slots, values: Sequence[Any]) -> None:
        """Restored values; no mark is set. Before the first barrier."""
        pages = self.pages
        if len(slots) and slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
            start, stop = int(slots[0]), int(slots[-1]) + 1
            for page in range(start >> PAGE_BITS, (stop + PLACE_MASK) >> PAGE_BITS):
                first, last = max(start, page << PAGE_BITS), min(stop, (page + 1) << PAGE_BITS)
                pages[page][first & PLACE_MASK : last - (page << PAGE_BITS)] = values[first - start : last - start]
            return
        for slot, value in zip(slots.tolist(), values, strict=True):
            pages[slot >> PAGE_BITS][slot & PLACE_MASK] = value

    def merge(self, slots: Slots, values: Sequence[Any]) -> None:
        """As `load`, of lists, or dicts of a map's entries, of which some may be there."""
        pages = self.pages
        for slot, value in zip(slots.tolist(), values, strict=True):
            page, place = pages[slot >> PAGE_BITS], slot & PLACE_MASK
            if page[place] is MISSING:
                page[place] = value
            elif isinstance(value, list):
                page[place].extend(value)
            else:
                page[place].update(value)

    def clear(self) -> None:
        """Forget everything; nothing is written any more."""
        self.pages.clear()
        self.marks.clear()
        self._written.clear()

    def take_over(self, pages: Sequence[list[Any]]) -> None:
        """Begin with pages that others may read, too, who pin them: as behind a barrier."""
        self.pages[:] = pages
        self.marks[:] = [None] * len(pages)
        self._full[:] = bytes(len(pages))
        self._emptied[:] = [self._barriers] * len(pages)

    # ---------------------------------------------------------------------------------------------------------- barriers

    def freeze(self, count: int) -> list[list[Any]]:
        """The pages as they are, which don't change until `release`. `count`: slots that there are."""
        self._close_marks(count)
        self.pin()
        self._barriers += 1
        if self.remembers_written and self._frozen is not None:
            self._written.append((self._barriers, self._frozen))
        return self.pages[:]

    @property
    def written(self) -> tuple[tuple[int, DirtySlots], ...]:
        """(barrier, slots that were written between the one before and it) of the last ones; none without `remembers_written`."""
        return tuple(self._written)

    def pin(self) -> None:
        """Somebody reads the pages as they are, right behind a barrier, until `release`."""
        self._pins += 1
        self.pinned = True

    @property
    def full(self) -> bytes:
        """For each page 1 if it is known that all its slots have a value."""
        return bytes(self._full)

    @property
    def barriers(self) -> int:
        """How many there were."""
        return self._barriers

    def found_full(self, pages: Iterable[int], barrier: int) -> None:
        """Pages of which all slots had a value at the so-manieth barrier."""
        for page in pages:
            if page < len(self._emptied) and self._emptied[page] < barrier:
                self._full[page] = 1

    def release(self) -> None:
        self._pins -= 1
        self.pinned = self._pins > 0

    def _close_marks(self, count: int) -> None:
        self._known = count
        self._frozen = DirtySlots(self.marks[:])
        self.marks[:] = [None] * len(self.marks)

    def track_since(self, base: int, count: int) -> None:
        """As CopyOnWriteStateTable.track_since. `count`: slots that there are."""
        self._close_marks(count)
        self._dirty = DirtyKeys(base)

    def checkpoint_started(self, barrier: int, base: int, count: int) -> FrozenDirtyKeys:
        """As CopyOnWriteStateTable.checkpoint_started; keys are slots. `count`: slots that there are."""
        if self._dirty is None:
            self._dirty = DirtyKeys(barrier)
            return FrozenDirtyKeys(barrier, ())
        return self._dirty.close(barrier, self._frozen or (), base, count)

    # --------------------------------------------------------------------------------------------------------- compaction

    def needed(self, count: int) -> npt.NDArray[np.bool_]:
        """Which of so many slots have a value, or a change that an increment may need. A key that came and went
        since the last barrier has none."""
        needed = present(self.pages, count)
        if self._dirty is not None:
            marked = marked_slots(self.marks)
            needed[marked[marked < self._known]] = True
            for _, slots in self._dirty.epochs:
                if isinstance(slots, DirtySlots):
                    needed[slots.slots()] = True
        return needed

    def keep(self, kept: Slots, numbers: Slots) -> None:
        """Keep some slots, ascending, of which `needed` told all that must be; numbers[slot] is the new number of each."""
        values = [self.pages[slot >> PAGE_BITS][slot & PLACE_MASK] for slot in kept.tolist()]
        marked = numbers[marked_slots(self.marks)]
        self._known = int(np.searchsorted(kept, self._known))
        self.pages[:], self.marks[:], self._emptied = [], [], []
        self._full.clear()
        self._written.clear()
        self.numbering += 1
        self.reserve(len(kept))
        self.load(np.arange(len(kept)), values)
        for slot in marked[marked >= 0].tolist():
            page = slot >> PAGE_BITS
            marks = self.marks[page]
            if marks is None:
                marks = self.marks[page] = bytearray(PAGE_SLOTS)
            marks[slot & PLACE_MASK] = 1
        if self._dirty is not None:
            self._dirty.replace(lambda slots: DirtySlots((), numbers[slots.slots()]) if isinstance(slots, DirtySlots) else slots)


def present(pages: Sequence[Sequence[Any]], count: int) -> npt.NDArray[np.bool_]:
    """Which of the first so many slots have a value. By identity, since a value's own `==` may do anything."""
    missing = b"".join([bytes(map(is_, page, _MISSINGS)) for page in pages])
    found: npt.NDArray[np.bool_] = ~np.frombuffer(missing, np.bool_)[:count]
    return found


_MISSINGS = repeat(MISSING)


GATHERED_MAX = 1 << 10
"""Values up to which a slice of `PagedValues` is a list: so few stay in the processor's cache from the first visit on."""


class PagedValues(Sequence[Any]):
    """All values of some pages, but for some at their end. Nothing is gathered before a few are asked for: visiting a million
    objects for a list of them, and once more to forget it, takes half as long as their conversion."""

    __slots__ = ("_count", "_pages")

    def __init__(self, pages: Sequence[list[Any]], count: int) -> None:
        self._pages = pages
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return islice(chain.from_iterable(self._pages), self._count)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        """A slice from the beginning of a page on is like these if it is long, else a list."""
        if not isinstance(index, slice):
            place = range(self._count)[index]
            return self._pages[place >> PAGE_BITS][place & PLACE_MASK]
        start, stop, step = index.indices(self._count)
        if step != 1 or start & PLACE_MASK:
            return list(self)[index]
        some = PagedValues(self._pages[start >> PAGE_BITS : (stop + PLACE_MASK) >> PAGE_BITS], max(0, stop - start))
        return some if len(some) > GATHERED_MAX else list(some)


class FrozenPages:
    """The pages of one state, and the keys of their slots, as they were at one barrier. For the pool thread, but for `release` and
    `checkpoint_started`."""

    def __init__(self, pages: SlotPages, count: int, keys: Callable[[], Any]) -> None:
        """`count`: slots that there are; `keys` gives their key columns, when it is called."""
        self._live = pages
        self._full = pages.full
        self._found_full: list[int] = []
        self._pages = pages.freeze(count)
        self._written = pages.written
        self.count = count
        self.barrier = pages.barriers
        self.numbering = pages.numbering
        self.keys = keys
        self._changed: FrozenDirtyKeys | None = None

    def checkpoint_started(self, barrier: int, base: int) -> None:
        self._changed = self._live.checkpoint_started(barrier, base, self.count)

    @property
    def complete_from(self) -> int:
        """The lowest base since which all changes are known. Behind `checkpoint_started`."""
        assert self._changed is not None
        return self._changed.complete_from

    def batches(self, slots_max: int, pages: range | None = None) -> Iterator[tuple[Slots, Sequence[Any]]]:
        """(slots, their values), of all slots of some pages (None: all) that have one, from up to `slots_max` slots at a time."""
        step = max(1, slots_max >> PAGE_BITS)
        wanted = range(len(self._pages)) if pages is None else pages
        for first in wanted[::step]:
            some = self._pages[first : min(first + step, wanted.stop)]
            start = first << PAGE_BITS
            count = min(self.count - start, len(some) << PAGE_BITS)
            if count > 0:
                places = self._places(first, some, count)
                values: Sequence[Any] = PagedValues(some, count)
                if len(places) < count:
                    values = list(map(list(values).__getitem__, places.tolist()))
                if values:
                    yield places + start, values

    def _places(self, first: int, pages: Sequence[list[Any]], count: int) -> Slots:
        """Places that have a value, of so many in some pages from page `first` on."""
        unknown = np.flatnonzero(np.frombuffer(self._full, np.uint8)[first : first + len(pages)] == 0)
        if not len(unknown):
            return np.arange(count)
        found = present([pages[page] for page in unknown.tolist()], len(unknown) << PAGE_BITS).reshape(-1, PAGE_SLOTS)
        self._found_full += (unknown[found.all(axis=1)] + first).tolist()
        flags = np.ones((len(pages), PAGE_SLOTS), np.bool_)
        flags[unknown] = found
        return np.flatnonzero(flags.reshape(-1)[:count])

    def written_since(self, barrier: int, pages: range) -> Flags | None:
        """Of some pages the slots that were written since an earlier barrier; None: that is not known any more."""
        since = [slots for number, slots in self._written if number > barrier]
        if len(since) < self.barrier - barrier:
            return None
        flags = np.zeros((len(pages), PAGE_SLOTS), np.uint8)
        for slots in since:
            slots.add_to(flags, pages.start)
        return flags

    def flagged(self, flags: Flags, first: int, values_max: int) -> Iterator[list[Any]]:
        """Values (or MISSING) of the slots that have a flag in the pages from page `first` on, ascending, some `values_max` at a
        time."""
        counts = np.count_nonzero(flags, axis=1)
        pages = np.flatnonzero(counts)
        cuts = np.flatnonzero(np.diff((np.cumsum(counts[pages]) - 1) // values_max)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(pages)]):
            numbers = pages[start:stop]
            values = map(self._pages.__getitem__, (numbers + first).tolist())
            yield list(chain.from_iterable(map(compress, values, map(bytes, flags[numbers]))))

    def changes(self, base: int, slots_max: int) -> Iterator[tuple[Slots, list[Any]]]:
        """(slots, their values or MISSING), of all slots that were written since a base at or above `complete_from`."""
        epochs = () if self._changed is None else self._changed.epochs
        since = [slots.slots() for barrier, slots in epochs if barrier > base and isinstance(slots, DirtySlots)]
        slots: Slots = np.unique(np.concatenate(since)) if since else np.empty(0, np.int64)
        for start in range(0, len(slots), slots_max):
            some = slots[start : start + slots_max]
            yield some, [self._pages[slot >> PAGE_BITS][slot & PLACE_MASK] for slot in some.tolist()]

    def done(self) -> None:
        """Free forgotten changes here instead of on the loop thread."""
        if self._changed is not None:
            self._changed.forgotten.clear()

    def written(self) -> None:
        """All of it was read: free what was replaced since the barrier here instead of on the loop thread. Page by page, so that
        others get the interpreter in between."""
        while self._pages:
            self._pages.pop()

    def release(self) -> None:
        """Loop thread."""
        self._live.found_full(self._found_full, self.barrier)
        self._live.release()
