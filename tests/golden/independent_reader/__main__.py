import json
import sys
from pathlib import Path

from .container import read_snapshot

sys.stdout.write(json.dumps(read_snapshot(Path(sys.argv[1])), ensure_ascii=False, indent=1, sort_keys=True) + "\n")
