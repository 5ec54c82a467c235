"""Queries of regular joins: q3, q20. They keep both sides for ever, as in SQL."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from holdfast.api.nexmark.events import SCHEMAS
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.functions.connected import KeyedCoProcessFunction
from holdfast.operators.functions.process import Collector, ProcessContext
from holdfast.statebackends.state import ListStateDescriptor, ValueStateDescriptor


class OneToMany(KeyedCoProcessFunction):
    """Pairs of the one row of the first stream that a key has, and each row of the second."""

    def __init__(self, one: pa.Schema, many: pa.Schema) -> None:
        """Columns of both, of which none are called alike."""
        self.one = ValueStateDescriptor("one", pa.struct(list(one)))
        self.many = ListStateDescriptor("many", pa.struct(list(many)))
        self.states = (self.one, self.many)  # type: ignore[misc]  # of this instance: the columns are the streams'

    def process_element1(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        ctx.state(self.one).update(value)
        many = ctx.state(self.many)
        for row in many.get():
            out({**value, **row})
        many.clear()

    def process_element2(self, value: Any, ctx: ProcessContext, out: Collector) -> None:
        one = ctx.state(self.one).value()
        if one is None:
            ctx.state(self.many).add(value)
        else:
            out({**one, **value})


def _joined(one: Stream, many: Stream, keys: tuple[str, str]) -> Stream:
    assert one.schema is not None
    assert many.schema is not None
    connected = one.connect(many).key_by(*keys)
    return connected.process(OneToMany(one.schema, many.schema), returns=pa.schema([*one.schema, *many.schema])).uid("joined")


def local_items(house: Auctions) -> Stream:
    persons = house.persons("id", "name", "city", "state").filter("state IN ('OR', 'ID', 'CA')").uid("local")
    sellers = picked(persons, "name", "city", "state", seller="id").uid("sellers")
    auctions = house.auctions("id", "seller", "category").filter("category = 10").uid("of-category")
    sold = picked(auctions, "id", sold_by="seller").uid("sold")
    return _joined(sellers, sold, ("seller", "sold_by")).select("name", "city", "state", "id").uid("items")


AUCTION = tuple(name for name in SCHEMAS["auction"].names if name not in ("dateTime", "extra"))


def bids_with_auctions(house: Auctions) -> Stream:
    auctions = house.read("auction", SCHEMAS["auction"].names).filter("category = 10").uid("of-category")
    renamed = picked(auctions, *AUCTION, auction_dateTime="dateTime", auction_extra="extra").uid("renamed")
    return _joined(renamed, house.read("bid", SCHEMAS["bid"].names), ("id", "auction"))


QUERIES = (
    Query(
        "q3",
        "local items",
        local_items,
        """
        SELECT name, city, state, auction.id FROM auction JOIN person ON seller = person.id
        WHERE category = 10 AND state IN ('OR', 'ID', 'CA')
        """,
        kinds=("person", "auction"),
    ),
    Query(
        "q20",
        "bids with their auctions",
        bids_with_auctions,
        """
        SELECT bid.auction, bidder, price, channel, url, bid.dateTime AS dateTime, bid.extra AS extra, itemName, description,
            initialBid, reserve, auction.dateTime AS auction_dateTime, expires, seller, category, auction.extra AS auction_extra
        FROM bid JOIN auction ON bid.auction = auction.id WHERE category = 10
        """,
        kinds=("auction", "bid"),
    ),
)
