"""The sink of NATS at a real server: the kit of connectors, streams that don't fit, and what a reader sees."""

from __future__ import annotations

import json
import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.connectors.nats import batches
from holdfast.operators.connectors.nats.connection import JetStreamError, NatsLogin
from holdfast.operators.connectors.nats.sink import NatsSink, position_subject
from holdfast.operators.sinks.targets.positions import CommitOwner, CommitPosition
from holdfast.operators.sinks.targets.target import CommitTarget
from tests.operators.connectors.nats.conftest import create_stream, messages_of
from tests.operators.connectors.nats.test_nats_source import administer, count, publish
from tests.servers.nats import NatsServer


def kit(nats: NatsServer, label: str, **options: Any) -> list[str]:
    """check_sink with a stream for each run."""
    created: set[str] = set()

    def make(name: str, port: int = 0) -> NatsSink:
        if stream_of(name) not in created:
            created.add(create_stream(nats.url, stream_of(name)))
        url = nats.url_behind(port) if port else nats.url
        return NatsSink(url, stream_of(name), subject=f"{stream_of(name).lower()}.rows")

    def stream_of(name: str) -> str:
        return f"{label}-{name}"

    def read(name: str) -> list[tuple[int, str | None]]:
        rows = [json.loads(data) for data in messages_of(nats.url, stream_of(name), f"{stream_of(name).lower()}.rows")]
        return [(row["id"], row["text"]) for row in rows]

    return hf.testing.check_sink(make, read, **options)


@pytest.mark.parametrize("scenario", ["owners that wake late", "fails behind call 2, apply"])
def test_the_kit(nats_server: NatsServer, scenario: str) -> None:
    assert scenario in kit(nats_server, f"some{len(scenario)}", only=scenario)


@pytest.mark.endurance
def test_the_whole_kit(nats_server: NatsServer) -> None:
    kit(nats_server, "all", points="all")


@pytest.mark.endurance
@pytest.mark.timeout(1800)
def test_the_server_may_restart_and_connections_break_anywhere(nats_server: NatsServer) -> None:
    passed = kit(nats_server, "server", server=nats_server)
    assert any(each.startswith("server restarts within") for each in passed)
    assert any(each.startswith("connection swallowed") for each in passed)


SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("text", pa.string()), pa.field("to", pa.string())])


def owner(attempt: int = 1, known: CommitPosition | None = None, restored: int = 0, *, name: str = "orders/eu") -> CommitOwner:
    return CommitOwner(name, "job", attempt, f"nonce{attempt}", known, (), restored)


def target(server: NatsServer, stream: str, **settings: Any) -> CommitTarget:
    settings.setdefault("subject", f"{stream.lower()}.rows")
    made = NatsSink(settings.pop("servers", server.url), stream, **settings).target
    made.check(SCHEMA)
    return made


def rows(*ids: int, to: str | None = None, text: str = "x") -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"id": ids, "text": [text for _ in ids], "to": [to for _ in ids]}, schema=SCHEMA)


def staged(made: CommitTarget, *ids: int, **columns: Any) -> Iterator[pa.RecordBatch]:
    yield made.stage(rows(*ids, **columns))


def test_rows_go_to_the_subject_of_their_column_and_as_the_bytes_of_another(nats_server: NatsServer, stream: str) -> None:
    low = stream.lower()
    made = target(nats_server, stream, subject="", subject_column="to", value="text")
    position = made.open(owner())
    made.apply(staged(made, 1, 2, to=f"{low}.eu", text="plain"), position, moved := position.moved(1))
    made.apply(staged(made, 3, to=f"{low}.us", text="more"), moved, moved.moved(2))
    made.close()
    assert messages_of(nats_server.url, stream, f"{low}.eu") == [b"plain", b"plain"]
    assert messages_of(nats_server.url, stream, f"{low}.us") == [b"more"]
    assert len(messages_of(nats_server.url, stream, f"{low}.holdfast.orders%2Feu")) == 3


