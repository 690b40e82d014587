"""The loop of steady decodes in C++, with a mirror of its structure in csrc/decode_loop.h."""

from __future__ import annotations

import ctypes
import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from blockyard_kernels.decoding import NUM_ANSWER_WORDS, DecodeRows, StepAnswer

if TYPE_CHECKING:
    import numpy.typing as npt

    from blockyard_kernels.cpu.library import Executor
    from blockyard_kernels.decoding import Integers

_TYPES: dict[str, Any] = {"int": ctypes.c_int64, "float": ctypes.c_double}


class HasExecutor(Protocol):
    """The owner of the executor that replays a plan. Another one with other threads may take the executor's place."""

    executor: Executor


class PlanInputs(ctypes.Structure):
    """The part of csrc's DecodeRows that says what is replayed."""

    _fields_ = (
        ("ops", ctypes.c_void_p),
        ("num_ops", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("max_tokens", ctypes.c_int64),
        ("head_size", ctypes.c_int64),
    )


class _Rows(ctypes.Structure):
    # Numbers as they are annotated, arrays as addresses.
    _fields_ = (
        ("plan", PlanInputs),
        *((field.name, _TYPES.get(str(field.type), ctypes.c_void_p)) for field in fields(DecodeRows)),
    )


class CpuDecodeLoop:
    """See `blockyard_kernels.decoding.DecodeLoop`."""

    def __init__(self, library: ctypes.CDLL, plan: PlanInputs, owner: HasExecutor) -> None:
        """`owner` keeps what `plan` points to, and has the current team of threads."""
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._library = library
        # These calls are over sooner than Python's lock would change hands.
        self._brief: Any = ctypes.PyDLL(library._name)
        for each in (library, self._brief):
            _declare(each)
        if library.blockyard_decode_rows_bytes() != ctypes.sizeof(_Rows):
            raise RuntimeError(f"{library._name} has another structure of rows: build it anew")
        self._handle = library.blockyard_loop_create(self.event)
        self._plan, self._owner = plan, owner
        self._rows: tuple[DecodeRows, _Rows] | None = None
        # No step has more sequences or more tokens, and only half of the tokens can be those of sequences with drafts.
        self._words = np.zeros(NUM_ANSWER_WORDS + 4 * plan.max_tokens, np.int64)

    def open(self, rows: DecodeRows, last_step_id: int, first: Integers) -> None:
        if self._rows is None or self._rows[0] is not rows:
            if rows.progress.itemsize != self._brief.blockyard_progress_bytes():
                raise RuntimeError(f"{self._library._name} has another record of progress: build it anew")
            values = (_value(getattr(rows, field.name)) for field in fields(rows))
            self._rows = rows, _Rows(self._plan, *values)
        executor, structure = self._owner.executor.handle, ctypes.byref(self._rows[1])
        self._brief.blockyard_loop_open(self._handle, executor, structure, last_step_id, _address(first), len(first))

    def run(self) -> tuple[int, list[int]]:
        last_step_id = self._library.blockyard_loop_run(self._handle)
        left = np.zeros(self._brief.blockyard_loop_close(self._handle), np.int64)
        self._brief.blockyard_loop_left(self._handle, _address(left))
        return last_step_id, left.tolist()

    def push(self, record: Integers) -> bool:
        return bool(self._brief.blockyard_loop_push(self._handle, _address(record), len(record)))

    def end(self, *, drops: bool = False) -> None:
        self._brief.blockyard_loop_end(self._handle, drops)

    def tell(self, number: int) -> None:
        self._brief.blockyard_loop_tell(self._handle, number)

    def take(self) -> StepAnswer | int | None:
        words = self._words
        size = self._brief.blockyard_loop_take(self._handle, _address(words))
        if not size:
            return None
        return int(words[0]) if size == 1 else StepAnswer.of(words[:size])

    def __del__(self) -> None:
        os.close(self.event)
        self._library.blockyard_loop_destroy(self._handle)


def _declare(library: Any) -> None:
    address, integer = ctypes.c_void_p, ctypes.c_int64
    library.blockyard_decode_rows_bytes.restype = integer
    library.blockyard_progress_bytes.restype = integer
    library.blockyard_loop_create.restype = address
    library.blockyard_loop_create.argtypes = (ctypes.c_int32,)
    library.blockyard_loop_destroy.argtypes = (address,)
    library.blockyard_loop_open.argtypes = (address, address, address, integer, address, integer)
    library.blockyard_loop_run.restype = integer
    library.blockyard_loop_run.argtypes = (address,)
    library.blockyard_loop_close.restype = integer
    library.blockyard_loop_close.argtypes = (address,)
    library.blockyard_loop_left.argtypes = (address, address)
    library.blockyard_loop_push.argtypes = (address, address, integer)
    library.blockyard_loop_end.argtypes = (address, ctypes.c_int32)
    library.blockyard_loop_tell.argtypes = (address, integer)
    library.blockyard_loop_take.restype = integer
    library.blockyard_loop_take.argtypes = (address, address)


def _value(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    assert value.flags.c_contiguous
    return _address(value)


def _address(array: npt.NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]
