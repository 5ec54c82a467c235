"""Queries of regular joins: q3, q20. They keep both sides for longer than any run lasts, as SQL does for ever."""

from __future__ import annotations

from datetime import timedelta

from holdfast.api.nexmark.events import SCHEMAS
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream

RETAINED = timedelta(days=3_650)


def local_items(house: Auctions) -> Stream:
    persons = house.persons("id", "name", "city", "state", "dateTime").filter("state IN ('OR', 'ID', 'CA')").uid("local")
    sellers = picked(persons, "name", "city", "state", seller="id").uid("sellers")
    auctions = house.auctions("id", "seller", "category", "dateTime").filter("category = 10").uid("of-category")
    sold = picked(auctions, "id", "seller").uid("sold")
    return sold.join(sellers, on="seller", retain=RETAINED).uid("joined").select("name", "city", "state", "id").uid("items")


AUCTION = tuple(name for name in SCHEMAS["auction"].names if name not in ("dateTime", "extra"))


def bids_with_auctions(house: Auctions) -> Stream:
    auctions = house.read("auction", SCHEMAS["auction"].names).filter("category = 10").uid("of-category")
    renamed = picked(auctions, *AUCTION, auction_dateTime="dateTime", auction_extra="extra").uid("renamed")
    return house.read("bid", SCHEMAS["bid"].names).join(renamed, on=("auction", "id"), retain=RETAINED).uid("joined")


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
