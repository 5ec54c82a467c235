"""The S3 shell over the simulated wire: whatever becomes of its requests, what it says of an operation is true."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast.chaos.checkers.observations import Stored
from holdfast.chaos.checkers.sometimes import Sometimes
from holdfast.chaos.sim.stores import Outcome, StoreDecision
from holdfast.chaos.sim.wire import HICCUPS_MAX, Fate, ServiceError, SimClient, SimS3, Trouble
from holdfast.statebackends.errors import AmbiguousWriteError, HoldfastError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.port import Operation
from tests.simulation.test_stores import Bench
from tests.statebackends.storage_contract import DATA, PATH

NEW = "job/new"
CREATES: list[Operation] = [ops.PutIfAbsent(NEW, DATA), ops.WriteFile(NEW, [DATA]), ops.LinkFile(PATH, NEW)]


def wired(seed: int = 7) -> Bench:
    bench = Bench(objects=True, wire=True, seed=seed)
    bench.told(ops.PutIfAbsent(PATH, DATA))
    return bench


@pytest.mark.parametrize("operation", CREATES, ids=lambda operation: type(operation).__name__)
def test_who_made_an_object_is_found_out_when_the_answer_is_lost(operation: Operation) -> None:
    for seed in range(40):
        bench = wired(seed)
        told = bench.told(operation, StoreDecision("lie"))
        assert told in (True, len(DATA)), seed
        assert bench.view.peek(NEW) == DATA
        assert bench.last.on_wire
        assert bench.told(ops.PutIfAbsent(NEW, b"other"), StoreDecision("lie")) is False, "the name is taken, by another create"
        assert bench.view.peek(NEW) == DATA


@pytest.mark.parametrize("operation", CREATES, ids=lambda operation: type(operation).__name__)
def test_a_create_that_never_gets_through_says_whether_it_may_have_happened(operation: Operation) -> None:
    seen: set[type] = set()
    for seed in range(40):
        bench = wired(seed)
        told = bench.told(operation, StoreDecision("fail"))
        assert isinstance(told, StorageUnavailableError)
        assert bench.view.peek(NEW) is None
        seen.add(type(told))
    assert AmbiguousWriteError in seen or isinstance(operation, ops.LinkFile)
    assert len(seen) > 1, "a refusal leaves no doubt"


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("operation", CREATES, ids=lambda operation: type(operation).__name__)
def test_an_operation_that_breaks_down_on_its_way_tells_no_lie(operation: Operation, fraction: float) -> None:
    for seed in range(20):
        bench = wired(seed)
        told = bench.told(operation, StoreDecision("partial", fraction=fraction))
        is_there = bench.view.peek(NEW) == DATA
        assert is_there or isinstance(told, HoldfastError), seed
        assert not (is_there and isinstance(told, HoldfastError)) or isinstance(told, AmbiguousWriteError), seed


def test_a_late_create_finds_that_its_sender_asked_again() -> None:
    bench = wired()
    assert bench.told(ops.PutIfAbsent(NEW, DATA), StoreDecision("late", delay_ms=50)) is True
    assert bench.kernel.step()
    assert bench.last.fate == "late"
    assert bench.last.result is False
    assert bench.view.peek(NEW) == DATA


@pytest.mark.parametrize(("outcome", "delay_ms"), [("late", 0), ("late", 50), ("late", 400), ("late", 2_500), ("lie", 50)])
def test_what_is_late_arrives_when_its_sender_has_gone_on(outcome: Outcome, delay_ms: int) -> None:
    """It waits for each of its requests, and before it asks again: all of that is over."""
    arrivals = 0
    for seed in range(40):
        bench = wired(seed)
        assert bench.told(ops.PutIfAbsent(NEW, DATA), StoreDecision(outcome, delay_ms=delay_ms)) is True
        while bench.kernel.step():
            assert bench.last.fate == "late"
            assert bench.kernel.now_us >= bench.client.waited_us() + delay_ms * 1_000 - 1, seed  # whole us
            arrivals += 1
    assert arrivals > 0


def test_a_late_create_comes_back_when_its_object_was_deleted() -> None:
    """As S3 has it: whoever deletes a name that a create of its own may still be on its way to finds it again."""
    bench = wired()
    assert bench.told(ops.PutIfAbsent(NEW, DATA), StoreDecision("late", delay_ms=50)) is True
    assert bench.told(ops.DeleteFile(NEW)) is True
    assert bench.kernel.step()
    assert (bench.last.fate, bench.last.added) == ("late", (NEW,))
    assert bench.view.peek(NEW) == DATA


def test_reads_get_through_what_is_cut_and_refused() -> None:
    for seed in range(40):
        bench = wired(seed)
        assert bench.told(ops.ReadFile(PATH), StoreDecision("lie")) == DATA
        assert bench.told(ops.StatFile(PATH), StoreDecision("late", delay_ms=50)) == len(DATA)
        assert bench.told(ops.ListFolder("job"), StoreDecision("lie")) == ["chk-1/"]


def test_a_full_store_takes_nothing_and_gives_all() -> None:
    bench = wired()
    assert isinstance(bench.told(ops.PutIfAbsent(NEW, DATA), StoreDecision("full")), StorageUnavailableError)
    assert bench.told(ops.ReadFile(PATH), StoreDecision("full")) == DATA
    assert bench.told(ops.DeleteFile(PATH), StoreDecision("full")) is True


def test_waiting_takes_virtual_time() -> None:
    bench = wired()
    before_us = bench.client.waited_us()
    bench.told(ops.ReadFile(PATH))
    assert bench.client.waited_us() == before_us
    bench.told(ops.PutIfAbsent(NEW, DATA), StoreDecision("late", delay_ms=50))
    assert bench.client.waited_us() > before_us + 300_000


def test_listings_come_in_pages_and_folders_are_deleted_whole() -> None:
    bench = wired()
    names = [f"many/{number:02}" for number in range(20)]
    for name in names:
        bench.told(ops.PutIfAbsent(name, b""))
    assert bench.told(ops.ListFiles("many")) == names
    assert bench.told(ops.ListFolder("many")) == [name.removeprefix("many/") for name in names]
    assert bench.told(ops.DeleteFolder("many"), StoreDecision("lie")) == 20
    assert bench.told(ops.ListFiles("many")) == []


def test_every_fate_is_met() -> None:
    met: set[Fate] = set()
    names = ("head_object", "put_object", "get_object", "complete_multipart_upload")
    for outcome in ("lie", "late", "fail", "partial", "full"):
        for seed in range(200):
            trouble = Trouble(outcome, 0.5, random.Random(seed), lambda act: None)
            met |= {trouble.fate(name) for name in names for _ in range(3)}
    assert met == set(Fate)


def test_hiccups_end() -> None:
    trouble = Trouble("lie", 0.0, random.Random(1), lambda act: None)
    fates = [trouble.fate("head_object") for _ in range(200)]
    assert sum(fate is not Fate.FINE for fate in fates) == HICCUPS_MAX


def begun() -> tuple[SimS3, SimClient, list[dict[str, Any]]]:
    """An upload of two parts to the key `a`, and what its completion has to name."""
    store = SimS3(lambda: 0, random.Random(1))
    client = SimClient(store)
    client.create_multipart_upload(Bucket="sim", Key="a", Metadata={"holdfast-nonce": "n"})
    tags = [upload_part(client, "a", number)["ETag"] for number in (2, 1)]
    return store, client, [{"PartNumber": 1, "ETag": tags[1]}, {"PartNumber": 2, "ETag": tags[0]}]


def upload_part(client: SimClient, key: str, number: int) -> dict[str, Any]:
    return client.upload_part(Bucket="sim", Key=key, UploadId="upload-1", PartNumber=number, Body=b"%d" % number)


def complete(client: SimClient, parts: list[dict[str, Any]], key: str = "a") -> None:
    wanted = {"Parts": parts}
    client.complete_multipart_upload(Bucket="sim", Key=key, UploadId="upload-1", MultipartUpload=wanted, IfNoneMatch="*")


def test_an_upload_is_completed_once() -> None:
    store, client, parts = begun()
    complete(client, parts)
    assert (store.peek("/a"), store.maker("/a")) == (b"12", "n")
    with pytest.raises(ServiceError, match="NoSuchUpload"):
        complete(client, parts)


def test_an_upload_is_of_one_key() -> None:
    store, client, parts = begun()
    for ask in (
        lambda: upload_part(client, "b", 3),
        lambda: complete(client, parts, "b"),
        lambda: client.abort_multipart_upload(Bucket="sim", Key="b", UploadId="upload-1"),
    ):
        with pytest.raises(ServiceError, match="NoSuchUpload"):
            ask()
    complete(client, parts)
    assert (store.peek("/a"), store.peek("/b")) == (b"12", None)


@pytest.mark.parametrize("wrong", [{"PartNumber": 3, "ETag": "x"}, {"PartNumber": 1, "ETag": "x"}], ids=["number", "tag"])
def test_a_part_that_was_not_uploaded_completes_nothing(wrong: dict[str, Any]) -> None:
    store, client, parts = begun()
    with pytest.raises(ServiceError, match="InvalidPart"):
        complete(client, [wrong, *parts[1:]])
    assert store.peek("/a") is None


def test_the_facts_say_that_a_wire_was_there() -> None:
    plain = Bench(objects=True)
    plain.told(ops.PutIfAbsent(PATH, DATA))
    assert not plain.last.on_wire
    assert isinstance(wired().observed[0], Stored)


@pytest.mark.parametrize(("wire", "visited"), [(True, "wire_answer_lost"), (False, "write_ambiguous")])
def test_a_write_is_ambiguous_only_if_its_caller_is_left_in_the_dark(wire: bool, visited: str) -> None:
    bench = Bench(objects=True, wire=wire)
    bench.told(ops.PutIfAbsent(NEW, DATA), StoreDecision("lie"))
    sometimes = Sometimes()
    sometimes.observe(bench.last)
    assert set(sometimes.visits) == {visited}
