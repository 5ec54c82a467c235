"""Some parts of the connectors' benchmarks, as they end."""

from __future__ import annotations

import argparse
import json
import time

from benchmarks.connectors import PARTS
from benchmarks.harness import Bench


def main() -> None:
    parser = argparse.ArgumentParser(description="connectors beside the raw clients")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: all")
    parser.add_argument("--scale", type=float, default=1.0, help="of rows, checkpoints and kills")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    bench = Bench()
    try:
        for name in args.parts or PARTS:
            began = time.monotonic()
            for row in PARTS[name](bench, args.scale):
                print(json.dumps({key: value for key, value in row.items() if value != ""}), flush=True)
            print(json.dumps({"part": name, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
