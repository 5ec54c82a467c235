"""What the files of a job take, by a listing, and what that costs by a file of prices."""

from __future__ import annotations

import math

import msgspec
import pytest

from holdfast.coordinator.ha.records import ConfigRecord, encode_record
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.cost import (
    GETS,
    LISTS,
    PUTS_BESIDE_FILES,
    Cost,
    Prices,
    decode_prices,
    derive_cost,
    measure_cost,
    priced,
)
from holdfast.coordinator.ownership.labels import add_label
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.storage.port import FileFacts, run_flow
from tests.coordinator.ownership.test_labels import JOB, PATHS, SAVEPOINT, ended, mark, put_checkpoint, stored_job
from tests.coordinator.world import DictStorage


@pytest.fixture
def storage() -> DictStorage:
    return stored_job()


def test_sizes_and_files_add_up(storage: DictStorage) -> None:
    storage.files[f"{PATHS.checkpoint(4)}/large"] = b"x" * 200_000
    run_flow(add_label(PATHS, 2, "keep", mark()), storage)
    cost = run_flow(measure_cost(PATHS, 5_000), storage)
    own = {path: len(content) for path, content in storage.files.items() if path.startswith((f"{JOB}/", f"{SAVEPOINT}/"))}
    assert cost.files == len(own)
    assert cost.total_size == sum(own.values())
    assert cost.total_size == cost.exclusive_size + cost.shared_size + cost.savepoint_size + cost.other_size
    assert cost.savepoint_size == sum(size for path, size in own.items() if path.startswith(SAVEPOINT))
    assert (cost.small_files, cost.files - cost.small_files) == (len(own) - 1, 1)
    assert [each.checkpoint_id for each in cost.checkpoints] == [4, 3, 2, 1]
    four, three, two, _ = cost.checkpoints
    assert four.exclusive_size > 200_000
    assert (four.files, four.small_files) == (4, 3)
    assert three.exclusive_size == cost.savepoint_size
    assert two.labels == ("keep",)
    assert cost.as_of_ms == 5_000
    assert cost.unread == ()


def test_requests_are_told_from_what_the_newest_checkpoint_wrote(storage: DictStorage) -> None:
    cost = run_flow(measure_cost(PATHS, 5_000), storage)  # one each ten seconds, by the settings of the job
    assert cost.requests is not None
    assert cost.requests.checkpoints_per_hour == 360
    assert cost.requests.puts_per_hour == 360 * (1 + PUTS_BESIDE_FILES)
    assert (cost.requests.gets_per_hour, cost.requests.lists_per_hour) == (360 * GETS, 360 * LISTS)


def test_the_rate_is_by_the_interval_that_holds(storage: DictStorage) -> None:
    changed = ConfigRecord(1, 1, 1, {"checkpoint_interval_ms": 15_000}, "n")
    storage.files[PATHS.config(1)] = encode_record(changed)
    cost = run_flow(measure_cost(PATHS, 5_000), storage)
    assert cost.requests is not None
    assert cost.requests.checkpoints_per_hour == 240


@pytest.mark.parametrize("name", ["ended", "no interval"])
def test_a_job_that_takes_no_further_checkpoints_has_no_requests(storage: DictStorage, name: str) -> None:
    if name == "ended":
        ended(storage)
    else:
        storage.files[PATHS.config(1)] = encode_record(ConfigRecord(1, 1, 1, {"checkpoint_interval_ms": None}, "n"))
    cost = run_flow(measure_cost(PATHS, 5_000), storage)
    assert cost.requests is None
    assert len(cost.checkpoints) == 4


def test_the_column_adds_up_to_the_sum_of_checkpoints(storage: DictStorage) -> None:
    """Pointers to savepoints and records of ids that were aborted are no checkpoint's own."""
    cost = run_flow(measure_cost(PATHS, 5_000), storage)
    assert cost.exclusive_size == sum(each.exclusive_size for each in cost.checkpoints if each.kind == "checkpoint")
    pointer = sum(len(content) for path, content in storage.files.items() if path.startswith(f"{PATHS.checkpoint(3)}/"))
    assert cost.other_size > pointer > 0


def test_a_savepoint_that_was_disposed_of_has_no_row(storage: DictStorage) -> None:
    storage.files = {path: content for path, content in storage.files.items() if not path.startswith(SAVEPOINT)}
    cost = run_flow(measure_cost(PATHS, 5_000), storage)
    assert [each.checkpoint_id for each in cost.checkpoints] == [4, 2, 1]
    assert cost.savepoint_size == 0


def test_a_job_without_checkpoints_has_no_requests(storage: DictStorage) -> None:
    files = {path: content for path, content in storage.files.items() if "chk-" not in path and SAVEPOINT not in path}
    storage.files = files
    cost = run_flow(measure_cost(PATHS, 5_000), storage)
    assert (cost.requests, cost.checkpoints, cost.exclusive_size) == (None, (), 0)


