"""The limit of open files, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

LIMIT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
from blockyard.service.process import raise_file_limit
print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_process_takes_all_the_files_that_it_may_have() -> None:
    told = subprocess.run([sys.executable, "-c", LIMIT], capture_output=True, text=True, timeout=20, check=True)
    assert told.stdout.strip() == "200 (200, 200)"
