"""Who is let in: known peers at once, later ones when their attempt begins, strangers never; each waits on its own."""

from __future__ import annotations

import zmq

from holdfast.barriers.transport.authentication import Handshake, HandshakeAnswer, PeerAuthentication, is_data_key

KEYS = frozenset(("zero", "two"))


def let_in(ticket: int, identity: str) -> HandshakeAnswer:
    return HandshakeAnswer(ticket, identity, let_in=True)


def turned_away(ticket: int, identity: str) -> HandshakeAnswer:
    return HandshakeAnswer(ticket, identity, let_in=False)


def test_a_known_key_is_let_in_at_once() -> None:
    door = PeerAuthentication()
    assert door.allow(KEYS, "s") == []
    assert door.ask(Handshake(1, "zero"), now_ms=0) == [let_in(1, "zero")]
    assert door.ask(Handshake(2, "two", b"s"), now_ms=0) == [let_in(2, "two")]


def test_an_unknown_key_waits_and_is_let_in_when_its_attempt_begins() -> None:
    door = PeerAuthentication(held_timeout_ms=100)
    assert door.ask(Handshake(1, "zero"), now_ms=0) == []
    assert door.next_deadline_ms() == 100
    assert door.allow(KEYS, "s") == [let_in(1, "zero")]
    assert door.next_deadline_ms() is None
    assert door.expire(now_ms=1_000) == []


def test_an_unknown_key_is_turned_away_in_the_end() -> None:
    door = PeerAuthentication(held_timeout_ms=100)
    door.allow(KEYS, "s")
    assert door.ask(Handshake(1, "stranger"), now_ms=0) == []
    assert door.expire(now_ms=99) == []
    assert door.expire(now_ms=100) == [turned_away(1, "stranger")]
    assert door.next_deadline_ms() is None


def test_nobody_waits_behind_a_stranger() -> None:
    door = PeerAuthentication()
    door.allow(KEYS, "s")
    assert door.ask(Handshake(1, "stranger"), now_ms=0) == []
    assert door.ask(Handshake(2, "zero"), now_ms=0) == [let_in(2, "zero")]


def test_at_the_socket_a_key_is_only_said_and_the_secret_counts() -> None:
    door = PeerAuthentication(held_timeout_ms=100)
    assert door.ask(Handshake(1, "zero", b""), now_ms=0) == []  # before any attempt there is no secret
    assert door.allow(KEYS, "") == []
    assert door.allow(KEYS, "of attempt 1") == []
    assert door.ask(Handshake(2, "zero", b"of attempt 2"), now_ms=0) == []
    assert door.ask(Handshake(3, "stranger", b"of attempt 1"), now_ms=0) == []
    assert door.allow(KEYS, "of attempt 2") == [let_in(2, "zero")]
    assert door.expire(now_ms=100) == [turned_away(1, "zero"), turned_away(3, "stranger")]


def test_those_who_wait_are_bounded() -> None:
    door = PeerAuthentication(held_max=2)
    for ticket in (1, 2):
        assert door.ask(Handshake(ticket, "stranger"), now_ms=0) == []
    assert door.ask(Handshake(3, "stranger"), now_ms=0) == [turned_away(3, "stranger")]
    assert door.allow(frozenset(("stranger",)), "s") == [let_in(1, "stranger"), let_in(2, "stranger")]


def test_a_replaced_worker_is_not_let_in_again() -> None:
    door = PeerAuthentication(held_timeout_ms=100)
    door.allow(KEYS, "one")
    door.allow(frozenset(("two",)), "two")
    assert door.ask(Handshake(1, "zero"), now_ms=0) == []
    assert door.expire(now_ms=100) == [turned_away(1, "zero")]


def test_keys_of_zeromq_are_keys_and_other_texts_are_none() -> None:
    for _ in range(20):
        public, secret = zmq.curve_keypair()
        assert is_data_key(public.decode())
        assert is_data_key(secret.decode())
    for text in ("", "0" * 39, "0" * 41, "#" * 40, "%nSc1" * 8, "ä" * 40):
        assert not is_data_key(text)
    assert is_data_key("%nSc0" * 8)  # the largest number of 32 bits
