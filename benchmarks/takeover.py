"""The active member is killed (kill -9) or stopped (SIGSTOP) under a running job: seconds until another one leads it.

Members are real `holdfast serve --ha` processes, workers real processes without Spark. *One host*: members share the lock of a
folder. *Two hosts*: they share the folder and no lock, as members of two hosts do. *S3*: the state is on a server that speaks S3
(moto's), no lock. For each repetition: seconds until another member says that it is active; until it leads the job with all workers
registered; and the longest silence between two records of one worker meanwhile, as the job's function saw it.

    python -m benchmarks.takeover [--repeats 20] [--places "one host,two hosts,S3"] [--quick]"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.api.client import RestClient
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import ProcessFunction
from holdfast.operators.sinks.files.parquet import ParquetSink
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import HoldfastError
from tests.harness.members import MemberProcess, start_job, wait_for_active
from tests.harness.slots import LocalProcessSlots
from tests.integration.counting import COUNTS, SCHEMA, make_batch

Row = dict[str, Any]

ONE_HOST, TWO_HOSTS, S3 = "one host", "two hosts", "S3"
AIMS_S = {ONE_HOST: 1.0, TWO_HOSTS: 4.0, S3: 12.0}
"""99 of 100 kills: seconds until the job is led again."""
AIM_STOPPED_S = 10.0
"""SIGSTOP, in each place. On S3 it is met by chance alone with the default of `takeover_after_ms`: a sign of life stands still for
10 s before anybody probes."""
AIM_GAP_S = 0.2
RECORDS_PER_SECOND = 2_000
RECORDS = 1 << 40
WORKERS = 2
HEARTBEAT_S = 2.0
WAIT_S = 60.0
TOKEN = "benchmark-token-0123456789"


class Traced(ProcessFunction):
    """Writes down its longest silence between two records, every 20 ms, one file a process."""

    returns = COUNTS

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.last_s = self.written_s = self.gap_s = 0.0

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        now_s = time.time()
        self.gap_s = max(self.gap_s, now_s - self.last_s) if self.last_s else 0.0
        self.last_s = now_s
        if now_s - self.written_s >= 0.02:
            with open(f"{self.folder}/{os.getpid()}", "a") as file:
                file.write(f"{now_s:.6f} {self.gap_s:.6f}\n")
            self.written_s, self.gap_s = now_s, 0.0


class Rig:
    """Two members, a job, and its workers."""

    def __init__(self, folder: Path, place: str, state_url: str | None) -> None:
        self._folder, self._place, self._state_url = folder, place, state_url
        for name in ("state", "logs", "local", "trace"):
            (folder / name).mkdir()
        self._started = 0
        self.members: list[MemberProcess] = []
        self._slots: LocalProcessSlots | None = None
        self.job = ""

    def start_member(self) -> MemberProcess:
        self._started += 1
        environment = {"HOLDFAST_TOKEN": TOKEN, "HOLDFAST_LOCAL_DIR": str(self._folder / "member-files")}
        found = MemberProcess(
            self._folder,
            str(self._started),
            has_locks=self._place == ONE_HOST,
            state_dir=self._state_url,
            environment=environment,
        )
        self.members.append(found)
        return found

    def submit(self) -> None:
        env = Environment("takeover", parallelism=WORKERS, checkpoint_interval_ms=500, tolerable_failed_checkpoints=1_000)
        source = GeneratorSource(make_batch, RECORDS, SCHEMA, rows_per_second=RECORDS_PER_SECOND)
        traced = env.from_source(source).uid("source").key_by("key").process(Traced(str(self._folder / "trace"))).uid("traced")
        traced.sink_to(ParquetSink(str(self._folder / "out"), "out"), uid="sink")
        self.job, self._slots = start_job(self.client(), env.build(), self._folder)

    def client(self) -> RestClient:
        return RestClient(",".join(each.url for each in self.members), TOKEN, reconnect_timeout_s=WAIT_S)

    def is_led_by(self, member: MemberProcess) -> bool:
        """Whether the job is RUNNING there, as the member itself says: a new leader says so when every worker is registered."""
        try:
            return RestClient(member.url, TOKEN, reconnect_timeout_s=0).job_state(self.job) == "RUNNING"
        except HoldfastError:
            return False

    def lose_active(self, number: signal.Signals) -> Row:
        """Kill or stop the active member; what it took."""
        active = wait_for_active(self.members)
        standby = next(each for each in self.members if each is not active)
        client = self.client()
        _until(lambda: self.is_led_by(active) and standby.status("/standby") == 200, "all is well")
        completed = client.checkpoints(self.job)["counts"]["completed"]
        _until(lambda: client.checkpoints(self.job)["counts"]["completed"] > completed, "a checkpoint")
        attempt = client.workers(self.job)["attempt"]
        active.send(number)
        at_s, at_wall_s = time.monotonic(), time.time()
        wait_for_active([standby], WAIT_S)
        active_s = time.monotonic() - at_s
        _until(lambda: self.is_led_by(standby), "the job is led again")
        led_s = time.monotonic() - at_s
        _until(lambda: self._newest_record_s() > at_wall_s + led_s + 0.5, "records go on")
        same = RestClient(standby.url, TOKEN).workers(self.job)["attempt"] == attempt
        active.close()
        self.members.remove(active)
        joined = self.start_member()
        _until(lambda: joined.url in self._known_at(standby), "the new member is known")
        time.sleep(2 * HEARTBEAT_S)  # a worker is told of it by the answer to a heartbeat
        return {
            "workload": "takeover",
            "place": self._place,
            "event": "kill -9" if number is signal.SIGKILL else number.name,
            "active_s": round(active_s, 2),
            "led_s": round(led_s, 2),
            "gap_s": round(self._longest_gap_s(at_wall_s), 3),
            "same_attempt": same,
        }

    def _known_at(self, member: MemberProcess) -> list[str]:
        return [each["url"] for each in RestClient(member.url, TOKEN)._get("/v1/members")["members"]]

    def _lines(self) -> list[tuple[float, float]]:
        lines = [line.split() for path in (self._folder / "trace").iterdir() for line in path.read_text().split("\n")[:-1]]
        return [(float(at_s), float(gap_s)) for at_s, gap_s in lines]

    def _newest_record_s(self) -> float:
        return max((at_s for at_s, _ in self._lines()), default=0.0)

    def _longest_gap_s(self, since_s: float) -> float:
        return max((gap_s for at_s, gap_s in self._lines() if at_s >= since_s), default=0.0)

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()
        for member in self.members:
            member.close()


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not within {WAIT_S:.0f} s: {what}")
        time.sleep(0.01)


@contextlib.contextmanager
def _state_of(place: str) -> Iterator[str | None]:
    """URL of the state directory; None: a folder. The server's access is in this process's environment meanwhile."""
    if place != S3:
        yield None
        return
    from holdfast.statebackends.storage.s3_connection import S3Connection, S3Settings
    from tests.s3_server import CREDENTIALS, S3Server

    server, before = S3Server(), dict(os.environ)
    os.environ.update(CREDENTIALS, AWS_ENDPOINT_URL=server.url, AWS_ENDPOINT_URL_S3=server.url)
    try:
        yield f"s3://{server.new_bucket(S3Connection(S3Settings(endpoint_url=server.url)))}/state"
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.close()


def measure(
    repeats: int, places: tuple[str, ...] = (ONE_HOST, TWO_HOSTS, S3), *, tell: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """One row for each repetition: `repeats` kills and one stop at each place."""
    rows: list[Row] = []
    for place in places:
        scratch = tempfile.TemporaryDirectory(prefix="holdfast-takeover-", ignore_cleanup_errors=True)
        with scratch as folder, _state_of(place) as url:
            rig = Rig(Path(folder), place, url)
            try:
                rig.start_member()
                wait_for_active(rig.members)
                rig.start_member()
                rig.submit()
                for number in [signal.SIGKILL] * repeats + [signal.SIGSTOP]:
                    rows.append(rig.lose_active(number))
                    tell(rows[-1])
            finally:
                rig.close()
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """For each place and event: what 99 of 100 take at most, beside the aim."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["place"], row["event"]), []).append(row)
    table = []
    for (place, event), each in found.items():
        led = sorted(row["led_s"] for row in each)
        p99 = led[min(len(led) - 1, int(0.99 * len(led)))]
        gap = max(row["gap_s"] for row in each)
        aim = AIMS_S[place] if event == "kill -9" else AIM_STOPPED_S
        meets = p99 <= aim and gap <= AIM_GAP_S and all(row["same_attempt"] for row in each)
        table.append(
            {"workload": "takeover", "place": place, "event": event, "times": len(each), "led_p50_s": led[len(led) // 2],
             "led_p99_s": p99, "aim_at_most_s": aim, "gap_max_s": gap, "gap_aim_s": AIM_GAP_S, "meets": meets}
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--places", default=",".join(AIMS_S))
    parser.add_argument("--quick", action="store_true", help="2 repeats")
    options = parser.parse_args()
    places = tuple(each.strip() for each in options.places.split(","))
    rows = measure(2 if options.quick else options.repeats, places, tell=lambda row: print(json.dumps(row), flush=True))
    for row in summary(rows):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
