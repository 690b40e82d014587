"""Makes errors of panics: llguidance, tokenizers and safetensors are written in Rust.

A panic comes to Python as a `PanicException`, which each of these libraries has of its own. It is no `Exception`, so
what is to hold a failure to one request would let it through. Whoever calls such a library for a request does it here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


class ExtensionPanic(RuntimeError):
    """A library written in Rust panicked: a bug of that library. What it was called for is lost, and nothing else."""


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Raises ExtensionPanic for a panic, and anything else as it is. Also a decorator.

    The panic's own message is left out: it may quote a prompt. Rust writes it to standard error.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ExtensionPanic("a library written in Rust panicked: standard error has its message") from None
