"""Runs a module as a child that does not outlive its parent.

`python -m blockyard.local.child PARENT_PID MODULE [FLAG ...]`

Linux sends SIGTERM to this process when its parent dies, however that happens. The process asks for it here, after
exec, since a process with threads must not run Python between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGTERM) -> None:
    """Asks Linux for a signal when the parent dies; exits if it is dead already. Other systems have no such call."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the parent process died before this one started")


def main() -> None:
    parent_pid, module, *flags = sys.argv[1:]
    die_with_parent(int(parent_pid))
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
