"""What a worker process sets up for itself."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from holdfast.operators.worker.main import raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, min(hard, 512)))
raise_descriptor_limit()
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (512, 512), resource.getrlimit(resource.RLIMIT_NOFILE)
"""


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
