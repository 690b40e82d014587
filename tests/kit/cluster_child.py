"""Runs a service of a cluster: `python -m tests.kit.cluster_child PARENT_PID MODULE [FLAG ...]`.

Unlike `blockyard.child` it is killed when its parent dies: a frozen process does not heed SIGTERM.
"""

from __future__ import annotations

import runpy
import signal
import sys

from blockyard.child import die_with_parent


def main() -> None:
    """The program."""
    parent_pid, module, *flags = sys.argv[1:]
    die_with_parent(int(parent_pid), signal.SIGKILL)
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
