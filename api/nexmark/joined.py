"""Queries of regular joins: q3, q20.

Persons and auctions are kept for longer than any run lasts, as SQL keeps them for ever. An event may name one that comes later, but
never by much: it is kept so long."""

from __future__ import annotations

from datetime import timedelta

from holdfast.api.nexmark.events import AUCTIONS, EVENTS, LEAD, PERSONS, SCHEMAS
from holdfast.api.nexmark.query import Auctions, Query, picked
from holdfast.operators.datastream.stream import Stream

RETAINED = timedelta(days=3_650)


def ahead_ms(house: Auctions, share: int) -> int:
    """How much later than the event that names it a person or an auction may come; `share`: how many there are of 50 events."""
    rounds = -(-LEAD // share) + 1
    return -(-rounds * EVENTS * 1_000 // house.events_per_second) + 1


def local_items(house: Auctions) -> Stream:
    people, auctions = house.together(
        person=("id", "name", "city", "state", "dateTime"), auction=("id", "seller", "category", "dateTime")
    )
    sellers = picked(people.filter("state IN ('OR', 'ID', 'CA')").uid("local"), "name", "city", "state", seller="id").uid("sellers")
    sold = picked(auctions.filter("category = 10").uid("of-category"), "id", "seller").uid("sold")
    retain = (timedelta(milliseconds=ahead_ms(house, PERSONS)), RETAINED)
    return sold.join(sellers, on="seller", retain=retain).uid("joined").select("name", "city", "state", "id").uid("items")


AUCTION = tuple(name for name in SCHEMAS["auction"].names if name not in ("dateTime", "extra"))


def bids_with_auctions(house: Auctions) -> Stream:
    auctions, bids = house.together(auction=SCHEMAS["auction"].names, bid=SCHEMAS["bid"].names)
    of_category = auctions.filter("category = 10").uid("of-category")
    renamed = picked(of_category, *AUCTION, auction_dateTime="dateTime", auction_extra="extra").uid("renamed")
    retain = (timedelta(milliseconds=ahead_ms(house, AUCTIONS)), RETAINED)
    return bids.join(renamed, on=("auction", "id"), retain=retain).uid("joined")


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