def test_files_that_checkpoints_share_count_once_in_the_sum(storage: DictStorage) -> None:
    job = run_flow(read_job(PATHS), storage)
    files = [FileFacts(f"{JOB}/shared/1-1-u-0-n-a.sst", 100, 0), FileFacts(f"{JOB}/chk-1/_claim", 7, 0)]
    cost = derive_cost(job, files, {}, {}, now_ms=1)
    assert (cost.shared_size, cost.exclusive_size, cost.other_size, cost.total_size) == (100, 7, 0, 107)


def test_a_checkpoint_that_completed_behind_the_listing_is_not_told_yet(storage: DictStorage) -> None:
    """Its files were not listed: it is not one without files, and the next ones will not do without requests for them."""
    job = run_flow(read_job(PATHS), storage)
    facts = [FileFacts(path, len(content), 0) for path, content in storage.files.items() if path.startswith(f"{JOB}/")]
    points = [FileFacts(path, len(content), 0) for path, content in storage.files.items() if path.startswith(f"{SAVEPOINT}/")]
    whole = derive_cost(job, facts, {3: points}, {}, now_ms=1)
    early = [fact for fact in facts if not fact.path.startswith(f"{PATHS.checkpoint(4)}/")]
    cost = derive_cost(job, early, {3: points}, {}, now_ms=1)
    assert [each.checkpoint_id for each in cost.checkpoints] == [3, 2, 1]
    assert cost.requests == whole.requests
    assert cost.total_size == cost.exclusive_size + cost.shared_size + cost.savepoint_size + cost.other_size


def test_a_savepoint_that_can_not_be_listed_is_named(storage: DictStorage) -> None:
    class Away(DictStorage):
        def execute(self, operation: object) -> object:
            if str(getattr(operation, "prefix", "")).startswith(SAVEPOINT):
                raise InvalidConfigError("no such storage here", setting="x")
            return super().execute(operation)  # type: ignore[arg-type]

    away = Away()
    away.files = storage.files
    cost = run_flow(measure_cost(PATHS, 1), away)
    assert cost.unread == (f"{SAVEPOINT}: no such storage here",)
    assert cost.savepoint_size == 0
    (three,) = [each for each in cost.checkpoints if each.checkpoint_id == 3]
    assert (three.exclusive_size, three.files, three.small_files) == (-1, -1, -1), "nobody knows"


# ------------------------------------------------------------------------------------------------------------------ prices

TOML = b'name = "list of 2026"\ncurrency = "EUR"\nstorage_gib_month = 0.5\nputs_per_1000 = 0.01\n'


def test_money_by_a_price_file() -> None:
    prices = decode_prices(TOML, "p.toml")
    cost = Cost(JOB, 1, 4 << 30, 0, 0, 0, 0, 10, 10, 0, (), None)
    paid = priced(cost, prices).money
    assert paid is not None
    assert (paid.currency, paid.storage_per_month, paid.requests_per_month, paid.prices) == ("EUR", 2.0, 0.0, "list of 2026")
    put_checkpoint(storage := stored_job(), 9)
    counted = run_flow(measure_cost(PATHS, 1), storage)
    assert counted.requests is not None
    money = priced(counted, prices).money
    assert money is not None
    assert math.isclose(money.requests_per_month, 730 * counted.requests.puts_per_hour / 1000 * 0.01)
    assert math.isclose(money.total_per_month, money.storage_per_month + money.requests_per_month)


def test_small_files_are_billed_as_the_price_file_says() -> None:
    cost = Cost(JOB, 1, 1_000, 0, 0, 0, 0, 10, 10, 1_000, (), None)
    prices = Prices("p", "EUR", storage_gib_month=float(1 << 30), least_file_size=131_072)
    money = priced(cost, prices).money
    assert money is not None
    assert money.storage_per_month == 10 * 131_072


def test_json_is_read_as_toml_is() -> None:
    as_json = msgspec.json.encode({"name": "list of 2026", "currency": "EUR", "storage_gib_month": 0.5, "puts_per_1000": 0.01})
    assert decode_prices(as_json, "p.json") == decode_prices(TOML, "p.toml")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"name = ",
        b"\xff\xfe",
        b'name = "x"',
        b'currency = "EUR"',
        TOML + b"more = 1\n",
        TOML + b"gets_per_1000 = -1.0\n",
        TOML + b"gets_per_1000 = nan\n",
        TOML + b"gets_per_1000 = inf\n",
        TOML + b'gets_per_1000 = "free"\n',
        TOML + b"least_file_size = -1\n",
        b'name = ""\ncurrency = "EUR"\n',
        b'name = "a\\nb"\ncurrency = "EUR"\n',
        b"#" * 100_000,
    ],
)
def test_what_is_no_price_file_is_named(content: bytes) -> None:
    with pytest.raises(InvalidConfigError, match=r"p\.toml"):
        decode_prices(content, "p.toml")
