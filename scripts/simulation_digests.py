"""Whether a change leaves the simulator's runs as they are: traces, verdicts, results, byte for byte, over seeds of every workload.

    .venv/bin/python scripts/simulation_digests.py --seeds 4 > before    # at the old code
    .venv/bin/python scripts/simulation_digests.py --seeds 4 > after     # at the new code; then diff both

One line a run: workload, seed, digest of its trace and digest of its result. A change of the simulator's speed must change none;
a change of the product changes what it should. With --sabotage one run of each
sabotage, too."""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from holdfast.chaos.campaign.runner import prepare_process, tidy_up
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.workloads import ON_DEMAND, WORKLOADS

SLOW = frozenset({"long"})
"""Workloads whose runs take as long as a hundred of the others: only when they are named."""


def line(request: RunRequest) -> str:
    run = run_seed(request)
    result = hashlib.blake2b(msgspec.json.encode(run.result), digest_size=8).hexdigest()
    broken = ",".join(each.invariant for each in run.result.violations)
    named = f"{request.workload}!{request.sabotage}" if request.sabotage else request.workload
    return f"{named} {request.seed} {run.result.trace_digest} {result} {broken}".rstrip()


def requests(workloads: list[str], first: int, seeds: int, *, sabotages: bool) -> list[RunRequest]:
    found = [RunRequest(seed, name) for seed in range(first, first + seeds) for name in workloads]
    if sabotages:
        from holdfast.chaos.sabotage import SABOTAGES

        found += [
            RunRequest(first, (*each.workloads, "counter")[0], plan=each.plan, sabotage=each.name) for each in SABOTAGES.values()
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=4, help="seeds of each workload")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--sabotage", action="store_true", help="one run of each sabotage, too")
    parser.add_argument("workload", nargs="*", help="workloads; default: all but the slow ones")
    given = parser.parse_args()
    prepare_process()
    workloads = given.workload or [name for name in (*WORKLOADS, *ON_DEMAND) if name not in SLOW]
    for request in requests(workloads, given.first, given.seeds, sabotages=given.sabotage):
        print(line(request), flush=True)  # noqa: T201 - its result
        tidy_up()


if __name__ == "__main__":
    main()
