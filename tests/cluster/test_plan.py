"""What a seed gives, and that a run leaves nothing behind, wherever it ends; with the commands recorded, and no network made."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from tests.cluster import network
from tests.cluster.check import differences
from tests.cluster.job import make_rows
from tests.cluster.network import Network, NetworkError, UnsupportedError, check_supported
from tests.cluster.plan import HOSTS, LENGTHS, WORKERS, Kind, Lost, plan_cuts

SEEDS = range(200)


class Machine:
    """Implements `network.Run`: the namespaces and interfaces that commands made and nobody deleted. Command `fails` does."""

    def __init__(self, fails: int = -1) -> None:
        self.namespaces: dict[str, list[int]] = {}
        """Name -> pids of processes in it."""
        self.routes: set[tuple[str, str]] = set()
        """Cut: from a namespace to an address."""
        self.calls = 0
        self._fails = fails

    def __call__(self, *command: str) -> str:
        self.calls += 1
        if self.calls == self._fails:
            raise NetworkError(f"told by the test: {command}")
        match command:
            case ("ip", "netns", "add", name):
                assert name not in self.namespaces
                self.namespaces[name] = []
            case ("ip", "netns", "del", name):
                assert not self.namespaces.pop(name), "with processes in it"
            case ("ip", "netns", "list"):
                return "".join(f"{name} (id: {number})\n" for number, name in enumerate(self.namespaces))
            case ("ip", "netns", "pids", name):
                self.namespaces[name] = [pid for pid in self.namespaces[name] if is_alive(pid)]
                return "\n".join(map(str, self.namespaces[name]))
            case ("ip", "-n", name, "neigh", "replace", address, *_):
                self.routes.add((name, address))
            case ("ip", "-n", name, "neigh", "del", address, *_):
                self.routes.remove((name, address))
        return ""


def is_alive(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] == 0


def test_a_seed_gives_one_plan_of_all_kinds_shorter_and_longer_than_the_others_wait() -> None:
    plans = {seed: plan_cuts(seed) for seed in SEEDS}
    assert plans == {seed: plan_cuts(seed) for seed in SEEDS}
    for cuts in plans.values():
        assert {cut.kind for cut in cuts} == set(Kind)
        assert {cut.is_long for cut in cuts} == {False, True}
        for cut in cuts:
            assert cut.is_long == (cut.duration_ms > LENGTHS[cut.kind].limit)
            assert {cut.first, cut.second} < set(HOSTS)
            assert cut.first in WORKERS
            assert (cut.second in WORKERS) == (cut.kind is Kind.WORKER)
    drawn = [cut for cuts in plans.values() for cut in cuts]
    assert {(cut.kind, cut.first, cut.is_long, cut.lost) for cut in drawn} == {
        (kind, worker, is_long, lost) for kind in Kind for worker in WORKERS for is_long in (False, True) for lost in Lost
    }
    with pytest.raises(ValueError, match=r"1\.\.12 cuts, not 0"):
        plan_cuts(1, 0)


def test_a_link_is_cut_in_the_directions_that_are_drawn_and_no_other_is(tmp_path: Path) -> None:
    machine = Machine()
    with Network(tmp_path, command=machine, owner=7) as made:
        out, back = ("holdfast-7-worker-1", made.address("storage")), ("holdfast-7-storage", made.address("worker-1"))
        for lost, expected in {Lost.BOTH: {out, back}, Lost.OUT: {out}, Lost.BACK: {back}}.items():
            made.cut("worker-1", "storage", lost)
            assert machine.routes == expected
            made.heal("worker-1", "storage", lost)
            assert machine.routes == set()


def test_nothing_is_left_wherever_making_it_fails(tmp_path: Path) -> None:
    whole = Machine()
    with Network(tmp_path, command=whole):
        assert len(whole.namespaces) == len(HOSTS) + 1
        calls = whole.calls
    assert whole.namespaces == {}
    for fails in range(2, calls + 1):
        machine = Machine(fails)
        with pytest.raises(NetworkError, match="told by the test"), Network(tmp_path, command=machine):
            pass
        assert machine.namespaces == {}, f"command {fails}"


def test_the_end_kills_what_runs_on_the_hosts_and_another_runs_hosts_stay(tmp_path: Path) -> None:
    machine = Machine()
    living, dead = f"holdfast-{os.getpid()}-driver", f"holdfast-{1 << 30}-driver"
    machine.namespaces = {living: [], dead: [sleeper()], "of-somebody-else": []}
    with Network(tmp_path, hosts=("only",), command=machine, owner=7) as made:
        assert dead not in machine.namespaces, "its run was killed"
        machine.namespaces[made.namespace("only")] = [sleeper(), sleeper()]
    assert machine.namespaces == {living: [], "of-somebody-else": []}


def sleeper() -> int:
    return os.posix_spawnp("sleep", ["sleep", "60"], os.environ)


def test_a_machine_that_cant_is_told_why_with_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(fails=2)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda name: name)
    with pytest.raises(UnsupportedError, match="gives no network namespaces"):
        check_supported(machine)
    assert machine.namespaces == {}
    monkeypatch.setattr(network.shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedError, match="`ip` is needed"):
        check_supported(machine)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnsupportedError, match="needs root"):
        check_supported(machine)

    from tests.cluster.__main__ import main

    assert main([]) == 2


def test_the_comparison_finds_a_row_that_is_missing_and_one_that_came_twice() -> None:
    import numpy as np

    rows = make_rows(np.arange(1_000)).to_pylist()
    nths: dict[int, int] = {}
    counts = [{"key": row["key"], "id": row["id"], "nth": nths.setdefault(row["key"], 0) + 1} for row in rows]
    for row in counts:
        nths[row["key"]] += 1
        row["nth"] = nths[row["key"]]
    windows: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        start = int(row["time"].timestamp()) // 5 * 5
        windows.setdefault((row["key"], start), []).append(row["value"])
    closed = pa.Table.from_pylist(
        [{"key": key, "window_start": start, "n": len(values), "total": sum(values)} for (key, start), values in windows.items()]
    )
    closed = closed.set_column(1, "window_start", closed["window_start"].cast(pa.timestamp("s", "UTC")))
    exact = {"counts": pa.Table.from_pylist(counts), "windows": closed}
    assert differences(1_000, exact) == {}
    twice = {**exact, "counts": pa.Table.from_pylist([*counts, counts[5]])}
    assert differences(1_000, twice) == {"counts": {"missing": 0, "extra": 1}, "nths": {"missing": 0, "extra": 1}}
    assert differences(1_000, {**exact, "windows": closed.slice(1)}) == {"windows": {"missing": 1, "extra": 0}}
