"""Nexmark's events: persons, auctions and bids of an online auction house, each made from its number alone.

Of 50 events in a row the first is a person, the next three are auctions and the last 46 are bids. Ids and times follow exactly
from an event's number; everything else is a hash of (seed, number, field), so that a source can rewind to any event. Proportions,
ratios, leads and sizes are those of https://github.com/nexmark/nexmark. One difference: its Java generator adds the first person
id to a bid's bidder twice, which leaves most bids without a bidder; here it is added once.

A source has one kind, and its record i is the i-th event of that kind; or it has the numbers of all events, of which each kind is
made behind it: then no kind is read ahead of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.operators.sources.generator import GeneratorSource

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

PERSONS, AUCTIONS, BIDS = 1, 3, 46
"""Of each 50 events."""
EVENTS = PERSONS + AUCTIONS + BIDS
FIRST_ID = 1_000
"""Of persons, and of auctions."""
FIRST_CATEGORY, CATEGORIES = 10, 5
HOT_SELLER, HOT_BIDDER, HOT_AUCTION = 4, 4, 2
"""All but one in so many choose the hot one."""
HOT_BATCH = 100
"""One person and one auction out of so many are hot."""
LEAD = 10
"""Persons and auctions that are named so many ids before they exist."""
ACTIVE_PERSONS, OPEN_AUCTIONS = 1_000, 100
CHANNELS = 10_000
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
POOL = 4_096
"""Different texts of each kind that are not told apart by a query."""
_HASH_BITS = 31
"""Of a hash that choose a number; with those of a bound they fit 64 bits."""
_LOG_10 = math.log(10.0)
_PRICE_ERROR = 1e-5
"""Cents, far more than the error of a price by `exp`."""

TIME = pa.timestamp("ms", "UTC")
SCHEMAS = {
    "person": pa.schema(
        {"id": pa.int64(), "name": pa.string(), "emailAddress": pa.string(), "creditCard": pa.string(), "city": pa.string(),
         "state": pa.string(), "dateTime": TIME, "extra": pa.string()}
    ),
    "auction": pa.schema(
        {"id": pa.int64(), "itemName": pa.string(), "description": pa.string(), "initialBid": pa.int64(), "reserve": pa.int64(),
         "dateTime": TIME, "expires": TIME, "seller": pa.int64(), "category": pa.int64(), "extra": pa.string()}
    ),
    "bid": pa.schema(
        {"auction": pa.int64(), "bidder": pa.int64(), "price": pa.int64(), "channel": pa.string(), "url": pa.string(),
         "dateTime": TIME, "extra": pa.string()}
    ),
}  # fmt: skip
_PLACES = {"person": (PERSONS, 0), "auction": (AUCTIONS, PERSONS), "bid": (BIDS, PERSONS + AUCTIONS)}
"""Kind -> (events of 50, the first of them)."""
_FIELDS = (
    "seller", "bidder", "auction", "hot person", "hot auction", "price", "reserve", "category", "length", "channel", "hot channel",
    "name", "email", "card", "city", "state", "item", "description", "extra",
)  # fmt: skip


def count_of(kind: str, events: int) -> int:
    """Events of a kind among the first so many."""
    share, first = _PLACES[kind]
    rounds, rest = divmod(events, EVENTS)
    return rounds * share + min(share, max(0, rest - first))


def indices_of(kind: str, numbers: Numbers) -> Numbers:
    """Indices among a kind of those of these events that are of it; in their order."""
    share, first = _PLACES[kind]
    rounds = numbers // EVENTS
    place = numbers - rounds * EVENTS - first
    own = (place >= 0) & (place < share)
    return rounds[own] * share + place[own]


NUMBERS = pa.schema({"number": pa.int64()})


def numbered(numbers: Numbers) -> pa.RecordBatch:
    """Events of which nothing is made yet."""
    return pa.RecordBatch.from_arrays([pa.array(numbers)], schema=NUMBERS)


def source(kind: str, events: int, *, columns: Sequence[str] | None = None, rows_per_second: float | None = None,
           **settings: Any) -> GeneratorSource:  # fmt: skip
    """A rewindable source of the `person`, `auction` or `bid` events among the first `events`.

    `columns`: those to make, all by default. `settings`: fields of `Nexmark`. `rows_per_second`: of this kind."""
    make = Nexmark(kind, columns=None if columns is None else tuple(columns), **settings)
    return GeneratorSource(make, count_of(kind, events), make.schema, rows_per_second=rows_per_second, name=f"{kind}s")


@dataclass(frozen=True)
class Nexmark:
    """Makes events of one kind: indices among that kind -> columns."""

    kind: str
    columns: tuple[str, ...] | None = None
    """Those to make, in this order; None: all."""
    seed: int = 0
    events_per_second: int = 100_000
    """Of event time; of all kinds together."""
    base_time_ms: int = 1_436_918_400_000
    """Event time of the first event: 2015-07-15T00:00:00Z, as upstream."""

    @cached_property
    def schema(self) -> pa.Schema:
        whole = SCHEMAS[self.kind]
        return whole if self.columns is None else pa.schema([whole.field(name) for name in self.columns])

    def __call__(self, indices: Numbers) -> pa.RecordBatch:
        events = _Events(indices, self)
        arrays = [getattr(events, f"{self.kind}_{name.name}")() for name in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class _Events:
    """One batch of one kind. A method for each column, called `<kind>_<column>`.

    Division by a plain number and shifts are several times as fast in NumPy as `divmod` and other products are."""

    def __init__(self, indices: Numbers, settings: Nexmark) -> None:
        share, first = _PLACES[settings.kind]
        self._indices = indices
        self._rounds: Numbers = indices // share
        """Persons before each event's 50, and their positions."""
        self._numbers: Numbers = self._rounds * (EVENTS - share) + indices + first
        self._settings = settings

    # ------------------------------------------------------------------------------------------------------------ numbers

    @cached_property
    def _products(self) -> Hashes:
        return self._numbers.view(np.uint64) * np.uint64(0xD1342543DE82EF95)

    def _hash(self, name: str, rows: Numbers | None = None) -> Hashes:
        """64 bits for each event, or for some, that depend on the seed, its number and the field."""
        salt = np.uint64((self._settings.seed * len(_FIELDS) + _FIELDS.index(name) + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1))
        mixed = self._products + salt if rows is None else self._products[rows] + salt
        shifted = np.empty_like(mixed)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.right_shift(mixed, np.uint64(shift), out=shifted)
            mixed ^= shifted
            mixed *= np.uint64(factor)
        np.right_shift(mixed, np.uint64(31), out=shifted)
        mixed ^= shifted
        return mixed

    def _below(self, name: str, bound: int | Numbers, rows: Numbers | None = None) -> Numbers:
        """A whole number from 0 on, below `bound`, which is from 2 to 2^31, for each event, or for some."""
        return _scaled(self._hash(name, rows), bound)

    def _is_hot(self, name: str, ratio: int) -> npt.NDArray[np.bool_]:
        """All but one in so many."""
        least = -(-(2**_HASH_BITS) // ratio) << (64 - _HASH_BITS)
        hot: npt.NDArray[np.bool_] = self._hash(name) >= np.uint64(least)
        return hot

    def _text(self, pool: pa.Array, name: str) -> pa.Array:
        return pool.take(pa.array(self._below(name, len(pool))))

    def _price(self, name: str) -> Numbers:
        """From 100 to 10^8 cents, evenly on a logarithmic scale."""
        exponents = (self._hash(name) >> np.uint64(11)).view(np.int64).astype(np.float64)
        exponents *= 2.0**-53 * 6.0
        prices = np.exp(exponents * _LOG_10)
        prices *= 100.0
        rounded = np.rint(prices)
        prices -= rounded
        near = np.flatnonzero(np.abs(prices, out=prices) > 0.5 - _PRICE_ERROR)
        if len(near):  # on which side of a half cent they are the slower function decides
            rounded[near] = np.rint(np.power(10.0, exponents[near]) * 100.0)
        return rounded.astype(np.int64)

    def _time_ms(self, numbers: Numbers) -> Numbers:
        shared = math.gcd(1_000, self._settings.events_per_second)
        passed = numbers * (1_000 // shared) if shared < 1_000 else numbers
        return passed // (self._settings.events_per_second // shared) + self._settings.base_time_ms

    def _last_person(self) -> Numbers:
        """Position of the newest person, from 0."""
        return self._rounds * PERSONS

    def _last_auction(self) -> Numbers:
        """Position of the newest auction, from 0."""
        return self._indices if self._settings.kind == "auction" else self._rounds * AUCTIONS + (AUCTIONS - 1)

    def _person(self, name: str, hot: int, hot_ratio: int) -> Numbers:
        """The hot person of the newest batch, at position `hot` in it, or an active person, or one of the next few."""
        newest = self._last_person()
        chosen = newest // HOT_BATCH * HOT_BATCH + (FIRST_ID + hot)
        others = np.flatnonzero(~self._is_hot("hot person", hot_ratio))
        persons = newest[others] + 1
        active = np.minimum(persons, ACTIVE_PERSONS)
        chosen[others] = FIRST_ID + persons - active + self._below(name, active + LEAD, others)
        return chosen

    def _date_time(self) -> pa.Array:
        return pa.array(self._time_ms(self._numbers)).view(TIME)

    # ------------------------------------------------------------------------------------------------------------ persons

    def person_id(self) -> pa.Array:
        return pa.array(FIRST_ID + self._last_person())

    def person_name(self) -> pa.Array:
        return self._text(_pools().names, "name")

    def person_emailAddress(self) -> pa.Array:
        return self._text(_pools().emails, "email")

    def person_creditCard(self) -> pa.Array:
        return self._text(_pools().cards, "card")

    def person_city(self) -> pa.Array:
        return self._text(_pools().cities, "city")

    def person_state(self) -> pa.Array:
        return self._text(_pools().states, "state")

    def person_extra(self) -> pa.Array:
        return self._text(_pools().person_extras, "extra")

    # ----------------------------------------------------------------------------------------------------------- auctions

    def auction_id(self) -> pa.Array:
        return pa.array(FIRST_ID + self._last_auction())

    def auction_itemName(self) -> pa.Array:
        return self._text(_pools().items, "item")

    def auction_description(self) -> pa.Array:
        return self._text(_pools().descriptions, "description")

    def auction_initialBid(self) -> pa.Array:
        return pa.array(self._initial_bid)

    @cached_property
    def _initial_bid(self) -> Numbers:
        return self._price("price")

    def auction_reserve(self) -> pa.Array:
        return pa.array(self._initial_bid + self._price("reserve"))

    def auction_expires(self) -> pa.Array:
        """Open for 1 ms to twice the time that it takes to make OPEN_AUCTIONS further ones."""
        begins = self._time_ms(self._numbers)
        horizon = self._time_ms(self._numbers + OPEN_AUCTIONS * EVENTS // AUCTIONS) - begins
        return pa.array(begins + 1 + self._below("length", np.maximum(2 * horizon, 1))).view(TIME)

    def auction_seller(self) -> pa.Array:
        return pa.array(self._person("seller", 0, HOT_SELLER))

    def auction_category(self) -> pa.Array:
        return pa.array(FIRST_CATEGORY + self._below("category", CATEGORIES))

    def auction_extra(self) -> pa.Array:
        return self._text(_pools().auction_extras, "extra")

    # --------------------------------------------------------------------------------------------------------------- bids

    def bid_auction(self) -> pa.Array:
        newest = self._last_auction()
        chosen = newest // HOT_BATCH * HOT_BATCH + FIRST_ID
        others = np.flatnonzero(~self._is_hot("hot auction", HOT_AUCTION))
        latest = newest[others]
        oldest = np.maximum(latest - OPEN_AUCTIONS, 0)
        chosen[others] = FIRST_ID + oldest + self._below("auction", latest - oldest + (1 + LEAD), others)
        return pa.array(chosen)

    def bid_bidder(self) -> pa.Array:
        return pa.array(self._person("bidder", 1, HOT_BIDDER))

    def bid_price(self) -> pa.Array:
        return pa.array(self._price("price"))

    def bid_channel(self) -> pa.Array:
        return _pools().channels.take(self._channel)

    def bid_url(self) -> pa.Array:
        return _pools().urls.take(self._channel)

    @cached_property
    def _channel(self) -> pa.Array:
        """Half of the bids come through one of the hot channels, which stand in front of the others."""
        hashes = self._hash("channel")
        others = len(HOT_CHANNELS) + _scaled(hashes, CHANNELS)
        return pa.array(np.where(self._is_hot("hot channel", 2), _scaled(hashes, len(HOT_CHANNELS)), others))

    def bid_extra(self) -> pa.Array:
        return self._text(_pools().bid_extras, "extra")

    person_dateTime = auction_dateTime = bid_dateTime = _date_time


def _scaled(hashes: Hashes, bound: int | Numbers) -> Numbers:
    """Whole numbers from 0 on, below `bound`, of the upper bits of some hashes."""
    if isinstance(bound, int) and bound & (bound - 1) == 0:
        return (hashes >> np.uint64(65 - bound.bit_length())).view(np.int64)
    scaled = hashes >> np.uint64(64 - _HASH_BITS)
    scaled *= np.uint64(bound) if isinstance(bound, int) else bound.view(np.uint64)
    scaled >>= np.uint64(_HASH_BITS)
    return scaled.view(np.int64)


# ------------------------------------------------------------------------------------------------------------------ texts


class _Pools:
    """Texts that events choose from; the same in every process. Each pool is drawn when an event first chooses from it."""

    @cached_property
    def names(self) -> pa.Array:
        first = ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
        last = ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
        return pa.array([f"{one} {other}" for one in first for other in last])

    @cached_property
    def cities(self) -> pa.Array:
        cities = ["Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne"]
        return pa.array(cities)

    @cached_property
    def states(self) -> pa.Array:
        return pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])

    @cached_property
    def emails(self) -> pa.Array:
        draw = _drawing(1)
        hosts = pc.binary_join_element_wise(_words(draw, POOL, 5), "com", ".")
        return pc.binary_join_element_wise(_words(draw, POOL, 7), hosts, "@")

    @cached_property
    def cards(self) -> pa.Array:
        numbers = _drawing(2).integers(0, 10_000, (POOL, 4)).tolist()
        return pa.array([" ".join(f"{part:04d}" for part in parts) for parts in numbers])

    @cached_property
    def items(self) -> pa.Array:
        return pc.utf8_trim(_words(_drawing(3), POOL, 20, " "), " ")

    @cached_property
    def descriptions(self) -> pa.Array:
        return pc.utf8_trim(_words(_drawing(4), POOL, 100, " "), " ")

    @cached_property
    def channels(self) -> pa.Array:
        return pa.array([*HOT_CHANNELS, *(f"channel-{channel}" for channel in range(CHANNELS))])

    @cached_property
    def urls(self) -> pa.Array:
        """In the order of channels; nine of ten that are not hot say their channel's number."""
        draw = _drawing(5)
        directories = [_words(draw, len(HOT_CHANNELS) + CHANNELS, 5) for _ in range(3)]
        urls = pc.binary_join_element_wise("https://www.nexmark.com", *directories, "item.htm?query=1", "/")
        says = (draw.integers(0, 10, CHANNELS) > 0).tolist()
        numbers = [f"&channel_id={_reversed(channel)}" if says[channel] else "" for channel in range(CHANNELS)]
        return pc.binary_join_element_wise(urls, pa.array([*("" for _ in HOT_CHANNELS), *numbers]), "")

    @cached_property
    def bid_extras(self) -> pa.Array:
        return _extras(_drawing(6), 100 - 32)

    @cached_property
    def person_extras(self) -> pa.Array:
        return _extras(_drawing(7), 200 - 65)

    @cached_property
    def auction_extras(self) -> pa.Array:
        return _extras(_drawing(8), 500 - 110)


@lru_cache(maxsize=1)
def _pools() -> _Pools:
    return _Pools()


def _drawing(pool: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(pool))


def _words(draw: np.random.Generator, count: int, length_max: int, special: str = "_") -> pa.Array:
    """Each of 3 to `length_max` - 1 letters, one in 13 of them special."""
    lengths = draw.integers(3, length_max, count)
    letters = _letters(draw, int(lengths.sum()))
    letters[draw.integers(0, 13, len(letters)) == 0] = ord(special)
    return _texts(letters, lengths)


def _reversed(channel: int) -> int:
    """The magnitude of the number whose 32 bits stand in reverse, as two's complement."""
    bits = int(f"{channel:032b}"[::-1], 2)
    return bits if bits < 2**31 else 2**32 - bits


def _extras(draw: np.random.Generator, length: int) -> pa.Array:
    """Letters that fill an event up to its size: `length` on average, up to a fifth more or less."""
    lengths = length - round(length * 0.2) + draw.integers(0, max(1, 2 * round(length * 0.2)), POOL)
    return _texts(_letters(draw, int(lengths.sum())), lengths)


def _letters(draw: np.random.Generator, count: int) -> npt.NDArray[np.uint8]:
    return draw.integers(ord("a"), ord("z") + 1, count, np.uint8)


def _texts(letters: npt.NDArray[np.uint8], lengths: Numbers) -> pa.Array:
    """Texts of these lengths, out of their letters in a row."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return pa.StringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(letters))
