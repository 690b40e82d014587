"""Threads that llguidance works in. It follows rules and references by calling itself, as deep as they lead.

A thread of the usual 8 MB ends, and the whole process with it, behind some 2,000 of them, which 30 KB of text can hold.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

# Twice the stack that the deepest grammar of MAX_GRAMMAR_BYTES needs. It costs memory only as far as it is used.
STACK_BYTES = 512 * 1024 * 1024


def make_executor(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Makes an executor all of whose threads run already, with stacks of STACK_BYTES."""
    executor, all_run = ThreadPoolExecutor(num_threads, name), threading.Barrier(num_threads)
    usual = threading.stack_size(STACK_BYTES)
    try:
        waits = [executor.submit(all_run.wait) for _ in range(num_threads)]
    finally:
        threading.stack_size(usual)
    for each in waits:
        each.result()
    return executor
