"""The process that compiles grammars for a gateway, one at a time: what a grammar costs ends it, and nothing else.

    python -m gateway.grammars.compiling.compiler_process MAX_BYTES

Reads from its input how many seconds of processor time it has, and a grammar; writes the seconds that it took, and what
is wrong with the grammar, as llguidance says it. A grammar that needs more ends it by a signal; one that needs more
memory, too. One that llguidance fails on, even by a panic, is complained of. It ends with its input, and, to be made
anew, where memory stays behind, or where llguidance compiles nothing any more.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from blockyard.grammars.limits import is_dead_end, is_limit, is_panic, parser_limits
from blockyard.grammars.threads import make_executor
from blockyard.panics import panics_as_errors
from gateway.grammars.compiling.lark_tokens import without_specials

if TYPE_CHECKING:
    from llguidance import LLTokenizer

HEADER = struct.Struct("<dI")
"""Seconds, and the size of the text behind it."""
_STATM = Path("/proc/self/statm")
# A token that the vocabulary of bytes has; which one it is changes no cost.
_SPECIAL = "<[1]>"
_NUM_BYTES = 8
# A grammar that any vocabulary can follow.
_SIMPLEST = 'start: "a"'
FAILED = "cannot be compiled: llguidance fails on it unexpectedly"
"""The complaint of a grammar that llguidance should have refused, and did not."""


def read_message(stream: BinaryIO) -> tuple[float, str]:
    """Reads seconds and a text; raises EOFError."""
    seconds, size = HEADER.unpack(_read(stream, HEADER.size))
    return seconds, _read(stream, size).decode()


def _read(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found


def write_message(stream: BinaryIO, seconds: float, text: str) -> None:
    data = text.encode()
    stream.write(HEADER.pack(seconds, len(data)) + data)
    stream.flush()


def complain(vocabulary: LLTokenizer, text: str) -> str:
    """Returns what is wrong with a grammar, as llguidance says it; empty: nothing.

    The grammar is compiled as in a worker, for a vocabulary of bytes, and advanced by a few of them, which shows rows
    with too many items. Reported are errors that need no vocabulary, a grammar that allows no text, and exceeded
    limits: any other error may be due to this vocabulary.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  an extra

    limits = LLParserLimits(**parser_limits(text))
    try:
        plain = text if text.lstrip().startswith("{") else without_specials(text, _SPECIAL)
    except ValueError:
        plain = text
    matcher = LLMatcher(vocabulary, plain, log_level=0, limits=limits)
    num_followed = 0
    while num_followed < _NUM_BYTES:
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        # Into an object, and into the names in it: neither white space, nor an end where there is something else.
        allowed = [byte for byte in range(33, 256) if byte // 8 < len(mask) and mask[byte // 8] >> byte % 8 & 1]
        if not allowed or not matcher.consume_token(allowed[(len(allowed) - 1) // 2]):
            break
        num_followed += 1
    if not matcher.is_error():
        return ""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    if is_wrong:
        return messages[0]
    complaint = matcher.get_error()
    if is_panic(complaint):
        return FAILED
    if not num_followed and is_dead_end(complaint):
        # Any vocabulary is made of bytes, and none of them begins a text of this form.
        return "the grammar matches no finite text"
    return complaint if is_limit(complaint) else ""


def serve(max_bytes: int) -> None:
    """Answers until the input ends. `max_bytes`: of memory, beyond what it has itself."""
    from llguidance import LLTokenizer  # noqa: PLC0415  an extra

    vocabulary = LLTokenizer("byte")
    complain(vocabulary, _SIMPLEST)
    base, has_failed = _limit_memory(max_bytes), False
    write_message(sys.stdout.buffer, 0, "")
    while True:
        try:
            seconds, text = read_message(sys.stdin.buffer)
        except EOFError:
            return
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        complaint = _complain_always(vocabulary, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_message(sys.stdout.buffer, time.process_time() - begin, complaint)
        if complaint == FAILED:
            # If the failure left llguidance broken, this fails too and ends the process.
            complain(vocabulary, _SIMPLEST)
            # The first panic reads the library's symbols, some 70 MB, for its stack: no grammar takes these.
            base, has_failed = base if has_failed else _limit_memory(max_bytes), True
        if _size() > base + max_bytes // 4:
            # It would be counted for the grammars to come.
            return


def _complain_always(vocabulary: LLTokenizer, text: str) -> str:
    """Returns what is wrong with a grammar, or that llguidance failed on it."""
    try:
        with panics_as_errors():
            return complain(vocabulary, text)
    except MemoryError:
        os.abort()
    except Exception:  # noqa: BLE001 - whatever it is, this grammar alone brings it
        return FAILED


def _limit_memory(max_bytes: int) -> int:
    """Holds the process to so much more than it has, where that is known; returns what it has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if size := _size():
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + max_bytes, most))
    return size


def _size() -> int:
    return int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else 0


if __name__ == "__main__":
    make_executor(1, "grammars").submit(serve, int(sys.argv[1])).result()
