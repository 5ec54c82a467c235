"""Nexmark's events: persons, auctions and bids of an online auction house, each made from its number alone.

Of 50 events in a row the first is a person, the next three are auctions and the last 46 are bids. Ids and times follow exactly
from an event's number; everything else is a hash of (seed, number, field), so that a source can rewind to any event. Proportions,
ratios, leads and sizes are those of https://github.com/nexmark/nexmark. One difference: its Java generator adds the first person
id to a bid's bidder twice, which leaves most bids without a bidder; here it is added once.

Each kind is a source of its own, whose record i is the i-th event of that kind: their event times rise together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
        share, first = _PLACES[self.kind]
        rounds, place = np.divmod(indices, share)
        events = _Events(rounds * EVENTS + first + place, rounds, place, self)
        arrays = [getattr(events, f"{self.kind}_{name.name}")() for name in self.schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


class _Events:
    """One batch of one kind. A method for each column, called `<kind>_<column>`."""

    def __init__(self, numbers: Numbers, rounds: Numbers, place: Numbers, settings: Nexmark) -> None:
        self._numbers = numbers
        self._rounds = rounds
        self._place = place
        self._settings = settings

    # ------------------------------------------------------------------------------------------------------------ numbers

    def _hash(self, name: str) -> Hashes:
        """64 bits for each event that depend on the seed, its number and the field."""
        salt = np.uint64((self._settings.seed * len(_FIELDS) + _FIELDS.index(name) + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1))
        mixed = self._numbers.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + salt
        mixed ^= mixed >> np.uint64(30)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        return mixed

    def _below(self, name: str, bound: int | Numbers) -> Numbers:
        """A whole number from 0 on, below `bound`, which is below 2^31."""
        top = self._hash(name) >> np.uint64(33)
        return ((top * np.asarray(bound).astype(np.uint64)) >> np.uint64(31)).astype(np.int64)

    def _text(self, pool: pa.Array, name: str) -> pa.Array:
        return pool.take(pa.array(self._below(name, len(pool))))

    def _price(self, name: str) -> Numbers:
        """From 100 to 10^8 cents, evenly on a logarithmic scale."""
        unit = (self._hash(name) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return np.round(np.power(10.0, unit * 6.0) * 100.0).astype(np.int64)

    def _time_ms(self, numbers: Numbers | int) -> Any:
        return self._settings.base_time_ms + numbers * 1_000 // self._settings.events_per_second

    def _last_person(self) -> Numbers:
        """Position of the newest person, from 0."""
        return self._rounds * PERSONS

    def _last_auction(self) -> Numbers:
        """Position of the newest auction, from 0; -1 before the first."""
        return self._rounds * AUCTIONS + (self._place if self._settings.kind == "auction" else AUCTIONS - 1)

    def _some_person(self, name: str) -> Numbers:
        """An active person, or one of the next few."""
        persons = self._last_person() + 1
        active = np.minimum(persons, ACTIVE_PERSONS)
        return persons - active + self._below(name, active + LEAD)

    def _person(self, name: str, hot: int, hot_ratio: int) -> Numbers:
        """The hot person of the newest batch, at position `hot` in it, or some person."""
        is_hot = self._below("hot person", hot_ratio) > 0
        popular = self._last_person() // HOT_BATCH * HOT_BATCH + hot
        return FIRST_ID + np.where(is_hot, popular, self._some_person(name))

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
        return pa.array(self._price("price"))

    def auction_reserve(self) -> pa.Array:
        return pa.array(self._price("price") + self._price("reserve"))

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
        is_hot = self._below("hot auction", HOT_AUCTION) > 0
        oldest = np.maximum(newest - OPEN_AUCTIONS, 0)
        some = oldest + self._below("auction", newest - oldest + 1 + LEAD)
        return pa.array(FIRST_ID + np.where(is_hot, newest // HOT_BATCH * HOT_BATCH, some))

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
        is_hot = self._below("hot channel", 2) > 0
        hot = self._below("channel", len(HOT_CHANNELS))
        return pa.array(np.where(is_hot, hot, len(HOT_CHANNELS) + self._below("channel", CHANNELS)))

    def bid_extra(self) -> pa.Array:
        return self._text(_pools().bid_extras, "extra")

    person_dateTime = auction_dateTime = bid_dateTime = _date_time


# ------------------------------------------------------------------------------------------------------------------ texts


class _Pools:
    """Texts that events choose from; the same in every process."""

    def __init__(self) -> None:
        draw = np.random.Generator(np.random.PCG64(0))
        first = ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
        last = ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
        self.names = pa.array([f"{one} {other}" for one in first for other in last])
        cities = ["Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne"]
        self.cities = pa.array(cities)
        self.states = pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"])
        self.emails = pa.array([f"{_word(draw, 7)}@{_word(draw, 5)}.com" for _ in range(POOL)])
        self.cards = pa.array([" ".join(f"{part:04d}" for part in draw.integers(0, 10_000, 4)) for _ in range(POOL)])
        self.items = pa.array([_word(draw, 20, " ").strip() for _ in range(POOL)])
        self.descriptions = pa.array([_word(draw, 100, " ").strip() for _ in range(POOL)])
        hot_urls = [_url(draw) for _ in HOT_CHANNELS]
        urls = [_url(draw) + (f"&channel_id={_reversed(channel)}" if draw.integers(10) else "") for channel in range(CHANNELS)]
        self.channels = pa.array([*HOT_CHANNELS, *(f"channel-{channel}" for channel in range(CHANNELS))])
        self.urls = pa.array([*hot_urls, *urls])
        self.bid_extras = _extras(draw, 100 - 32)
        self.person_extras = _extras(draw, 200 - 65)
        self.auction_extras = _extras(draw, 500 - 110)


@lru_cache(maxsize=1)
def _pools() -> _Pools:
    return _Pools()


def _word(draw: np.random.Generator, length_max: int, special: str = "_") -> str:
    """3 to `length_max` - 1 letters, one in 13 of them special."""
    letters = draw.integers(0, 26, draw.integers(3, length_max))
    return "".join(special if draw.integers(13) == 0 else chr(97 + letter) for letter in letters.tolist())


def _url(draw: np.random.Generator) -> str:
    return f"https://www.nexmark.com/{_word(draw, 5)}/{_word(draw, 5)}/{_word(draw, 5)}/item.htm?query=1"


def _reversed(channel: int) -> int:
    """The magnitude of the number whose 32 bits stand in reverse, as two's complement."""
    bits = int(f"{channel:032b}"[::-1], 2)
    return bits if bits < 2**31 else 2**32 - bits


def _extras(draw: np.random.Generator, length: int) -> pa.Array:
    """Letters that fill an event up to its size: `length` on average, up to a fifth more or less."""
    lengths = length - round(length * 0.2) + draw.integers(0, max(1, 2 * round(length * 0.2)), POOL)
    return pa.array(["".join(map(chr, (97 + draw.integers(0, 26, size)).tolist())) for size in lengths.tolist()])
