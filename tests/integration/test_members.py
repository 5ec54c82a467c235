"""Members as processes, with real workers: the active one is killed and paused under a running job, which is exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.client import RestClient
from holdfast.api.errors import ConnectionLostError
from holdfast.statebackends.layout import JobPaths
from tests.harness.members import ROOT, MemberProcess, start_job, wait_for_active
from tests.harness.slots import LocalProcessSlots
from tests.integration.test_two_processes import committed, counting_plan, eventually, expected

TAKEOVER_AFTER_MS = 1_500


class Members:
    """Members of one state directory, and the workers of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "logs", "local"):
            (folder / name).mkdir()
        self.processes: list[MemberProcess] = []
        self.slots: LocalProcessSlots | None = None
        self.job = ""

    def start(self, **options: Any) -> MemberProcess:
        options = {"takeover_after_ms": TAKEOVER_AFTER_MS, **options}
        self.processes.append(MemberProcess(self.folder, str(len(self.processes)), **options))
        return self.processes[-1]

    @property
    def token(self) -> str:
        return (self.folder / "state" / "_token").read_text().strip()

    def client(self, *members: MemberProcess, **options: Any) -> RestClient:
        return RestClient(",".join(each.url for each in members or self.processes), self.token, **options)

    def submit(self, rows: int, seconds: float) -> None:
        plan = counting_plan(rows, seconds, self.folder / "out", "memory")
        self.job, self.slots = start_job(self.client(), plan, self.folder)

    def close(self) -> None:
        if self.slots is not None:
            self.slots.close()
        for process in self.processes:
            process.close()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path)
    yield members
    members.close()


def _completed(client: RestClient, job: str) -> int:
    return int(client.checkpoints(job)["counts"]["completed"])


def _stuck(job: Path) -> int:
    """Id of a checkpoint that stays undecided, by the records: a view may show one as pending that is complete by now."""
    seen: list[tuple[float, list[str]]] = []

    def is_stuck() -> bool:
        claimed = {path.parent.name for path in job.glob("chk-*/_claim")}
        seen.append((time.monotonic(), sorted(claimed - {path.parent.name for path in job.glob("chk-*/_metadata")})))
        same = [at_s for at_s, names in seen if names == seen[-1][1] != []]
        return bool(same) and same[-1] - same[0] > 0.5

    eventually(is_stuck, "a pending checkpoint")
    return int(seen[-1][1][0].removeprefix("chk-"))


@pytest.mark.slow
def test_job_goes_on_through_kill_and_pause_of_the_active_member(members: Members, tmp_path: Path) -> None:
    rows = 6_000
    first, second = members.start(), members.start()
    active = wait_for_active([first, second])
    standby = second if active is first else first
    members.submit(rows, 12.0)
    client, job = members.client(), members.job
    eventually(lambda: _completed(client, job) >= 2, "two checkpoints")
    attempt = client.workers(job)["attempt"]
    assert members.slots is not None
    held = members.slots.pid(0)
    assert held is not None

    os.kill(held, signal.SIGSTOP)  # its acknowledgement is missing: a checkpoint is pending when the active member dies
    pending = _stuck(tmp_path / "state" / job)
    active.kill()
    killed_s = time.monotonic()
    wait_for_active([standby], 5.0)
    assert time.monotonic() - killed_s < 1.0 + TAKEOVER_AFTER_MS / 1000, "the kernel frees the lock"
    decision = tmp_path / "state" / JobPaths(job).decision(pending)
    eventually(decision.exists, "the pending checkpoint is decided")
    assert b'"leader_changed"' in decision.read_bytes()
    os.kill(held, signal.SIGCONT)
    before = _completed(client, job)
    eventually(lambda: _completed(client, job) > before, "a checkpoint under the new leader")

    def told() -> tuple[str, ...]:
        """Where the job resumes, by the snapshot itself."""
        resume = client.health(job).resume
        return resume.sources[0].positions if resume.positions_of > 0 else ()

    eventually(lambda: bool(told()), "the positions of its source")
    first_row = int(told()[0].removeprefix("row ").partition(", and")[0].replace(",", ""))
    assert 0 < first_row <= rows

    third = members.start()
    assert third.status("/standby") == 200
    standby.send(signal.SIGSTOP)
    stopped_s = time.monotonic()
    wait_for_active([third], 20.0)
    assert time.monotonic() - stopped_s < 10.0
    standby.send(signal.SIGCONT)
    eventually(lambda: standby.status("/standby") == 200, "the one that was paused stands by")
    assert third.is_active
    client = members.client(standby)  # it passes on what people ask
    eventually(lambda: client.job_state(job) == "FINISHED", "the end of the job")
    assert committed(tmp_path / "out") == expected(rows)
    assert [members.slots.starts(slot) for slot in range(2)] == [1, 1], "workers keep their process"
    assert client.workers(job)["attempt"] == attempt, "and their attempt"


@pytest.mark.slow
def test_active_member_that_leaves_hands_over_and_none_is_named(members: Members, tmp_path: Path) -> None:
    # By time alone nobody takes over within the 5 s below; a member looks at the others' signs every 1.2 s.
    first, second = members.start(takeover_after_ms=12_000), members.start(takeover_after_ms=12_000)
    active = wait_for_active([first, second])
    other = second if active is first else first
    plain = MemberProcess(tmp_path, "plain", options=())
    try:
        assert plain.process.wait(30) == 2
        assert "another coordinator runs on" in plain.log.read_text()
    finally:
        plain.close()
    active.send(signal.SIGTERM)
    wait_for_active([other], 5.0)
    assert active.process.wait(15) == 0

    def told() -> list[tuple[str, str, bool]]:
        found = members.client(other)._get("/v1/members")["members"]
        return [(each["url"], each["role"], each["leaving"]) for each in found]

    expected_roles = [(other.url, "active", False), (active.url, "gone", True)]
    eventually(lambda: told() == expected_roles, "the one that left is told as gone")  # read from its file now and then
    other.kill()
    with pytest.raises(ConnectionLostError, match="can't reach the coordinator"):
        members.client(reconnect_timeout_s=0).jobs()


@pytest.mark.endurance
@pytest.mark.slow
def test_file_system_without_locks_is_named_and_members_do_without(members: Members) -> None:
    first, second = members.start(has_locks=False), members.start(has_locks=False)
    active = wait_for_active([first, second])
    other = second if active is first else first
    eventually(lambda: len(members.client()._get("/v1/members")["members"]) == 2, "both are known")
    found = members.client()._get("/v1/members")["members"]
    assert [each["holds_lock"] for each in found] == [False, False]
    assert all("takes no locks" in each["lock_problem"] for each in found)
    assert "take over by time and probe alone" in first.log.read_text()
    active.kill()
    wait_for_active([other], 10.0)
    with pytest.raises(subprocess.TimeoutExpired):
        other.process.wait(0)


@pytest.mark.slow
def test_member_does_not_stand_beside_a_coordinator_that_knows_of_none(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    plain = MemberProcess(tmp_path, "plain", options=())
    try:
        assert plain.url
        assert (plain.status("/leader"), plain.status("/standby")) == (200, 503)
        command = [sys.executable, "-m", "holdfast", "serve", "--ha", "--state-dir", str(tmp_path / "state")]
        refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 2
        assert "a coordinator without --ha runs on" in refused.stderr
        assert plain.url in refused.stderr
    finally:
        plain.close()
