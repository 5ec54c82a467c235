"""`python -m tests.cluster`: the job over many hosts, with cuts of their links. Exit code 0: exact; 1: not, or not at all; 2: this
machine can't have the hosts."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from tests.cluster.network import Network, UnsupportedError, check_supported
from tests.cluster.plan import CUTS_MAX, HOSTS, plan_cuts
from tests.cluster.processes import RunError
from tests.cluster.runner import Runner


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make cluster ARGS=...", description="A job over four hosts whose links are cut.")
    parser.add_argument("--seed", type=int, default=1, help="which links, when, and for how long")
    parser.add_argument("--cuts", type=int, default=3, choices=range(1, CUTS_MAX + 1), metavar=f"1..{CUTS_MAX}")
    parser.add_argument("--without-spark", action="store_true", help="workers are plain processes: quicker")
    parser.add_argument("--connect", action="store_true", help="the driver is a client of Spark Connect")
    options = parser.parse_args(arguments)
    if options.connect and options.without_spark:
        parser.error("--connect is a way to Spark, and --without-spark has none")
    try:
        check_supported()
    except UnsupportedError as error:
        sys.stderr.write(f"cluster: {error}\n")
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    began = time.monotonic()

    def say(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:6.1f} s  {text}\n")
        sys.stdout.flush()

    cuts = plan_cuts(options.seed, options.cuts)
    folder = Path(tempfile.mkdtemp(prefix="hf-cluster-"))
    runner: Runner | None = None
    exact = keep = False
    try:
        with Network(folder) as network:
            runner = Runner(network, cuts, say, with_spark=not options.without_spark, connect=options.connect)
            try:
                _, told = runner.run()
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again: all is being removed
        exact = not told["wrong"]
        if exact:
            say(f"{told['rows']:,} rows are as DuckDB computes them")
        else:
            sys.stderr.write(f"cluster: the output is wrong, seed {options.seed}: {told['wrong']}\n")
    except (RunError, subprocess.TimeoutExpired) as error:
        assert runner is not None
        keep = True
        sys.stderr.write(f"{runner.processes.tail()}\ncluster: seed {options.seed}: {error}\ncluster: logs are in {folder}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("cluster: interrupted; its hosts and processes are gone\n")
        return 130
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(f"CLUSTER {'OK' if exact else 'WRONG'} hosts={len(HOSTS)} cuts={len(cuts)} exact={str(exact).lower()}\n")
    return 0 if exact else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