@pytest.mark.parametrize("way", ["one by one", "in pieces", "answered"])
def test_a_batch_is_stored_in_order_however_it_is_sent(
    nats_server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "one by one":
        monkeypatch.setattr(batches, "WRITE", "a name that the client does not have")
    monkeypatch.setattr(batches, "PIECE_BYTES", 100)
    monkeypatch.setattr(batches, "UNANSWERED_BYTES_MAX", 500 if way == "answered" else 1_000_000)
    made = target(nats_server, stream, value="text")
    position = made.open(owner())
    for size in (1, 2, 3, 100):
        made.apply(staged(made, *range(size), text=f"{size} \r\n"), position, moved := position.moved(position.checkpoint_id + 1))
        position = moved
    made.close()
    found = messages_of(nats_server.url, stream, f"{stream.lower()}.rows")
    assert found == [b"%d \r\n" % size for size in (1, 2, 3, 100) for _ in range(size)]


def test_why_a_batch_does_not_begin_is_told(nats_server: NatsServer, stream: str) -> None:
    made = target(nats_server, stream)
    position = made.open(owner())

    async def forbid(jetstream: Any) -> None:
        config = (await jetstream.stream_info(stream)).config
        await jetstream.update_stream(config, allow_atomic=False)

    administer(nats_server.url, forbid)
    with pytest.raises(JetStreamError, match="atomic publish is disabled"):
        made.apply(staged(made, 1, 2), position, position.moved(1))
    made.close()


def test_each_sink_of_a_stream_has_a_subject_of_its_own_and_finds_the_position_of_an_earlier_version(
    nats_server: NatsServer, stream: str
) -> None:
    names = ["a.b", "a_b", "a/b", "a%2Eb", "a b", "a>", "ä*"]
    assert len({position_subject(stream, name) for name in names}) == len(names)
    shared = f"{stream.lower()}.holdfast.a_b"
    old = owner(name="a.b").take(None).moved(7)
    publish(nats_server.url, shared, [old.encode()])
    made = {name: target(nats_server, stream) for name in ("a.b", "a/b")}
    assert made["a.b"].open(owner(2, old, 7, name="a.b")).checkpoint_id == 7
    position = made["a/b"].open(owner(name="a/b"))
    made["a/b"].apply(staged(made["a/b"], 1), position, position.moved(1))
    for each in made.values():
        each.close()
    assert len(messages_of(nats_server.url, stream, shared)) == 1
    assert len(messages_of(nats_server.url, stream, f"{stream.lower()}.holdfast.a%2Fb")) == 2


def test_older_positions_are_purged_and_the_last_one_outlives_the_age_of_messages(nats_server: NatsServer) -> None:
    stream = create_stream(nats_server.url, "AGED", max_age=3600.0, allow_msg_ttl=True)
    made = target(nats_server, stream)
    position = made.open(owner())
    for checkpoint in range(1, 5):
        made.apply(staged(made, checkpoint), position, moved := position.moved(checkpoint))
        position = moved
    again = made.open(owner(2, position, 4))
    made.close()
    assert again.checkpoint_id == 4
    assert len(messages_of(nats_server.url, stream, "aged.holdfast.orders%2Feu")) == 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"allow_atomic": False}, "takes no atomic batches: set allow_atomic"),
        ({"retention": "interest"}, "would lose the position"),
        ({"max_age": 60.0}, "set allow_msg_ttl"),
        ({"subjects": ["elsewhere.rows"]}, r"does not take subject bad\w+\.rows, its subjects are elsewhere"),
    ],
)
def test_a_stream_that_can_not_keep_the_promise_is_refused(nats_server: NatsServer, config: dict[str, Any], words: str) -> None:
    stream = create_stream(nats_server.url, f"BAD{len(words)}", **config)
    made = NatsSink(nats_server.url, stream, subject=f"{stream.lower()}.rows").target
    with pytest.raises(hf.InvalidConfigError, match=words):
        made.open(owner())
    made.close()


