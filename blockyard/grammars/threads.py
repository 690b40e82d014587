"""Threads with large stacks for llguidance, which follows rules and references recursively.

A stack of the usual 8 MB overflows, and kills the process, at a depth of about 2,000, which 30 KB of text can reach.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

# Twice the stack that the deepest grammar of MAX_GRAMMAR_BYTES needs. Only the used part takes memory.
STACK_BYTES = 512 * 1024 * 1024


def make_executor(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Creates an executor whose threads are all started, with stacks of STACK_BYTES."""
    executor, all_run = ThreadPoolExecutor(num_threads, name), threading.Barrier(num_threads)
    usual = threading.stack_size(STACK_BYTES)
    try:
        waits = [executor.submit(all_run.wait) for _ in range(num_threads)]
    finally:
        threading.stack_size(usual)
    for each in waits:
        each.result()
    return executor
