"""The wheel in an empty folder: the command serves, with its pages, and a job of a user's program runs to its end."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import urllib3

from holdfast.operators.sinks.files.parquet import read_committed
from tests.harness.installed import PACKAGES, ROOT, clean_environment, installed_once

pytestmark = pytest.mark.slow

ROWS = 2_000
DEADLINE_S = 60.0

PROGRAM = """
import os, pickle, subprocess, sys, time

import pyarrow as pa

import holdfast as hf
from holdfast.api.client import RestClient
from holdfast.barriers.jobgraph import Submission
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.operators.worker.main import WorkerSpec, pickle_plan

SCHEMA = pa.schema([("key", pa.int64())])

def make_batch(indices):
    return pa.record_batch([pa.array((indices % 7).tolist(), pa.int64())], schema=SCHEMA)

class Total(hf.ProcessFunction):
    count = hf.ValueStateDescriptor("count", int)
    states = (count,)

    def process_element(self, value, ctx, out):
        state = ctx.state(self.count)
        state.update((state.value() or 0) + 1)
        out({"key": value["key"], "count": state.value()})

def submit(url, token, rows):
    env = Environment("shop", parallelism=2, checkpoint_interval_ms=200, state_backend="filesystem")
    keyed = env.from_source(GeneratorSource(make_batch, rows, SCHEMA, rows_per_second=rows)).uid("source").key_by("key")
    counts = keyed.process(Total(), returns=pa.schema([("key", pa.int64()), ("count", pa.int64())])).uid("total")
    counts.sink_to(hf.ParquetSink(os.path.abspath("out")), uid="sink")
    plan, client = env.build(), RestClient(url, token)
    accepted = client.submit(Submission(plan.graph, driver_nonce=os.urandom(8).hex()))
    workers = []
    for slot in range(accepted.slots):
        os.makedirs(f"local-{slot}")
        spec = WorkerSpec(job_id=accepted.job_id, slot=slot, submission=accepted.submission, task_attempt=1, coordinator_url=url,
            token=accepted.worker_token, state_directory=accepted.directory, plan=pickle_plan(plan),
            local_directory=os.path.abspath(f"local-{slot}"))
        with open(f"worker-{slot}", "wb") as file:
            pickle.dump(spec, file)
        workers.append(subprocess.Popen([sys.executable, "-m", "holdfast.operators.worker.main", f"worker-{slot}"]))
    until = time.monotonic() + 50
    while client.job_state(accepted.job_id) not in ("FINISHED", "FAILED") and time.monotonic() < until:
        time.sleep(0.05)
    for worker in workers:
        worker.kill()
        worker.wait()
    print(accepted.job_id, client.job_state(accepted.job_id), hf.__file__)

if __name__ == "__main__":
    submit(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


@dataclass
class Serving:
    """`holdfast serve` of the wheel."""

    python: Path
    folder: Path
    url: str
    token: str

    def get(self, path: str) -> urllib3.BaseHTTPResponse:
        return urllib3.request("GET", self.url + path, headers={"Authorization": f"Bearer {self.token}"}, retries=False, timeout=10)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    tmp_path = tmp_path_factory.mktemp("empty")
    python = installed_once(tmp_path_factory).python
    command = [str(python.with_name("holdfast")), "serve", "--state-dir", "state", "--port", "0", "--json", "--log-format", "json"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            told = json.loads(process.stdout.readline() or "null")
            assert told is not None, (tmp_path / "log").read_text()[-2_000:]
            yield Serving(python, tmp_path, told["url"], Path(told["token_file"]).read_text().strip())
        finally:
            process.terminate()
            code = process.wait(20)
    assert code == 0, (tmp_path / "log").read_text()[-2_000:]


def test_every_file_beside_the_modules_is_in_the_wheel(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pages, scripts, licences: what a build leaves out is missed by users first."""
    library = next((installed_once(tmp_path_factory).python.parents[1] / "lib").glob("python*/site-packages"))
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file() and path.suffix != ".py"]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".pyc" and not path.name.startswith(".")}
    assert any(name.startswith("api/docs/vendor/swagger-ui/") for name in wanted)
    assert sorted(name for name in wanted if not (library / "holdfast" / name).exists()) == []


def test_pages_are_served(served: Serving) -> None:
    documentation = served.get("/docs")
    assert documentation.status == 200
    for name in re.findall(r'(?:src|href)="([^":]+\.(?:js|css))"', documentation.data.decode()):
        assert served.get(f"/{name}").status == 200, name
    entrance = served.get("/ui/")
    assert entrance.status == 200
    named = re.findall(r'(?:src|href)="([^":#]+\.(?:js|css|svg))"', entrance.data.decode())
    assert named
    for name in named:
        assert served.get(f"/ui/{name.removeprefix('/ui/').removeprefix('./')}").status == 200, name
    assert served.get("/metrics").status == 200


def test_a_job_runs_to_its_end(served: Serving) -> None:
    program = served.folder / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [str(served.python), str(program), served.url, served.token, str(ROWS)],
        cwd=served.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    job_id, state, place = done.stdout.split()
    assert state == "FINISHED", done.stderr[-3_000:]
    assert Path(place).is_relative_to(served.python.parents[1]), "the wheel's, not the checkout's"
    assert found(served.folder / "out") == Counter((n % 7, n // 7 + 1) for n in range(ROWS))
    status = subprocess.run(
        [str(served.python.with_name("holdfast")), "jobs", "--state-dir", "state", "--json"],
        cwd=served.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert [job["jid"] for job in json.loads(status.stdout)] == [job_id]


def found(folder: Path) -> Counter[tuple[int, int]]:
    table = read_committed(folder, "sink")
    return Counter(zip(table["key"].to_pylist(), table["count"].to_pylist(), strict=True))


def test_the_doctor_of_the_wheel_finds_it_well(served: Serving) -> None:
    done = subprocess.run(
        [str(served.python.with_name("holdfast")), "doctor", "--state-dir", "state", "--json"],
        cwd=served.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    findings = {each["check"]: each for each in json.loads(done.stdout)}
    assert findings["coordinator"]["verdict"] == findings["token"]["verdict"] == findings["conditional create"]["verdict"] == "ok"
