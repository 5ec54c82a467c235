"""A key leaves a running job of real worker processes: one of them dies in the middle, and no file decodes to the key then."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.api.access.audit_log import read_audit
from holdfast.api.cli.main import app
from holdfast.barriers.jobgraph import RestartStrategy
from holdfast.operators.base import JobPlan
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sources.generator import GeneratorSource
from tests.api.test_forgetting import files_with
from tests.integration.counting import GUEST, GUEST_ROWS, KEYS, NAMED, CountPerName, make_named_batch
from tests.integration.test_two_processes import TOKEN, Cluster, eventually

ROWS, SECONDS = 40_000, 600.0
"""More than a busy machine needs: reading back is done at the lowest priority."""
WAIT_S = 240.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def naming_plan(output: Path, backend: Any) -> JobPlan:
    env = Environment(
        "names",
        parallelism=2,
        checkpoint_interval_ms=150,
        tolerable_failed_checkpoints=100,
        state_backend=backend,
        retained_checkpoints=3,
        restart=RestartStrategy(),
    )
    source = GeneratorSource(make_named_batch, ROWS, NAMED, rows_per_second=ROWS / SECONDS)
    counts = env.from_source(source).uid("source").key_by("name").process(CountPerName()).uid("count")
    counts.sink_to(ParquetSink(output, "out"), uid="sink")
    return env.build()


def expected() -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    names: Counter[str] = Counter()
    for name in make_names():
        names[name] += 1
        found[name, names[name]] += 1
    return found


def make_names() -> list[str]:
    return [GUEST if row < GUEST_ROWS and row % 10 == 0 else f"name-{row % KEYS}" for row in range(ROWS)]


def holding(cluster: Cluster, *others: Path) -> list[str]:
    """Files of the job's state, and copies on workers' disks, that decode to the key."""
    texts = [base64.b64encode(b"x" * shift + GUEST.encode())[4:-4] for shift in range(3)]
    folders = [cluster.state, cluster.local / "recovery", *others]
    found = [path for folder in folders for path in files_with(folder, GUEST)]
    for folder, _, names in os.walk(cluster.state):  # a checkpoint may be deleted meanwhile, which `rglob` does not bear
        for path in (Path(folder, name) for name in names if name.startswith("_")):
            with contextlib.suppress(FileNotFoundError):
                if any(text in path.read_bytes() for text in texts):
                    found.append(str(path))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", [pytest.param("filesystem", marks=pytest.mark.endurance), "rocksdb"])
def test_a_key_is_forgotten_while_a_worker_is_killed(cluster: Cluster, tmp_path: Path, backend: Any) -> None:
    job = cluster.submit(naming_plan(tmp_path / "out", backend)).job_id
    eventually(lambda: rows_out(cluster, job) > GUEST_ROWS, "the guest's rows behind us")
    before = cluster.completed(job)
    eventually(lambda: cluster.completed(job) > before + 1, "checkpoints that hold them")
    savepoint = Path(cluster.client.savepoint(job, str(tmp_path / "savepoints")))
    assert holding(cluster)
    assert files_with(savepoint, GUEST)
    assert cluster.slots is not None
    held = cluster.slots.pid(1)
    assert held is not None
    os.kill(held, signal.SIGSTOP)  # the erasure's checkpoint can't be complete before the death
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.client.forget, job, [("count", "*")], GUEST, timeout_s=WAIT_S)
        eventually(lambda: is_erasing(cluster, job), "the erasure's checkpoint under way")
        assert not asked.done()
        os.kill(held, signal.SIGKILL)
        certificate = asked.result(WAIT_S)
    assert certificate["is_complete"], certificate["kept"]
    assert certificate["erased_at"] > before
    assert certificate["result"].endswith(f"chk-{certificate['erased_at']}")
    assert str(savepoint) in certificate["deleted"]
    assert GUEST not in json.dumps(certificate)
    assert {"sources", "output", "in_flight", "local_copies"} <= certificate["not_covered"].keys()
    eventually(lambda: not holding(cluster, tmp_path / "savepoints"), "no file that decodes to the key")
    cluster.kill_worker(0)
    completed = cluster.completed(job)
    eventually(lambda: cluster.completed(job) > completed + 1, "checkpoints of the next attempt")
    assert not holding(cluster, tmp_path / "savepoints")
    assert cluster.client.labels(job)["labels"] == []
    cluster.client.stop(job, str(tmp_path / "end"))
    table = read_committed(tmp_path / "out", "out")
    found = Counter(zip(table["name"].to_pylist(), table["count"].to_pylist(), strict=True))
    assert found[GUEST, GUEST_ROWS // 10]
    assert found <= expected(), "what is committed is what was counted, once"
    assert not any(GUEST in str(line) for line in read_audit(str(cluster.state)))


def rows_out(cluster: Cluster, job: str) -> int:
    return sum(int(each["metrics"]["write-records"]) for each in cluster.client.job(job)["vertices"])


def is_erasing(cluster: Cluster, job: str) -> bool:
    newest = cluster.client.checkpoints(job)["history"][0]
    return bool(newest["status"] == "IN_PROGRESS" and cluster.client._get(f"/v1/jobs/{job}/forget")["forgettings"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_line_of_a_running_job_and_what_keeps_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(naming_plan(tmp_path / "out", "filesystem")).job_id
    eventually(lambda: cluster.completed(job) >= 2, "two checkpoints")
    eventually(lambda: cluster.client.history(job)["records"], "a file of the history, which is written behind")
    newest = cluster.client.checkpoints(job)["latest"]["completed"]["id"]
    cluster.client.add_label(job, newest, "mine")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    key = tmp_path / "key"
    key.write_text("name-3\n")
    command = ["forget", job, "--state", "count", "count", "--key-file", str(key), "--url", cluster.coordinator.url]
    ran = CliRunner().invoke(app, [*command, "--token-file", str(token), "--json", "--keep-history"])
    assert ran.exit_code == 1, ran.output
    document = json.loads(ran.stdout)
    kept = {Path(place).name: why for place, why in document["kept"].items()}
    assert kept[f"chk-{newest}"] == "a label keeps it"
    assert kept["history"].startswith("it was to stay")
    assert any(place.endswith("count/said") for place in document["remaining"])
    cluster.client.remove_label(job, "mine")
    ran = CliRunner().invoke(app, [*command, "--token-file", str(token)])
    assert ran.exit_code == 0, ran.output
    assert "erased at      the barrier of checkpoint" in ran.output
    wrong = [*command[:2], "--state", "count", "nothing", *command[5:], "--token-file", str(token)]
    ran = CliRunner().invoke(app, wrong)
    assert ran.exit_code == 1
    assert "nothing" in ran.output
    cluster.client.cancel(job)