def test_bad_settings_rows_and_servers_are_named(nats_server: NatsServer, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(hf.InvalidConfigError, match="either subject or subject_column"):
        NatsSink(nats_server.url, stream)
    with pytest.raises(hf.InvalidConfigError, match=r"'a\.\*' is no subject"):
        NatsSink(nats_server.url, stream, subject="a.*")
    with pytest.raises(hf.InvalidConfigError, match="rows_per_commit is a number from 1 to 999, not 1000"):
        NatsSink(nats_server.url, stream, subject="a", rows_per_commit=1000)
    with pytest.raises(hf.InvalidConfigError, match="'no' is no column of the rows"):
        target(nats_server, stream, value="no")
    with pytest.raises(hf.InvalidRowError, match="its message has 2000 bytes, 1000 are allowed"):
        target(nats_server, stream, value="text", message_bytes_max=1000).stage(rows(1, text="x" * 2000))
    with pytest.raises(hf.InvalidRowError, match=r"'a\.>' is no subject to publish to"):
        target(nats_server, stream, subject="", subject_column="to").stage(rows(1, to="a.>"))
    with pytest.raises(hf.InvalidConfigError, match="there is no stream GONE"):
        target(nats_server, "GONE").open(owner())
    monkeypatch.setenv("NATS_URL", nats_server.url)
    made = target(nats_server, stream, servers=hf.Secret("NATS_URL"))
    assert str(nats_server.port).encode() not in pickle.dumps(made)
    assert str(nats_server.port) not in made.place
    assert made.open(owner()).owner == 1
    made.close()


@pytest.mark.parametrize(
    "login",
    [
        {"password": "s3cret", "user": "shop"},
        {"token": "s3cret"},
        {"servers": "nats://shop:s3cret@host"},
        {"servers": "nats://s3cret@host"},
        {"servers": ["nats://host", "shop:s3cret@other:4222"]},
    ],
)
@pytest.mark.parametrize("make", [hf.NatsSink, hf.NatsSource])
def test_a_login_as_plain_text_is_refused_and_not_shown(make: Any, login: dict[str, Any]) -> None:
    subject = {"subject": "orders"} if make is hf.NatsSink else {}
    with pytest.raises(hf.InvalidConfigError, match=r"hf\.Secret") as refused:
        make(**{"servers": "nats://host", "stream": "ORDERS", **subject, **login})
    assert "s3cret" not in str(refused.value)


def test_a_login_shows_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_PASSWORD", "s3cret")
    login = NatsLogin(("nats://host:4222", hf.Secret("NATS_URL")), "shop", hf.Secret("NATS_PASSWORD"))
    assert repr(login) == "NatsLogin('nats://host:4222,***')"


def test_rows_that_the_stream_would_not_take_are_refused_before_they_are_staged(nats_server: NatsServer) -> None:
    stream = create_stream(nats_server.url, "SMALL", subjects=["small.*", "small.holdfast.>", "other.>"], max_msg_size=2_000)
    made = target(nats_server, stream, subject="", subject_column="to", value="text")
    for wrong, words in {
        "small.a.b": r"'small.a.b' is none that the stream took when the job was built: small.\*, small.holdfast.>, other.>",
        "elsewhere": "'elsewhere' is none that the stream took",
        "small.holdfast.orders_eu": "is a subject of positions of sinks",
        "other.a\x7fb": "is no subject to publish to",
        "other." + "x" * 3_500: "has more than 3500 bytes, which no server takes for a subject",
    }.items():
        with pytest.raises(hf.InvalidRowError, match=rf"NatsSink to SMALL: row .*'id': 7.*{words}"):
            made.stage(rows(7, to=wrong))
    with pytest.raises(hf.InvalidRowError, match=r"its message has 1873 bytes, 1872 are allowed"):
        made.stage(rows(1, to="small.a", text="x" * 1_873))
    position = made.open(owner())
    made.apply(staged(made, *range(999), to="other.a.b", text="x" * 1_872), position, position.moved(1))
    longest = "other." + "x" * 3_494
    made.apply(staged(made, 1_000, to=longest), position.moved(1), position.moved(2))
    made.close()
    assert count(nats_server.url, stream) == 999 + 1 + 3


def test_a_subject_of_positions_and_limits_that_are_too_high_are_refused(nats_server: NatsServer, stream: str) -> None:
    low = stream.lower()
    with pytest.raises(hf.InvalidConfigError, match="is a subject of positions of sinks"):
        target(nats_server, stream, subject=f"{low}.holdfast.other")
    with pytest.raises(hf.InvalidConfigError, match="is a subject of positions of sinks"):
        target(nats_server, stream, subject=f"{low}.rows", positions=f"{low}.rows")
    with pytest.raises(hf.InvalidConfigError, match=f"does not take subject elsewhere, its subjects are {low}"):
        target(nats_server, stream, subject="elsewhere")
    small = create_stream(nats_server.url, f"LOW{stream}", max_msg_size=500)
    unknown = NatsSink(nats_server.url, small, subject=f"low{low}.rows").target
    with pytest.raises(hf.InvalidConfigError, match=r"NatsSink orders/eu: .* takes messages of 372 bytes, .*set message_bytes_max"):
        unknown.open(owner())
    unknown.close()


def test_a_wrong_password_is_named_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with NatsServer(user="shop", password="right") as server:
        monkeypatch.setenv("NATS_URL", server.url.replace("right", "wrong"))
        with pytest.raises(hf.InvalidConfigError, match="the server refuses the login") as refused:
            target(server, "ORDERS", servers=hf.Secret("NATS_URL"))
        assert "wrong" not in str(refused.value)


def test_a_server_without_batches_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as lines:
                info = {"server_id": "x", "version": "2.9.10", "max_payload": 1_048_576, "headers": True, "proto": 1}
                connection.sendall(b"INFO " + json.dumps(info).encode() + b"\r\n")
                for line in lines:
                    if line.startswith(b"PING"):
                        connection.sendall(b"PONG\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        made = NatsSink(f"nats://127.0.0.1:{port}", "ORDERS", subject="orders.rows").target
        with pytest.raises(hf.InvalidConfigError, match=r"the server is NATS 2\.9, 2\.12 or newer is needed"):
            made.open(owner())
        thread.join(10)
