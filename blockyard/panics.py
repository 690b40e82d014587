"""Turns Rust panics into errors: llguidance, tokenizers and safetensors are written in Rust.

A panic reaches Python as a `PanicException`, a class that each library defines for itself. It is not an `Exception`, so
handlers that confine a failure to one request do not catch it. Wrap every call of such a library for a request.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


class ExtensionPanic(RuntimeError):
    """A library written in Rust panicked, which is the library's bug. Only the current call is lost."""


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Turns a panic into ExtensionPanic; other errors pass unchanged. Also a decorator.

    The panic's message is left out, since it may quote a prompt. Rust writes it to standard error.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ExtensionPanic("a library written in Rust panicked: standard error has its message") from None
