"""The process that compiles a gateway's grammars, one at a time. A grammar that costs too much ends only this process.

    python -m gateway.grammars.compiling.compiler_process MAX_BYTES

Reads messages of a limit (seconds of processor time) and a grammar from stdin. Answers each on stdout with the seconds
used and llguidance's error, or an empty text. A grammar that exceeds the time or memory limit ends the process by a
signal; a failure or panic of llguidance is answered as an error. The process ends with its input; it also ends, so that
the gateway starts a new one, if a grammar's memory was not freed or llguidance no longer compiles anything.
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
"""The header of a message: seconds, and the size in bytes of the text that follows."""
_STATM = Path("/proc/self/statm")
# A special token of the byte vocabulary. It replaces all special tokens: the choice does not change the cost.
_SPECIAL = "<[1]>"
_NUM_BYTES = 8
# A grammar that is valid for any vocabulary.
_SIMPLEST = 'start: "a"'
FAILED = "cannot be compiled: llguidance fails on it unexpectedly"
"""The error for a grammar on which llguidance panics or fails unexpectedly."""


def read_message(stream: BinaryIO) -> tuple[float, str]:
    """Reads seconds and a text; raises EOFError if the stream ends."""
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
    """Returns llguidance's error for a grammar, or an empty text if the grammar is valid.

    The grammar is compiled as in a worker, but for a vocabulary of bytes, and advanced by a few bytes to find parser
    rows with too many items. Three kinds of errors are reported: errors that need no vocabulary, a grammar that
    matches no text, and exceeded limits. Any other error may be due to the byte vocabulary.
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
        # The middle one of the allowed bytes leads into objects and their names; white space is never taken.
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
        # No byte begins a text of this grammar, so no token of any vocabulary does.
        return "the grammar matches no finite text"
    return complaint if is_limit(complaint) else ""


def serve(max_bytes: int) -> None:
    """Answers messages until the input ends. `max_bytes`: the memory allowed beyond the process's own."""
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
            # The first panic loads the library's symbols, some 70 MB, for its stack trace: do not count them.
            base, has_failed = base if has_failed else _limit_memory(max_bytes), True
        if _size() > base + max_bytes // 4:
            # The grammar's memory was not freed: it would count against later grammars.
            return


def _complain_always(vocabulary: LLTokenizer, text: str) -> str:
    """Returns `complain`'s error for a grammar, or FAILED if llguidance fails on it. Aborts if memory runs out."""
    try:
        with panics_as_errors():
            return complain(vocabulary, text)
    except MemoryError:
        os.abort()
    except Exception:  # noqa: BLE001 - whatever it is, this grammar alone brings it
        return FAILED


def _limit_memory(max_bytes: int) -> int:
    """Limits the process to its present size plus `max_bytes`; returns the size, or 0 without a limit if unknown."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if size := _size():
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + max_bytes, most))
    return size


def _size() -> int:
    return int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else 0


if __name__ == "__main__":
    make_executor(1, "grammars").submit(serve, int(sys.argv[1])).result()
